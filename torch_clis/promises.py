"""Promises from weights, as the op takes them: float32 ``[H]`` on the query's device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from certify.arithmetic import ARITHMETICS, validate_tolerance
from certify.promise import promise_certifies
from certify.static import StaticCertificate
from torch_clis.validation import validate_promise

CACHED_PROMISES = 1024
"""Promises held on devices: more than any model has layers; each is a few hundred bytes."""


def promise_tensor(
    promise: StaticCertificate | torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    tolerance: float,
) -> torch.Tensor | None:
    """The bound in bits on each head's logits beside a query and key ``[B, S, H, D]``.

    A certificate is sent to the device at its first use and found there afterwards; sending does
    not wait for the device. One that does not certify every head at this tolerance and number of
    keys is left out: K's statistics then say more. A tensor is taken as it is.

    Raises:
        TypeError: for neither a certificate nor a tensor.
        ValueError: a wrong number of heads, dtype or device.
    """
    if promise is None or query.dim() != 4 or key.dim() != 4:  # the op refuses other ranks
        return None
    if isinstance(promise, torch.Tensor):
        validate_promise(promise, query)
        return promise
    if not isinstance(promise, StaticCertificate):
        raise TypeError(
            f"promise: got {type(promise).__name__}; give a certify.static.StaticCertificate of "
            "the layer, a float32 tensor [H] of bounds in bits, or None."
        )
    bound = promise.logit_bound.astype(np.float32).tobytes()
    tensor = _on_device(bound, str(query.device))
    validate_promise(tensor, query)
    dtype = str(query.dtype).removeprefix("torch.")
    return tensor if _certifies(bound, key.shape[1], tolerance, dtype) else None


@lru_cache(maxsize=CACHED_PROMISES)
def _certifies(logit_bound: bytes, num_keys: int, tolerance: float, dtype: str) -> bool:
    if not num_keys or dtype not in ARITHMETICS:
        return False
    return promise_certifies(
        np.frombuffer(logit_bound, np.float32),
        num_keys=num_keys,
        tolerance=validate_tolerance(tolerance),
        kernel=ARITHMETICS[dtype],
    )


@lru_cache(maxsize=CACHED_PROMISES)
def _on_device(logit_bound: bytes, device: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(logit_bound, np.float32).copy()).to(device)
