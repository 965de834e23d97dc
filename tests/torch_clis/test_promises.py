"""`promise=`: what it spares, and that a wrong one costs time and never the answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torch_clis
from certify import BOUND_NAMES, VERDICTS
from certify.static import StaticCertificate
from tests.torch_clis.helpers import (
    Tensors,
    allowed_error,
    definition,
    largest_error,
    moved,
    on_host,
    plain_attention,
    random_inputs,
)
from torch_clis import promises

WEIGHTS = BOUND_NAMES.index("weights")


def _static(*bounds: float) -> StaticCertificate:
    return StaticCertificate("blocks.0.attn1", np.array(bounds, np.float32), "a test")


def _inputs(generator: torch.Generator, spread: float = 1.0) -> Tensors:
    query, key, value = random_inputs(generator, (1, 130, 2, 64), (1, 1300, 2, 64))
    return query * spread, key, value


def _run(inputs: Tensors, promise: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out, fields = torch_clis.attention(*inputs, promise=promise, return_certificate=True)
    out, *values = on_host(out, *fields.values())
    return out, dict(zip(fields, values, strict=True))


@pytest.mark.parametrize("kind", ["certificate", "tensor"])
def test_a_true_promise_certifies(
    kind: str, xla_device: torch.device, generator: torch.Generator
) -> None:
    """Fault: the promise does not reach the kernel, or in nats, or in another order of heads."""
    inputs = _inputs(generator)
    wanted, _ = definition(*inputs)
    bounds = (30.0, 40.0)
    promise = _static(*bounds) if kind == "certificate" else torch.tensor(bounds, device=xla_device)
    out, fields = _run(moved(inputs, xla_device), promise)
    assert largest_error(out, wanted) <= allowed_error(plain_attention(inputs), wanted)
    assert (fields["verdict"] == VERDICTS.index("certified")).all()
    assert (fields["bound_used"] == WEIGHTS).all()
    # |logit| <= bound: the log-sum-exp lies within an interval of twice that.
    for head, bound in enumerate(bounds):
        gap = fields["gap"][:, head]
        assert (gap - 2 * bound).abs().max() <= 1.0


@pytest.mark.parametrize("bound", [0.0, 1.0, float("nan"), -5.0])
def test_a_wrong_promise_gives_the_right_answer(
    bound: float, xla_device: torch.device, generator: torch.Generator
) -> None:
    """Fault: a certified block is believed without the check after the loop.

    Logits reach some hundred bits, which a promise of a few denies.
    """
    inputs = _inputs(generator, spread=60.0)
    wanted, _ = definition(*inputs)
    out, fields = _run(moved(inputs, xla_device), torch.tensor([bound, bound], device=xla_device))
    assert largest_error(out, wanted) <= allowed_error(plain_attention(inputs), wanted)
    assert (fields["verdict"] == VERDICTS.index("recomputed")).any()


@pytest.mark.parametrize("bound", [float("inf"), 200.0])
def test_a_promise_that_does_not_certify_is_none(
    bound: float, xla_device: torch.device, generator: torch.Generator
) -> None:
    """Fault: a head without a sufficient claim loses the statistics that would certify it."""
    inputs = moved(_inputs(generator), xla_device)
    _, fields = _run(inputs, _static(30.0, bound))
    _, without = _run(inputs, None)
    for name, field in without.items():
        assert torch.equal(fields[name], field)


def test_masked_calls_take_no_notice(xla_device: torch.device, generator: torch.Generator) -> None:
    """Fault: the promise is taken for a mask, or the mask for the promise."""
    inputs = _inputs(generator)
    lengths, mask = torch.tensor([777]), torch.rand(1300, generator=generator)[None] < 0.5
    wanted, _ = definition(*inputs, key_lengths=lengths, attn_mask=mask)
    got = torch_clis.attention(
        *moved(inputs, xla_device),
        key_lengths=lengths.to(xla_device),
        attn_mask=mask.to(xla_device),
        promise=_static(30.0, 30.0),
    )
    limit = allowed_error(plain_attention(inputs, key_lengths=lengths, attn_mask=mask), wanted)
    assert largest_error(got, wanted) <= limit


def test_host_tensors_need_none(generator: torch.Generator) -> None:
    """Fault: a promise changes, or breaks, the exact path of plain CPU tensors."""
    inputs = _inputs(generator)
    got, wanted = (torch_clis.attention(*inputs, promise=p) for p in (_static(1.0, 1.0), None))
    assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match=r"promise: got torch.float32 of shape \[3\].*\[2\]"):
        torch_clis.attention(*inputs, promise=_static(1.0, 1.0, 1.0))


def test_a_certificate_is_sent_once(xla_device: torch.device, generator: torch.Generator) -> None:
    """Fault: every call sends its bounds anew, makes them a constant of the graph, or waits."""
    import torch_xla
    from torch_xla.debug import metrics

    inputs = moved(_inputs(generator), xla_device)
    torch_xla.sync()
    promises._on_device.cache_clear()

    def step(bound: float) -> int:
        out = torch_clis.attention(*inputs, promise=_static(bound, 40.0))
        torch_xla.sync()
        assert out.shape == inputs[0].shape
        return int(metrics.counter_value("UncachedCompile"))

    transfers = metrics.metric_data("TransferFromDeviceTime")
    first = step(30.0)
    assert [step(bound) for bound in (30.0, 31.0, 30.0)] == [first] * 3
    assert metrics.metric_data("TransferFromDeviceTime") == transfers
    assert promises._on_device.cache_info().misses == 2


@pytest.mark.parametrize("aspect", ["test_schema", "test_faketensor", "test_aot_dispatch_static"])
def test_opcheck(aspect: str, xla_device: torch.device, generator: torch.Generator) -> None:
    """Fault: the schema's last argument is not carried through tracing."""
    for device in (torch.device("cpu"), xla_device):
        inputs = random_inputs(generator, (1, 24, 4, 64), (1, 33, 2, 64))
        tensors = moved(inputs, device, requires_grad=aspect == "test_aot_dispatch_static")
        promise = torch.full((4,), 30.0, device=device)
        arguments = (*tensors, None, None, None, False, 2.0**-12, "auto", promise)
        torch.library.opcheck(torch.ops.clis.attention, arguments, test_utils=aspect)
