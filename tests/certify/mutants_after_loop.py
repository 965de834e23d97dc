"""Mutants of the check after the loop: of the theorem's functions, and of the kernel's look.

The look at the numerator and the look at the output are each enough (an infinite or NaN numerator
gives such an output, and values so large that only the output overflows prove nothing anyway), so
the kernel is mutated in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from certify import arithmetic, theorem
from jax_kernels import forward
from tests.certify import checks_after_loop, measures


class Mutant(NamedTuple):
    """Replace every (old, new) of ``changes``, each found exactly once; ``check`` must then fail.

    Attributes:
        owner: the module or class that holds the function ``name``.
    """

    fault: str
    owner: Any
    name: str
    changes: tuple[tuple[str, str], ...]
    check: str

    @property
    def function(self) -> Callable[..., Any]:
        return vars(self.owner)[self.name]  # type: ignore[no-any-return]


def of_theorem(fault: str, name: str, old: str, new: str, check: str) -> Mutant:
    return Mutant(fault, theorem, name, ((old, new),), check)


def of_finish(fault: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(fault, forward._FixedStabilizer, "finish", changes, "kernel_after_loop")


MUTANTS = [
    of_theorem(
        "l_min dropped",
        "row_sum_passes",
        "(row_sum >= head.row_sum_min) & ",
        "",
        "kernel_after_loop",
    ),
    of_theorem(
        "upper limit dropped",
        "row_sum_passes",
        " & (row_sum <= ROW_SUM_MAX)",
        "",
        "kernel_after_loop",
    ),
    of_theorem(
        "tested at the wrong side",
        "row_sum_passes",
        "row_sum >= head.row_sum_min",
        "row_sum <= head.row_sum_min",
        "kernel_after_loop",
    ),
    of_theorem("either side will do", "row_sum_passes", ") & (", ") | (", "kernel_after_loop"),
    of_theorem(
        "l itself may overflow",
        "row_sum_passes",
        "row_sum <= ROW_SUM_MAX",
        "row_sum <= 4.0 * ROW_SUM_MAX",
        "kernel_after_loop",
    ),
    of_theorem(
        "NaN passes",
        "row_sum_passes",
        "(row_sum >= head.row_sum_min) & (row_sum <= ROW_SUM_MAX)",
        "~((row_sum < head.row_sum_min) | (row_sum > ROW_SUM_MAX))",
        "not_finite_proves_nothing",
    ),
    of_theorem(
        "V_lo is max|v|",
        "limits",
        "low = value_max if value_low is None else value_low",
        "low = value_max",
        "values_of_hidden_size",
    ),
    of_theorem(
        "losses relative to V_lo",
        "limits",
        "kernel.probability_losses * ratio",
        "kernel.probability_losses",
        "values_of_hidden_size",
    ),
    of_theorem(
        "flushes relative to V_hi",
        "limits",
        "kernel.product_flushes / value)",
        "kernel.product_flushes / value_max)",
        "values_of_hidden_size",
    ),
    of_theorem(
        "lse: flushed keys are forgotten",
        "lse_error_from_row_sum",
        "- xp.log1p(-lost)",
        "",
        "lse_after_loop",
    ),
    of_theorem(
        "lse: flushed keys on the wrong side",
        "lse_error_from_row_sum",
        "- xp.log1p(-lost)",
        "+ xp.log1p(-lost)",
        "lse_after_loop",
    ),
    of_theorem(
        "lse: exp2's argument is forgotten",
        "lse_error_from_row_sum",
        "arithmetic.ARGUMENT_ERROR",
        "0.0 * arithmetic.ARGUMENT_ERROR",
        "lse_after_loop",
    ),
    Mutant(
        "n is left out of the flushes",
        theorem,
        "flush_scale",
        ((" * num_keys", ""),),
        "kernel_after_loop",
    ),
    Mutant(
        "kappa is 1",
        arithmetic,
        "summation_factor",
        (("1.0 + max(", "1.0 + 0.0 * max("),),
        "kappa",
    ),
    Mutant(
        "no look on the machine",
        measures,
        "all_finite",
        (("result.finite", "np.ones_like(result.finite)"),),
        "look_sees_overflow",
    ),
    Mutant(
        "looked at before all keys",
        checks_after_loop,
        "judged_at_the_end",
        (("row_sum[:, -1], numerator[:, -1]", "row_sum[:, 19], numerator[:, 19]"),),
        "every_key_is_seen",
    ),
    # The kernel's look.
    of_finish("kernel: no look at numerator and output", (" & (broken <= 0)", "")),
    of_finish("kernel: one finite channel will do", ("jnp.max((~finite)", "jnp.min((~finite)")),
    of_finish(
        "kernel: infinite is finite",
        ("jnp.abs(head.numerator[...]) <= FLOAT32_LARGEST", "head.numerator[...] != jnp.nan"),
        ("jnp.abs(out) <= largest_output(self.problem.dtype)", "out != jnp.nan"),
    ),
    of_finish(
        "kernel: only one sign of infinity is seen",
        ("jnp.abs(head.numerator[...])", "head.numerator[...]"),
        ("jnp.abs(out)", "out"),
    ),
    of_finish(
        "kernel: row sums are not looked at", ("theorem.row_sum_passes(row_sum, limits) & ", "")
    ),
    of_finish(
        "kernel: one of eight partial sums is looked at",
        (
            "theorem.row_sum_passes(row_sum, limits)",
            "theorem.row_sum_passes(head.row_sum[:1], limits)",
        ),
    ),
    of_finish(
        "kernel: rows past the end are judged",
        ("_largest((inside & ~passes)", "_largest((~passes)"),
    ),
    of_finish(
        "kernel: one good row passes its block",
        ("failed = _largest((inside & ~passes)", "failed = 1.0 - _largest((inside & passes)"),
    ),
    of_finish(
        "kernel: the verdict of before the loop stands",
        ("jnp.where(failed > 0, float(theorem.RECOMPUTED), verdict)", "verdict"),
    ),
    of_finish(
        "kernel: reported error of the best row",
        (
            "_largest(jnp.where(inside, error, 0.0))",
            "-_largest(jnp.where(inside, -error, -jnp.inf))",
        ),
    ),
    Mutant(
        "kernel: every head has the first one's limits",
        forward._FixedStabilizer,
        "_limits",
        (("self.limit_ref[row, head.key_head]", "self.limit_ref[row, 0]"),),
        "kernel_after_loop",
    ),
    Mutant(
        "kernel: the loop ends before the last keys",
        forward,
        "_run_block",
        (("pl.when(kv_block == last)(finish)", "pl.when(kv_block == 0)(finish)"),),
        "kernel_after_loop",
    ),
]
