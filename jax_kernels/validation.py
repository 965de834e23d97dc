"""Checks at the border: every error names the argument, what was given and what to do instead."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from certify.arithmetic import arithmetic_for, query_factor
from certify.promise import promise_certifies
from jax_kernels.config import LARGEST_HEAD_DIM, PATHS, BlockSizes
from jax_kernels.masks import Masking

DTYPES = ("bfloat16", "float16", "float32")


def validate_shapes(query: Any, key: Any, value: Any) -> None:
    """Check ranks, shapes and dtypes of [B, S, H, D] inputs.

    Raises:
        ValueError: where they do not fit together.
    """
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(
                f"{name}: got shape {array.shape}; give [batch, sequence, heads, head_dim]."
            )
    if key.shape != value.shape:
        raise ValueError(
            f"value: got shape {value.shape}, key has {key.shape}; give both the same shape."
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(
            f"key: got batch {key.shape[0]}, query has {query.shape[0]}; make them equal."
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"key: got head_dim {key.shape[3]}, query has {query.shape[3]}; make them equal."
        )
    if key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"key: got {key.shape[2]} heads for {query.shape[2]} query heads; the number of query "
            "heads must be a multiple of the number of key heads."
        )


def validate_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    path: str,
    scale: float | None,
    window: Any,
    logits_soft_cap: float | None,
    block_sizes: object = None,
) -> None:
    """``validate_shapes`` and what only the kernels ask for.

    Raises:
        ValueError: for a dtype, head size, path, scale, window or soft cap that is not supported.
    """
    validate_shapes(query, key, value)
    names = [jnp.dtype(array.dtype).name for array in (query, key, value)]
    if len(set(names)) > 1:
        raise ValueError(
            f"value: dtypes {names} differ; cast query, key and value to one of {DTYPES}."
        )
    if names[0] not in DTYPES:
        raise ValueError(f"query: got dtype {names[0]}; cast to one of {DTYPES}.")
    if not 0 < query.shape[3] <= LARGEST_HEAD_DIM:
        raise ValueError(
            f"query: got head_dim {query.shape[3]}; the kernels take 1 to {LARGEST_HEAD_DIM}."
        )
    if path not in PATHS:
        raise ValueError(f"path: got {path!r}; choose one of {PATHS}.")
    if scale is not None and not math.isfinite(query_factor(scale)):
        raise ValueError(
            f"scale: got {scale}; give a number whose product with log2(e) is finite in float32, "
            "or None for head_dim**-0.5."
        )
    whole = isinstance(window, (int, np.integer)) and not isinstance(window, bool)
    if window is not None and (not whole or window < 0):
        raise ValueError(f"window: got {window!r}; give a number of positions, 0 or more, or None.")
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(f"logits_soft_cap: got {logits_soft_cap}; give a positive number or None.")
    if not (block_sizes is None or isinstance(block_sizes, BlockSizes)):
        raise ValueError(
            f"block_sizes: got {block_sizes!r}; give jax_kernels.BlockSizes(block_q, block_kv) "
            "or None."
        )


def logit_bound_from(
    promise: Any, query: jax.Array, num_keys: int, tolerance: float
) -> jax.Array | None:
    """The bounds [H] (bits) of a promise, or None where it does not certify every head.

    Args:
        promise: None, a ``StaticCertificate``, or an array [H]. An array that is traced is taken
            as it is: a head whose bound is too large is then left to the check after the loop.

    Raises:
        ValueError: where it has another shape or dtype.
    """
    if promise is None:
        return None
    query_heads = query.shape[2]
    bound = getattr(promise, "logit_bound", promise)
    if jnp.shape(bound) != (query_heads,) or not jnp.issubdtype(
        jnp.result_type(bound), jnp.floating
    ):
        raise ValueError(
            f"promise: got logit bounds of shape {jnp.shape(bound)}; give a StaticCertificate or "
            f"floats (bits) of shape ({query_heads},), one per query head."
        )
    if not isinstance(bound, jax.core.Tracer):
        kernel = arithmetic_for(jnp.dtype(query.dtype).name)
        if num_keys == 0 or not promise_certifies(
            bound, num_keys=num_keys, tolerance=tolerance, kernel=kernel
        ):
            return None
    return jnp.asarray(bound, jnp.float32)


def masking_from(
    query: Any, key: Any, segment_ids: Any, key_lengths: Any, attn_mask: Any
) -> Masking:
    """Normalise the arguments that hide keys.

    Args:
        segment_ids: None, int [B, S] for both sides, or a pair ([B, S_q], [B, S_k]).
        key_lengths: None or int [B].
        attn_mask: None, or bool or float, broadcastable to [B, H, S_q, S_k].

    Raises:
        ValueError: where a shape or dtype does not fit; a mask is never dropped.
    """
    batch, query_length, heads, _ = query.shape
    key_length = key.shape[1]
    query_segments = key_segments = None
    if segment_ids is not None:
        paired = isinstance(segment_ids, (tuple, list)) and all(
            np.ndim(part) == 2 for part in segment_ids
        )
        pair = segment_ids if paired else (segment_ids, segment_ids)
        query_segments, key_segments = (jnp.asarray(part) for part in pair)
        for part, length in ((query_segments, query_length), (key_segments, key_length)):
            if part.shape != (batch, length) or not jnp.issubdtype(part.dtype, jnp.integer):
                raise ValueError(
                    f"segment_ids: got {part.dtype} {part.shape}; give int32 [{batch}, {length}], "
                    "or a pair for queries and keys."
                )
    if key_lengths is not None:
        key_lengths = jnp.asarray(key_lengths)
        if key_lengths.shape != (batch,) or not jnp.issubdtype(key_lengths.dtype, jnp.integer):
            raise ValueError(
                f"key_lengths: got {key_lengths.dtype} {key_lengths.shape}; give int32 [{batch}]."
            )
    if attn_mask is not None:
        attn_mask = _four_dimensional(attn_mask, (batch, heads, query_length, key_length))
    return Masking(attn_mask, key_lengths, query_segments, key_segments)


def _four_dimensional(attn_mask: Any, full: tuple[int, int, int, int]) -> jax.Array:
    mask = jnp.asarray(attn_mask)
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise ValueError(
            f"attn_mask: got dtype {mask.dtype}; give bool (True = attend) or an additive float."
        )
    fits = mask.ndim <= 4 and all(
        given in (1, wanted) for given, wanted in zip(mask.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask: got shape {mask.shape}; it must broadcast to {list(full)}.")
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
