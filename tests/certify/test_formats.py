"""bfloat16 by bit operations, against a library that knows the format."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from certify.formats import (
    FloatArray,
    bfloat16_to_float32,
    read_array,
    round_to_bfloat16,
    split_bfloat16,
)


def numbers() -> np.ndarray:
    rng = np.random.default_rng(71)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32)
    floats = bits.view(np.float32)
    return np.concatenate(
        [floats, np.array([0.0, -0.0, 1e-45, np.inf, -np.inf, np.nan], np.float32)]
    )


def test_every_bfloat16_number_is_read() -> None:
    """All 65,536 patterns. Catches swapped bytes and lost subnormals."""
    bits = np.arange(2**16, dtype=np.uint16)
    expected = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(bfloat16_to_float32(bits), expected, equal_nan=True)
    read = read_array("query", bits.view(ml_dtypes.bfloat16))
    assert read.dtype == "bfloat16" and np.array_equal(read.values, expected, equal_nan=True)


def test_halves_are_bfloat16_and_add_up() -> None:
    """|x - high - low| <= 2^-17 |x|, both halves exact in bfloat16, high + low exact in float32."""
    values = numbers()
    values = values[(np.abs(values) < 2.0**127) & (np.abs(values) > 2.0**-100)]
    high, low = split_bfloat16(values)
    for half in (high, low):
        assert np.array_equal(half.astype(ml_dtypes.bfloat16).astype(np.float32), half)
    exact = high.astype(np.float64) + low.astype(np.float64)
    assert np.array_equal((high + low).astype(np.float64), exact)
    assert np.all(np.abs(values - exact) <= 2.0**-17 * np.abs(values.astype(np.float64)))


def test_rounding_is_to_nearest_even() -> None:
    """Against ml_dtypes. Catches truncation, which makes the query four times coarser."""
    values = numbers()
    values = values[~np.isnan(values)]
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(round_to_bfloat16(values), expected, equal_nan=True)


def test_strided_arrays_are_read() -> None:
    """A transposed view. Catches a view of the bits of a non-contiguous array."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    assert np.array_equal(read_array("key", array.T).values, np.arange(12.0).reshape(3, 4).T)
    assert np.array_equal(
        round_to_bfloat16(np.arange(12, dtype=np.float32).reshape(3, 4).T),
        np.arange(12.0).reshape(3, 4).T,
    )


def test_what_is_no_array_is_named() -> None:
    """Catches numpy's own message, which does not say which argument."""

    class Device:
        def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
            raise TypeError("on another device")

    with pytest.raises(ValueError, match=r"value: .*another device"):
        read_array("value", Device())
    with pytest.raises(ValueError, match="float32"):
        FloatArray(np.zeros(3), "float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float8"):
        FloatArray(np.zeros(3, np.float32), "float8")
