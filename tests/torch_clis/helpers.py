"""Oracle and tolerances of the torch tests, written apart from the code under test."""

from __future__ import annotations

from typing import Any

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(
    generator: torch.Generator,
    query_shape: tuple[int, ...],
    key_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    """Standard normal query, key and value."""
    shapes = (query_shape, key_shape or query_shape, key_shape or query_shape)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def visible_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """bool [B, H, S_q, S_k]: by the definitions of the docstrings, causal bottom-right."""
    batch, num_queries, heads, _ = query.shape
    num_keys = key.shape[1]
    visible = torch.ones(batch, heads, num_queries, num_keys, dtype=torch.bool)
    if is_causal:
        visible &= torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    if key_lengths is not None:
        for entry, length in enumerate(key_lengths.tolist()):
            visible[entry, :, :, length:] = False
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            visible &= attn_mask
        else:
            visible &= attn_mask > torch.finfo(attn_mask.dtype).min / 2
    return visible


def definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    dtype: torch.dtype = torch.float64,
    probability_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, D], lse [B, H, S_q]) as the formula says, in ``dtype``; differentiable.

    ``probability_dtype`` rounds the probabilities before they meet the values: the plain
    low-precision implementation whose error is the measure for tolerances.
    """
    shared = query.shape[2] // key.shape[2]
    queries, keys, values = (tensor.transpose(1, 2).to(dtype) for tensor in (query, key, value))
    keys, values = (tensor.repeat_interleave(shared, dim=1) for tensor in (keys, values))
    logits = (
        queries @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    )
    visible = visible_keys(query, key, attn_mask, key_lengths, is_causal)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.to(dtype).masked_fill(~visible, 0.0)
    logits = logits.masked_fill(~visible, float("-inf"))
    seen = visible.any(dim=-1, keepdim=True)
    probabilities = torch.softmax(logits.masked_fill(~seen, 0.0), dim=-1) * seen
    lse = torch.logsumexp(logits, dim=-1)
    if probability_dtype is not None:
        probabilities = probabilities.to(probability_dtype).to(dtype)
    return (probabilities @ values).transpose(1, 2), lse


def plain_attention(inputs: Tensors, **options: Any) -> torch.Tensor:
    """Softmax in float32, probabilities and output rounded to the dtype of the query."""
    dtype = inputs[0].dtype
    out, _ = definition(*inputs, **options, dtype=torch.float32, probability_dtype=dtype)
    return out.to(dtype)


def as_leaves(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """Copies of the inputs in ``dtype`` that collect gradients."""
    query, key, value = (tensor.detach().clone().to(dtype).requires_grad_() for tensor in inputs)
    return query, key, value


def moved(inputs: Tensors, device: torch.device, requires_grad: bool = False) -> Tensors:
    """Copies of the inputs on ``device``, leaves of a graph if asked for."""
    query, key, value = (
        tensor.detach().clone().to(device).requires_grad_(requires_grad) for tensor in inputs
    )
    return query, key, value


def moved_options(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The options with their tensors on ``device``."""
    return {
        name: option.to(device) if isinstance(option, torch.Tensor) else option
        for name, option in options.items()
    }


def transposed(inputs: Tensors) -> Tensors:
    """[B, S, H, D] <-> [B, H, S, D]."""
    query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
    return query, key, value


def on_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors moved to the host, by one program where they are lazy."""
    if any(tensor.device.type == "xla" for tensor in tensors):
        import torch_xla

        torch_xla.sync()
    return [tensor.detach().cpu() for tensor in tensors]


def largest_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute difference, in float64; NaN anywhere gives NaN, which passes no test."""
    return float((got.detach().cpu().double() - wanted.detach().double()).abs().max())


def allowed_error(plain: torch.Tensor, wanted: torch.Tensor, factor: float = 2.0) -> float:
    """Twice what the plain implementation errs, and two units of float32 where it errs nothing."""
    return factor * largest_error(plain, wanted) + 2.0**-22 * float(wanted.detach().abs().max())
