"""CLiS attention for PyTorch and PyTorch/XLA users.

Names load on first use: ``import torch_clis`` needs torch only; torch_xla, jax and diffusers are
imported by the functions that bind to them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (a clear ImportError here rather than inside an attribute access)

if TYPE_CHECKING:
    from torch_clis.capture import record
    from torch_clis.diffusers import CLiSProcessor
    from torch_clis.functional import attention, scaled_dot_product_attention
    from torch_clis.recorder import Recorder

__all__ = ["CLiSProcessor", "Recorder", "attention", "record", "scaled_dot_product_attention"]

_HOME = {
    "CLiSProcessor": "torch_clis.diffusers",
    "Recorder": "torch_clis.recorder",
    "attention": "torch_clis.functional",
    "record": "torch_clis.capture",
    "scaled_dot_product_attention": "torch_clis.functional",
}
_SUBMODULES = ("diffusers", "functional", "lowering", "ops")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _SUBMODULES:
        return import_module(f"torch_clis.{name}")
    raise AttributeError(f"module 'torch_clis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
