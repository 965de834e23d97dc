"""The environment of all tests, set before any of them imports jax or torch_xla."""

from __future__ import annotations

import os

# The tests are about the CPU device and interpret mode, also on a machine with a TPU.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["JAX_PLATFORMS"] = "cpu"
# Nothing may reach for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Most of the time goes into compiling for the CPU; these flags more than halve it.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
