"""Promises from weights, as the op takes them: float32 ``[H]`` on the query's device."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_clis.validation import validate_promise

if TYPE_CHECKING:
    from certify.static import StaticCertificate

CACHED_PROMISES = 1024
"""Promises held on devices: more than any model has layers; each is a few hundred bytes."""


def promise_tensor(
    promise: StaticCertificate | torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """The bound in bits on each head's logits beside a query ``[B, S_q, H, D]``.

    A certificate is sent to the device at its first use and found there afterwards; sending does
    not wait for the device.

    Raises:
        TypeError: for neither a certificate nor a tensor.
        ValueError: a wrong number of heads, dtype or device.
    """
    if promise is None:
        return None
    if not isinstance(promise, torch.Tensor):
        bound = getattr(promise, "logit_bound", None)
        if bound is None:
            raise TypeError(
                f"promise: got {type(promise).__name__}; give a certify.static.StaticCertificate "
                "of the layer, a float32 tensor [H] of bounds in bits, or None."
            )
        promise = _on_device(np.ascontiguousarray(bound, np.float32).tobytes(), str(query.device))
    validate_promise(promise, query)
    return promise


@lru_cache(maxsize=CACHED_PROMISES)
def _on_device(logit_bound: bytes, device: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(logit_bound, np.float32).copy()).to(device)
