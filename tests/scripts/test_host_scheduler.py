"""The scheduler kept on the host: the same steps as diffusers' own, one transfer a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)

STEPS = 5


def unipc() -> SchedulerMixin:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def euler() -> SchedulerMixin:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def model_outputs(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


@pytest.mark.parametrize("make", [unipc, euler])
def test_equals_the_wrapped_scheduler_and_never_recompiles(
    make: Callable[[], SchedulerMixin],
) -> None:
    """Fault: a step out of order, a sample mixed up, a coefficient traced into a device program."""
    import torch_xla

    from wan_video import runtime
    from wan_video.host_scheduler import HostScheduler

    sample = torch.randn((1, 4, 2, 6, 6), generator=torch.Generator().manual_seed(4))
    outputs = model_outputs(tuple(sample.shape))

    plain = make()
    plain.set_timesteps(STEPS)
    plain.set_begin_index(0)
    expected = sample
    for output, timestep in zip(outputs, plain.timesteps, strict=True):
        expected = plain.step(output, timestep, expected, return_dict=False)[0]

    device = torch_xla.device()
    host = HostScheduler(make(), device)
    host.set_timesteps(STEPS, device=device)
    host.set_begin_index(0)
    current = sample.to(device)
    compiled = []
    for output, timestep in zip(outputs, host.timesteps, strict=True):
        before = runtime.activity()
        # Something for the device to do, as a transformer would: depends on sample and timestep.
        on_device = output.to(device) + 0.0 * current * timestep.expand(1).float()
        current = host.step(on_device, timestep, current)[0]
        compiled.append((runtime.activity() - before).compilations)
    assert torch.allclose(current.cpu(), expected, rtol=0, atol=1e-6)
    assert compiled[1:] == [0] * (STEPS - 1)


def test_timestep_compares_without_touching_the_device() -> None:
    """Fault: `t >= boundary` waits for the device every step."""
    import torch_xla

    from wan_video import runtime
    from wan_video.host_scheduler import HostTimestep

    timestep = HostTimestep(torch.tensor(875), torch_xla.device())
    before = runtime.activity()
    assert timestep >= 875.0
    assert not timestep >= 875.5
    assert (runtime.activity() - before).device_to_host == 0
    assert timestep.expand(3).cpu().tolist() == [875, 875, 875]
    mask = torch.ones(2, 2, device=torch_xla.device())
    assert (mask * timestep).cpu().tolist() == [[875.0, 875.0], [875.0, 875.0]]
