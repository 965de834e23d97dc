"""The environment of all tests, set before any of them imports jax or torch_xla."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# The tests are about the CPU device and interpret mode, also on a machine with a TPU.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["JAX_PLATFORMS"] = "cpu"
# Nothing may reach for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Most of the time goes into compiling for the CPU; these flags more than halve it.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# Every compiled program maps some memory, and a process may have 65,530 mappings: all tests in one
# process would reach that, and die of it.
os.environ["XLA_COMPILATION_CACHE_SIZE"] = "32"


@pytest.fixture(scope="module", autouse=True)
def programs_are_let_go() -> Iterator[None]:
    """What jax compiled for one file of tests does not outlive it."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
