"""Number formats by bit operations: bfloat16 without a library that knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic

Float32 = npt.NDArray[np.float32]

FLOAT_NAMES = tuple(arithmetic.ARITHMETICS)


@dataclass(frozen=True)
class FloatArray:
    """Exact float32 values of an array together with the name of the dtype that it came in."""

    values: Float32
    dtype: str

    def __post_init__(self) -> None:
        arithmetic.arithmetic_for(self.dtype)
        if self.values.dtype != np.float32:
            raise ValueError(f"values: got {self.values.dtype}; they must be float32.")


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> Float32:
    """The float32 values of bfloat16 bit patterns; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bfloat16(values: Float32) -> Float32:
    """float32 -> the nearest bfloat16 number (ties to even), held in float32."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)


def split_bfloat16(values: Float32) -> tuple[Float32, Float32]:
    """float32 -> (high, low), two bfloat16 numbers in float32; the rest is within 2^-17 of values.

    By the same operations on bits as in the kernel. high + low is exact in float32.
    """
    high = round_to_bfloat16(values)
    return high, round_to_bfloat16(values - high)


def split_for(dtype: str, values: Float32) -> tuple[Float32, Float32]:
    """The pair that the kernel multiplies: two bfloat16 halves, or float32 as it is and zero."""
    if dtype == "bfloat16":
        return split_bfloat16(values)
    return values, np.zeros_like(values)


def read_array(argument: str, array: Any) -> FloatArray:
    """Take an argument as float32 values; anything with ``__array__`` will do.

    A bfloat16 array is known by the name of its dtype (ml_dtypes makes such arrays).

    Raises:
        ValueError: when it is no array of bfloat16, float16 or float32.
    """
    if isinstance(array, FloatArray):
        return array
    try:
        values = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{argument}: cannot be read as a numpy array ({error}). Move it to the host and pass "
            "an array of bfloat16 (ml_dtypes), float16 or float32."
        ) from error
    name = values.dtype.name
    if name == "bfloat16":
        return FloatArray(bfloat16_to_float32(np.ascontiguousarray(values).view(np.uint16)), name)
    if name not in FLOAT_NAMES:
        raise ValueError(f"{argument}: got dtype {name}; pass bfloat16, float16 or float32.")
    return FloatArray(values.astype(np.float32), name)


def printable(text: str) -> str:
    """A name from a file with its control characters written out, so that no terminal obeys it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
