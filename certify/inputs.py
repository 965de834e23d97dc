"""An attention call's arguments, read and validated at the border."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic
from certify.bounds import BOUND_NAMES
from certify.formats import Float32, FloatArray, read_array

BOUND_CHOICES = ("auto", *BOUND_NAMES[1:])

EXACT_PATH = (
    "The kernels compute such a call by an exact path, which needs no certificate; leave the "
    "argument out to certify the call without it."
)


@dataclass(frozen=True)
class AttentionInputs:
    """A validated call: float32 values of [B, S, H, D] arrays that came in ``dtype``."""

    query: Float32
    key: Float32
    value: Float32 | None
    key_lengths: npt.NDArray[np.int64]
    dtype: str
    scale: float

    @property
    def group(self) -> int:
        """Query heads that share one head of keys."""
        return self.query.shape[2] // self.key.shape[2]


def positive_int(argument: str, number: object) -> int:
    """Check a size.

    Raises:
        ValueError: when it is not an integer above 0.
    """
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number <= 0:
        raise ValueError(f"{argument}: got {number!r}; give a positive integer.")
    return int(number)


def validate_bounds(name: object) -> str:
    """Check the name of a bound family.

    Raises:
        ValueError: when it is not one of ``BOUND_CHOICES``.
    """
    if not isinstance(name, str) or name not in BOUND_CHOICES:
        raise ValueError(f"bounds: got {name!r}; choose one of {', '.join(BOUND_CHOICES)}.")
    return name


def refuse_masks(**arguments: Any) -> None:
    """Masks and the soft cap have no certificate in this version; ``key_lengths`` has.

    Raises:
        NotImplementedError: naming the first argument that asks for one.
    """
    for name, given in arguments.items():
        if given is not None and given is not False:
            raise NotImplementedError(f"{name}: calls with it are not certified yet. {EXACT_PATH}")


def read_inputs(
    query: Any, key: Any, value: Any, *, scale: float | None, key_lengths: Any
) -> AttentionInputs:
    """Read and check the arrays of a call.

    Raises:
        ValueError: naming the argument, what was given and what to do instead.
    """
    arrays = {"query": read_array("query", query), "key": read_array("key", key)}
    if value is not None:
        arrays["value"] = read_array("value", value)
    _check_shapes(arrays)
    batch, _, _, head_dim = arrays["query"].values.shape
    num_keys = arrays["key"].values.shape[1]
    return AttentionInputs(
        query=arrays["query"].values,
        key=arrays["key"].values,
        value=arrays["value"].values if value is not None else None,
        key_lengths=_read_key_lengths(key_lengths, batch, num_keys),
        dtype=arrays["query"].dtype,
        scale=_read_scale(scale, head_dim),
    )


def _check_shapes(arrays: dict[str, FloatArray]) -> None:
    query = arrays["query"]
    for name, array in arrays.items():
        if array.values.ndim != 4:
            raise ValueError(f"{name}: got shape {array.values.shape}; pass [B, S, H, D].")
        if 0 in array.values.shape:
            raise ValueError(f"{name}: got shape {array.values.shape}; every size must be above 0.")
        if array.dtype != query.dtype:
            raise ValueError(
                f"{name}: got dtype {array.dtype} beside a query of {query.dtype}; cast to one of "
                "the two."
            )
    key_shape = arrays["key"].values.shape
    batch, _, heads, head_dim = query.values.shape
    if key_shape[0] != batch or key_shape[3] != head_dim or heads % key_shape[2]:
        raise ValueError(
            f"key: got shape {key_shape} beside a query of {query.values.shape}; batch and "
            "head_dim must be equal and the query heads a multiple of the key heads."
        )
    if "value" in arrays and arrays["value"].values.shape[:3] != key_shape[:3]:
        raise ValueError(
            f"value: got shape {arrays['value'].values.shape} beside a key of {key_shape}; all but "
            "head_dim must be equal."
        )
    if key_shape[1] >= arithmetic.LARGEST_NUM_KEYS:
        raise ValueError(
            f"key: got {key_shape[1]} keys; the theorem's sums hold below "
            f"{arithmetic.LARGEST_NUM_KEYS}."
        )


def _read_key_lengths(key_lengths: Any, batch: int, num_keys: int) -> npt.NDArray[np.int64]:
    if key_lengths is None:
        return np.full(batch, num_keys, np.int64)
    lengths = np.asarray(key_lengths)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"key_lengths: got {lengths.dtype.name} of shape {lengths.shape}; pass integers of "
            f"shape ({batch},), one per batch element."
        )
    if lengths.min() < 0 or lengths.max() > num_keys:
        raise ValueError(
            f"key_lengths: got values from {lengths.min()} to {lengths.max()}; they must lie "
            f"between 0 and the number of keys, {num_keys}."
        )
    return lengths.astype(np.int64)


def _read_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.floating, np.integer)):
        raise ValueError(f"scale: got {scale!r}; pass a number or None for head_dim ** -0.5.")
    if not math.isfinite(scale):
        raise ValueError(f"scale: got {scale}; it must be finite.")
    return float(scale)
