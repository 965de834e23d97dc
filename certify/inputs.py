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
from certify.visibility import Masks

BOUND_CHOICES = ("auto", *(name for name in BOUND_NAMES if name not in ("none", "weights")))


@dataclass(frozen=True)
class AttentionInputs:
    """A validated call: float32 values of [B, S, H, D] arrays that came in ``dtype``."""

    query: Float32
    key: Float32
    value: Float32 | None
    masks: Masks
    dtype: str
    scale: float
    soft_cap: float | None

    def length(self, element: int) -> int:
        """Keys of a batch element that ``key_lengths`` leaves."""
        lengths = self.masks.key_lengths
        return int(self.key.shape[1] if lengths is None else lengths[element])

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


def validate_bounds(name: object, soft_cap: float | None) -> str:
    """Check the name of a bound family.

    Raises:
        ValueError: when it is not one of ``BOUND_CHOICES``, or "soft cap" without one.
    """
    if not isinstance(name, str) or name not in BOUND_CHOICES:
        raise ValueError(f"bounds: got {name!r}; choose one of {', '.join(BOUND_CHOICES)}.")
    if name == "soft cap" and soft_cap is None:
        raise ValueError("bounds: got 'soft cap' without logits_soft_cap; pass that too.")
    return name


def read_inputs(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float | None,
    key_lengths: Any,
    causal: bool,
    segment_ids: Any,
    window: int | None,
    attn_mask: Any,
    logits_soft_cap: float | None,
) -> AttentionInputs:
    """Read and check the arrays of a call.

    Raises:
        ValueError: naming the argument, what was given and what to do instead.
    """
    arrays = {"query": read_array("query", query), "key": read_array("key", key)}
    if value is not None:
        arrays["value"] = read_array("value", value)
    _check_shapes(arrays)
    batch, query_length, heads, head_dim = arrays["query"].values.shape
    num_keys = arrays["key"].values.shape[1]
    segments = _read_segments(segment_ids, batch, query_length, num_keys)
    if not isinstance(causal, (bool, np.bool_)):
        raise ValueError(f"causal: got {causal!r}; pass True or False.")
    if window is not None and (isinstance(window, bool) or not _is_whole(window) or window < 0):
        raise ValueError(f"window: got {window!r}; pass a whole number of positions, 0 or more.")
    masks = Masks(
        attn_mask=_read_attn_mask(attn_mask, (batch, heads, query_length, num_keys)),
        key_lengths=_read_key_lengths(key_lengths, batch, num_keys),
        query_segments=segments[0],
        key_segments=segments[1],
        causal=bool(causal),
        window=window,
    )
    return AttentionInputs(
        query=arrays["query"].values,
        key=arrays["key"].values,
        value=arrays["value"].values if value is not None else None,
        masks=masks,
        dtype=arrays["query"].dtype,
        scale=_read_scale(scale, head_dim),
        soft_cap=_read_soft_cap(logits_soft_cap),
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


def _is_whole(number: object) -> bool:
    return isinstance(number, (int, np.integer))


def _read_soft_cap(cap: object) -> float | None:
    """The cap in bits."""
    if cap is None:
        return None
    number = isinstance(cap, (int, float, np.floating)) and not isinstance(cap, bool)
    if not number or not (isinstance(cap, (int, float, np.floating)) and 0.0 < cap < math.inf):
        raise ValueError(f"logits_soft_cap: got {cap!r}; pass a finite number above 0, or None.")
    return float(cap) * math.log2(math.e)


def _read_segments(
    segment_ids: Any, batch: int, query_length: int, num_keys: int
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
    arrays = [np.asarray(part) for part in pair]
    expected = [(batch, query_length), (batch, num_keys)]
    shapes = [array.shape for array in arrays]
    if shapes != expected or any(array.dtype.kind not in "iu" for array in arrays):
        raise ValueError(
            f"segment_ids: got shapes {shapes}; pass integers of shapes {expected}, or one array "
            "where query and key are equally long."
        )
    return arrays[0].astype(np.int64), arrays[1].astype(np.int64)


def _read_attn_mask(attn_mask: Any, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
    """bool, or float32 in bits with -inf where hidden; 4-D."""
    if attn_mask is None:
        return None
    mask = np.asarray(attn_mask)
    if mask.ndim > 4 or mask.ndim == 0:
        raise ValueError(f"attn_mask: got {mask.ndim} dimensions; pass at most 4, {shape}.")
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if any(size not in (1, whole) for size, whole in zip(mask.shape, shape, strict=True)):
        raise ValueError(
            f"attn_mask: got shape {mask.shape}; it must broadcast to [B, H, S_q, S_k] = {shape}."
        )
    if mask.dtype == np.bool_:
        return mask
    hidden = _half_of_lowest(mask)
    bias = read_array("attn_mask", mask).values
    if np.any(np.isnan(bias)) or np.any(bias == np.inf):
        raise ValueError("attn_mask: holds NaN or +inf; a bias must be finite, or -inf to hide.")
    bits = (bias * np.float32(math.log2(math.e))).astype(np.float32)
    return np.where(bias <= hidden, np.float32(-np.inf), bits)


def _half_of_lowest(mask: npt.NDArray[Any]) -> float:
    """At or below this an additive bias hides its key."""
    if mask.dtype.name == "bfloat16":
        return -(2.0 - 2.0**-7) * 2.0**127 / 2
    if mask.dtype.name not in ("float32", "float16"):
        raise ValueError(
            f"attn_mask: got dtype {mask.dtype.name}; pass bool, bfloat16, float16 or float32."
        )
    return float(np.finfo(mask.dtype).min) / 2


def _read_key_lengths(key_lengths: Any, batch: int, num_keys: int) -> npt.NDArray[np.int64] | None:
    if key_lengths is None:
        return None
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
