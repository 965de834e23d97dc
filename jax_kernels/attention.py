"""The public function: validation, dispatch by shape, certificates, gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from certify.arithmetic import DEFAULT_TOLERANCE, validate_tolerance
from jax_kernels.config import (
    LANES,
    BlockSizes,
    Problem,
    choose_block_sizes,
    computed_in,
    round_up,
)
from jax_kernels.exact import ExactSettings, Gradients, exact_attention, exact_backward
from jax_kernels.forward import (
    CERTIFICATE_FIELDS,
    ForwardResult,
    attention_forward,
    exact_certificate,
)
from jax_kernels.masks import Masking
from jax_kernels.validation import logit_bound_from, masking_from, validate_call

_INTEGER_FIELDS = ("verdict", "bound_used")


@dataclass(frozen=True)
class _Settings:
    """Static arguments of one call."""

    exact: ExactSettings
    tolerance: float
    path: str
    blocks: BlockSizes
    interpret: bool | None

    def masked(self, masking: Masking) -> bool:
        by_position = self.exact.causal or self.exact.window is not None
        return (
            by_position
            or self.exact.logits_soft_cap is not None
            or any(part is not None for part in masking)
        )


class AttentionResult(NamedTuple):
    """Out [B, S_q, H, D], lse [B, H, S_q] in nats, certificate [B, H, num_q_blocks, fields]."""

    out: jax.Array
    lse: jax.Array
    certificate: jax.Array


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    segment_ids: Any = None,
    key_lengths: jax.Array | None = None,
    window: int | None = None,
    attn_mask: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    path: str = "auto",
    promise: Any = None,
    block_sizes: BlockSizes | None = None,
    return_lse: bool = False,
    return_certificate: bool = False,
    interpret: bool | None = None,
) -> Any:
    """Attention with a stabilizer fixed before the KV loop wherever that is proved or verified.

    Each (batch, head, query block) is *certified* before the loop, or else *verified* by its row
    sums after it, or else *recomputed* with online softmax; keys of a single block,
    ``path="online"`` and masked calls use the true row maximum from the start (*exact*).

    Args:
        query: [B, S_q, H, D], bfloat16, float16 (computed in float32) or float32.
        key, value: [B, S_k, H_kv, D] of the same dtype; H is a multiple of H_kv.
        scale: factor of q.k; None for D**-0.5.
        causal: query i sees keys up to i + S_k - S_q (the last query sees every key).
        segment_ids: int [B, S], or a pair ([B, S_q], [B, S_k]): attention within equal numbers.
        key_lengths: int [B]; keys at or beyond are hidden.
        window: sees keys at most this many positions away.
        attn_mask: bool (True = attend) or additive float in nats, broadcastable to
            [B, H, S_q, S_k]. A bias of -inf or at most finfo(dtype).min / 2 hides its key.
        logits_soft_cap: logits become cap * tanh(logits / cap).
        tolerance: proven |o - o_exact| / max|v| beyond what online softmax rounds.
        path: "auto" as above; "online" for online softmax only; "clis" runs the fixed-stabilizer
            kernel and never recomputes: for measurement only, its result is meaningless where the
            verdict is "recomputed". Masked calls take the exact path whatever this says.
        promise: a ``certify.static.StaticCertificate`` (from the weights), or its logit bounds,
            float32 [H] in bits, inf where nothing is promised. Where it certifies every head,
            nothing is computed from the keys beforehand; max|v|, the check and recomputation
            stay, so a wrong promise costs time and never the answer.
        block_sizes: tile of the kernels; None for a rule by shape.
        return_lse: also return the log-sum-exp, float32 [B, H, S_q], nats.
        return_certificate: also return a dict of arrays [B, H, num_q_blocks], see
            ``CERTIFICATE_FIELDS``: verdict and bound_used int8, the others float32 (gap and budget
            in bits, error_bound relative to max|v|; NaN where the verdict is exact).
        interpret: run the Pallas kernels in interpret mode; None: everywhere but on TPU.

    Returns:
        out [B, S_q, H, D] in the dtype of query, or a tuple (out, lse?, certificate?). A query
        without a visible key gives 0 and lse -inf.

    Raises:
        ValueError: for shapes, dtypes, masks or settings that do not fit, naming the argument.
    """
    validate_call(
        query,
        key,
        value,
        path=path,
        scale=scale,
        window=window,
        logits_soft_cap=logits_soft_cap,
        block_sizes=block_sizes,
    )
    tolerance = validate_tolerance(tolerance)
    logit_bound = logit_bound_from(promise, query, key.shape[1], tolerance)
    masking = masking_from(query, key, segment_ids, key_lengths, attn_mask)
    blocks = block_sizes or choose_block_sizes(query.shape[1], key.shape[1], query.shape[3])
    head_scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    settings = _Settings(
        exact=ExactSettings(head_scale, bool(causal), window, logits_soft_cap),
        tolerance=tolerance,
        path=path,
        blocks=blocks,
        interpret=interpret,
    )
    result = _compiled(settings, query, key, value, masking, logit_bound)
    returned: list[Any] = [result.out]
    if return_lse:
        returned.append(result.lse)
    if return_certificate:
        returned.append(certificate_fields(result.certificate))
    return tuple(returned) if len(returned) > 1 else result.out


def certificate_fields(packed: jax.Array) -> dict[str, jax.Array]:
    """float32 [B, H, num_q_blocks, fields] -> a dict of [B, H, num_q_blocks] arrays by name."""
    fields = {name: packed[..., lane] for lane, name in enumerate(CERTIFICATE_FIELDS)}
    return {
        name: field.astype(jnp.int8) if name in _INTEGER_FIELDS else field
        for name, field in fields.items()
    }


def attention_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lse: jax.Array,
    grad_out: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    segment_ids: Any = None,
    key_lengths: jax.Array | None = None,
    window: int | None = None,
    attn_mask: jax.Array | None = None,
    logits_soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value from the forward pass's lse (nats).

    Args and errors are those of ``attention``; all arrays as there.
    """
    validate_call(
        query,
        key,
        value,
        path="auto",
        scale=scale,
        window=window,
        logits_soft_cap=logits_soft_cap,
    )
    masking = masking_from(query, key, segment_ids, key_lengths, attn_mask)
    settings = ExactSettings(scale, bool(causal), window, logits_soft_cap)
    grads = _gradients(query, key, value, masking, settings, lse, grad_out)
    return grads.query, grads.key, grads.value


def _gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masking: Masking,
    settings: ExactSettings,
    lse: jax.Array,
    grad_out: jax.Array,
    grad_lse: jax.Array | None = None,
) -> Gradients:
    if 0 in (*query.shape, *key.shape):
        inputs = (jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value))
        mask = masking.attn_mask
        return Gradients(*inputs, None if mask is None else jnp.zeros(mask.shape, jnp.float32))
    return exact_backward(query, key, value, masking, settings, lse, grad_out, grad_lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masking: Masking,
    logit_bound: jax.Array | None,
) -> AttentionResult:
    if 0 in (*query.shape, *key.shape):
        return _nothing_to_see(settings, query, key)
    if settings.masked(masking):
        out, lse = exact_attention(query, key, value, masking, settings.exact)
        problem = _problem(settings, query, key, interpret=True)
        return AttentionResult(out, lse, exact_certificate(problem))
    if settings.interpret is not None:
        interpret = settings.interpret
        return _kernel_attention(settings, query, key, value, logit_bound, interpret=interpret)
    return jax.lax.platform_dependent(
        query,
        key,
        value,
        logit_bound,
        tpu=functools.partial(_kernel_attention, settings, interpret=False),
        default=functools.partial(_kernel_attention, settings, interpret=True),
    )


def _nothing_to_see(settings: _Settings, query: jax.Array, key: jax.Array) -> AttentionResult:
    """No query, or none that sees a key: 0 and -inf."""
    problem = _problem(settings, query, key, interpret=True)
    lse = jnp.full((query.shape[0], query.shape[2], query.shape[1]), -jnp.inf, jnp.float32)
    return AttentionResult(jnp.zeros_like(query), lse, exact_certificate(problem))


def _forward(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masking: Masking,
    logit_bound: jax.Array | None,
) -> tuple[AttentionResult, tuple[Any, ...]]:
    result = _differentiable(settings, query, key, value, masking, logit_bound)
    return result, (query, key, value, masking, logit_bound, result.lse)


def _backward(
    settings: _Settings, saved: tuple[Any, ...], grads: AttentionResult
) -> tuple[jax.Array, jax.Array, jax.Array, Masking, jax.Array | None]:
    query, key, value, masking, logit_bound, lse = saved
    found = _gradients(query, key, value, masking, settings.exact, lse, grads.out, grads.lse)
    none = jax.tree.map(lambda part: np.zeros(part.shape, jax.dtypes.float0), masking)
    mask = masking.attn_mask
    if found.attn_mask is not None and mask is not None and mask.dtype != jnp.bool_:
        none = none._replace(attn_mask=found.attn_mask.astype(mask.dtype))
    promised = None if logit_bound is None else jnp.zeros_like(logit_bound)
    return found.query, found.key, found.value, none, promised


_differentiable.defvjp(_forward, _backward)
_compiled = jax.jit(_differentiable, static_argnums=0)


def _problem(settings: _Settings, query: jax.Array, key: jax.Array, *, interpret: bool) -> Problem:
    batch, query_length, query_heads, head_dim = query.shape
    return Problem(
        batch=batch,
        query_length=query_length,
        key_length=key.shape[1],
        query_heads=query_heads,
        key_heads=key.shape[2],
        head_dim=_padded_head_dim(head_dim, query_heads == key.shape[2]),
        dtype=computed_in(query.dtype),
        scale=settings.exact.scale or 0.0,
        tolerance=settings.tolerance,
        blocks=settings.blocks,
        interpret=interpret,
    )


def _padded_head_dim(head_dim: int, same_heads: bool) -> int:
    """Channels in HBM: column blocks are whole registers, or two heads of 64 side by side."""
    half = LANES // 2
    if head_dim <= half and same_heads:
        return half
    return round_up(head_dim, LANES)


def _kernel_attention(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    logit_bound: jax.Array | None,
    *,
    interpret: bool,
) -> AttentionResult:
    problem = _problem(settings, query, key, interpret=interpret)
    batch, query_length, heads, head_dim = query.shape

    def columns(array: jax.Array) -> jax.Array:
        added = problem.head_dim - head_dim
        if added:
            array = jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, added)))
        return array.astype(problem.dtype).reshape(batch, array.shape[1], -1)

    result: ForwardResult = attention_forward(
        columns(query), columns(key), columns(value), problem, settings.path, logit_bound
    )
    out = result.out.reshape(batch, query_length, heads, problem.head_dim)
    out = out[..., :head_dim].astype(query.dtype)
    return AttentionResult(out, result.lse, result.certificate)
