"""Environment of the torch tests: the XLA CPU device, quick compiles, no accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

import torch


@pytest.fixture(scope="session")
def xla_device() -> torch.device:
    import torch_xla

    return torch.device(torch_xla.device())


@pytest.fixture(params=["cpu", "xla"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    found: torch.device = request.getfixturevalue("xla_device")
    return found


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(20)
