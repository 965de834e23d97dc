"""A recording of one attention call from its query, key and value; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from certify import arithmetic
from certify.bounds import RECORDED_BOUNDS
from certify.call import DEFAULT_BLOCK_Q, record
from certify.formats import Float32, FloatArray
from certify.inputs import AttentionInputs, read_inputs
from certify.keys import key_values, scaled_query
from certify.recorded_layers import CERTIFICATE_FIELDS, KeptRows, LayerPasses, LayerSettings
from certify.recording import Recording
from certify.visibility import visible_rows

Progress = Callable[[int, int], None]

PRODUCTS_AT_ONCE = 2**22
"""Logits of the exact log-sum-exp computed together, which bounds the memory."""


@dataclass(frozen=True)
class CallOptions:
    """What the tensors do not say.

    Attributes:
        scale: logits are scale * query . key (nats); None: head_dim ** -0.5.
        causal: query i sees keys up to i + S_k - S_q.
        soft_cap: of the logits (nats), or None.
        row_sums: compute the exact log-sum-exp, S_q x S_k products a head; it gives the row sums.
        keep_rows: query rows of each head to keep with its keys, evenly spaced.
    """

    scale: float | None = None
    causal: bool = False
    soft_cap: float | None = None
    tolerance: float = arithmetic.DEFAULT_TOLERANCE
    row_sums: bool = True
    keep_rows: int = 0

    def __post_init__(self) -> None:
        arithmetic.validate_tolerance(self.tolerance)
        if isinstance(self.keep_rows, bool) or self.keep_rows < 0:
            raise ValueError(f"keep_rows: got {self.keep_rows}; give a number of rows, 0 or more.")


def record_tensors(
    name: str,
    tensors: Mapping[str, FloatArray],
    options: CallOptions,
    progress: Progress | None = None,
) -> Recording:
    """Record a call as one layer.

    Args:
        name: of the layer.
        tensors: query [B, S_q, H, D], key and value [B, S_k, H_kv, D], of one dtype.
        progress: called with (steps done, steps in all).

    Raises:
        ValueError: for tensors or options of the wrong shape, dtype or range.
    """
    query, key, value = (tensors[part] for part in ("query", "key", "value"))
    _check_head_dim(key, value)
    masks: dict[str, Any] = {"causal": options.causal, "logits_soft_cap": options.soft_cap}
    unset: dict[str, Any] = dict.fromkeys(("key_lengths", "segment_ids", "window", "attn_mask"))
    inputs = read_inputs(query, key, value, scale=options.scale, **masks, **unset)
    report = _Stages(progress, 2 if options.row_sums else 1)
    lse = exact_log_sum_exp(inputs, report.stage()) if options.row_sums else None
    bounds = record(
        query,
        key,
        value,
        scale=options.scale,
        **masks,
        tolerance=options.tolerance,
        lse=lse,
        progress=report.stage(),
    )
    _, query_length, heads, head_dim = inputs.query.shape
    settings = LayerSettings(
        head_dim=head_dim,
        dtype=inputs.dtype,
        scale=inputs.scale,
        num_queries=query_length,
        num_keys=inputs.key.shape[1],
        heads=heads,
        key_heads=inputs.key.shape[2],
        block_q=DEFAULT_BLOCK_Q,
        causal=options.causal,
        soft_cap=options.soft_cap,
    )
    not_run = np.full((1, *bounds.shape[:3], len(CERTIFICATE_FIELDS)), np.nan, np.float32)
    layer = LayerPasses(
        name=name,
        settings=settings,
        bounds=bounds[None],
        certificate=not_run,
        passes=np.zeros(1, np.int32),
        kept=_kept(inputs, options.keep_rows),
    )
    return Recording([layer], RECORDED_BOUNDS, options.tolerance, created_by="certify audit")


class _Stages:
    """One progress bar over several loops of the same length."""

    def __init__(self, progress: Progress | None, number: int) -> None:
        self._progress, self._number, self._begun = progress, number, -1

    def stage(self) -> Progress:
        self._begun += 1
        begun = self._begun

        def report(done: int, total: int) -> None:
            if self._progress is not None:
                self._progress(begun * total + done, self._number * total)

        return report


def _check_head_dim(key: FloatArray, value: FloatArray) -> None:
    """The library certifies any width of value; the kernels, whose calls are recorded, need one."""
    shapes = [array.values.shape for array in (key, value)]
    if all(len(shape) == 4 for shape in shapes) and shapes[0][3] != shapes[1][3]:
        raise ValueError(
            f"value: got head_dim {shapes[1][3]} beside a key of {shapes[0][3]}; the kernels need "
            "one head_dim for query, key and value. Record the value of the same call."
        )


def exact_log_sum_exp(inputs: AttentionInputs, progress: Progress) -> Float32:
    """float32 [B, H, S_q], nats: of the values that the kernel multiplies, summed in float64.

    -inf where a row sees no key; NaN where an input is not finite.
    """
    batch, query_length, heads, _ = inputs.query.shape
    num_keys = inputs.key.shape[1]
    lse = np.empty((batch, heads, query_length), np.float32)
    step = max(1, PRODUCTS_AT_ONCE // num_keys)
    with np.errstate(all="ignore"):
        for done, (element, head) in enumerate(np.ndindex(batch, heads), start=1):
            key = inputs.key[element, :, head // inputs.group].astype(np.float64)
            for start in range(0, query_length, step):
                rows = np.arange(start, min(start + step, query_length))
                logits = _exact_logits(inputs, int(element), int(head), rows, key)
                largest = np.max(logits, axis=1, keepdims=True)
                shift = np.where(np.isfinite(largest), largest, 0.0)
                total = np.sum(np.exp2(logits - shift), axis=1)
                lse[element, head, rows] = (shift[:, 0] + np.log2(total)) * math.log(2.0)
            progress(done, batch * heads)
    return lse


def _exact_logits(
    inputs: AttentionInputs, element: int, head: int, rows: Any, key: Any
) -> np.ndarray[Any, np.dtype[np.float64]]:
    query = inputs.query[element, rows, head]
    scaled = scaled_query(query, inputs.dtype, inputs.scale).astype(np.float64)
    logits = np.asarray(scaled @ key.T)
    if inputs.soft_cap is not None:
        logits = inputs.soft_cap * np.tanh(logits / inputs.soft_cap)
    if inputs.masks.by_row:
        shape = {"query_length": inputs.query.shape[1], "key_length": key.shape[0]}
        seen = visible_rows(inputs.masks, element, head, rows, **shape, xp=np)
        logits = np.where(seen.visible, logits, -np.inf)
    return logits


def _kept(inputs: AttentionInputs, number: int) -> tuple[KeptRows, ...]:
    if not number:
        return ()
    batch, query_length, heads, _ = inputs.query.shape
    rows = np.unique(np.linspace(0, query_length - 1, number).astype(np.int64))
    assert inputs.value is not None
    kept = []
    for element, head in np.ndindex(batch, heads):
        key_head = head // inputs.group
        kept.append(
            KeptRows(
                pass_index=0,
                batch=int(element),
                head=int(head),
                rows=rows,
                query=FloatArray(inputs.query[element, rows, head], inputs.dtype),
                key=FloatArray(inputs.key[element, :, key_head], inputs.dtype),
                value_max=key_values(inputs.value[element, :, key_head], xp=np),
            )
        )
    return tuple(kept)
