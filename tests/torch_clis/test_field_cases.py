"""Faults reported from the field, across devices, paths and layouts. Numbers are the reports'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import torch_clis
from certify import VERDICTS
from tests.torch_clis.helpers import (
    Tensors,
    allowed_error,
    definition,
    largest_error,
    moved,
    moved_options,
    on_host,
    plain_attention,
    random_inputs,
    transposed,
)


@dataclass(frozen=True)
class Case:
    """One report: inputs [B, S, H, D] in float32, and what must come out.

    ``fault`` says what went wrong there. ``value`` is the right answer where it is one number;
    otherwise the float64 definition on the rounded inputs is. A ``slow`` case takes seconds per
    program on the XLA CPU device and runs there in the native layout only.
    """

    name: str
    fault: str
    inputs: Callable[[torch.Generator], Tensors]
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    value: float | None = None
    repetitions: int = 1
    slow: bool = False


def _random(query: tuple[int, ...], key: tuple[int, ...] | None = None) -> Callable[..., Tensors]:
    return lambda generator: random_inputs(generator, query, key)


def _uniform_logits(generator: torch.Generator) -> Tensors:
    del generator
    unit = torch.zeros(64)
    unit[0] = 1.0
    query = (8.0 * unit).expand(1, 32, 1, 64).clone()  # q.u * 64**-0.5 = 1
    key = (-4.0 * unit).expand(1, 600, 1, 64).clone()
    return query, key, torch.ones_like(key)


def _values(*values: float) -> Callable[[torch.Generator], Tensors]:
    def build(generator: torch.Generator) -> Tensors:
        value = torch.tensor(values)[None, :, None, None].expand(1, -1, 2, 64).clone()
        key = torch.randn(value.shape, generator=generator)
        return torch.zeros(1, 3, 2, 64), key, value

    return build


def _large_values(generator: torch.Generator) -> Tensors:
    query, key, value = random_inputs(generator, (1, 64, 2, 64), (1, 1200, 2, 64))
    return query, key, torch.full_like(value, 6e4)


def _offset_keys(generator: torch.Generator) -> Tensors:
    query, key, value = random_inputs(generator, (1, 128, 2, 64), (1, 1100, 2, 64))
    key[..., 0] += 300.0
    return query, key, value


def _flushed_products(generator: torch.Generator) -> Tensors:
    query, key, value = random_inputs(generator, (1, 64, 2, 64), (1, 1500, 2, 64))
    query[..., 0] = 0.0
    key[..., 0] = 0.0
    key *= 0.2 / key.norm(dim=-1, keepdim=True)
    key[:, :2] = 0.0
    key[:, 0, :, 0], key[:, 1, :, 0] = 300.0, -300.0
    return query, key, 0.02 * value


_HALF = torch.tensor([True] * 5 + [False] * 5)
_LEFT_PADDED = torch.tensor([False] * 2 + [True] * 4)
_FIRST_TWO = torch.tensor([True, True, False, False])


def _masks(visible: torch.Tensor) -> dict[str, torch.Tensor]:
    lowest = torch.finfo(torch.float32).min
    zeros = torch.zeros(visible.shape)
    return {
        "bool": visible[None, None, None],
        "inf": zeros.masked_fill(~visible, float("-inf"))[None, None, None],
        "lowest": zeros.masked_fill(~visible, lowest)[None, None, None],
    }


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

CASES = [
    *(
        Case(
            f"1-{name}",
            "a length that is no multiple of the block",
            _random((1, 192, 16, 8)),
            dtype,
        )
        for name, dtype in DTYPES.items()
    ),
    Case(
        "2",
        "the first call differs from later ones",
        _random((1, 4092, 1, 32)),
        repetitions=10,
        slow=True,
    ),
    Case("3-few-queries", "S_q != S_k", _random((1, 128, 2, 64), (1, 2048, 2, 64))),
    Case("3-long", "S_q != S_k", _random((1, 2048, 1, 96), (1, 8192, 1, 96)), slow=True),
    Case("4", "zero padding joins the softmax: 0.041", _uniform_logits, torch.float32, value=1.0),
    Case("5", "an explicit scale is ignored", _random((1, 577, 16, 64)), options={"scale": 1.0}),
    *(
        Case(
            f"6-{kind}",
            "a mask is dropped",
            _values(*[1.0] * 5, *[100.0] * 5),
            value=1.0,
            options={"attn_mask": mask},
        )
        for kind, mask in _masks(_HALF).items()
    ),
    *(
        Case(
            f"7-{kind}",
            "a left-padded mask is read as a length: 1.5",
            _values(*range(6)),
            value=3.5,
            options={"attn_mask": mask},
        )
        for kind, mask in _masks(_LEFT_PADDED).items()
    ),
    Case(
        "8",
        "a boolean mask is cast to a 0/1 bias: 2.08",
        _values(1, 1, 5, 5),
        value=1.0,
        options={"attn_mask": _masks(_FIRST_TWO)["bool"]},
    ),
    *(
        Case(
            f"9-{name}", "large values overflow", _large_values, DTYPES[name], value=6e4, slow=True
        )
        for name in ("bfloat16", "float16")
    ),
    *(
        Case(f"10-{name}", "an offset of K changes the answer", _offset_keys, dtype, slow=True)
        for name, dtype in DTYPES.items()
        if name != "float16"
    ),
    *(
        Case(f"14-{name}", "products of small values flush: 0", _flushed_products, dtype, slow=True)
        for name, dtype in DTYPES.items()
        if name != "float16"
    ),
]


@dataclass(frozen=True)
class Runner:
    """Where and how a case runs; ``layout`` is that of the public function."""

    device: str
    path: str = "auto"
    layout: str = "BSHD"

    def __call__(self, inputs: Tensors, options: dict[str, Any]) -> torch.Tensor:
        import torch_xla

        device = torch_xla.device() if self.device == "xla" else torch.device("cpu")
        tensors = moved(inputs, device)
        options = moved_options(options, device)
        if self.layout == "BSHD":
            out = torch_clis.attention(*tensors, path=self.path, **options)
        else:
            query, key, value = transposed(tensors)
            out = torch_clis.scaled_dot_product_attention(query, key, value, **options)
            out = out.transpose(1, 2)
        unchanged = all(
            torch.equal(given, moved.cpu()) for given, moved in zip(inputs, tensors, strict=True)
        )
        assert unchanged, "an input was modified"
        return out.cpu()


RUNNERS = {
    "cpu": Runner("cpu"),
    "cpu-BHSD": Runner("cpu", layout="BHSD"),
    "xla-certified": Runner("xla"),
    "xla-online": Runner("xla", path="online"),
    "xla-BHSD": Runner("xla", layout="BHSD"),
}


COMBINATIONS = [
    pytest.param(case, runner, id=f"case{case.name}-{name}")
    for case in CASES
    for name, runner in RUNNERS.items()
    if not (case.slow and name == "xla-BHSD")
]


@pytest.mark.parametrize(("case", "runner"), COMBINATIONS)
def test_field_case(case: Case, runner: Runner, generator: torch.Generator) -> None:
    """Fault: the case's own, see ``Case.fault``."""
    query, key, value = (tensor.to(case.dtype) for tensor in case.inputs(generator))
    inputs = (query, key, value)
    wanted, _ = definition(*inputs, **case.options)
    plain = plain_attention(inputs, **case.options)
    if case.value is not None:
        wanted = torch.full_like(wanted, torch.tensor(case.value, dtype=case.dtype).item())
    results = [runner(inputs, case.options) for _ in range(case.repetitions)]
    assert results[0].isfinite().all(), case.fault
    assert all(torch.equal(result, results[0]) for result in results), case.fault
    assert largest_error(results[0], wanted) <= allowed_error(plain, wanted), case.fault


@pytest.mark.parametrize("name", ["cpu", "xla-certified", "xla-online"])
def test_field_case10_offset_cancels(name: str, generator: torch.Generator) -> None:
    """Fault: an offset common to all keys, which softmax cancels, changes the output."""
    query, key, value = _offset_keys(generator)
    without = key.clone()
    without[..., 0] -= 300.0
    wanted = RUNNERS[name]((query, without, value), {})
    got = RUNNERS[name]((query, key, value), {})
    assert largest_error(got, wanted) <= 1e-3


@pytest.mark.parametrize("name", ["cpu", "xla-certified"])
def test_field_case11_one_bad_head(name: str, generator: torch.Generator) -> None:
    """Fault: one head's huge logits take certificates from others, or give non-finite outputs."""
    bad = 7
    query, key, value = random_inputs(generator, (1, 16, 24, 64), (1, 1100, 24, 64))
    query[:, :, bad] *= 1000.0  # logits of a standard deviation of 1,400 bits: +-5,000
    device = torch.device("cpu")
    if name.startswith("xla"):
        import torch_xla

        device = torch_xla.device()
    inputs = (query.bfloat16(), key.bfloat16(), value.bfloat16())
    out, certificate = torch_clis.attention(*moved(inputs, device), return_certificate=True)
    out, verdict = on_host(out, certificate["verdict"])
    wanted, _ = definition(*inputs)
    plain = plain_attention(inputs)
    assert out.isfinite().all()
    assert largest_error(out, wanted) <= allowed_error(plain, wanted)
    if name == "cpu":
        assert (verdict == VERDICTS.index("exact")).all()
        return
    certified = (verdict == VERDICTS.index("certified")).all(dim=-1)[0]
    assert certified.tolist() == [head != bad for head in range(24)]
