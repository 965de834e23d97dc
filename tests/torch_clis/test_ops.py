"""The op against the definition, and against what PyTorch asks of an op."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import torch_clis
from certify import BOUND_NAMES, VERDICTS
from tests.torch_clis.helpers import (
    allowed_error,
    definition,
    largest_error,
    moved,
    moved_options,
    on_host,
    plain_attention,
    random_inputs,
)
from torch_clis.ops import CERTIFICATE_FIELDS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _mask(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    visible = torch.rand(shape, generator=generator) < 0.6
    visible[..., 3, :] = False  # a row that sees nothing
    if kind == "bool":
        return visible
    bias = torch.randn(shape, generator=generator)
    return bias.masked_fill(~visible, float("-inf"))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": torch.tensor([5, 130], dtype=torch.int32)},
    "lengths-causal": {"key_lengths": torch.tensor([0, 77]), "is_causal": True},
    "bool": {"attn_mask": "bool"},
    "additive": {"attn_mask": "additive"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("kind", OPTIONS)
def test_agrees_with_the_definition(
    kind: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: a mask, length, scale or shared key head is dropped or misaligned on one device."""
    query, key, value = random_inputs(generator, (2, 70, 4, 64), (2, 133, 2, 64), dtype)
    options = dict(OPTIONS[kind])
    if "attn_mask" in options:
        options["attn_mask"] = _mask(options["attn_mask"], (2, 1, 70, 133), generator)
    wanted, wanted_lse = definition(query, key, value, **options)
    limit = allowed_error(plain_attention((query, key, value), **options), wanted)
    out, lse = torch_clis.attention(
        *moved((query, key, value), device),
        **moved_options(options, device),
        enable_gqa=True,
        return_lse=True,
    )
    out, lse = on_host(out, lse)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert largest_error(out, wanted) <= limit
    seen = wanted_lse > float("-inf")
    assert torch.equal(lse > float("-inf"), seen)
    # A bfloat16 kernel holds the scaled query as two halves of 8 bits, so its logits err by up to
    # 2^-17 of |q||k|; a float32 dot product of 64 errs by far less than 64 units of it.
    unit = 2.0**-17 if dtype == torch.bfloat16 else 2.0**-20
    norms = query.float().norm(dim=-1).max() * key.float().norm(dim=-1).max()
    lse_limit = unit * float(norms) * options.get("scale", 64**-0.5)
    assert largest_error(lse[seen], wanted_lse[seen]) <= lse_limit


@pytest.mark.parametrize("path", ["auto", "online"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_many_keys_and_their_certificate(
    path: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: fields of the packed certificate are permuted, or codes lose their meaning."""
    query, key, value = random_inputs(generator, (1, 200, 2, 64), (1, 1500, 2, 64), dtype)
    wanted, _ = definition(query, key, value)
    limit = allowed_error(plain_attention((query, key, value)), wanted)
    out, certificate = torch_clis.attention(
        *moved((query, key, value), device), path=path, return_certificate=True
    )
    assert tuple(certificate) == CERTIFICATE_FIELDS
    out, *values = on_host(out, *certificate.values())
    assert largest_error(out, wanted) <= limit
    fields = dict(zip(CERTIFICATE_FIELDS, values, strict=True))
    assert fields["verdict"].dtype == fields["bound_used"].dtype == torch.int8
    assert {field.shape for field in fields.values()} == {fields["verdict"].shape}
    assert fields["verdict"].shape[:2] == (1, 2)
    if device.type == "xla" and path == "auto":
        assert (fields["verdict"] == VERDICTS.index("certified")).all()
        assert (fields["gap"] <= fields["budget"]).all()
        assert (fields["error_bound"] <= 2.0**-12).all()
        assert (fields["row_sum_min"] <= fields["row_sum_max"]).all()
        assert (fields["bound_used"] != BOUND_NAMES.index("none")).all()
    else:
        assert (fields["verdict"] == VERDICTS.index("exact")).all()
        assert (fields["error_bound"] == 0).all()
        for name in ("gap", "budget", "row_sum_min", "row_sum_max"):
            assert fields[name].isnan().all()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(40, 40), (40, 65), (65, 40)])
def test_causal_alignment(
    num_queries: int, num_keys: int, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: scaled_dot_product_attention aligns bottom-right where torch aligns top-left."""
    inputs = random_inputs(generator, (1, 2, num_queries, 32), (1, 2, num_keys, 32))
    theirs = torch.nn.functional.scaled_dot_product_attention
    query, key, value = inputs
    wanted = theirs(query.double(), key.double(), value.double(), is_causal=True)
    plain = theirs(query, key, value, is_causal=True)
    query, key, value = moved(inputs, device)
    got = torch_clis.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert largest_error(got, wanted) <= allowed_error(plain, wanted)


@pytest.mark.parametrize("beyond", [2**31, 2**32, 2**40])
def test_long_lengths_do_not_wrap(
    beyond: int, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: an int64 length becomes 0 or negative as int32, and every key is hidden."""
    inputs = random_inputs(generator, (2, 20, 2, 64), (2, 30, 2, 64))
    wanted, _ = definition(*inputs, key_lengths=torch.tensor([30, 0]))
    lengths = torch.tensor([beyond, -beyond], device=device)
    got = torch_clis.attention(*moved(inputs, device), key_lengths=lengths)
    assert largest_error(got, wanted) <= 2.0**-20


EMPTY = {
    "batch": ((0, 6, 4, 8), (0, 5, 2, 8)),
    "heads": ((2, 6, 0, 8), (2, 5, 2, 8)),
    "queries": ((2, 0, 4, 8), (2, 5, 2, 8)),
    "keys": ((2, 6, 4, 8), (2, 0, 2, 8)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", EMPTY)
def test_empty_inputs(
    kind: str, masked: bool, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: an empty batch divides by 0 or fails inside a compiler; devices differ."""
    query_shape, key_shape = EMPTY[kind]
    inputs = moved(random_inputs(generator, query_shape, key_shape), device, requires_grad=True)
    options: dict[str, Any] = {}
    if masked:
        options["key_lengths"] = torch.full(key_shape[:1], 3, device=device)
        options["attn_mask"] = torch.ones(1, 1, 1, key_shape[1], dtype=torch.bool, device=device)
    out, lse, certificate = torch_clis.attention(
        *inputs, **options, enable_gqa=True, return_lse=True, return_certificate=True
    )
    gradients = list(torch.autograd.grad(out.sum(), inputs))
    out, lse, verdict, *gradients = on_host(out, lse, certificate["verdict"], *gradients)
    batch, queries, heads, _ = query_shape
    assert torch.equal(out, torch.zeros(query_shape))
    assert torch.equal(lse, torch.full((batch, heads, queries), float("-inf")))
    assert verdict.shape[:2] == (batch, heads) and (verdict == VERDICTS.index("exact")).all()
    for gradient, given in zip(gradients, inputs, strict=True):
        assert torch.equal(gradient, torch.zeros(given.shape))


def test_numbers_of_numpy_are_numbers(device: torch.device, generator: torch.Generator) -> None:
    """Fault: the op's schema refuses a numpy scalar that the documentation allows."""
    inputs = moved(random_inputs(generator, (1, 20, 2, 64)), device)
    wanted = torch_clis.attention(*inputs, scale=0.25, tolerance=2.0**-10)
    numbers: dict[str, Any] = {"scale": np.float32(0.25), "tolerance": np.float32(2.0**-10)}
    got = torch_clis.attention(*inputs, **numbers)
    assert torch.equal(got.cpu(), wanted.cpu())


def test_float16_probabilities_stay_float32(device: torch.device) -> None:
    """Fault: probabilities below 2^-25 are 0 in float16, in the output and the values' gradient."""
    query = torch.ones(1, 1, 1, 16)
    key = torch.zeros(1, 2, 1, 16)
    key[0, 1] = -18.0 / 16  # e^-18 = 2^-26
    value = torch.tensor([0.0, 6e4]).view(1, 2, 1, 1).expand(1, 2, 1, 16)
    half = (query.half(), key.half(), value.half())
    leaves = moved(half, device, requires_grad=True)
    out = torch_clis.attention(*leaves, scale=1.0)
    (grad_value,) = torch.autograd.grad((out * 1e4).sum(), leaves[2])
    out, grad_value = on_host(out, grad_value)
    small = math.exp(-18.0)
    assert largest_error(out / (6e4 * small), torch.ones(out.shape)) <= 2.0**-9
    wanted = torch.full((16,), 1e4 * small)
    assert largest_error(grad_value[0, 1, 0] / wanted, torch.ones(16)) <= 2.0**-7


def test_cpu_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """Fault: queries at a chunk's edge are lost or attended to with another chunk's mask."""
    query, key, value = random_inputs(generator, (2, 53, 4, 16), (2, 61, 2, 16))
    options: dict[str, Any] = {
        "is_causal": True,
        "attn_mask": _mask("bool", (1, 4, 53, 61), generator),
    }
    wanted = torch_clis.attention(query, key, value, enable_gqa=True, **options)
    monkeypatch.setattr("torch_clis.cpu.LOGITS_PER_CHUNK", 8 * 61 * 7)
    got = torch_clis.attention(query, key, value, enable_gqa=True, **options)
    assert largest_error(got, wanted) <= 2.0**-22


OPCHECK_ARGUMENTS = (None, None, None, False, 2.0**-12, "auto")


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "aspect",
    [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
        "test_aot_dispatch_dynamic",
    ],
)
def test_opcheck(
    aspect: str, requires_grad: bool, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: wrong schema, fake shapes that differ from the kernel's, autograd lost in tracing."""
    if aspect == "test_autograd_registration":
        device = torch.device("cpu")  # opcheck knows no other backend of ours
    inputs = random_inputs(generator, (1, 24, 4, 64), (1, 33, 2, 64))
    tensors = moved(inputs, device, requires_grad)
    torch.library.opcheck(
        torch.ops.clis.attention, (*tensors, *OPCHECK_ARGUMENTS), test_utils=aspect
    )


@pytest.mark.parametrize("aspect", ["test_schema", "test_faketensor"])
def test_opcheck_backward(aspect: str, device: torch.device, generator: torch.Generator) -> None:
    """Fault: the backward op's fake shapes follow the query where key heads are fewer."""
    query, key, value = moved(random_inputs(generator, (1, 24, 4, 64), (1, 33, 2, 64)), device)
    out, lse, _ = torch.ops.clis.attention(query, key, value, *OPCHECK_ARGUMENTS)
    arguments = (query, key, value, lse, torch.ones_like(out), None, None, None, False)
    torch.library.opcheck(torch.ops.clis.attention_backward, arguments, test_utils=aspect)


def _between_other_ops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out = torch_clis.attention(query * 2, key, value)
    out += 1  # in place: functionalization has to carry it
    assert isinstance(out, torch.Tensor)
    return out


class _Module(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _between_other_ops(query, key, value)


def test_functionalization_and_export(generator: torch.Generator) -> None:
    """Fault: the op breaks up into parts, or captures nothing, under export."""
    inputs = random_inputs(generator, (1, 24, 2, 64))
    wanted = _between_other_ops(*inputs)
    assert torch.equal(torch.func.functionalize(_between_other_ops)(*inputs), wanted)
    program = torch.export.export(_Module(), inputs)
    assert "clis.attention.default" in {str(node.target) for node in program.graph.nodes}
    assert torch.equal(program.module()(*inputs), wanted)


def test_compile_openxla(xla_device: torch.device, generator: torch.Generator) -> None:
    """Fault: a graph break, or another result, under torch.compile on XLA."""
    inputs = moved(random_inputs(generator, (1, 24, 2, 64)), xla_device)
    wanted = _between_other_ops(*inputs).cpu()
    torch._dynamo.reset()
    compiled = torch.compile(_between_other_ops, backend="openxla", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(*inputs).cpu(), wanted)


def test_no_second_compilation(xla_device: torch.device, generator: torch.Generator) -> None:
    """Fault: each call lowers anew, so that each step is another program to XLA."""
    import torch_xla
    from torch_xla.debug import metrics

    inputs = moved(random_inputs(generator, (1, 24, 2, 64)), xla_device)

    def step() -> int:
        out = torch_clis.attention(*inputs)
        torch_xla.sync()
        assert out.shape == inputs[0].shape
        return int(metrics.counter_value("UncachedCompile"))

    first = step()
    assert [step() for _ in range(3)] == [first] * 3
