"""The JAX functions that `torch_clis.ops` lowers, module-level: they are parts of cache keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_kernels
from certify import VERDICTS

OLDEST_JAX_FOR_TPU = (0, 7, 1)
"""Older ones write kernels in a form, and exp2 as an exp, that was never tried on a TPU."""


def attention_program(
    *arrays: Any,
    has_mask: bool,
    has_key_lengths: bool,
    has_promise: bool,
    scale: float,
    causal: bool,
    tolerance: float,
    path: str,
    platform: str,
) -> tuple[Any, Any, Any]:
    """(out, lse, certificate) of ``jax_kernels.attention``, the certificate stacked last.

    Where the verdict is "exact" the fields that say nothing are 0 and not NaN: the outputs of a
    PyTorch op are compared by tools that take no NaN for equal.

    Raises:
        NotImplementedError: for TPU with a jax that is too old, as on Python 3.10.
    """
    if platform == "tpu" and jax.__version_info__ < OLDEST_JAX_FOR_TPU:
        needed = ".".join(map(str, OLDEST_JAX_FOR_TPU))
        raise NotImplementedError(
            f"jax: {jax.__version__} is installed; attention on a TPU needs jax {needed} or newer "
            "(and with it Python 3.11). Only the CPU device works here."
        )
    query, key, value, *optional = arrays
    out, lse, certificate = jax_kernels.attention(
        query,
        key,
        value,
        **_masks(optional, has_mask, has_key_lengths),
        scale=scale,
        causal=causal,
        tolerance=tolerance,
        path=path,
        promise=optional[-1] if has_promise else None,
        return_lse=True,
        return_certificate=True,
        interpret=platform != "tpu",
    )
    fields = [certificate[name].astype(jnp.float32) for name in jax_kernels.CERTIFICATE_FIELDS]
    packed = jnp.stack(fields, axis=-1)
    exact = certificate["verdict"][..., None] == VERDICTS.index("exact")
    return out, lse, jnp.where(exact & jnp.isnan(packed), 0.0, packed)


def record_bounds_program(
    *arrays: Any,
    has_lse: bool,
    has_mask: bool,
    has_key_lengths: bool,
    scale: float,
    causal: bool,
    tolerance: float,
    block_q: int,
    platform: str,
) -> tuple[Any]:
    """The result of ``jax_kernels.record_bounds``, float32 [B, H, num_q_blocks, fields]."""
    del platform  # one definition for both
    query, key, value, *optional = arrays
    record = jax_kernels.record_bounds(
        query,
        key,
        value,
        lse=optional.pop(0) if has_lse else None,
        **_masks(optional, has_mask, has_key_lengths),
        scale=scale,
        causal=causal,
        tolerance=tolerance,
        block_q=block_q,
    )
    return (record,)


def attention_backward_program(
    *arrays: Any,
    has_mask: bool,
    has_key_lengths: bool,
    scale: float,
    causal: bool,
    platform: str,
) -> tuple[Any, Any, Any]:
    """(grad_query, grad_key, grad_value) of ``jax_kernels.attention_backward``."""
    del platform  # one definition for both
    query, key, value, lse, grad_out, *optional = arrays
    grads: tuple[Any, Any, Any] = jax_kernels.attention_backward(
        query,
        key,
        value,
        lse,
        grad_out,
        **_masks(optional, has_mask, has_key_lengths),
        scale=scale,
        causal=causal,
    )
    return grads


def _masks(optional: list[Any], has_mask: bool, has_key_lengths: bool) -> dict[str, Any]:
    remaining = iter(optional)
    return {
        "attn_mask": next(remaining) if has_mask else None,
        "key_lengths": next(remaining) if has_key_lengths else None,
    }
