"""Loading a checkpoint on the host and running it once, to have its attention recorded."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from torch_clis.capture import record
from torch_clis.recorder import Recorder

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DENOISERS = ("transformer", "transformer_2", "unet")
DTYPES = ("auto", "bfloat16", "float16", "float32")

SMALL_CLIP = {"num_inference_steps": 2, "height": 256, "width": 256, "num_frames": 17}
"""What a pipeline makes where nothing is said: enough for a first look on a CPU."""

# What the libraries raise for a file that is damaged, incomplete or of another architecture.
LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)

OnPass = Callable[[int, int], None]


class ModelError(Exception):
    """Something about the model that the user can put right; one line that says how."""


@dataclass(frozen=True)
class TextRun:
    """What a text model reads: up to ``passes`` pieces of ``max_tokens`` tokens each."""

    text: str
    max_tokens: int
    passes: int


@dataclass(frozen=True)
class PipelineRun:
    """What a pipeline makes. ``sizes``: arguments of its call that the user gave."""

    prompt: str
    sizes: dict[str, int]
    seed: int


def is_pipeline(model: str) -> bool:
    """Whether ``model`` is a diffusers pipeline, else a transformers model.

    Raises:
        ModelError: for neither, and where a hub name cannot be reached.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if (directory / "model_index.json").is_file():
            return True
        if (directory / "config.json").is_file():
            return False
        raise ModelError(
            f"{model}: holds neither model_index.json (a diffusers pipeline) nor config.json (a "
            "transformers model); give the directory that save_pretrained wrote"
        )
    if not HUB_NAME.fullmatch(model) or directory.exists():
        raise ModelError(
            f"{model}: is no directory; give a downloaded checkpoint or a hub name such as "
            "Qwen/Qwen3-0.6B"
        )
    from transformers.utils import cached_file

    with _reported(model):
        missing_is_none = {"_raise_exceptions_for_missing_entries": False}
        return cached_file(model, "model_index.json", **missing_is_none) is not None


def record_text_model(
    model: str, run: TextRun, recorder: Recorder, *, dtype: str, on_pass: OnPass
) -> None:
    """Record the layers of a transformers model while it reads.

    Raises:
        ModelError: a model that cannot be loaded, or reads something other than text.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": False, **_local(model)}
    with _reported(model):
        config = transformers.AutoConfig.from_pretrained(model, **options)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{model}: is an encoder-decoder model; record it in Python with "
                "torch_clis.record(model, FILE)"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, **options)
        network, information = transformers.AutoModel.from_pretrained(
            model,
            use_safetensors=True,
            attn_implementation="sdpa",
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    # Models are often saved without their pooler, which comes after all attention.
    _check_complete(model, {key for key in information["missing_keys"] if "pooler" not in key})
    network.eval()
    longest = getattr(config, "max_position_embeddings", None) or run.max_tokens
    size = min(run.max_tokens, longest)
    tokens = tokenizer(run.text, return_tensors="pt", truncation=False)["input_ids"]
    pieces = list(tokens.split(size, dim=1))[: run.passes]
    if not tokens.numel():
        raise ModelError("--prompt or --text: holds no token; give some text")
    with record(network, recorder), torch.no_grad(), _reported(model):
        for index, piece in enumerate(pieces):
            on_pass(index, len(pieces))
            network(input_ids=piece, use_cache=False)
    on_pass(len(pieces), len(pieces))


def record_pipeline(
    model: str, run: PipelineRun, recorder: Recorder, *, dtype: str, on_pass: OnPass
) -> None:
    """Record the denoisers of a diffusers pipeline while it makes something small.

    Raises:
        ModelError: a pipeline that cannot be loaded, or does not take an argument that was given.
    """
    import diffusers
    import transformers

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"use_safetensors": True, **_local(model)}
    if dtype != "auto":
        options["torch_dtype"] = getattr(torch, dtype)
    with _reported(model):
        pipeline = diffusers.DiffusionPipeline.from_pretrained(model, **options)
    arguments = _call_arguments(pipeline, run)
    steps = int(arguments["num_inference_steps"])
    denoisers = {
        name: part
        for name in DENOISERS
        if isinstance(part := getattr(pipeline, name, None), torch.nn.Module)
    }
    if not denoisers:
        raise ModelError(f"{model}: has none of {', '.join(DENOISERS)}; record it in Python")

    for name, part in denoisers.items():
        meta = {key for key, tensor in part.named_parameters() if tensor.is_meta}
        _check_complete(f"{model}: {name}", meta)

    def after_step(_: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_pass(index + 1, steps)
        return {}

    if "callback_on_step_end" in inspect.signature(pipeline.__call__).parameters:
        arguments["callback_on_step_end"] = after_step
    pipeline.set_progress_bar_config(disable=True)
    on_pass(0, steps)
    with contextlib.ExitStack() as stack:
        for name, part in denoisers.items():
            prefix = f"{name}." if name == "transformer_2" else ""
            stack.enter_context(record(part, recorder, prefix=prefix))
        stack.enter_context(_reported(model))
        pipeline(**arguments)


def _check_complete(model: str, missing: set[str]) -> None:
    """Libraries fill missing weights with random numbers, whose certificates mean nothing."""
    if missing:
        raise ModelError(
            f"{model}: lacks {len(missing)} of the weights that its config.json asks for "
            f"({min(missing)}, ...); download it again"
        )


def _call_arguments(pipeline: Any, run: PipelineRun) -> dict[str, Any]:
    known = inspect.signature(pipeline.__call__).parameters
    refused = [name for name in run.sizes if name not in known]
    if refused:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise ModelError(f"{options}: {type(pipeline).__name__} does not take it; leave it out")
    sizes = {name: size for name, size in SMALL_CLIP.items() if name in known}
    generator = torch.Generator("cpu").manual_seed(run.seed)
    return {
        "prompt": run.prompt,
        "generator": generator,
        "output_type": "latent",
        **sizes,
        **run.sizes,
    }


def _local(model: str) -> dict[str, Any]:
    return {"local_files_only": True} if Path(model).expanduser().is_dir() else {}


@contextlib.contextmanager
def _reported(model: str) -> Iterator[None]:
    try:
        yield
    except LOADING_ERRORS as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else "no reason given"
        raise ModelError(
            f"{model}: cannot be loaded or run ({type(error).__name__}: {reason}); check that it "
            "is complete, in safetensors format, and takes these options"
        ) from error
