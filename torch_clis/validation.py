"""Checks at the border of the op: each error names the argument, what was given, what to do."""

from __future__ import annotations

import math

import torch

from certify.arithmetic import query_factor, validate_tolerance
from jax_kernels.config import LARGEST_HEAD_DIM

PATHS = ("auto", "clis", "online")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE_TYPES = ("cpu", "xla", "meta")


def validate_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    scale: float | None,
    tolerance: float,
    path: str,
) -> None:
    """Check every argument of ``torch.ops.clis.attention``, ``[B, S, H, D]``.

    Raises:
        ValueError: wrong rank, shape, head_dim, dtype, scale, tolerance or path.
        NotImplementedError: a device or dtype that there is no kernel for.
    """
    _validate_tensors(query, key, value)
    if attn_mask is not None:
        _validate_mask(attn_mask, query, key)
    if key_lengths is not None:
        _validate_key_lengths(key_lengths, query)
    _validate_scale(scale)
    validate_tolerance(tolerance)
    validate_path(path)


def validate_promise(promise: torch.Tensor | None, query: torch.Tensor) -> None:
    """Check a promise beside a query ``[B, S_q, H, D]``; what it holds stays on the device.

    Raises:
        ValueError: a wrong dtype, shape or device.
    """
    if promise is None:
        return
    heads = query.shape[2]
    if promise.dtype != torch.float32 or tuple(promise.shape) != (heads,):
        raise ValueError(
            f"promise: got {promise.dtype} of shape {_shape(promise)}; give float32 of shape "
            f"[{heads}], a bound in bits on the logits of each head of the query (inf: none)."
        )
    _validate_same_device("promise", promise, query)


def validate_path(path: str) -> str:
    """Check the name of a path.

    Raises:
        ValueError: for an unknown one.
    """
    if path not in PATHS:
        raise ValueError(f"path: got {path!r}; give one of {', '.join(PATHS)}.")
    return path


def as_float(name: str, number: float) -> float:
    """A number as Python's float, also from a scalar of numpy.

    Raises:
        ValueError: where it is none.
    """
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: got {number!r}; give a number.") from None


def _validate_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got {tensor.dim()} dimensions, shape {_shape(tensor)}; attention takes "
                "[batch, sequence, heads, head_dim]. Use unflatten or unsqueeze."
            )
        if tensor.dtype != query.dtype:
            raise ValueError(
                f"{name}: got dtype {tensor.dtype} beside a query of {query.dtype}; "
                f"cast it with {name}.to(query.dtype)."
            )
        if tensor.device != query.device:
            raise ValueError(
                f"{name}: got device {tensor.device} beside a query on {query.device}; "
                f"move it with {name}.to(query.device)."
            )
    _validate_kind(query)
    batch, _, heads, head_dim = query.shape
    if not 0 < head_dim <= LARGEST_HEAD_DIM:
        raise ValueError(
            f"query: got head_dim {head_dim}; attention takes 1 to {LARGEST_HEAD_DIM}. Use "
            "torch.nn.functional.scaled_dot_product_attention for larger heads."
        )
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(
            f"key: got shape {_shape(key)} beside a query of {_shape(query)}; batch and head_dim "
            "must be the query's."
        )
    if value.shape != key.shape:
        raise ValueError(
            f"value: got shape {_shape(value)} beside a key of {_shape(key)}; they must be equal."
        )
    if key.shape[2] == 0 or heads % key.shape[2] != 0:
        raise ValueError(
            f"key: got {key.shape[2]} heads beside {heads} of the query; the query's number of "
            "heads must be a multiple of the key's."
        )


def _validate_kind(query: torch.Tensor) -> None:
    if query.dtype not in DTYPES:
        raise ValueError(
            f"query: got dtype {query.dtype}; attention takes float32, bfloat16 or float16. "
            "Cast query, key and value (there is no float64 kernel; cast to float32)."
        )
    if query.device.type not in DEVICE_TYPES:
        raise NotImplementedError(
            f"query: got device {query.device}; attention runs on XLA devices (TPU, CPU) and on "
            "plain CPU tensors. Move the tensors, or use "
            "torch.nn.functional.scaled_dot_product_attention there."
        )


def _validate_scale(scale: float | None) -> None:
    if scale is not None and not math.isfinite(query_factor(scale)):
        raise ValueError(
            f"scale: got {scale}; give a number whose product with log2(e) is finite in float32, "
            "or None for head_dim ** -0.5."
        )


def _validate_mask(attn_mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    target = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        raise ValueError(
            f"attn_mask: got dtype {attn_mask.dtype}; give bool (True = attend) or an additive "
            "bias of float32, bfloat16 or float16. A 0/1 mask becomes one with .bool()."
        )
    if attn_mask.dim() not in (2, 3, 4) or any(
        given not in (1, wanted)
        for given, wanted in zip(reversed(attn_mask.shape), reversed(target), strict=False)
    ):
        raise ValueError(
            f"attn_mask: got shape {_shape(attn_mask)}; it must broadcast to [batch, heads, "
            f"queries, keys] = {list(target)} and have 2 to 4 dimensions. A key padding mask "
            "[batch, keys] becomes one with mask[:, None, None, :]."
        )
    _validate_same_device("attn_mask", attn_mask, query)


def _validate_key_lengths(key_lengths: torch.Tensor, query: torch.Tensor) -> None:
    if key_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"key_lengths: got dtype {key_lengths.dtype}; give int32, the number of keys that each "
            "batch entry attends to."
        )
    if tuple(key_lengths.shape) != (query.shape[0],):
        raise ValueError(
            f"key_lengths: got shape {_shape(key_lengths)}; give one length for each of the "
            f"{query.shape[0]} batch entries."
        )
    _validate_same_device("key_lengths", key_lengths, query)


def _validate_same_device(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(
            f"{name}: got device {tensor.device} beside a query on {query.device}; "
            f"move it with {name}.to(query.device)."
        )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
