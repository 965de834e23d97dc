"""A diffusers scheduler kept on the host, so that no step of it is traced or compiled by XLA.

Left on the device, a scheduler's coefficients enter the graph as constants (a new program every
step), its order warm-up changes the graph, slicing its timestep tensor makes one graph per step,
and the two-expert pipeline's `t >= boundary` waits for the device. On the host none of this
exists: the price is one transfer of the model output per denoising step, and the arithmetic is
float32 whatever the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch_xla


@dataclass(frozen=True)
class HostTimestep:
    """A timestep that is compared on the host and reaches the device as data, not as a constant."""

    value: torch.Tensor  # [] on the host
    device: torch.device

    def __ge__(self, boundary: float) -> bool:
        return float(self.value) >= boundary

    def expand(self, *sizes: int) -> torch.Tensor:
        return self.value.expand(*sizes).contiguous().to(self.device)

    def __rmul__(self, mask: torch.Tensor) -> torch.Tensor:
        return mask * self.value.reshape(1).to(self.device)


class HostScheduler:
    """Wraps a scheduler for a pipeline whose transformer lives on an XLA device.

    It offers what a diffusers pipeline uses: `set_timesteps`, `timesteps`, `sigmas`, `order`,
    `config`, `set_begin_index`, `step`. The wrapped scheduler sees float32 host tensors only.
    """

    def __init__(self, scheduler: Any, device: torch.device) -> None:
        self._scheduler = scheduler
        self._device = device
        self._host_sample: torch.Tensor | None = None
        self._device_sample: torch.Tensor | None = None
        self.timesteps: tuple[HostTimestep, ...] = ()

    @property
    def config(self) -> Any:
        return self._scheduler.config

    @property
    def order(self) -> int:
        return int(self._scheduler.order)

    @property
    def sigmas(self) -> torch.Tensor:
        return self._scheduler.sigmas

    def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
        """`device` is what the pipeline asks for; the schedule stays on the host all the same."""
        self._scheduler.set_timesteps(num_inference_steps, device="cpu")
        self.timesteps = tuple(HostTimestep(t, self._device) for t in self._scheduler.timesteps)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """The pipeline's last call before its loop: run what it prepared, apart from step 1."""
        self._scheduler.set_begin_index(begin_index)
        torch_xla.sync()

    def step(
        self,
        model_output: torch.Tensor,
        timestep: HostTimestep,
        sample: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """One step, `sample` and the result [B, C, F, H, W] float32 on the device.

        Everything pending is run as one program first. Reading the model output alone would leave
        the rest of the graph (totals of the certificates) to run the whole transformer again at
        the next sync.
        """
        torch_xla.sync()
        known = sample is self._device_sample and self._host_sample is not None
        host_sample = self._host_sample if known else sample.cpu()
        result = self._scheduler.step(
            model_output.cpu().float(), timestep.value, host_sample, return_dict=False
        )[0]
        self._host_sample = result
        self._device_sample = result.to(self._device)
        return (self._device_sample,)
