"""Calls of torch's own attention, read as calls of ``torch.ops.clis.attention``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from torch_clis.validation import DTYPES

HOSTED = ("cpu", "xla")
"""Device types that a call is recorded on; from any other it is copied to the host."""


def _torch_signature(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """``torch.nn.functional.scaled_dot_product_attention``, which has no readable signature."""


_SIGNATURE = inspect.signature(_torch_signature)


class NotReadableError(Exception):
    """A call that cannot be recorded; the message says why."""


@dataclass(frozen=True)
class Call:
    """Arguments of one attention call, layout ``[B, S, H, D]``.

    Attributes:
        causal: query i sees keys up to i + S_k - S_q.
        attn_mask: bool or additive, 4-D, or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None
    causal: bool
    attn_mask: torch.Tensor | None


def read_sdpa_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call of ``scaled_dot_product_attention``, ``[..., H, S, D]``, as one of ours.

    Leading dimensions become the batch, and a call of fewer than four has one head. Causal masks
    are top-left there: with as many queries as keys that is the same, otherwise it becomes a mask.
    Values of another width are replaced by their largest component, which is all that is recorded
    of them. Dropout is left out.

    Raises:
        NotReadableError: for a dtype without a kernel, or a nested tensor.
    """
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if query.is_nested:
        raise NotReadableError("it is on nested tensors; pad them and pass a mask")
    if query.dtype not in DTYPES:
        raise NotReadableError(
            f"it is in {query.dtype}; the kernels take float32, bfloat16 and float16"
        )
    attn_mask = given.get("attn_mask")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, *DTYPES):
        raise NotReadableError(f"its mask is in {attn_mask.dtype}; cast it to the query's dtype")
    if value.shape[-1] != key.shape[-1]:
        value = value.abs().amax(dim=-1, keepdim=True).expand(*value.shape[:-1], key.shape[-1])
    causal = bool(given.get("is_causal", False))
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if causal and num_queries != num_keys:
        attn_mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
        causal = False
    rank = max(query.dim(), key.dim())
    leading = torch.broadcast_shapes(*(_leading(tensor, rank) for tensor in (query, key, value)))
    query, key, value = (_sequence_first(tensor, leading, rank) for tensor in (query, key, value))
    return Call(
        query=query,
        key=key,
        value=value,
        scale=given.get("scale"),
        causal=causal,
        attn_mask=None if attn_mask is None else _mask(attn_mask, leading, rank),
    )


def hosted(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor where a recording can be made of it; from other devices a copy on the host."""
    if tensor is None or tensor.device.type in HOSTED:
        return tensor
    return tensor.cpu()


def _leading(tensor: torch.Tensor, rank: int) -> tuple[int, ...]:
    """What precedes heads, sequence and channels; in a call of rank 2 or 3 there are no heads."""
    own = tensor.shape[: -3 if rank > 3 else -2]
    return tuple(own)


def _sequence_first(tensor: torch.Tensor, leading: torch.Size, rank: int) -> torch.Tensor:
    tail = tensor.shape[-3:] if rank > 3 else (1, *tensor.shape[-2:])
    if rank <= 3:
        tensor = tensor.unsqueeze(-3)
    tensor = tensor.expand(*leading, *tail).reshape(-1, *tail)
    return tensor.transpose(1, 2)


def _mask(attn_mask: torch.Tensor, leading: torch.Size, rank: int) -> torch.Tensor:
    """4-D; dimensions of 1 stay where the batch has one dimension."""
    attn_mask = attn_mask[(None,) * (max(rank, 2) - attn_mask.dim())]
    if rank <= 3:
        attn_mask = attn_mask.unsqueeze(-3)
    if len(leading) == 1 and attn_mask.dim() == 4:
        return attn_mask
    tail = attn_mask.shape[-3:]
    return attn_mask.expand(*leading, *tail).reshape(-1, *tail)
