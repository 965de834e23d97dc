"""Bad input: an error that names the argument and the remedy, before anything is lowered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_clis
from tests.torch_clis.helpers import moved_options
from torch_clis import lowering


def _tensor(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def _good() -> dict[str, Any]:
    return {name: _tensor(2, 6, 4, 8) for name in ("query", "key", "value")}


Case = tuple[dict[str, Any], type[Exception], str]

ATTENTION: dict[str, Case] = {
    "query-rank": ({"query": _tensor(6, 4, 8)}, ValueError, r"query: got 3 dimensions.*unflatten"),
    "key-rank": ({"key": _tensor(2, 6, 32)}, ValueError, r"key: got 3 dimensions"),
    "no-key-heads": (
        {"key": _tensor(2, 6, 0, 8), "value": _tensor(2, 6, 0, 8), "enable_gqa": True},
        ValueError,
        r"key: got 0 heads",
    ),
    "no-channels": (
        {name: _tensor(2, 6, 4, 0) for name in ("query", "key", "value")},
        ValueError,
        r"query: got head_dim 0; attention takes 1 to 512",
    ),
    "large-heads": (
        {name: _tensor(2, 6, 4, 513) for name in ("query", "key", "value")},
        ValueError,
        r"query: got head_dim 513; attention takes 1 to 512",
    ),
    "batch": ({"key": _tensor(3, 6, 4, 8)}, ValueError, r"key: got shape \[3, 6, 4, 8\].*batch"),
    "head-dim": ({"key": _tensor(2, 6, 4, 16)}, ValueError, r"key: got shape.*head_dim"),
    "value-shape": ({"value": _tensor(2, 5, 4, 8)}, ValueError, r"value: got shape \[2, 5, 4, 8\]"),
    "gqa-off": (
        {"key": _tensor(2, 6, 2, 8), "value": _tensor(2, 6, 2, 8)},
        ValueError,
        r"key: got 2 heads.*enable_gqa=True",
    ),
    "gqa-ratio": (
        {"key": _tensor(2, 6, 3, 8), "value": _tensor(2, 6, 3, 8), "enable_gqa": True},
        ValueError,
        r"key: got 3 heads beside 4.*multiple",
    ),
    "mixed-dtype": (
        {"key": _tensor(2, 6, 4, 8, dtype=torch.bfloat16)},
        ValueError,
        r"key: got dtype torch.bfloat16 beside a query of torch.float32.*key.to",
    ),
    "float64": (
        {name: _tensor(2, 6, 4, 8, dtype=torch.float64) for name in ("query", "key", "value")},
        ValueError,
        r"query: got dtype torch.float64.*cast to float32",
    ),
    "integer": (
        {name: _tensor(2, 6, 4, 8, dtype=torch.int32) for name in ("query", "key", "value")},
        ValueError,
        r"query: got dtype torch.int32",
    ),
    "mixed-device": (
        {"value": _tensor(2, 6, 4, 8, device="meta")},
        ValueError,
        r"value: got device meta beside a query on cpu",
    ),
    "mask-rank": ({"attn_mask": _tensor(6)}, ValueError, r"attn_mask: got shape \[6\]"),
    "mask-shape": (
        {"attn_mask": _tensor(2, 6, dtype=torch.bool)},
        ValueError,
        r"attn_mask: got shape \[2, 6\].*\[2, 4, 6, 6\].*mask\[:, None, None, :\]",
    ),
    "mask-dtype": (
        {"attn_mask": _tensor(6, 6, dtype=torch.int32)},
        ValueError,
        r"attn_mask: got dtype torch.int32.*\.bool\(\)",
    ),
    "mask-device": (
        {"attn_mask": _tensor(6, 6, device="meta")},
        ValueError,
        r"attn_mask: got device meta",
    ),
    "lengths-dtype": ({"key_lengths": _tensor(2)}, ValueError, r"key_lengths: got dtype"),
    "lengths-shape": (
        {"key_lengths": _tensor(3, dtype=torch.int32)},
        ValueError,
        r"key_lengths: got shape \[3\].*2 batch entries",
    ),
    "tolerance-low": ({"tolerance": 1e-9}, ValueError, r"tolerance: got 1e-09"),
    "tolerance-high": ({"tolerance": 1.0}, ValueError, r"tolerance: got 1.0"),
    "tolerance-nan": ({"tolerance": float("nan")}, ValueError, r"tolerance: got nan"),
    "tolerance-text": ({"tolerance": "small"}, ValueError, r"tolerance: got 'small'; give a num"),
    "scale-nan": ({"scale": float("nan")}, ValueError, r"scale: got nan.*finite in float32"),
    "scale-infinite": ({"scale": -math.inf}, ValueError, r"scale: got -inf"),
    "scale-huge": ({"scale": 2.4e38}, ValueError, r"scale: got 2.4e\+38.*log2\(e\)"),
    "scale-text": ({"scale": "auto"}, ValueError, r"scale: got 'auto'; give a number"),
    "path": ({"path": "fast"}, ValueError, r"path: got 'fast'; give one of auto, clis, online"),
    "promise": ({"promise": object()}, TypeError, r"promise: got object.*StaticCertificate"),
    "promise-heads": (
        {"promise": _tensor(3)},
        ValueError,
        r"promise: got torch.float32 of shape \[3\]; give float32 of shape \[4\]",
    ),
    "promise-dtype": (
        {"promise": _tensor(4, dtype=torch.float16)},
        ValueError,
        r"promise: got torch.float16 of shape \[4\]; give float32",
    ),
    "promise-device": (
        {"promise": _tensor(4, device="meta")},
        ValueError,
        r"promise: got device meta.*promise.to\(query.device\)",
    ),
}

SDPA: dict[str, Case] = {
    "rank": ({"query": _tensor(4, 6, 8)}, ValueError, r"query: got 3 dimensions.*head_dim\]"),
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, r"dropout_p: got 0.1.*eval\(\)"),
    "mask-and-causal": (
        {"is_causal": True, "attn_mask": _tensor(4, 4, dtype=torch.bool)},
        ValueError,
        r"attn_mask: given together with is_causal",
    ),
}


def _check(function: Callable[..., Any], case: Case) -> None:
    changes, error, message = case
    before = lowering.cache_info()
    with pytest.raises(error, match=message):
        function(**{**_good(), **changes})
    assert lowering.cache_info() == before


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_refuses(name: str) -> None:
    """Fault: bad input is broadcast, cast, or fails somewhere inside a compiler."""
    _check(torch_clis.attention, ATTENTION[name])


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention_refuses(name: str) -> None:
    """Fault: an argument of torch's function that has no counterpart is dropped."""
    _check(torch_clis.scaled_dot_product_attention, SDPA[name])


ELSEWHERE = (
    "tolerance-low",
    "path",
    "mask-shape",
    "float64",
    "gqa-ratio",
    "no-key-heads",
    "no-channels",
    "large-heads",
    "scale-nan",
    "scale-infinite",
    "scale-huge",
)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_xla_refuses_before_lowering(name: str, xla_device: torch.device) -> None:
    """Fault: the XLA kernel trusts what only the CPU kernel checks."""
    changes, error, message = ATTENTION[name]
    changes = moved_options({**_good(), **changes}, xla_device)
    _check(torch_clis.attention, (changes, error, message))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_fake_tensors_are_refused_alike(name: str) -> None:
    """Fault: a graph is traced for arguments that the kernels then refuse."""
    changes, error, message = ATTENTION[name]
    changes = moved_options({**_good(), **changes}, torch.device("meta"))
    _check(torch_clis.attention, (changes, error, message))


def test_other_devices_are_named() -> None:
    """Fault: an accelerator without a kernel gets another device's, or an error without remedy."""
    with FakeTensorMode():
        query = _tensor(2, 6, 4, 8, device="cuda")
        with pytest.raises(NotImplementedError, match=r"query: got device cuda.*Move the tensors"):
            torch_clis.attention(query, query, query)
