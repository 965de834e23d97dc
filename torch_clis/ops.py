"""``torch.ops.clis.*``: schema, fake, CPU and XLA kernels, autograd.

Layout ``[B, S, H, D]`` = batch, sequence, heads, head dimension.
"""

from __future__ import annotations

from typing import Any

import torch

import jax_kernels
from certify import VERDICTS
from torch_clis import lowering
from torch_clis.cpu import Visibility, attention_backward_cpu, attention_cpu
from torch_clis.programs import attention_backward_program, attention_program
from torch_clis.validation import validate_attention, validate_promise

CERTIFICATE_FIELDS = jax_kernels.CERTIFICATE_FIELDS
"""Names along the certificate's last dimension."""


@torch.library.custom_op("clis::attention", mutates_args=())
def attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    tolerance: float,
    path: str,
    promise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention with its certificate.

    Args:
        query: ``[B, S_q, H, D]``, float32, bfloat16 or float16.
        key, value: ``[B, S_k, H_kv, D]``; H must be a multiple of H_kv.
        attn_mask: bool (True = attend) or additive bias in nats, broadcastable to
            ``[B, H, S_q, S_k]``. A bias of -inf or at most half of its dtype's lowest number hides.
        key_lengths: int32 ``[B]``; keys at or beyond the length are hidden.
        scale: factor of the logits; ``D ** -0.5`` if None.
        causal: query i sees keys up to ``i + S_k - S_q`` (bottom-right).
        tolerance: proven ``|o - o_exact| / max|v|`` beyond what online softmax rounds.
        path: ``"auto"``, ``"online"``, or ``"clis"`` (for measurement only).
        promise: float32 ``[H]``, a bound in bits on every head's logits, from its weights; inf
            promises nothing. It spares statistics of K; plain CPU tensors need none.

    Returns:
        out ``[B, S_q, H, D]`` in the dtype of ``query``; lse float32 ``[B, H, S_q]``, natural log,
        not differentiable; certificate float32 ``[B, H, num_q_blocks, 7]``, fields in the order of
        `CERTIFICATE_FIELDS`, all 0 but the verdict where that is "exact" (`unpack_certificate`
        makes the fields that say nothing there NaN). A row without a visible key gives 0 and
        lse = -inf.

    Raises:
        ValueError, NotImplementedError: see `torch_clis.validation.validate_attention`.
    """
    validate_attention(query, key, value, attn_mask, key_lengths, scale, tolerance, path)
    validate_promise(promise, query)
    visibility = Visibility(_four_dimensional(attn_mask), key_lengths, causal)
    out, lse = attention_cpu(query, key, value, visibility, scale_or_default(scale, query))
    return out, lse, _exact_certificate(query, key)


@attention_op.register_fake
def _attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    tolerance: float,
    path: str,
    promise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    validate_attention(query, key, value, attn_mask, key_lengths, scale, tolerance, path)
    validate_promise(promise, query)
    batch, num_queries, heads, _ = query.shape
    blocks = _num_query_blocks(query, key)
    return (
        query.new_empty(query.shape),
        query.new_empty((batch, heads, num_queries), dtype=torch.float32),
        query.new_empty((batch, heads, blocks, len(CERTIFICATE_FIELDS)), dtype=torch.float32),
    )


@attention_op.register_kernel("xla")
def _attention_xla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    tolerance: float,
    path: str,
    promise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    validate_attention(query, key, value, attn_mask, key_lengths, scale, tolerance, path)
    validate_promise(promise, query)
    promised = [] if promise is None else [promise]
    out, lse, certificate = lowering.call(
        attention_program,
        [query, key, value, *mask_tensors(key, attn_mask, key_lengths), *promised],
        name="xla::clis_attention",
        has_mask=attn_mask is not None,
        has_key_lengths=key_lengths is not None,
        has_promise=promise is not None,
        scale=scale_or_default(scale, query),
        causal=causal,
        tolerance=tolerance,
        path=path,
    )
    return out, lse, certificate


@torch.library.custom_op("clis::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, in their shapes and dtypes."""
    visibility = Visibility(_four_dimensional(attn_mask), key_lengths, causal)
    return attention_backward_cpu(
        query, key, value, lse, grad_out, visibility, scale_or_default(scale, query)
    )


@attention_backward_op.register_fake
def _attention_backward_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
    )


@attention_backward_op.register_kernel("xla")
def _attention_backward_xla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_query, grad_key, grad_value = lowering.call(
        attention_backward_program,
        [query, key, value, lse, grad_out, *mask_tensors(key, attn_mask, key_lengths)],
        name="xla::clis_attention_backward",
        has_mask=attn_mask is not None,
        has_key_lengths=key_lengths is not None,
        scale=scale_or_default(scale, query),
        causal=causal,
    )
    return grad_query, grad_key, grad_value


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, attn_mask, key_lengths, scale, causal, *_ = inputs
    if ctx.needs_input_grad[3]:
        raise NotImplementedError(
            "attn_mask: requires a gradient, which attention does not compute. Pass "
            "attn_mask.detach(), or use torch.nn.functional.scaled_dot_product_attention."
        )
    _, lse, certificate = output
    ctx.mark_non_differentiable(lse, certificate)
    ctx.save_for_backward(query, key, value, attn_mask, key_lengths, lse)
    ctx.scale, ctx.causal = scale, causal


def _backward(ctx: Any, grad_out: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    query, key, value, attn_mask, key_lengths, lse = ctx.saved_tensors
    grads = torch.ops.clis.attention_backward(
        query, key, value, lse, grad_out, attn_mask, key_lengths, ctx.scale, ctx.causal
    )
    return (*grads, *[None] * 7)


attention_op.register_autograd(_backward, setup_context=_setup_context)


def scale_or_default(scale: float | None, query: torch.Tensor) -> float:
    """The factor of the logits."""
    return float(query.shape[-1]) ** -0.5 if scale is None else scale


def _four_dimensional(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]


def mask_tensors(
    key: torch.Tensor, attn_mask: torch.Tensor | None, key_lengths: torch.Tensor | None
) -> list[torch.Tensor]:
    """The masks that are given, as a program takes them: 4-D mask, int32 lengths."""
    if key_lengths is not None:  # clamped first: an int64 length can wrap around
        key_lengths = key_lengths.clamp(0, key.shape[1]).to(torch.int32)
    return [part for part in (_four_dimensional(attn_mask), key_lengths) if part is not None]


def _num_query_blocks(query: torch.Tensor, key: torch.Tensor) -> int:
    return jax_kernels.num_query_blocks(
        tuple(int(size) for size in query.shape), tuple(int(size) for size in key.shape)
    )


def _exact_certificate(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Verdict "exact" everywhere, the other fields 0."""
    blocks = _num_query_blocks(query, key)
    shape = (query.shape[0], query.shape[2], blocks, len(CERTIFICATE_FIELDS))
    certificate = query.new_zeros(shape, dtype=torch.float32)
    certificate[..., CERTIFICATE_FIELDS.index("verdict")] = VERDICTS.index("exact")
    return certificate


def unpack_certificate(packed: torch.Tensor) -> dict[str, torch.Tensor]:
    """The op's ``[B, H, num_q_blocks, 7]`` as a dict of ``[B, H, num_q_blocks]`` by field name.

    Codes become int8; gap, budget and row sums become NaN where the verdict is "exact".
    """
    fields = dict(zip(CERTIFICATE_FIELDS, packed.unbind(dim=-1), strict=True))
    exact = fields["verdict"] == VERDICTS.index("exact")
    for name in CERTIFICATE_FIELDS:
        if name in ("verdict", "bound_used"):
            fields[name] = fields[name].to(torch.int8)
        elif name != "error_bound":
            fields[name] = fields[name].masked_fill(exact, float("nan"))
    return fields
