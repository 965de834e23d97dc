"""`CLiSProcessor`: certified attention for a diffusers transformer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from certify import DEFAULT_TOLERANCE
from certify.arithmetic import validate_tolerance
from torch_clis.diffusers.totals import AttentionSummary, RunningTotals
from torch_clis.ops import attention_op
from torch_clis.recorder import Recorder
from torch_clis.validation import validate_path


class CLiSProcessor:
    """Attention processor that runs `torch_clis.attention` and adds up its certificates.

    Install one object on every layer, and on the second expert where there is one::

        processor = CLiSProcessor()
        pipe.transformer.set_attn_processor(processor)
        processor.name_layers(pipe.transformer)

    Projections, norms and rotary embedding are the attention module's own. The totals stay on the
    device of the call; nothing is moved to the host before `summary` or `totals` asks, and the
    graph of every step is the same. A copy or a pickle of a processor starts with empty totals and
    does not record.

    Supported attention modules: diffusers' ``WanAttention`` (self- and cross-attention, fused
    projections, image keys).

    Args:
        tolerance: proven ``|o - o_exact| / max|v|`` beyond what online softmax rounds.
        path: ``"auto"``, ``"online"``, or ``"clis"`` (for measurement only).
        record: collect what lies behind every verdict, for ``certify audit`` and ``certify
            report``: the file that `save_recording` writes, or a `torch_clis.Recorder`, which can
            keep tensors too. Costs the bounds of every family once more per call.

    Raises:
        ValueError: tolerance, path or record out of range.
    """

    def __init__(
        self,
        tolerance: float = DEFAULT_TOLERANCE,
        path: str = "auto",
        record: str | Path | Recorder | None = None,
    ) -> None:
        self.tolerance = validate_tolerance(tolerance)
        self.path = validate_path(path)
        self.recorder = None if record is None else _recorder(record, self.tolerance)
        self._totals = RunningTotals()

    def __call__(
        self,
        attn: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """What the module's own processor computes, ``[B, S, C]`` in and out.

        Args:
            attn: the attention module.
            hidden_states: ``[B, S_q, C]``.
            encoder_hidden_states: ``[B, S_k, C]`` for cross-attention.
            attention_mask: bool (True = attend) or additive, broadcastable to
                ``[B, H, S_q, S_k]``.
            rotary_emb: cosine and sine tables.

        Raises:
            TypeError: for an attention module that there is no binding for.
        """
        compute = _binding_for(attn)
        return compute(
            attn,
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            rotary_emb,
            partial(self._attend, attn),
        )

    def _attend(
        self,
        attn: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        part: str = "",
    ) -> torch.Tensor:
        out, lse, certificate = attention_op(
            query, key, value, attn_mask, None, None, False, self.tolerance, self.path
        )
        self._totals.add(attn, part, certificate.detach())
        if self.recorder is not None:
            name = self._totals.name_of(attn) + part
            self.recorder.add(
                name, query, key, value, lse=lse, certificate=certificate, attn_mask=attn_mask
            )
        return out

    def name_layers(self, transformer: torch.nn.Module, prefix: str = "") -> None:
        """Name the layers that this processor is installed on after their place in ``transformer``.

        Without it they are numbered in the order of their first call. ``prefix`` tells two
        transformers apart.

        Raises:
            ValueError: when the processor is on none of the transformer's layers.
        """
        named = 0
        for name, module in transformer.named_modules():
            if getattr(module, "processor", None) is self:
                if self.recorder is not None:
                    self.recorder.rename(self._totals.name_of(module), prefix + name)
                self._totals.set_name(module, prefix + name)
                named += 1
        if not named:
            raise ValueError(
                f"transformer: none of the layers of this {type(transformer).__name__} has this "
                "processor. Call transformer.set_attn_processor(processor) first."
            )

    def summary(self) -> AttentionSummary:
        """The totals so far as a table (print it): layer by head. Moves them to the host."""
        return AttentionSummary(tuple(self._totals.to_host()))

    def totals(self) -> list[dict[str, Any]]:
        """The totals so far, one JSON-able row per layer and head. Moves them to the host.

        Keys: ``layer``, ``head``; the numbers of query blocks ``certified``, ``verified``,
        ``recomputed``, ``exact`` and their sum ``blocks``; ``smallest_margin_bits``, budget - gap
        of the tightest block that was judged (negative: not certified), or None;
        ``bound_used``, ``{certify.BOUND_NAMES: blocks}``; ``largest_error_bound``, or None.
        """
        return [row.to_dict() for row in self._totals.to_host()]

    def save_recording(self, path: str | Path | None = None) -> Path:
        """Write what was recorded so far, and return the file. Moves it to the host.

        Args:
            path: None: the file given as ``record``.

        Raises:
            ValueError: where nothing is or was recorded.
            OSError: where the file cannot be written; what was recorded is kept.
        """
        if self.recorder is None:
            raise ValueError(
                "record: this processor does not record. Make it with CLiSProcessor(record=FILE)."
            )
        return self.recorder.save(path)

    def reset(self) -> None:
        """Forget the totals and what was recorded; names stay."""
        self._totals.reset()
        if self.recorder is not None:
            self.recorder.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return CLiSProcessor, (self.tolerance, self.path)


def _recorder(record: str | Path | Recorder, tolerance: float) -> Recorder:
    if not isinstance(record, Recorder):
        return Recorder(record, tolerance=tolerance)
    if record.tolerance != tolerance:
        raise ValueError(
            f"record: its tolerance is {record.tolerance} and the processor's {tolerance}; make "
            f"it with Recorder(..., tolerance={tolerance})."
        )
    return record


def _binding_for(attn: torch.nn.Module) -> Callable[..., torch.Tensor]:
    from diffusers.models.transformers.transformer_wan import WanAttention

    from torch_clis.diffusers.wan import wan_attention

    if isinstance(attn, WanAttention):
        return wan_attention
    kind = type(attn)
    raise TypeError(
        f"attn: got {kind.__module__}.{kind.__qualname__}; CLiSProcessor supports diffusers' "
        "WanAttention. Leave the model's own processor on this layer."
    )
