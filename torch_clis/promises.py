"""Promises from weights, as the op takes them: float32 ``[H]`` on the query's device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from certify.static import StaticCertificate
from torch_clis.validation import validate_promise

CACHED_PROMISES = 1024
"""Promises held on devices: more than any model has layers; each is a few hundred bytes."""


def promise_tensor(
    promise: StaticCertificate | torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """The bound in bits on each head's logits beside a query ``[B, S_q, H, D]``.

    A certificate is sent to the device at its first use and found there afterwards; sending does
    not wait for the device. One that leaves out a head promises nothing: K's statistics, which say
    more than the check after the loop alone, are needed then.

    Raises:
        TypeError: for neither a certificate nor a tensor.
        ValueError: a wrong number of heads, dtype or device.
    """
    if promise is None or isinstance(promise, torch.Tensor):
        validate_promise(promise, query)
        return promise
    if not isinstance(promise, StaticCertificate):
        raise TypeError(
            f"promise: got {type(promise).__name__}; give a certify.static.StaticCertificate of "
            "the layer, a float32 tensor [H] of bounds in bits, or None."
        )
    bound = promise.logit_bound
    tensor = _on_device(bound.astype(np.float32).tobytes(), str(query.device))
    validate_promise(tensor, query)
    return tensor if np.isfinite(bound).all() else None


@lru_cache(maxsize=CACHED_PROMISES)
def _on_device(logit_bound: bytes, device: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(logit_bound, np.float32).copy()).to(device)
