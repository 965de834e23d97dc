"""``torch.ops.clis.record_bounds``: the bounds of every family, for a recording.

Layout ``[B, S, H, D]`` = batch, sequence, heads, head dimension.
"""

from __future__ import annotations

import math

import numpy as np
import torch

import jax_kernels
from certify import RECORD_FIELDS, record
from certify.formats import FloatArray
from torch_clis import lowering
from torch_clis.cpu import hidden_by_mask
from torch_clis.ops import mask_tensors, scale_or_default
from torch_clis.programs import record_bounds_program
from torch_clis.validation import validate_attention


@torch.library.custom_op("clis::record_bounds", mutates_args=())
def record_bounds_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    tolerance: float,
) -> torch.Tensor:
    """What a recording holds of each query block, beside the certificate of the call.

    Args:
        query, key, value, attn_mask, key_lengths, scale, causal, tolerance: as in
            ``torch.ops.clis.attention``.
        lse: float32 ``[B, H, S_q]``, nats, the exact log-sum-exp where it is known.

    Returns:
        float32 ``[B, H, num_q_blocks, fields]``, fields in the order of
        ``certify.RECORD_FIELDS`` (bounds in bits).

    Raises:
        ValueError, NotImplementedError: see `torch_clis.validation.validate_attention`.
    """
    validate_attention(query, key, value, attn_mask, key_lengths, scale, tolerance, "auto")
    found = record(
        *(host_array(tensor) for tensor in (query, key, value)),
        scale=scale_or_default(scale, query),
        causal=causal,
        key_lengths=None if key_lengths is None else key_lengths.clamp(0, key.shape[1]).numpy(),
        attn_mask=None if attn_mask is None else _host_mask(attn_mask),
        tolerance=tolerance,
        block_q=block_q_of(query, key),
        lse=None if lse is None else lse.numpy(),
    )
    return torch.from_numpy(np.ascontiguousarray(found))


@record_bounds_op.register_fake
def _record_bounds_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    tolerance: float,
) -> torch.Tensor:
    validate_attention(query, key, value, attn_mask, key_lengths, scale, tolerance, "auto")
    batch, num_queries, heads, _ = query.shape
    blocks = -(-num_queries // block_q_of(query, key))
    return query.new_empty((batch, heads, blocks, len(RECORD_FIELDS)), dtype=torch.float32)


@record_bounds_op.register_kernel("xla")
def _record_bounds_xla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    tolerance: float,
) -> torch.Tensor:
    validate_attention(query, key, value, attn_mask, key_lengths, scale, tolerance, "auto")
    exact = [] if lse is None else [lse]
    (found,) = lowering.call(
        record_bounds_program,
        [query, key, value, *exact, *mask_tensors(key, attn_mask, key_lengths)],
        name="xla::clis_record_bounds",
        has_lse=lse is not None,
        has_mask=attn_mask is not None,
        has_key_lengths=key_lengths is not None,
        scale=scale_or_default(scale, query),
        causal=causal,
        tolerance=tolerance,
        block_q=block_q_of(query, key),
    )
    return found


def block_q_of(query: torch.Tensor, key: torch.Tensor) -> int:
    """Query rows that the kernels judge together."""
    sizes = jax_kernels.config.choose_block_sizes(query.shape[1], key.shape[1], query.shape[3])
    return sizes.block_q


def host_array(tensor: torch.Tensor) -> FloatArray:
    """Exact float32 values of a host tensor, with the name of its dtype."""
    values = tensor.detach().to(torch.float32).numpy()
    return FloatArray(values, str(tensor.dtype).removeprefix("torch."))


def _host_mask(attn_mask: torch.Tensor) -> np.ndarray:
    """Bool, or float32 nats with -inf where hidden, so that the dtype no longer matters."""
    if attn_mask.dtype == torch.bool:
        return attn_mask.numpy()
    return attn_mask.float().masked_fill(hidden_by_mask(attn_mask), -math.inf).numpy()
