"""The op on plain CPU tensors: exact row maximum, float32, chunked over queries.

Layout ``[B, S, H, D]`` = batch, sequence, heads, head dimension; fewer key heads than query heads
share each key head among consecutive query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from certify.arithmetic import SMALLEST_NORMAL

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

    def unseen(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """bool ``[B, H_kv, S_k, 1]``: keys that one of the masks hides from every query.

        What lies there, in K and in V, may be NaN (padding), so it is set to 0 before it is
        multiplied. A NaN at a key hidden from some queries only reaches all of them, as in torch.
        """
        if self.key_lengths is None and self.attn_mask is None:
            return None
        batch, num_keys, key_heads, _ = key.shape
        unseen = torch.zeros((batch, key_heads, num_keys), dtype=torch.bool, device=_HOST)
        if self.key_lengths is not None:
            positions = torch.arange(num_keys, device=_HOST)
            unseen |= (positions >= self.key_lengths[:, None])[:, None, :]
        if self.attn_mask is not None:
            hidden = hidden_by_mask(self.attn_mask).all(dim=2)
            hidden = hidden.expand(batch, query.shape[2], num_keys)
            unseen |= hidden.unflatten(1, (key_heads, -1)).all(dim=2)
        return unseen[..., None]


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
    if 0 in (*query.shape, *key.shape):
        return _nothing_to_see(query)
    batch, num_queries, heads, head_dim = query.shape
    unseen = visibility.unseen(query, key)
    keys, values = (_without_unseen(_heads_first(array), unseen) for array in (key, value))
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
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    visibility: Visibility,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value from the saved log-sum-exp.

    With P = exp(logits - lse) / rowsum, dP = dO V^T and delta = rowsum(P * dP):
    dV = P^T dO, dS = P * (dP - delta), dQ = scale dS K, dK = scale dS^T Q
    (Dao et al., FlashAttention, 2022, appendix B.2). There delta = rowsum(out * dO), the same but
    for the rounding of ``out``, which on peaked rows would be all that is left of dS; and the row
    sum, 1 but for the rounding of ``lse``, is left out.
    """
    if 0 in (*query.shape, *key.shape):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    batch, num_queries, heads, head_dim = query.shape
    unseen = visibility.unseen(query, key)
    keys, values = (_without_unseen(_heads_first(array), unseen) for array in (key, value))
    key_heads = keys.shape[1]
    grad_query = query.new_empty(query.shape)
    grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
    finite_lse = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    for start, stop in _chunks(num_queries, batch * heads * key.shape[1]):
        logits, _ = _logits(query, keys, visibility, scale, start, stop)
        probabilities = torch.exp_(logits.sub_(finite_lse[:, :, start:stop, None]))
        grads = _fold(_heads_first(grad_out[:, start:stop]), key_heads)
        row_sum = probabilities.sum(dim=-1, keepdim=True)
        probabilities /= row_sum.clamp_min_(SMALLEST_NORMAL)
        probabilities = _fold(probabilities, key_heads)
        grad_value += probabilities.transpose(-1, -2) @ grads
        grad_probabilities = grads @ values.transpose(-1, -2)
        delta = (probabilities * grad_probabilities).sum(dim=-1, keepdim=True)
        grad_logits = grad_probabilities.sub_(delta).mul_(probabilities)
        grad_logits *= scale
        chunk = (grad_logits @ keys).view(batch, heads, stop - start, head_dim)
        grad_query[:, start:stop] = chunk.transpose(1, 2)
        grad_key += grad_logits.transpose(-1, -2) @ _fold(
            _heads_first(query[:, start:stop]), key_heads
        )
    return (
        grad_query,
        _sequence_first(_without_unseen(grad_key, unseen), key.dtype),
        _sequence_first(_without_unseen(grad_value, unseen), value.dtype),
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


def _sequence_first(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[B, H, S, D]`` -> contiguous ``[B, S, H, D]`` in ``dtype``."""
    return tensor.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _fold(tensor: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Stack the query heads that share a key head along the query dimension."""
    batch, heads, queries, last = tensor.shape
    return tensor.reshape(batch, key_heads, heads // key_heads * queries, last)


def _without_unseen(tensor: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
    return tensor if unseen is None else tensor.masked_fill(unseen, 0.0)


def _nothing_to_see(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No query, or none that sees a key: 0 and -inf."""
    batch, num_queries, heads, _ = query.shape
    lse = query.new_full((batch, heads, num_queries), float("-inf"), dtype=torch.float32)
    return query.new_zeros(query.shape), lse


def _chunks(num_queries: int, logits_per_query: int) -> Iterator[tuple[int, int]]:
    size = max(1, LOGITS_PER_CHUNK // logits_per_query)
    for start in range(0, num_queries, size):
        yield start, min(start + size, num_queries)
