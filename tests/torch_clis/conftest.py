"""Devices of the torch tests: plain CPU and the XLA CPU device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def xla_device() -> torch.device:
    """Started before any test: autograd counts its devices once, at the first backward pass."""
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
