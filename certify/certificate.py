"""The certificate of an attention call: what is proved of every row, and its JSON."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic
from certify.files import parse_json
from certify.formats import Float32
from certify.inputs import positive_int

SCHEMA = "certify.certificate"
SCHEMA_VERSION = 2

_BLOCK_ARRAYS = {"certified": np.dtype(np.bool_), "bound_used": np.dtype(np.int8)}
ROW_ARRAYS = (
    "stabilizer",
    "error_bound",
    "lse_error_bound",
    "rounding_bound",
    "gap",
    "budget",
    "upper",
    "lower",
    "value_low",
    "value_high",
)
"""Fields of a ``Certificate`` that are float32 [B, H, S_q]."""

_ROW_ARRAYS = {name: np.dtype(np.float32) for name in ROW_ARRAYS}
_ARRAYS = _BLOCK_ARRAYS | _ROW_ARRAYS


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is proved of every row of an attention call before its KV loop.

    A row is certified iff gap <= budget and its stabilizer stays within
    ``arithmetic.LARGEST_STABILIZER``; a query block is certified iff all its rows are.

    Attributes:
        certified: bool [B, H, num_q_blocks].
        stabilizer: float32 [B, H, S_q], bits (base 2); NaN where the row is not certified.
        error_bound: float32 [B, H, S_q]; proven |o - o_exact| / max|v| beyond what any attention in
            this precision rounds (the range error); inf where the row is not certified.
        lse_error_bound: float32 [B, H, S_q], nats; the same of the log-sum-exp.
        rounding_bound: float32 [B, H, S_q]; what any attention in this precision may round,
            relative to max|v| of the keys that the row sees (the rounding error, kept apart).
        gap: float32 [B, H, S_q], bits: S - L, upper minus lower bound on the row's log-sum-exp; inf
            where an input is not finite.
        budget: float32 [B, H, S_q], bits that the theorem allows; -inf where nothing can be proved.
        upper, lower: float32 [B, H, S_q], bits: S and L, the bounds on the log-sum-exp; -inf where
            no key is visible.
        value_low, value_high: float32 [B, H, S_q]: V_lo <= max|v| over the keys that the row sees,
            and V_hi, max|v| over all keys of the head. Errors are relative to max|v|, and to V_lo
            under an additive bias that puts keys 30 bits below others.
        bound_used: int8 [B, H, num_q_blocks], code into ``BOUND_NAMES``: the bound behind the row
            with the largest gap, certified or not; 0 ("none") where no key is visible.
        tolerance: the error_bound that was asked for.
        block_q: rows of a query block.

    Raises:
        ValueError: where an array has another dtype or shape.
    """

    certified: npt.NDArray[np.bool_]
    stabilizer: Float32
    error_bound: Float32
    lse_error_bound: Float32
    rounding_bound: Float32
    gap: Float32
    budget: Float32
    upper: Float32
    lower: Float32
    value_low: Float32
    value_high: Float32
    bound_used: npt.NDArray[np.int8]
    tolerance: float
    block_q: int

    def __post_init__(self) -> None:
        arithmetic.validate_tolerance(self.tolerance)
        positive_int("block_q", self.block_q)
        rows = np.shape(self.stabilizer)
        if len(rows) != 3:
            raise ValueError(f"stabilizer: got shape {rows}; expected [B, H, S_q].")
        blocks = (*rows[:2], -(-rows[2] // self.block_q))
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            expected = blocks if name in _BLOCK_ARRAYS else rows
            if array.dtype != dtype or array.shape != expected:
                given = f"{array.dtype} of shape {array.shape}"
                raise ValueError(f"{name}: got {given}; expected {dtype} of shape {expected}.")

    @property
    def margin(self) -> Float32:
        """float32 [B, H, S_q], bits: budget - gap; -inf where nothing can be proved."""
        known = np.isfinite(self.gap) & np.isfinite(self.budget)
        room = self.budget - np.where(known, self.gap, 0.0)
        return np.where(known, room, -np.inf).astype(np.float32)

    def to_json(self) -> str:
        """One JSON object; arrays as base64 of little-endian bytes, so that nothing is lost."""
        arrays = {}
        for name, dtype in _ARRAYS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype.newbyteorder("<"))
            data = base64.b64encode(array.tobytes()).decode("ascii")
            arrays[name] = {"dtype": dtype.name, "shape": array.shape, "base64": data}
        document = {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "tolerance": self.tolerance,
            "block_q": self.block_q,
            "arrays": arrays,
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The certificate that ``to_json`` wrote.

        Raises:
            ValueError: when the text is not one, or of another version of the schema.
        """
        try:
            document = parse_json(text)
            schema, version = document["schema"], document["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"text: not the JSON of a certificate ({error!r}).") from error
        if schema != SCHEMA or version != SCHEMA_VERSION:
            raise ValueError(
                f"text: got schema {schema!r} version {version!r}; this release reads {SCHEMA!r} "
                f"version {SCHEMA_VERSION}."
            )
        try:
            arrays = {name: _decode(name, document["arrays"][name]) for name in _ARRAYS}
            return cls(**arrays, tolerance=document["tolerance"], block_q=document["block_q"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text: a part of the certificate is wrong ({error!r}).") from error


def _decode(name: str, entry: dict[str, Any]) -> npt.NDArray[Any]:
    dtype = _ARRAYS[name]
    data = base64.b64decode(entry["base64"], validate=True)
    shape = tuple(int(size) for size in entry["shape"])
    if entry["dtype"] != dtype.name or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"text: {name} does not hold a {dtype.name} array of shape {shape}.")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
