"""Running totals of certificates, per layer and head, kept on the device."""

from __future__ import annotations

import io
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from certify import BOUND_NAMES, VERDICTS
from certify.report import verdict_table
from torch_clis.host import on_host
from torch_clis.ops import CERTIFICATE_FIELDS

_COUNTS = len(VERDICTS) + len(BOUND_NAMES)

_NOTHING = -(2.0**126)
"""Stands for "no value yet" in a running maximum. Not -inf: PyTorch/XLA clamps infinite scalars."""


@dataclass(frozen=True)
class HeadTotals:
    """What the certificates of one head of one layer said, over calls, batch entries and blocks.

    Attributes:
        layer: name of the attention module.
        head: index of the query head.
        verdicts: query blocks per verdict, in the order of ``certify.VERDICTS``.
        bounds: query blocks per bound, in the order of ``certify.BOUND_NAMES``.
        smallest_margin_bits: budget - gap of the tightest judged block with a finite gap; negative
            where it was not certified; None where no block was judged.
        largest_error_bound: largest finite proven error over max|v|; None where there was none.
    """

    layer: str
    head: int
    verdicts: tuple[int, ...]
    bounds: tuple[int, ...]
    smallest_margin_bits: float | None
    largest_error_bound: float | None

    @property
    def blocks(self) -> int:
        """Query blocks judged or run exactly."""
        return sum(self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able row, as `CLiSProcessor.totals` documents it."""
        return {
            "layer": self.layer,
            "head": self.head,
            **dict(zip(VERDICTS, self.verdicts, strict=True)),
            "blocks": self.blocks,
            "smallest_margin_bits": self.smallest_margin_bits,
            "bound_used": {
                name: count for name, count in zip(BOUND_NAMES, self.bounds, strict=True) if count
            },
            "largest_error_bound": self.largest_error_bound,
        }


@dataclass(frozen=True)
class AttentionSummary:
    """Totals of all heads; prints as a table."""

    rows: tuple[HeadTotals, ...]

    def __rich__(self) -> Table:
        """Layer by head, or a line per layer where there are many heads; see `certify.report`."""
        return verdict_table([row.to_dict() for row in self.rows])

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=120).print(self.__rich__())
        return buffer.getvalue()

    __repr__ = __str__


@dataclass
class _Layer:
    module: weakref.ReferenceType[torch.nn.Module]
    name: str
    states: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)


class RunningTotals:
    """Adds up packed certificates on their own device, one small state tensor per layer and part.

    A state tensor is transferred as data before its first use: a tensor of zeros made on the
    device would be a constant in the first step's graph and an input of the second's, two programs.
    """

    def __init__(self) -> None:
        self._layers: list[_Layer] = []
        self._by_id: dict[int, _Layer] = {}

    def add(self, module: torch.nn.Module, part: str, certificate: torch.Tensor) -> None:
        """Add a certificate ``[B, H, num_q_blocks, 7]``; ``part`` tells calls of a layer apart."""
        states = self._layer(module).states
        place = (part, certificate.device)
        if place not in states:
            states[place] = _empty_state(certificate.shape[1]).to(certificate.device)
        states[place] = _updated_state(states[place], certificate)

    def set_name(self, module: torch.nn.Module, name: str) -> None:
        """Name a layer."""
        self._layer(module).name = name

    def name_of(self, module: torch.nn.Module) -> str:
        """The name of a layer: its own, or a number in the order of first calls."""
        return self._layer(module).name

    def reset(self) -> None:
        """Forget the numbers, keep the names."""
        for layer in self._layers:
            layer.states.clear()

    def to_host(self) -> Iterator[HeadTotals]:
        """One row per layer, part and head, in the order of naming or of first calls."""
        places = [
            (layer.name + part, state)
            for layer in self._layers
            for (part, _), state in layer.states.items()
        ]
        merged: dict[str, torch.Tensor] = {}
        for (name, _), state in zip(places, on_host([s for _, s in places]), strict=True):
            merged[name] = _merged(merged[name], state) if name in merged else state
        for name, state in merged.items():
            for head, values in enumerate(state.tolist()):
                yield _head_totals(name, head, values)

    def _layer(self, module: torch.nn.Module) -> _Layer:
        layer = self._by_id.get(id(module))
        if layer is None or layer.module() is not module:
            layer = _Layer(weakref.ref(module), f"attention.{len(self._layers)}")
            self._layers.append(layer)
            self._by_id[id(module)] = layer
        return layer


def _empty_state(heads: int) -> torch.Tensor:
    """float32 ``[H, counts of verdicts, counts of bounds, -margin, error bound]``, on the host.

    float32 counts are exact up to 2^24 blocks.
    """
    state = torch.zeros(heads, _COUNTS + 2, device="cpu")
    state[:, _COUNTS:] = _NOTHING
    return state


def _updated_state(state: torch.Tensor, certificate: torch.Tensor) -> torch.Tensor:
    fields = dict(zip(CERTIFICATE_FIELDS, certificate.unbind(dim=-1), strict=True))
    verdict = fields["verdict"]
    judged = verdict != VERDICTS.index("exact")
    excess = torch.where(judged, fields["gap"] - fields["budget"], math.nan)
    update = (
        _counts(verdict, len(VERDICTS)),
        _counts(fields["bound_used"], len(BOUND_NAMES)),
        _largest_finite(excess),
        _largest_finite(fields["error_bound"]),
    )
    return _merged(state, torch.cat(update, dim=1))


def _merged(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    counts = one[:, :_COUNTS] + other[:, :_COUNTS]
    return torch.cat((counts, torch.maximum(one[:, _COUNTS:], other[:, _COUNTS:])), dim=1)


def _counts(codes: torch.Tensor, number: int) -> torch.Tensor:
    """``[B, H, num_q_blocks]`` -> how often each code occurs, float32 ``[H, number]``."""
    names = torch.arange(number, dtype=codes.dtype, device=codes.device)
    return (codes[..., None] == names).sum(dim=(0, 2), dtype=torch.float32)


def _largest_finite(values: torch.Tensor) -> torch.Tensor:
    """``[B, H, num_q_blocks]`` -> ``[H, 1]``."""
    return torch.where(values.isfinite(), values, _NOTHING).amax(dim=(0, 2))[:, None]


def _head_totals(layer: str, head: int, values: list[float]) -> HeadTotals:
    counts = [int(value) for value in values[:_COUNTS]]
    gap_over_budget, error_bound = values[_COUNTS:]
    return HeadTotals(
        layer=layer,
        head=head,
        verdicts=tuple(counts[: len(VERDICTS)]),
        bounds=tuple(counts[len(VERDICTS) :]),
        smallest_margin_bits=-gap_over_budget if gap_over_budget > _NOTHING else None,
        largest_error_bound=error_bound if error_bound > _NOTHING else None,
    )
