"""Gradients against autograd through the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_clis
from tests.torch_clis.helpers import (
    Tensors,
    allowed_error,
    as_leaves,
    definition,
    largest_error,
    moved,
    moved_options,
    on_host,
    random_inputs,
)

FACTOR = 2.0
"""Allowed multiple of the plain implementation's error; with delta from a rounded output it was 3
to 25 on sharp rows, and 2.7 with probabilities that do not sum to 1."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.4},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": torch.tensor([0, 31], dtype=torch.int32)},
    "bool": {"attn_mask": torch.ones(40, 50, dtype=torch.bool).tril(-3)},
    "additive": {"attn_mask": torch.linspace(-4, 4, 50).expand(1, 4, 40, 50)},
}


def _gradients(out: torch.Tensor, inputs: Tensors, weights: torch.Tensor) -> list[torch.Tensor]:
    loss = (out * weights.to(out)).sum()
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_gradients(
    kind: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: a wrong or unscaled term, a mask ignored on the way back, key heads not summed."""
    options = OPTIONS[kind]
    inputs = random_inputs(generator, (2, 40, 4, 32), (2, 50, 2, 32), dtype)
    weights = torch.randn(inputs[0].shape, generator=generator)

    leaves = as_leaves(inputs, torch.float64)
    wanted = _gradients(definition(*leaves, **options)[0], leaves, weights)
    leaves = as_leaves(inputs, inputs[0].dtype)
    out, _ = definition(*leaves, **options, dtype=torch.float32, probability_dtype=dtype)
    plain = _gradients(out.to(dtype), leaves, weights)

    leaves = moved(inputs, device, requires_grad=True)
    out = torch_clis.attention(*leaves, **moved_options(options, device), enable_gqa=True)
    got = on_host(*_gradients(out, leaves, weights))
    for gradient, reference, simple, leaf in zip(got, wanted, plain, inputs, strict=True):
        assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
        limit = allowed_error(simple, reference, FACTOR)
        assert largest_error(gradient, reference) <= limit


@pytest.mark.parametrize("sharpness", [1.0, 4.0, 10.0, 30.0])
def test_gradients_of_peaked_rows(
    sharpness: float, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: the rounding of a bfloat16 output enters the gradients, which it dominates there."""
    query, key, value = random_inputs(generator, (1, 200, 2, 64))
    inputs = ((sharpness * query).bfloat16(), (sharpness * key).bfloat16(), value.bfloat16())
    weights = torch.randn(query.shape, generator=generator).bfloat16()
    leaves = as_leaves(inputs, torch.float64)
    wanted = _gradients(definition(*leaves)[0], leaves, weights)
    leaves = as_leaves(inputs, torch.bfloat16)
    out, _ = definition(*leaves, dtype=torch.float32, probability_dtype=torch.bfloat16)
    plain = _gradients(out.bfloat16(), leaves, weights)
    leaves = moved(inputs, device, requires_grad=True)
    got = on_host(*_gradients(torch_clis.attention(*leaves), leaves, weights))
    for gradient, reference, simple in zip(got, wanted, plain, strict=True):
        limit = allowed_error(simple, reference, FACTOR)
        assert largest_error(gradient, reference) <= limit


UNSEEN: dict[str, dict[str, Any]] = {
    "lengths": {"key_lengths": torch.tensor([25], dtype=torch.int32)},
    "bool": {"attn_mask": torch.arange(30)[None, :] < 25},
    "additive": {
        "attn_mask": torch.zeros(1, 2, 20, 30).masked_fill(
            torch.arange(30) >= 25, torch.finfo(torch.float32).min
        )
    },
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_keys_that_no_query_sees_may_be_anything(
    kind: str, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: 0 * NaN of a padded key or value reaches the output or a gradient."""
    inputs = random_inputs(generator, (1, 20, 2, 64), (1, 30, 2, 64))
    weights = torch.randn(inputs[0].shape, generator=generator)
    leaves = as_leaves(inputs, torch.float64)
    wanted_out = definition(*leaves, **UNSEEN[kind])[0]
    wanted = _gradients(wanted_out, leaves, weights)
    for padded in inputs[1:]:
        padded[:, 25:27] = float("nan")
        padded[:, 27:] = float("inf")
    leaves = moved(inputs, device, requires_grad=True)
    out = torch_clis.attention(*leaves, **moved_options(UNSEEN[kind], device))
    got = on_host(out, *_gradients(out, leaves, weights))
    for result, reference in zip(got, [wanted_out, *wanted], strict=True):
        assert largest_error(result, reference) <= 2.0**-18


def test_gradients_after_the_fixed_stabilizer_kernel(
    xla_device: torch.device, generator: torch.Generator
) -> None:
    """Fault: the log-sum-exp of the fixed-stabilizer kernel is of another base or offset."""
    inputs = random_inputs(generator, (1, 30, 2, 64), (1, 1100, 2, 64))
    weights = torch.randn(inputs[0].shape, generator=generator)
    leaves = as_leaves(inputs, torch.float64)
    wanted = _gradients(definition(*leaves)[0], leaves, weights)
    leaves = as_leaves(inputs, inputs[0].dtype)
    plain = _gradients(definition(*leaves, dtype=torch.float32)[0], leaves, weights)
    leaves = moved(inputs, xla_device, requires_grad=True)
    got = on_host(*_gradients(torch_clis.attention(*leaves), leaves, weights))
    for gradient, reference, simple in zip(got, wanted, plain, strict=True):
        limit = allowed_error(simple, reference, FACTOR)
        assert largest_error(gradient, reference) <= limit


def test_only_out_is_differentiable(device: torch.device, generator: torch.Generator) -> None:
    """Fault: a loss on the log-sum-exp or the certificate trains on a gradient of zero."""
    query, key, value = moved(random_inputs(generator, (1, 8, 1, 16)), device, requires_grad=True)
    out, lse, certificate = torch_clis.attention(
        query, key, value, return_lse=True, return_certificate=True
    )
    assert out.requires_grad
    assert not lse.requires_grad
    assert not any(field.requires_grad for field in certificate.values())


def test_a_mask_that_needs_a_gradient_is_refused(
    device: torch.device, generator: torch.Generator
) -> None:
    """Fault: a learned bias silently stops learning."""
    query, key, value = moved(random_inputs(generator, (1, 8, 1, 16)), device)
    bias = torch.zeros(8, 8, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"attn_mask: requires a gradient"):
        torch_clis.attention(query, key, value, attn_mask=bias)
