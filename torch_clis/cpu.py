"""The op on plain CPU tensors: exact row maximum, float32, chunked over queries.

Layout ``[B, S, H, D]`` = batch, sequence, heads, head dimension; fewer key heads than query heads
share each key head among consecutive query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_HOST = torch.device("cpu")

LOGITS_PER_CHUNK = 2**23
"""Logits held at once: 32 MB in float32 for each of the arrays that a chunk needs."""


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees, and with what additive bias (nats).

    Attributes:
        attn_mask: bool (True = attend) or additive, broadcastable to [B, H, S_q, S_k], 4-D.
        key_lengths: int [B]; a key at or beyond its batch entry's length is hidden.
        causal: query i sees keys up to i + S_k - S_q.
    """

    attn_mask: torch.Tensor | None
    key_lengths: torch.Tensor | None
    causal: bool

    def hidden(self, start: int, stop: int, num_queries: int, num_keys: int) -> torch.Tensor | None:
        """bool, broadcastable to [B, H, stop - start, S_k]; None where nothing is hidden."""
        parts = []
        positions = torch.arange(num_keys, device=_HOST)
        if self.causal:
            last = torch.arange(start, stop, device=_HOST)[:, None] + num_keys - num_queries
            parts.append((positions > last)[None, None])
        if self.key_lengths is not None:
            parts.append((positions >= self.key_lengths[:, None])[:, None, None, :])
        if self.attn_mask is not None:
            parts.append(hidden_by_mask(_rows(self.attn_mask, start, stop)))
        if not parts:
            return None
        hidden = parts[0]
        for part in parts[1:]:
            hidden = hidden | part
        return hidden

    def bias(self, start: int, stop: int) -> torch.Tensor | None:
        """float32 bias of the chunk's queries, or None."""
        if self.attn_mask is None or self.attn_mask.dtype == torch.bool:
            return None
        return _rows(self.attn_mask, start, stop).float()


def hidden_by_mask(attn_mask: torch.Tensor) -> torch.Tensor:
    """True where a mask hides a key: False, or a bias at or below half of the dtype's lowest."""
    if attn_mask.dtype == torch.bool:
        return ~attn_mask
    return attn_mask <= torch.finfo(attn_mask.dtype).min / 2


def _rows(attn_mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return attn_mask if attn_mask.shape[2] == 1 else attn_mask[:, :, start:stop]


def attention_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visibility: Visibility,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp.

    Returns:
        out ``[B, S_q, H, D]`` in the dtype of ``query``; lse float32 ``[B, H, S_q]`` in nats. A row
        without a visible key gives 0 and -inf.
    """
    batch, num_queries, heads, head_dim = query.shape
    keys, values = _heads_first(key), _usable_values(value, visibility, query)
    out = query.new_empty(query.shape)
    lse = query.new_empty((batch, heads, num_queries), dtype=torch.float32)
    for start, stop in _chunks(num_queries, batch * heads * key.shape[1]):
        logits, hidden = _logits(query, keys, visibility, scale, start, stop)
        row_max = logits.amax(dim=-1, keepdim=True)
        if hidden is not None:
            blind = hidden.all(dim=-1, keepdim=True).expand_as(row_max)
            row_max = row_max.masked_fill(blind, 0.0)
        probabilities = torch.exp_(logits.sub_(row_max))
        row_sum = probabilities.sum(dim=-1, keepdim=True)
        lse[:, :, start:stop] = (row_max + row_sum.log()).squeeze(-1)
        if hidden is not None:
            row_sum = row_sum.masked_fill(blind, 1.0)
        product = torch.matmul(_fold(probabilities, keys.shape[1]), values)
        chunk = product.view(batch, heads, stop - start, head_dim) / row_sum
        out[:, start:stop] = chunk.transpose(1, 2)
    return out, lse


def attention_backward_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    visibility: Visibility,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value from the saved log-sum-exp.

    With P = exp(logits - lse) and delta = rowsum(out * grad_out):
    dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q
    (Dao et al., FlashAttention, 2022, appendix B.2).
    """
    batch, num_queries, heads, head_dim = query.shape
    keys, values = _heads_first(key), _usable_values(value, visibility, query)
    key_heads = keys.shape[1]
    grad_query = query.new_empty(query.shape)
    grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
    finite_lse = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    for start, stop in _chunks(num_queries, batch * heads * key.shape[1]):
        logits, _ = _logits(query, keys, visibility, scale, start, stop)
        probabilities = torch.exp_(logits.sub_(finite_lse[:, :, start:stop, None]))
        grads = _heads_first(grad_out[:, start:stop])
        delta = (_heads_first(out[:, start:stop]) * grads).sum(dim=-1, keepdim=True)
        grads = _fold(grads, key_heads)
        probabilities = _fold(probabilities, key_heads)
        grad_value += probabilities.transpose(-1, -2) @ grads
        grad_logits = probabilities * (grads @ values.transpose(-1, -2) - _fold(delta, key_heads))
        grad_logits *= scale
        chunk = (grad_logits @ keys).view(batch, heads, stop - start, head_dim)
        grad_query[:, start:stop] = chunk.transpose(1, 2)
        grad_key += grad_logits.transpose(-1, -2) @ _fold(
            _heads_first(query[:, start:stop]), key_heads
        )
    return (
        grad_query,
        grad_key.transpose(1, 2).to(key.dtype, memory_format=torch.contiguous_format),
        grad_value.transpose(1, 2).to(value.dtype, memory_format=torch.contiguous_format),
    )


def _logits(
    query: torch.Tensor,
    keys: torch.Tensor,
    visibility: Visibility,
    scale: float,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch, num_queries, heads, _ = query.shape
    key_heads, num_keys = keys.shape[1:3]
    queries = _fold(_heads_first(query[:, start:stop]) * scale, key_heads)
    logits = (queries @ keys.transpose(-1, -2)).view(batch, heads, stop - start, num_keys)
    bias = visibility.bias(start, stop)
    if bias is not None:
        logits += bias
    hidden = visibility.hidden(start, stop, num_queries, num_keys)
    if hidden is not None:
        logits.masked_fill_(hidden, float("-inf"))
    return logits, hidden


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, S, H, D]`` -> contiguous float32 ``[B, H, S, D]``."""
    return tensor.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)


def _fold(tensor: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Stack the query heads that share a key head along the query dimension."""
    batch, heads, queries, last = tensor.shape
    return tensor.reshape(batch, key_heads, heads // key_heads * queries, last)


def _usable_values(
    value: torch.Tensor, visibility: Visibility, query: torch.Tensor
) -> torch.Tensor:
    """float32 ``[B, H_kv, S_k, D]``, 0 at keys that no query sees: 0 * NaN would be NaN."""
    values = _heads_first(value)
    batch, key_heads, num_keys, _ = values.shape
    unseen = value.new_zeros((batch, key_heads, num_keys), dtype=torch.bool)
    if visibility.key_lengths is not None:
        positions = torch.arange(num_keys, device=_HOST)
        unseen |= (positions >= visibility.key_lengths[:, None])[:, None, :]
    if visibility.attn_mask is not None:
        hidden = hidden_by_mask(visibility.attn_mask).all(dim=2)
        hidden = hidden.expand(batch, query.shape[2], num_keys)
        unseen |= hidden.unflatten(1, (key_heads, -1)).all(dim=2)
    return values.masked_fill(unseen[..., None], 0.0)


def _chunks(num_queries: int, logits_per_query: int) -> Iterator[tuple[int, int]]:
    size = max(1, LOGITS_PER_CHUNK // logits_per_query)
    for start in range(0, num_queries, size):
        yield start, min(start + size, num_queries)
