"""Moving small tensors from devices to the host, together."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the host: one transfer for all lazy ones, and at most one small program."""
    lazy = [tensor for tensor in tensors if tensor.device.type == "xla"]
    moved: list[torch.Tensor] = []
    if lazy:
        import torch_xla

        torch_xla._XLAC._xla_sync_multi(lazy, [])
        moved = torch_xla._XLAC._xla_get_cpu_tensors(lazy)
    remaining = iter(moved)
    return [next(remaining) if t.device.type == "xla" else t.cpu() for t in tensors]
