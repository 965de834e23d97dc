"""One layer of a recording: its settings, its calls, the rows that were kept. Checked arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic
from certify.formats import Float32, FloatArray
from certify.inputs import positive_int
from certify.theorem import CERTIFICATE_FIELDS, VERDICTS

BLOCK_FIELDS = (
    "num_keys",
    "value_low",
    "value_high",
    "value_ratio",
    "row_sum_log2_min",
    "row_sum_log2_max",
    "visible_rows",
)
"""Lanes of a block's record beside "upper:F" and "lower:F" of each family F."""


def record_fields(families: Sequence[str]) -> tuple[str, ...]:
    """Names of a record's lanes: S and L in bits of every family, then ``BLOCK_FIELDS``."""
    sides = (f"{side}:{family}" for family in families for side in ("upper", "lower"))
    return (*sides, *BLOCK_FIELDS)


@dataclass(frozen=True)
class LayerSettings:
    """How a layer's calls were made; all calls of one ``LayerPasses`` share it.

    Attributes:
        scale: logits are scale * query . key (nats).
        block_q: query rows judged together.
        causal: whether a row sees keys up to its own position (aligned bottom-right).
        soft_cap: of the logits (nats), or None.
        masked: whether any other mask was given; it is not recorded.
        group: free text, such as the part of the model that the layer belongs to.

    Raises:
        ValueError: naming the field, what was given and what it must be.
    """

    head_dim: int
    dtype: str
    scale: float
    num_queries: int
    num_keys: int
    heads: int
    key_heads: int
    block_q: int
    causal: bool = False
    soft_cap: float | None = None
    masked: bool = False
    group: str = ""

    def __post_init__(self) -> None:
        kernel = arithmetic.arithmetic_for(self.dtype)
        for name in ("head_dim", "num_queries", "num_keys", "heads", "key_heads", "block_q"):
            positive_int(name, getattr(self, name))
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads: got {self.key_heads}; it must divide {self.heads} heads.")
        if kernel.summation_length(self.num_keys) >= arithmetic.LARGEST_NUM_KEYS:
            raise ValueError(f"num_keys: got {self.num_keys}, too many for a sum in float32.")
        for name in ("scale", "soft_cap"):
            number = getattr(self, name)
            if number is None and name == "soft_cap":
                continue
            if not _is_number(number) or not math.isfinite(number):
                raise ValueError(f"{name}: got {number!r}; it must be a finite number.")
        for name in ("causal", "masked"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; it must be true or false.")
        if not isinstance(self.group, str):
            raise ValueError(f"group: got {self.group!r}; it must be text.")

    @property
    def num_blocks(self) -> int:
        """Query blocks of a call."""
        return -(-self.num_queries // self.block_q)


def _is_number(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool)


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Query rows of one head of one call, with all its keys.

    Attributes:
        pass_index: the call, one of the layer's ``passes``.
        rows: int64 [R], positions of the query rows.
        query: [R, D], the layer's dtype.
        key: [S_k, D], the layer's dtype.
        value_max: float32 [S_k], max |v| of each key.
    """

    pass_index: int
    batch: int
    head: int
    rows: npt.NDArray[np.int64]
    query: FloatArray
    key: FloatArray
    value_max: Float32


@dataclass(frozen=True, eq=False)
class LayerPasses:
    """All recorded calls of one layer with one shape.

    Attributes:
        name: of the layer; text from a model, never markup.
        bounds: float32 [P, B, H, Q, fields]; see ``record_fields``. NaN where nothing was recorded.
        certificate: float32 [P, B, H, Q, 7], lanes in ``CERTIFICATE_FIELDS``; a verdict of NaN
            where the attention was not run by the kernels.
        passes: int32 [P], the index of each call among the layer's calls ("step").

    Raises:
        ValueError: where an array has another dtype or shape, or a kept row lies outside.
    """

    name: str
    settings: LayerSettings
    bounds: Float32
    certificate: Float32
    passes: npt.NDArray[np.int32]
    kept: tuple[KeptRows, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name: got {self.name!r}; a layer's name is text.")
        calls = np.shape(self.passes)
        if len(calls) != 1 or self.passes.dtype != np.int32:
            raise ValueError(f"passes: got {_described(self.passes)}; expected int32 [P].")
        if np.unique(self.passes).size != self.passes.size:
            raise ValueError(f"passes: layer {self.name!r} has two calls of the same index.")
        shape = np.shape(self.bounds)
        blocks = (self.settings.heads, self.settings.num_blocks)
        if len(shape) != 5 or shape[0] != calls[0] or shape[2:4] != blocks or 0 in shape:
            raise ValueError(
                f"bounds: got shape {shape}; expected [P, B, H, Q, fields] with P = {calls[0]}, "
                f"H = {blocks[0]} and Q = {blocks[1]}, none of them 0."
            )
        if np.shape(self.certificate) != (*shape[:4], len(CERTIFICATE_FIELDS)):
            raise ValueError(
                f"certificate: got shape {np.shape(self.certificate)} beside bounds of {shape}; "
                f"expected {(*shape[:4], len(CERTIFICATE_FIELDS))}."
            )
        for name in ("bounds", "certificate"):
            if getattr(self, name).dtype != np.float32:
                raise ValueError(f"{name}: got {getattr(self, name).dtype}; expected float32.")
        verdict = self.certificate[..., CERTIFICATE_FIELDS.index("verdict")]
        if not np.all(np.isnan(verdict) | np.isin(verdict, range(len(VERDICTS)))):
            raise ValueError(f"certificate: layer {self.name!r} has a verdict that does not exist.")
        for kept in self.kept:
            self._check_kept(kept)

    def _check_kept(self, kept: KeptRows) -> None:
        settings = self.settings
        place = f"kept rows of layer {self.name!r}"
        if kept.pass_index not in self.passes:
            raise ValueError(f"{place}: call {kept.pass_index} is not among its calls.")
        if not (0 <= kept.batch < self.bounds.shape[1] and 0 <= kept.head < settings.heads):
            raise ValueError(f"{place}: batch {kept.batch}, head {kept.head} do not exist.")
        rows = kept.rows
        if rows.ndim != 1 or not rows.size or rows.min() < 0 or rows.max() >= settings.num_queries:
            raise ValueError(f"{place}: rows must lie within {settings.num_queries} queries.")
        expected = {
            "query": (rows.size, settings.head_dim),
            "key": (settings.num_keys, settings.head_dim),
        }
        for name, shape in expected.items():
            array: FloatArray = getattr(kept, name)
            if array.values.shape != shape or array.dtype != settings.dtype:
                raise ValueError(
                    f"{place}: {name} is {array.dtype} of shape {array.values.shape}; expected "
                    f"{settings.dtype} of shape {shape}."
                )
        if kept.value_max.shape != (settings.num_keys,) or kept.value_max.dtype != np.float32:
            raise ValueError(f"{place}: value_max is {_described(kept.value_max)}; expected [S_k].")


def _described(array: Any) -> str:
    return f"{array.dtype} of shape {array.shape}"
