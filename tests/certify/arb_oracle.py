"""The definition in interval arithmetic: a comparison that holds here holds for the real numbers.

Numbers of float32 and float64 are taken exactly; every result is an enclosure of 200 bits.
``arb``'s ``<=`` is True only where it is certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flint import arb, ctx

PRECISION = 200


def precisely() -> Any:
    """A context in which arb computes with ``PRECISION`` bits."""
    return ctx.workprec(PRECISION)


def exact(number: Any) -> arb:
    """A float32 or float64 number."""
    return arb(float(number))


def exp2(exponent: arb) -> arb:
    return (exponent * arb.const_log2()).exp()


def log2(number: arb) -> arb:
    return number.log() / arb.const_log2()


def total(numbers: Iterable[arb]) -> arb:
    return sum(numbers, arb(0))


def dot(left: Sequence[Any], right: Sequence[Any]) -> arb:
    """Exact inner product of two vectors of floating-point numbers."""
    return total(exact(x) * exact(y) for x, y in zip(left, right, strict=True))


def log2_sum_exp2(logits: Sequence[arb]) -> arb:
    """log2 sum 2^logit of at least one logit."""
    return log2(total(exp2(logit) for logit in logits))


def attention(logits: Sequence[arb], value: np.ndarray) -> list[arb]:
    """Softmax of base 2 over keys with values [n, C], exactly: [C]."""
    weights = [exp2(logit) for logit in logits]
    row_sum = total(weights)
    return [
        total(w * exact(v) for w, v in zip(weights, value[:, channel], strict=True)) / row_sum
        for channel in range(value.shape[1])
    ]


def soft_cap(logit: arb, cap_nats: float) -> arb:
    """cap tanh(logit / cap) of a logit in bits."""
    cap = exact(cap_nats) / arb.const_log2()
    return cap * (logit / cap).tanh()


def nats(bits: float) -> arb:
    """A number of nats in bits."""
    return exact(bits) / arb.const_log2()
