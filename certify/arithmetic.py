"""The machine that the theorem speaks about: formats, cut-offs and rounding slack.

Every constant that a kernel or a bound uses is derived here, from the formats and from the number
of operations. Logits are in bits (base 2) throughout. "Cut-off" means that a value below the
smallest normal number is read and written as 0; an overflow gives inf or NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SMALLEST_NORMAL_EXPONENT = -126
"""float32 and bfloat16 share it; hardware flushes everything below 2^-126 to 0."""

SMALLEST_NORMAL = 2.0**SMALLEST_NORMAL_EXPONENT

FLOAT32_LARGEST = (2.0 - 2.0**-23) * 2.0**127

OVERFLOW_EXPONENT = 125
"""Row sums and numerators are kept at or below 2^125: two bits below the largest power of two, so
that a sum, its bfloat16 cast and its reciprocal (which stays normal) are all in range."""

FLOAT32_ROUNDOFF = 2.0**-24

LARGEST_NUM_KEYS = 2**23
"""From this length on a float32 sum has no error bound below 1."""

EXP2_ERROR = 2.0**-21
"""Relative error of the machine's exp2 and log2 (eight units in the last place), an assumption. It
is part of the rounding error, not of the range error."""

CHUNK_KEYS = 512
"""Keys of one matrix product in the kernels, at most; the products are added up in float32."""

SMALLEST_CHUNK_KEYS = 128
"""Keys of one matrix product, at least, the last one aside."""

MATMUL_PASSES = 6
"""bfloat16 passes of a float32 matrix product at full precision, each with a product per channel:
what the bounds are evaluated with on a device."""

ARGUMENT_ROUNDINGS = 3
"""Roundings of exp2's argument: 1 for ``exp2(logit - stabilizer)``, 3 where a compiler lowers exp2
to ``exp(ln2 * x)`` and that to ``exp2(log2e * (ln2 * x))``. The larger count holds for both and
costs a tenth of a bit at the default tolerance."""

ARGUMENT_ERROR = 2.0 * ARGUMENT_ROUNDINGS * math.log(2.0) * 2.0**-18
"""Nats by which exp2's argument can be off, whose magnitude stays below 128 bits for every
probability that is not flushed: half a unit in the last place is 2^-18 bits, and two of them for
every rounding also pay for the constants ln2 and log2e and for a product rounded in nats."""

GRID_MARGIN = 0.25
"""Bits by which each end of the interval of safe stabilizers is drawn in, so that the check of the
row sum after the loop agrees with the certificate before it."""

GRID_SPACING = 1.0
"""Stabilizers are a logit plus an integer: a row ruled by one key multiplies by powers of two."""

VERIFY_MARGIN = 0.5
"""Bits between the top of the lower side's interval and the stabilizer of a row that is left to the
check after the loop."""

DEFAULT_TOLERANCE = 2.0**-12
"""Proven |o - o_exact| / max|v| beyond ordinary rounding, unless the caller asks otherwise."""

LARGEST_STABILIZER = 2.0**18
"""Beyond this many bits the float32 grid of stabilizers is coarser than ``GRID_MARGIN`` allows."""

TANH_ERROR = 2.0**-20
"""Relative error of tanh and of the division and product around it, of the machine and of the bound
together: sixteen units in the last place, an assumption."""

SPLIT_ERROR = 2.0**-15
"""Relative error of a number held as two bfloat16 halves, the first cut off after eight bits and
the second rounded."""

SQUARES_ERROR = 2.0**-9 + 2.0**-16
"""Relative error of a norm whose squares are rounded to bfloat16 (half of their own 2^-8)."""

EVALUATION_SLACK = 2.0**-10
"""Bits added outward to every bound for the error of exp2, log2 and float32 addition in the bound's
own evaluation (a few hundred terms: below 2^-13), and for products of a logit that are flushed."""

COEFFICIENT_SLACK = 2.0**-20
"""Relative slack, on top of ``dot_slack``, for the float32 additions that put an exponent together,
and for the evaluation of a limit in a few float32 operations (16 roundings)."""


@dataclass(frozen=True)
class KernelArithmetic:
    """How the attention kernel multiplies one input dtype.

    Attributes:
        name: dtype of query, key and value inside the kernel.
        contraction_factor: products per channel of a logit; a bfloat16 query is held as a high and
            a low half (2), a float32 dot product is six bfloat16 passes (6).
        probability_losses: cut-offs per key that lose at most 2^-126 of a probability: its own
            flush once in the numerator and once in the row sum, and, for float32, its two split
            parts.
        product_flushes: cut-offs per key that lose at most 2^-126 of a product or of a partial sum.
        value_flushes: cut-offs that lose at most 2^-126 of a value or of the final product.
        passes: matrix passes, each with a product per key.
        probability_roundoff: relative error of a probability (and, in split products, of what the
            passes leave out) as it is multiplied by a value.
        output_roundoff: unit roundoff of the output's dtype.
    """

    name: str
    contraction_factor: int
    probability_losses: int
    product_flushes: int
    value_flushes: int
    passes: int
    probability_roundoff: float
    output_roundoff: float

    def contraction_length(self, head_dim: int) -> int:
        """Number of products summed into one logit."""
        return self.contraction_factor * head_dim

    def summation_length(self, num_keys: int) -> int:
        """Terms of a sum over the keys, of which a product takes part in ``passes``, any order."""
        return num_keys + (self.passes - 1) * CHUNK_KEYS

    def summation_depth(self, num_keys: int) -> int:
        """Additions that a term goes through at most, as the kernels add: by chunks of keys."""
        return self.passes * CHUNK_KEYS + num_keys // SMALLEST_CHUNK_KEYS + 16

    def loss_factor(self, value_max: float) -> float:
        """Error per flushed unit of probability, relative to ``value_max`` = max|v|."""
        return self.probability_losses + self.product_flushes / value_max


BFLOAT16_ROUNDOFF = 2.0**-8

BFLOAT16 = KernelArithmetic("bfloat16", 2, 2, 1, 2, 1, BFLOAT16_ROUNDOFF, BFLOAT16_ROUNDOFF)
FLOAT32 = KernelArithmetic("float32", 6, 4, 6, 4, 6, 4.0 * FLOAT32_ROUNDOFF, 2.0 * FLOAT32_ROUNDOFF)

ARITHMETICS = {"bfloat16": BFLOAT16, "float32": FLOAT32, "float16": FLOAT32}
"""By input dtype. float16 is converted to float32 before the kernel and back after it; what is
proved is proved of the float32 output before that last cast, which any attention does."""


def arithmetic_for(dtype: object) -> KernelArithmetic:
    """The kernel arithmetic of an input dtype (a name or a numpy/jax dtype).

    Raises:
        ValueError: for a dtype that no kernel takes.
    """
    name = getattr(dtype, "name", None) or str(dtype)
    try:
        return ARITHMETICS[name]
    except KeyError:
        raise ValueError(
            f"dtype: got {name}; attention takes bfloat16, float16 or float32. Cast the inputs."
        ) from None


def dot_slack(length: int) -> float:
    """Relative error of a float32 dot product of ``length`` products, in units of |x||y|.

    The classical bound n u / (1 - n u), with twice the unit roundoff so that products which are
    themselves rounded are covered (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3).
    """
    accumulated = length * 2.0 * FLOAT32_ROUNDOFF
    if accumulated >= 1.0:
        raise ValueError(f"length: got {length}; it must be below {LARGEST_NUM_KEYS}.")
    return accumulated / (1.0 - accumulated)


def norm_underflow(length: int) -> float:
    """What the float32 norm of ``length`` numbers can lose to squares that are flushed."""
    return math.sqrt(2.0 * length) * 2.0**-63


def summation_factor(num_keys: int) -> float:
    """kappa: factor that covers second-order roundings in sums over ``num_keys`` keys.

    With g the relative error of summing n numbers in any order, a loss in the numerator can grow by
    1 + g on its way and the row sum can come out low by 1 - g; (1 + g) / (1 - g) <= 1 + 4 g for
    g <= 1/2, and ``dot_slack`` is at least 2 g. The floor of 2^-4 rules up to n = 2^18.
    """
    return 1.0 + max(2.0**-4, 2.0 * dot_slack(num_keys))


def query_factor(scale: float) -> float:
    """log2(e) * scale, rounded once to float32: what every query is multiplied by, in float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(math.log2(math.e) * scale))


def smallest_tolerance() -> float:
    """A tolerance at or below this can never be proved (``ARGUMENT_ERROR`` alone uses it up)."""
    return ARGUMENT_ERROR


def validate_tolerance(tolerance: float) -> float:
    """Check a tolerance at the border.

    Raises:
        ValueError: when it is not a finite number above ``smallest_tolerance()`` and below 1.
    """
    smallest = smallest_tolerance()
    number = isinstance(tolerance, (int, float, np.floating))
    if not (number and smallest < tolerance < 1.0):
        raise ValueError(
            f"tolerance: got {tolerance!r}; it must be above {smallest:.3g}, the error of rounding "
            "exp2's argument alone, and below 1 (the default is 2**-12)."
        )
    return float(tolerance)
