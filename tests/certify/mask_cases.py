"""Masked and capped calls, and their exact log-sum-exp and values by definition, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from certify.formats import Float32
from tests.certify import families
from tests.certify.emulator import Float64
from tests.certify.families import SCALE
from tests.certify.measures import kernel_query

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class MaskCase:
    """One call of one head: its arrays [S, D], arguments of ``certify``, and the definition.

    Attributes:
        visible: bool [S_q, S_k].
        bias: float64 [S_q, S_k], nats; 0 where there is none.
        cap: nats, or None.
    """

    name: str
    query: Float32
    key: Float32
    value: Float32
    arguments: dict[str, Any]
    visible: np.ndarray
    bias: Float64 = field(default_factory=lambda: np.zeros((1, 1)))
    cap: float | None = None

    def call(self) -> tuple[tuple[Float32, Float32, Float32], dict[str, Any]]:
        """Arrays [1, S, 1, D] and keyword arguments."""
        arrays = (self.query, self.key, self.value)
        query, key, value = (array[None, :, None] for array in arrays)
        return (query, key, value), {"scale": SCALE, **self.arguments}

    def logits(self) -> Float64:
        """[S_q, S_k] in bits, -inf where hidden."""
        logits = (
            kernel_query(self.query, "float32").astype(np.float64)
            @ np.where(np.isnan(self.key), 0.0, self.key.astype(np.float64)).T
        )
        if self.cap is not None:
            cap = self.cap * LOG2_E
            logits = cap * np.tanh(logits / cap)
        return np.where(self.visible, logits + self.bias * LOG2_E, -np.inf)

    def log_sum(self) -> Float64:
        """[S_q], bits; -inf where nothing is visible."""
        logits = self.logits()
        largest = np.max(logits, axis=1, keepdims=True)
        largest = np.where(np.isfinite(largest), largest, 0.0)
        with np.errstate(divide="ignore"):
            total = np.log2(np.sum(np.exp2(logits - largest), axis=1, keepdims=True))
        return (largest + total)[:, 0]


def _position(queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(queries)[:, None] + keys - queries, np.arange(keys)[None, :]


def cases(
    family: families.Family, rng: np.random.Generator, queries: int, keys: int, dim: int
) -> list[MaskCase]:
    """Every kind of mask over one head."""
    query, key, value = families.draw(family, rng, queries, keys, dim)
    own, position = _position(queries, keys)
    query_segments = np.sort(rng.integers(0, 4, queries))
    key_segments = np.sort(rng.integers(0, 5, keys))
    chosen = rng.random((queries, keys)) < 0.2
    chosen[0] = False
    bias = (5.0 * rng.standard_normal((queries, keys))).astype(np.float32)
    bias[:, ::3] = -10000.0
    bias[:, 1::5] = -np.inf
    bias[1] = -np.inf
    hidden_nan = key.copy()
    hidden_nan[keys // 2 :] = np.nan
    window = int(rng.integers(0, keys // 4))
    everything = np.ones((queries, keys), np.bool_)

    def case(name: str, arguments: dict[str, Any], visible: Any, **more: Any) -> MaskCase:
        return MaskCase(
            name,
            query,
            more.pop("key", key),
            value,
            arguments,
            np.broadcast_to(visible, everything.shape),
            **more,
        )

    shown = ~np.isneginf(bias)
    return [
        case("causal", {"causal": True}, position <= own),
        case("window", {"window": window}, np.abs(position - own) <= window),
        case(
            "causal window",
            {"causal": True, "window": window},
            (position <= own) & (own - position <= window),
        ),
        case(
            "segments",
            {"segment_ids": (query_segments[None], key_segments[None])},
            query_segments[:, None] == key_segments[None, :],
        ),
        case(
            "lengths",
            {"key_lengths": np.array([keys // 2])},
            position < keys // 2,
            key=hidden_nan,
        ),
        case(
            "causal lengths",
            {"causal": True, "key_lengths": np.array([keys // 2])},
            (position < keys // 2) & (position <= own),
            key=hidden_nan,
        ),
        case("boolean", {"attn_mask": chosen}, chosen),
        case(
            "padding mask",
            {"attn_mask": (position < keys // 2)[None, None]},
            position < keys // 2,
            key=hidden_nan,
        ),
        case(
            "bias",
            {"attn_mask": bias[None, None]},
            shown,
            bias=np.where(shown, bias, 0.0).astype(np.float64),
        ),
        case("cap", {"logits_soft_cap": 20.0}, everything, cap=20.0),
        case(
            "capped causal bias",
            {"logits_soft_cap": 20.0, "causal": True, "attn_mask": bias[None, None]},
            shown & (position <= own),
            bias=np.where(shown, bias, 0.0).astype(np.float64),
            cap=20.0,
        ),
    ]
