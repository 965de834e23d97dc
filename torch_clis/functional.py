"""Attention for PyTorch users: ``[B, S, H, D]`` and torch's own ``[B, H, S, D]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from certify import DEFAULT_TOLERANCE
from torch_clis.ops import attention_op, unpack_certificate
from torch_clis.promises import promise_tensor
from torch_clis.validation import as_float

if TYPE_CHECKING:
    from certify.static import StaticCertificate


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    enable_gqa: bool = False,
    key_lengths: torch.Tensor | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    path: str = "auto",
    promise: StaticCertificate | torch.Tensor | None = None,
    return_lse: bool = False,
    return_certificate: bool = False,
) -> Any:
    """Certified softmax attention, ``[B, S, H, D]`` = batch, sequence, heads, head dimension.

    Runs on XLA devices as one cached program, and on plain CPU tensors with the exact row maximum.
    Differentiable in query, key and value.

    Args:
        query: ``[B, S_q, H, D]``, float32, bfloat16 or float16 (computed in float32); D up to 512.
        key, value: ``[B, S_k, H_kv, D]`` of the same dtype and device.
        scale: finite factor of the logits; ``D ** -0.5`` if None.
        is_causal: query i sees keys up to ``i + S_k - S_q``: bottom-right, as decoding needs.
        attn_mask: bool (True = attend) or additive bias in nats, broadcastable to
            ``[B, H, S_q, S_k]``. A bias of -inf or at most half of its dtype's lowest number hides
            the key; any other bias is added. What K and V hold at keys that ``attn_mask`` or
            ``key_lengths`` hides from every query may be anything, NaN included.
        enable_gqa: allow fewer key heads than query heads (H a multiple of H_kv).
        key_lengths: int32 ``[B]``; keys at or beyond the length are hidden.
        tolerance: proven ``|o - o_exact| / max|v|`` beyond what online softmax rounds; above
            ``certify.arithmetic.smallest_tolerance()`` and below 1.
        path: ``"auto"`` certifies before the loop, else verifies after it, else recomputes;
            ``"online"`` is online softmax; ``"clis"`` never recomputes and is for measurement only.
        promise: a ``certify.static.StaticCertificate`` of the layer, or float32 ``[H]``: a bound in
            bits on the absolute logits of each head, for every input (inf: none). Where a
            certificate certifies every head, and whatever a tensor says, no statistics of K are
            computed. max|v|, the check after the loop and recomputation stay, so a wrong promise
            costs time and never the answer. Plain CPU tensors and masked calls are exact and need
            none.
        return_lse: also return the log-sum-exp, float32 ``[B, H, S_q]``, natural log (nats). It
            carries no gradient.
        return_certificate: also return a dict of tensors ``[B, H, num_q_blocks]`` on the same
            device, without a host sync: ``verdict`` int8 -> ``certify.VERDICTS``, ``gap`` and
            ``budget`` float32 in bits (certified iff gap <= budget), ``error_bound`` float32,
            ``bound_used`` int8 -> ``certify.BOUND_NAMES``, ``row_sum_min`` and ``row_sum_max``
            float32; gap, budget and row sums are NaN where the verdict is "exact".

    Returns:
        out, or a tuple of out, then lse and certificate as asked for. out has the shape and dtype
        of ``query``; a row with no visible key gives 0 and lse = -inf (torch gives NaN there).

    Raises:
        ValueError: a wrong rank, shape, head_dim, dtype, device, scale, tolerance or path; fewer
            key heads without ``enable_gqa``.
        TypeError: a promise that is neither.
        NotImplementedError: a mask that needs a gradient, a device without a kernel.
    """
    if not enable_gqa and query.dim() == key.dim() == 4 and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key: got {key.shape[2]} heads beside {query.shape[2]} of the query; pass "
            "enable_gqa=True to share key heads, or repeat them."
        )
    scale = None if scale is None else as_float("scale", scale)
    tolerance = as_float("tolerance", tolerance)  # the op takes no numpy scalars
    out, lse, packed = attention_op(
        query,
        key,
        value,
        attn_mask,
        key_lengths,
        scale,
        is_causal,
        tolerance,
        path,
        promise_tensor(promise, query, key, tolerance),
    )
    results = [out]
    if return_lse:
        results.append(lse)
    if return_certificate:
        results.append(unpack_certificate(packed))
    return tuple(results) if len(results) > 1 else out


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Drop-in for ``torch.nn.functional.scaled_dot_product_attention``, layout ``[B, H, S, D]``.

    Args, as torch's, with these limits and differences:
        query: ``[B, H, S_q, D]``; key, value: ``[B, H_kv, S_k, D]``. Four dimensions, one head_dim.
        attn_mask: bool (True = attend) or additive, broadcastable to ``[B, H, S_q, S_k]``.
        dropout_p: only 0.
        is_causal: query i sees keys up to i: top-left, as in torch, also where S_q != S_k.

    A row whose keys are all hidden gives zeros. For an additive mask of a dtype's lowest number
    torch gives the mean of the values there, since it hides nothing, and NaN for -inf.

    Raises:
        ValueError: as `attention`; also for ``is_causal`` together with ``attn_mask``, as in torch.
        NotImplementedError: as `attention`; also for ``dropout_p`` > 0.
    """
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p: got {dropout_p}; attention has no dropout. Pass 0.0 (in a model: call "
            "eval(), or set its attention dropout to 0)."
        )
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attn_mask: given together with is_causal=True. Fold the causal mask into attn_mask."
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got {tensor.dim()} dimensions, shape {list(tensor.shape)}; this takes "
                "[batch, heads, sequence, head_dim]. Use unflatten or unsqueeze."
            )
    num_queries, num_keys = query.shape[2], key.shape[2]
    if is_causal and num_queries != num_keys:
        attn_mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
        is_causal = False
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scale,
        is_causal=is_causal,
        attn_mask=attn_mask,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)
