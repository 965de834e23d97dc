"""An attention call with everything that hides or moves keys, and its logits by the definition.

Written apart from the package: what a row sees and what its logits are follow from the arguments
alone, in numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from certify.formats import Float32, FloatArray, round_to_bfloat16

Float64 = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Call:
    """query [B, S_q, H, D], key and value [B, S_k, H_kv, D]: float32 numbers exact in ``dtype``.

    ``attn_mask`` is bool (True: attend) or float32 (nats), broadcastable to [B, H, S_q, S_k].
    """

    query: Float32
    key: Float32
    value: Float32
    dtype: str
    scale: float
    causal: bool = False
    window: int | None = None
    key_lengths: Integers | None = None
    segment_ids: tuple[Integers, Integers] | None = None
    attn_mask: npt.NDArray[Any] | None = None
    logits_soft_cap: float | None = None

    @property
    def arrays(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The tensors as certify.certify() takes them."""
        return (
            FloatArray(self.query, self.dtype),
            FloatArray(self.key, self.dtype),
            FloatArray(self.value, self.dtype),
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that certify.certify() and jax_kernels.attention() share."""
        given: dict[str, Any] = {"scale": self.scale}
        if self.causal:
            given["causal"] = True
        names = ("window", "key_lengths", "segment_ids", "attn_mask", "logits_soft_cap")
        given.update({name: getattr(self, name) for name in names})
        return {name: value for name, value in given.items() if value is not None}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S_q, S_k."""
        batch, rows, heads, _ = self.query.shape
        return batch, heads, rows, self.key.shape[1]

    def visible(self) -> npt.NDArray[np.bool_]:
        """bool [B, H, S_q, S_k]: which keys each row sees."""
        batch, _, rows, keys = self.shape
        seen = np.ones(self.shape, np.bool_)
        # The last query sees the last key.
        own = np.arange(rows)[:, None] + (keys - rows)
        position = np.arange(keys)[None, :]
        if self.causal:
            seen &= position <= own
        if self.window is not None:
            seen &= np.abs(position - own) <= self.window
        if self.key_lengths is not None:
            for element in range(batch):
                seen[element, :, :, self.key_lengths[element] :] = False
        if self.segment_ids is not None:
            of_query, of_key = self.segment_ids
            seen &= (of_query[:, :, None] == of_key[:, None, :])[:, None]
        if self.attn_mask is not None:
            mask = np.broadcast_to(self.attn_mask, self.shape)
            seen &= mask if mask.dtype == np.bool_ else mask > np.finfo(mask.dtype).min / 2
        return seen

    def logits(self, how: str = "matmul") -> Float64:
        """Bits [B, H, S_q, S_k] as a float32 kernel may compute them; -inf at hidden keys.

        Args:
            how: order of the dot products: "matmul" (the host's), "reversed" (one after the other,
                in float32), "exact" (float64).
        """
        query, key = self.kernel_query(), self.key
        key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
        query, key = np.moveaxis(query, 2, 1), np.moveaxis(key, 2, 1)
        dot = _dot(query, np.swapaxes(key, 2, 3), how)
        if self.logits_soft_cap is not None:
            cap = self.logits_soft_cap * math.log2(math.e)
            dot = cap * np.tanh(dot / cap)
        if self.attn_mask is not None and self.attn_mask.dtype != np.bool_:
            dot = dot + np.broadcast_to(self.attn_mask, self.shape) * math.log2(math.e)
        if how != "exact":
            dot = dot.astype(np.float32).astype(np.float64)
        return np.where(self.visible(), dot, -np.inf)

    def kernel_query(self) -> Float32:
        """log2(e) * scale * query as the kernel holds it: float32, or two bfloat16 halves."""
        scaled = self.query * np.float32(math.log2(math.e) * self.scale)
        if self.dtype != "bfloat16":
            return scaled
        high = scaled.astype(ml_dtypes.bfloat16).astype(np.float32)
        return high + (scaled - high).astype(ml_dtypes.bfloat16).astype(np.float32)

    def row_values(self) -> Float32:
        """Values of the keys that each query head multiplies, [B, H, S_k, C]."""
        heads = self.query.shape[2] // self.value.shape[2]
        return np.moveaxis(np.repeat(self.value, heads, axis=2), 2, 1)


def _dot(query: Float32, key: Float32, how: str) -> Float64:
    if how == "exact":
        return query.astype(np.float64) @ key.astype(np.float64)
    if how == "matmul":
        return (query @ key).astype(np.float64)
    total = np.zeros((*query.shape[:-1], key.shape[-1]), np.float32)
    for channel in range(query.shape[-1] - 1, -1, -1):
        total = total + query[..., channel : channel + 1] * key[..., channel : channel + 1, :]
    return total.astype(np.float64)


def in_dtype(numbers: Any, dtype: str) -> Float32:
    """The nearest numbers of a dtype, in float32; float16 is kept within its range."""
    single = np.asarray(numbers, np.float32)
    if dtype == "bfloat16":
        return round_to_bfloat16(single)
    if dtype == "float16":
        return np.clip(single, -65504.0, 65504.0).astype(np.float16).astype(np.float32)
    return single


def log_sum_exp(logits: Float64) -> Float64:
    """log2 sum 2^logit over the last axis; -inf where every key is hidden."""
    largest = np.max(logits, axis=-1)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        return shift + np.log2(np.sum(np.exp2(logits - shift[..., None]), axis=-1))


MASKS = (
    "none",
    "causal",
    "window",
    "lengths",
    "segments",
    "boolean",
    "bias",
    "soft cap",
    "causal segments",
)


def masking(
    kind: str, rng: np.random.Generator, batch: int, rows: int, keys: int
) -> dict[str, Any]:
    """Arguments of a ``Call`` of one kind of ``MASKS``."""
    if kind == "none":
        return {}
    if kind == "causal":
        return {"causal": True}
    if kind == "window":
        return {"window": int(rng.integers(0, keys))}
    if kind == "lengths":
        return {"key_lengths": rng.integers(0, keys + 1, batch)}
    if kind == "soft cap":
        return {"logits_soft_cap": float(rng.choice([2.0, 30.0, 100.0]))}
    if kind == "boolean":
        return {"attn_mask": rng.uniform(size=(batch, 1, rows, keys)) < rng.choice([0.1, 0.9])}
    if kind == "bias":
        bias = rng.choice([1.0, 30.0]) * rng.standard_normal((batch, 1, rows, keys))
        hidden = rng.uniform(size=bias.shape) < 0.2
        return {"attn_mask": np.where(hidden, -np.inf, bias).astype(np.float32)}
    cuts = np.sort(rng.integers(0, 4, (batch, rows + keys)), axis=1)
    segments = {"segment_ids": (cuts[:, :rows], cuts[:, -keys:])}
    return segments if kind == "segments" else {"causal": True, **segments}
