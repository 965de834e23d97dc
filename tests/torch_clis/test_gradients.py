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

FACTOR = 4.0
"""Autograd keeps float32 probabilities; from a saved log-sum-exp they are made again, and delta
comes from an output that was rounded: two more sources of the same size."""

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
        assert largest_error(gradient, reference) <= allowed_error(simple, reference, FACTOR)


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
        assert largest_error(gradient, reference) <= allowed_error(simple, reference, FACTOR)


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
