"""Recordings to test with: of named families of heads, and of made-up numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import certify
from certify.bounds import RECORDED_BOUNDS
from certify.formats import Float32, FloatArray
from certify.recording import (
    CERTIFICATE_FIELDS,
    LayerPasses,
    LayerSettings,
    Recording,
)
from certify.tensor_recording import CallOptions, record_tensors
from tests.certify.families import FAMILIES, SCALE, call_arrays, draw

EVIL = "<script>alert('x')</script>\"&[bold]"

CERTIFIED, VERIFIED, RECOMPUTED, EXACT = range(4)

KINDS = (
    "gaussian 1",
    "gaussian 15",
    "gaussian 60",
    "sink anti",
    "sink mixed",
    "offset 5000",
    "orthogonal outliers",
    "clusters",
)
"""Heads that certify with room, without, and not at all."""


def tensors(
    names: tuple[str, ...] = KINDS,
    dtype: str = "bfloat16",
    *,
    rows: int = 96,
    keys: int = 512,
    dim: int = 64,
    seed: int = 5,
) -> dict[str, FloatArray]:
    """query, key and value [1, S, H, D], a head of each family, for calls with ``SCALE``."""
    rng = np.random.default_rng(seed)
    heads = [draw(FAMILIES[name], rng, rows, keys, dim) for name in names]
    return dict(zip(("query", "key", "value"), call_arrays(heads, dtype), strict=True))


def recorded(arrays: dict[str, FloatArray], **options: Any) -> Recording:
    """A recording of one call."""
    return record_tensors("layer", arrays, CallOptions(**{"scale": SCALE, **options}))


def block(
    gap: float = 50.0,
    *,
    lower: float = 10.0,
    num_keys: float = 1000.0,
    value: float = 2.0,
    row_sums: tuple[float, float] = (0.0, 1.0),
    **lanes: float,
) -> dict[str, float]:
    """The lanes of one made-up block: every family the same, row sums as log2 of them."""
    both = {
        f"{side}:{family}": lower + (gap if side == "upper" else 0.0)
        for family in RECORDED_BOUNDS
        for side in ("upper", "lower")
    }
    return {
        **both,
        "num_keys": num_keys,
        "value_low": value,
        "value_high": value,
        "value_ratio": 1.0,
        "row_sum_log2_min": row_sums[0],
        "row_sum_log2_max": row_sums[1],
        "visible_rows": 8.0,
        **lanes,
    }


def settings_of(heads: int, *, blocks: int = 1, **settings: Any) -> LayerSettings:
    made_up: dict[str, Any] = {
        "head_dim": 64,
        "dtype": "bfloat16",
        "scale": 0.125,
        "num_queries": 8 * blocks,
        "num_keys": 1000,
        "heads": heads,
        "key_heads": heads,
        "block_q": 8,
    }
    return LayerSettings(**{**made_up, **settings})


def layer_of(
    heads: list[dict[str, float]],
    *,
    name: str = "layer",
    run: Sequence[Mapping[str, float]] = (),
    passes: tuple[int, ...] = (0,),
    **settings: Any,
) -> LayerPasses:
    """One block per head, the same in every call; ``run`` holds lanes of the certificates."""
    fields = certify.RECORD_FIELDS
    bounds = np.array([[head[field] for field in fields] for head in heads], np.float32)
    certificate = np.full((len(heads), len(CERTIFICATE_FIELDS)), np.nan, np.float32)
    for head, lanes in enumerate(run):
        for field, number in lanes.items():
            certificate[head, CERTIFICATE_FIELDS.index(field)] = number
    calls = len(passes)
    return LayerPasses(
        name=name,
        settings=settings_of(len(heads), **settings),
        bounds=np.tile(bounds[None, None, :, None], (calls, 1, 1, 1, 1)),
        certificate=np.tile(certificate[None, None, :, None], (calls, 1, 1, 1, 1)),
        passes=np.array(passes, np.int32),
    )


def recording_of(*layers: LayerPasses, **fields: Any) -> Recording:
    return Recording(
        list(layers), RECORDED_BOUNDS, **{"tolerance": certify.DEFAULT_TOLERANCE, **fields}
    )


def with_lane(layer: LayerPasses, field: str, change: Any) -> LayerPasses:
    """The layer with one lane of its record changed by a function."""
    bounds: Float32 = layer.bounds.copy()
    index = certify.RECORD_FIELDS.index(field)
    bounds[..., index] = change(bounds[..., index])
    return LayerPasses(
        layer.name, layer.settings, bounds, layer.certificate, layer.passes, layer.kept
    )
