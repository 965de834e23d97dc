"""The attention kernel: one skeleton in the transposed dataflow, the stabilizer a strategy.

Grid: (blocks of work, KV blocks), a block of work being a (batch, head group, query block) named
by a prefetched list, so that the same kernel runs over all blocks or over those that failed the
check. Q, K, V and O are column blocks of [B, S, heads * head_dim]: nothing is transposed or padded
outside. Inside, S^T = K Q^T has keys along sublanes and queries along lanes, so a row's stabilizer,
sum and checks are [1, block_q] rows, and O^T accumulates as V^T P^T.

Note [exact scaling]: q' = scale * log2(e) * q is computed in float32 once per query block and held
as two bfloat16 halves [high | low] against [K | K]: the matrix unit is 256 deep, so for head_dim
128 the second half costs nothing and the logits are those of a 17-bit q'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from certify import theorem
from certify.arithmetic import FLOAT32_LARGEST, query_factor
from certify.bounds import (
    RowBounds,
    ball_reach,
    exponents,
    promised_bounds,
    row_bounds,
    scaled_reach,
    smaller_reach,
)
from certify.summary import NUM_SENTINELS, root_above
from certify.theorem import CERTIFICATE_FIELDS
from jax_kernels.config import LANES, Problem, div, rem, round_up
from jax_kernels.statistics import (
    LOG2_COUNT,
    PLAIN,
    REACH_DOWN,
    REACH_UP,
    ROW_TILE,
    SAVED,
    SCALED,
    SCALED_RADIUS,
    SCALED_SAVED,
    Statistics,
    key_statistics,
    largest_values,
    num_block_rows,
    split_for,
    weighted_squares,
)

SUBLANES = 8
LOWEST = -FLOAT32_LARGEST
"""Row maximum before any key: finite, so that no inf - inf can arise."""

VMEM_LIMIT_BYTES = 60 * 2**20
"""What a kernel may use; TPU7x has 64 MB, v6e 128 MB."""

_LIMIT_FIELDS = ("upper_room", "lower_room", "budget", "row_sum_min", "loss", "floor")


class ForwardResult(NamedTuple):
    """Output [B, S_q, heads * head_dim], log-sum-exp (nats) and certificates.

    Attributes:
        lse: float32 [B, query heads, S_q].
        certificate: float32 [B, query heads, num_q_blocks, 7], fields in ``CERTIFICATE_FIELDS``.
    """

    out: jax.Array
    lse: jax.Array
    certificate: jax.Array


class Promise(NamedTuple):
    """What stands in for statistics of the keys where a bound is known before the model runs.

    Attributes:
        logit_bound: float32 [query heads, padded to whole groups], bits.
        value_max: float32 [groups, heads] over the key heads, max|v|.
    """

    logit_bound: jax.Array
    value_max: jax.Array


class _Place(NamedTuple):
    """Where a block of work lies: batch, column block of Q, query block, column block of K."""

    batch: Any
    query_group: Any
    query_block: Any
    key_group: Any


def _locate(block: Any, problem: Problem) -> _Place:
    group, query_block = div(block, problem.num_q_blocks), rem(block, problem.num_q_blocks)
    batch, query_group = div(group, problem.query_groups), rem(group, problem.query_groups)
    key_group = div(query_group, problem.query_groups // problem.key_groups)
    return _Place(batch, query_group, query_block, key_group)


def _contract(left: jax.Array, right: jax.Array, dims: tuple[int, int], dtype: Any) -> jax.Array:
    """float32 product of two matrices over one dimension each, at the precision of the theorem."""
    exact = jnp.dtype(dtype) == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (((dims[0],), (dims[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _sum_to_sublanes(array: jax.Array) -> jax.Array:
    """[rows, queries] -> [8, queries]: eight partial sums."""
    return jnp.sum(array.reshape(-1, SUBLANES, array.shape[1]), axis=0)


class _Head:
    """One head of the current block of work: its channels and its running sums in VMEM."""

    def __init__(
        self, index: int, place: _Place, problem: Problem, scratch: tuple[Any, ...]
    ) -> None:
        self.index, self.place, self.problem = index, place, problem
        self.query, self.stabilizer, self.row_sum, self.numerator = (
            ref.at[index] for ref in scratch
        )
        first = index * problem.head_dim
        self.channels = slice(first, first + problem.head_dim)

    @property
    def key_head(self) -> Any:
        """Row of the head in arrays over (batch, key group, head of the group)."""
        group = self.place.batch * self.problem.key_groups + self.place.key_group
        return group * self.problem.heads_per_group + self.index

    def logits(self, rows: jax.Array) -> jax.Array:
        """float32 [rows, block_q], in bits, of ``rows`` (keys or summary rows)."""
        if self.problem.query_in_halves:
            rows = jnp.concatenate([rows, rows], axis=1)
        return _contract(rows, self.query[...], (1, 1), self.problem.dtype)

    def accumulate(self, probabilities: jax.Array, values: jax.Array) -> None:
        """Add a chunk's probabilities and weighted values to the running sums."""
        dtype = self.problem.dtype
        self.row_sum[...] += _sum_to_sublanes(probabilities)
        self.numerator[...] += _contract(values, probabilities.astype(dtype), (0, 0), dtype)


class _Stabilizer(Protocol):
    """A strategy: what happens before the loop, with a chunk of logits, and at the end."""

    def begin(self, head: _Head, scaled_query: jax.Array) -> None: ...
    def update(self, head: _Head, logits: jax.Array, values: jax.Array) -> None: ...
    def finish(self, head: _Head, row_sum: jax.Array, out: jax.Array) -> None: ...


class _OnlineStabilizer:
    """The running row maximum, raised where sums of large values would overflow."""

    def __init__(self, shift_ref: Any) -> None:
        self.shift_ref = shift_ref

    def begin(self, head: _Head, scaled_query: jax.Array) -> None:
        head.stabilizer[...] = jnp.full(head.stabilizer.shape, LOWEST, jnp.float32)

    def update(self, head: _Head, logits: jax.Array, values: jax.Array) -> None:
        before = head.stabilizer[...]
        shift = self.shift_ref[head.key_head]
        largest = jnp.max(logits, axis=0, keepdims=True) + shift
        after = jnp.maximum(before, largest)
        rescale = jnp.exp2(before - after)
        head.stabilizer[...] = after
        head.row_sum[...] *= rescale
        head.numerator[...] *= rescale
        head.accumulate(jnp.exp2(logits - after), values)

    def finish(self, head: _Head, row_sum: jax.Array, out: jax.Array) -> None:
        """Nothing to check: the row maximum was exact."""


class _RowBounder(Protocol):
    """Where S and L of a head's rows come from: [1, block_q] each."""

    def __call__(self, head: _Head, scaled_query: jax.Array) -> RowBounds: ...


class _BoundsFromKeys:
    """S and L from the summary of the keys, before the loop."""

    def __init__(self, problem: Problem, center_ref: Any, column_ref: Any, weight_ref: Any) -> None:
        self.problem, self.weight_ref = problem, weight_ref
        self.center_ref, self.column_ref = center_ref, column_ref

    def __call__(self, head: _Head, scaled_query: jax.Array) -> RowBounds:
        problem, weights = self.problem, self.weight_ref[0, head.index]
        squares = weighted_squares(scaled_query, weights)
        query_norm = root_above(squares[PLAIN : PLAIN + 1], problem.head_dim, xp=jnp)
        largest_scale = jnp.sqrt(jnp.max(weights[SCALED : SCALED + 1], axis=1, keepdims=True))
        scaled_norm = root_above(
            squares[SCALED : SCALED + 1], problem.head_dim, xp=jnp, scale=largest_scale
        )
        rows = NUM_SENTINELS + num_block_rows(problem) + ROW_TILE
        logits = head.logits(self.center_ref[0, head.index])
        if logits.shape[0] > rows:
            paired = logits[NUM_SENTINELS:rows] + logits[rows:]
            logits = jnp.concatenate([logits[:NUM_SENTINELS], paired], axis=0)
        columns = jnp.transpose(self.column_ref[0, head.index])[:rows]

        def column(index: int) -> jax.Array:
            return columns[:, index : index + 1]

        down = column(REACH_DOWN) * query_norm
        reach = smaller_reach(
            ball_reach(column(REACH_UP), column(SAVED), query_norm, xp=jnp),
            scaled_reach(column(SCALED_RADIUS), column(SCALED_SAVED), scaled_norm, down, xp=jnp),
            xp=jnp,
        )
        return row_bounds(
            exponents(logits, column(LOG2_COUNT), reach, down),
            jnp.max(logits[:NUM_SENTINELS], axis=0, keepdims=True),
            reach.scaled,
            num_sentinels=NUM_SENTINELS,
            num_blocks=num_block_rows(problem),
            xp=jnp,
        )


class _BoundsFromPromise:
    """S and L from a bound on every logit of the query head, known before the model runs."""

    def __init__(self, problem: Problem, promise_ref: Any) -> None:
        self.problem, self.promise_ref = problem, promise_ref

    def __call__(self, head: _Head, scaled_query: jax.Array) -> RowBounds:
        problem = self.problem
        query_head = head.place.query_group * problem.heads_per_group + head.index
        every_row = jnp.zeros((1, problem.blocks.block_q), jnp.float32)
        bound = every_row + self.promise_ref[query_head]
        return promised_bounds(bound, num_keys=problem.key_length, xp=jnp)


class _FixedStabilizer:
    """A stabilizer per row chosen before the loop from S and L, and checked after it."""

    def __init__(
        self, problem: Problem, bounder: _RowBounder, limit_ref: Any, certificate_ref: Any
    ) -> None:
        self.problem, self.bounder = problem, bounder
        self.limit_ref, self.certificate_ref = limit_ref, certificate_ref

    def _limits(self, head: _Head) -> theorem.Limits:
        fields = {
            name: self.limit_ref[row, head.key_head] for row, name in enumerate(_LIMIT_FIELDS)
        }
        flush = theorem.flush_scale(self.problem.key_length, self.problem.kernel)
        return theorem.Limits(flush=flush, **fields)

    def _inside(self, head: _Head) -> jax.Array:
        """bool [1, block_q]: queries before the end; the rest holds anything and is not judged."""
        block_q = self.problem.blocks.block_q
        left = self.problem.query_length - head.place.query_block * block_q
        return jax.lax.broadcasted_iota(jnp.int32, (1, block_q), 1) < left

    def begin(self, head: _Head, scaled_query: jax.Array) -> None:
        """Certify the block: S and L, a stabilizer per row, the worst gap."""
        limits, bounds = self._limits(head), self.bounder(head, scaled_query)
        choice = theorem.choose_stabilizer(
            bounds.upper, bounds.lower, bounds.grid_origin, limits, xp=jnp
        )
        head.stabilizer[...] = choice.stabilizer
        inside = self._inside(head)
        gap = bounds.upper - bounds.lower
        gap = jnp.where(jnp.abs(gap) <= FLOAT32_LARGEST, gap, jnp.inf)
        worst = _largest(jnp.where(inside, gap, -jnp.inf))
        uncertified = _largest((inside & ~choice.certified).astype(jnp.float32))
        code = _largest(jnp.where(inside & (gap == worst), bounds.code, 0.0))
        verdict = uncertified * theorem.VERIFIED + (1.0 - uncertified) * theorem.CERTIFIED
        self._certificate_row(head)[...] = jnp.zeros((1, LANES), jnp.float32)
        self._record(head, verdict=verdict, gap=worst, budget=limits.budget, bound_used=code)

    def update(self, head: _Head, logits: jax.Array, values: jax.Array) -> None:
        head.accumulate(jnp.exp2(logits - head.stabilizer[...]), values)

    def finish(self, head: _Head, row_sum: jax.Array, out: jax.Array) -> None:
        """The check after the loop: row sums in range, numerator and output finite."""
        limits, inside = self._limits(head), self._inside(head)
        finite = jnp.abs(head.numerator[...]) <= FLOAT32_LARGEST
        finite = finite & (jnp.abs(out) <= largest_output(self.problem.dtype))
        broken = jnp.max((~finite).astype(jnp.float32), axis=0, keepdims=True)
        passes = theorem.row_sum_passes(row_sum, limits) & (broken <= 0)
        failed = _largest((inside & ~passes).astype(jnp.float32))
        error = theorem.error_from_row_sum(row_sum, limits, xp=jnp)
        verdict = self._certificate_row(head)[...][:, :1]
        self._record(
            head,
            verdict=jnp.where(failed > 0, float(theorem.RECOMPUTED), verdict),
            error_bound=_largest(jnp.where(inside, error, 0.0)),
            row_sum_min=-_largest(jnp.where(inside, -row_sum, -jnp.inf)),
            row_sum_max=_largest(jnp.where(inside, row_sum, -jnp.inf)),
        )

    def _record(self, head: _Head, **fields: Any) -> None:
        """Set fields of the block's certificate and leave the others."""
        lanes = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        row_ref = self._certificate_row(head)
        row = row_ref[...]
        for name, number in fields.items():
            row = jnp.where(lanes == CERTIFICATE_FIELDS.index(name), number, row)
        row_ref[...] = row

    def _certificate_row(self, head: _Head) -> Any:
        return self.certificate_ref.at[0, 0, slice(head.index, head.index + 1)]


def largest_output(dtype: Any) -> float:
    """Above this an output is, or may become, infinite in its dtype."""
    return float(jnp.finfo(dtype).max)


def _largest(row: jax.Array) -> jax.Array:
    """[1, 1] maximum of a [1, queries] row."""
    return jnp.max(row, axis=1, keepdims=True)


def _run_block(
    place: _Place,
    refs: tuple[Any, ...],
    scratch: tuple[Any, ...],
    problem: Problem,
    stabilizer: _Stabilizer,
) -> None:
    """The skeleton: one KV block of one block of work."""
    query_ref, key_ref, value_ref, out_ref, lse_ref = refs
    heads = [_Head(i, place, problem, scratch) for i in range(problem.heads_per_group)]
    kv_block, last = pl.program_id(1), problem.num_kv_blocks - 1

    @pl.when(kv_block == 0)
    def _begin() -> None:
        for head in heads:
            query = query_ref[0, :, head.channels].astype(jnp.float32)
            high, low = split_for(problem.dtype, query * query_factor(problem.scale))
            parts = [high, low] if problem.query_in_halves else [high]
            head.query[...] = jnp.concatenate(parts, axis=1).astype(problem.dtype)
            head.row_sum[...] = jnp.zeros(head.row_sum.shape, jnp.float32)
            head.numerator[...] = jnp.zeros(head.numerator.shape, jnp.float32)
            stabilizer.begin(head, high + low)

    def attend(num_keys: int) -> None:
        for start in range(0, num_keys, problem.blocks.chunk_kv):
            valid = min(problem.blocks.chunk_kv, num_keys - start)
            rows = slice(start, start + round_up(valid, ROW_TILE))
            for head in heads:
                logits = head.logits(key_ref[0, rows, head.channels])
                values = value_ref[0, rows, head.channels]
                if valid % ROW_TILE:
                    inside = jax.lax.broadcasted_iota(jnp.int32, (logits.shape[0], 1), 0) < valid
                    logits = jnp.where(inside, logits, -jnp.inf)
                    values = jnp.where(inside, values, jnp.zeros_like(values))
                stabilizer.update(head, logits, values)

    def finish() -> None:
        for head in heads:
            row_sum = jnp.sum(head.row_sum[...], axis=0, keepdims=True)
            out = head.numerator[...] * (1.0 / row_sum)
            stabilizer.finish(head, row_sum, out)
            out_ref[0, :, head.channels] = jnp.transpose(out).astype(out_ref.dtype)
            bits = head.stabilizer[...] + jnp.log2(row_sum)
            lse_ref[0, head.index : head.index + 1, :] = bits * math.log(2.0)

    tail = problem.key_length - last * problem.blocks.block_kv
    if tail == problem.blocks.block_kv:
        attend(tail)
        pl.when(kv_block == last)(finish)
        return

    @pl.when(kv_block < last)
    def _full() -> None:
        attend(problem.blocks.block_kv)

    @pl.when(kv_block == last)
    def _tail() -> None:
        attend(tail)
        finish()


class _Specs(NamedTuple):
    """Block specifications of the arrays that both kernels use."""

    query: pl.BlockSpec
    key: pl.BlockSpec
    lse: pl.BlockSpec


def _specs(problem: Problem) -> _Specs:
    width, blocks = problem.group_width, problem.blocks

    def at_query(step: Any, kv_block: Any, order_ref: Any) -> tuple[Any, ...]:
        place = _locate(order_ref[step], problem)
        return place.batch, place.query_block, place.query_group

    def at_key(step: Any, kv_block: Any, order_ref: Any) -> tuple[Any, ...]:
        place = _locate(order_ref[step], problem)
        return place.batch, kv_block, place.key_group

    def at_lse(step: Any, kv_block: Any, order_ref: Any) -> tuple[Any, ...]:
        place = _locate(order_ref[step], problem)
        return place.batch * problem.query_groups + place.query_group, 0, place.query_block

    return _Specs(
        query=pl.BlockSpec((1, blocks.block_q, width), at_query),
        key=pl.BlockSpec((1, blocks.block_kv, width), at_key),
        lse=pl.BlockSpec((1, problem.heads_per_group, blocks.block_q), at_lse),
    )


def _call(
    kernel: Callable[..., None],
    problem: Problem,
    num_steps: Any,
    *,
    name: str,
    in_specs: list[pl.BlockSpec],
    more_outputs: list[tuple[pl.BlockSpec, jax.ShapeDtypeStruct]],
    aliases: dict[int, int],
) -> Any:
    """A pallas_call with the scratch and the outputs (out, lse) that both kernels share."""
    heads, block_q = problem.heads_per_group, problem.blocks.block_q
    halves = 2 if problem.query_in_halves else 1
    groups = problem.batch * problem.query_groups
    specs = _specs(problem)
    outputs = [
        (
            specs.query,
            jax.ShapeDtypeStruct(
                (problem.batch, problem.query_length, problem.query_heads * problem.head_dim),
                problem.dtype,
            ),
        ),
        (specs.lse, jax.ShapeDtypeStruct((groups, heads, problem.query_length), jnp.float32)),
        *more_outputs,
    ]
    scratch = [
        ((heads, block_q, halves * problem.head_dim), problem.dtype),
        ((heads, 1, block_q), jnp.float32),
        ((heads, SUBLANES, block_q), jnp.float32),
        ((heads, problem.head_dim, block_q), jnp.float32),
    ]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_steps, problem.num_kv_blocks),
            in_specs=in_specs,
            out_specs=[spec for spec, _ in outputs],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
        ),
        out_shape=[shape for _, shape in outputs],
        input_output_aliases=aliases,
        interpret=problem.interpret,
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
    )


def _fixed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    knowledge: Statistics | Promise,
    problem: Problem,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Out, lse [groups, heads, S_q] and certificate rows [groups, num_q_blocks, heads, 128]."""
    heads = problem.heads_per_group
    limits = theorem.limits(
        knowledge.value_max.reshape(-1),
        num_keys=problem.key_length,
        tolerance=problem.tolerance,
        kernel=problem.kernel,
        xp=jnp,
    )
    limit_rows = jnp.stack([getattr(limits, name) for name in _LIMIT_FIELDS])

    def at_statistics(step: Any, kv_block: Any, order_ref: Any) -> tuple[Any, ...]:
        place = _locate(order_ref[step], problem)
        return place.batch * problem.key_groups + place.key_group, 0, 0, 0

    def at_certificate(step: Any, kv_block: Any, order_ref: Any) -> tuple[Any, ...]:
        place = _locate(order_ref[step], problem)
        group = place.batch * problem.query_groups + place.query_group
        return group, place.query_block, 0, 0

    operands: tuple[jax.Array, ...]
    if isinstance(knowledge, Promise):
        operands = (knowledge.logit_bound,)
        operand_specs = [pl.BlockSpec(memory_space=pltpu.SMEM)]
    else:
        operands = (knowledge.centers, knowledge.columns, knowledge.weights)
        operand_specs = [
            pl.BlockSpec((1, *operand.shape[1:]), at_statistics) for operand in operands
        ]

    def kernel(order_ref: Any, limit_ref: Any, *refs: Any) -> None:
        inputs, known = refs[:3], refs[3 : 3 + len(operands)]
        out_ref, lse_ref, certificate_ref, *scratch = refs[3 + len(operands) :]
        promised = isinstance(knowledge, Promise)
        bounder: _RowBounder = (_BoundsFromPromise if promised else _BoundsFromKeys)(
            problem, *known
        )
        stabilizer = _FixedStabilizer(problem, bounder, limit_ref, certificate_ref)
        place = _locate(order_ref[pl.program_id(0)], problem)
        _run_block(place, (*inputs, out_ref, lse_ref), tuple(scratch), problem, stabilizer)

    specs = _specs(problem)
    groups = problem.batch * problem.query_groups
    certificate_shape = (groups, problem.num_q_blocks, heads, LANES)
    run = _call(
        kernel,
        problem,
        problem.num_blocks,
        name="clis_fixed",
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            specs.query,
            specs.key,
            specs.key,
            *operand_specs,
        ],
        more_outputs=[
            (
                pl.BlockSpec((1, 1, heads, LANES), at_certificate),
                jax.ShapeDtypeStruct(certificate_shape, jnp.float32),
            )
        ],
        aliases={},
    )
    return tuple(run(_every_block(problem), limit_rows, query, key, value, *operands))


def _every_block(problem: Problem) -> jax.Array:
    return jnp.asarray(np.arange(problem.num_blocks, dtype=np.int32))


def _online_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    value_max: jax.Array,
    problem: Problem,
    order: jax.Array,
    num_steps: Any,
    into: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Online softmax over the first ``num_steps`` blocks of ``order``, written into ``into``."""
    previous = () if into is None else into
    shift = theorem.online_shift(value_max.reshape(-1), num_keys=problem.key_length, xp=jnp)

    def kernel(order_ref: Any, shift_ref: Any, *refs: Any) -> None:
        inputs = refs[:3]
        out_ref, lse_ref, *scratch = refs[3 + len(previous) :]
        place = _locate(order_ref[pl.program_id(0)], problem)
        stabilizer = _OnlineStabilizer(shift_ref)
        _run_block(place, (*inputs, out_ref, lse_ref), tuple(scratch), problem, stabilizer)

    specs = _specs(problem)
    run = _call(
        kernel,
        problem,
        num_steps,
        name="clis_online",
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            specs.query,
            specs.key,
            specs.key,
            *(pl.BlockSpec(memory_space=pl.ANY),) * len(previous),
        ],
        more_outputs=[],
        aliases={5 + i: i for i in range(len(previous))},
    )
    return tuple(run(order, shift, query, key, value, *previous))


def attention_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    problem: Problem,
    path: str,
    logit_bound: jax.Array | None = None,
) -> ForwardResult:
    """Unmasked attention on [B, S, heads * head_dim]; see ``attention.attention``.

    Args:
        logit_bound: float32 [query heads], bits; None: from statistics of the keys.
    """
    single = path == "auto" and problem.num_kv_blocks == 1
    if path == "online" or single:
        every = _every_block(problem)
        value_max = largest_values(value, problem)
        out, lse = _online_attention(
            query, key, value, value_max, problem, every, problem.num_blocks
        )
        return ForwardResult(out, _per_head(lse, problem), exact_certificate(problem))
    knowledge: Statistics | Promise
    if logit_bound is None:
        knowledge = key_statistics(key, value, problem)
    else:
        added = problem.query_groups * problem.heads_per_group - problem.query_heads
        padded = jnp.pad(logit_bound.astype(jnp.float32), (0, added))
        knowledge = Promise(padded, largest_values(value, problem))
    out, lse, rows = _fixed_attention(query, key, value, knowledge, problem)
    if path == "auto":
        again = functools.partial(
            _online_attention, query, key, value, knowledge.value_max, problem
        )
        out, lse = _recompute_failed(again, out, lse, failed_blocks(rows, problem))
    return ForwardResult(out, _per_head(lse, problem), _certificate(rows, problem))


def failed_blocks(rows: jax.Array, problem: Problem) -> jax.Array:
    """bool [blocks of work]: some head of the block failed. Where the number of heads is odd, the
    last column block has a second half that is no head and does not count."""
    failed = rows[..., 0] == theorem.RECOMPUTED
    group = np.arange(rows.shape[0])[:, None, None] % problem.query_groups
    head = group * problem.heads_per_group + np.arange(problem.heads_per_group)
    return jnp.any(failed & (head < problem.query_heads), axis=-1).reshape(-1)


def _recompute_failed(
    online: Callable[..., tuple[jax.Array, jax.Array]],
    out: jax.Array,
    lse: jax.Array,
    failed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Do the failed blocks again with online softmax, in place, if there are any.

    Heads that share a column block are redone together; a certified one among them keeps its
    verdict, since online softmax is within its bound too.
    """

    def again(into: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(jnp.logical_not(failed), stable=True).astype(jnp.int32)
        return online(order, jnp.sum(failed, dtype=jnp.int32), into)

    return jax.lax.cond(jnp.any(failed), again, lambda into: into, (out, lse))


def _per_head(lse: jax.Array, problem: Problem) -> jax.Array:
    """[groups, heads, S_q] -> [B, query heads, S_q]."""
    lse = lse.reshape(problem.batch, -1, problem.query_length)
    return lse[:, : problem.query_heads]


def _certificate(rows: jax.Array, problem: Problem) -> jax.Array:
    """Certificate rows of the kernel -> [B, query heads, num_q_blocks, fields]."""
    blocks, heads = problem.num_q_blocks, problem.heads_per_group
    rows = rows[..., : len(CERTIFICATE_FIELDS)]
    rows = rows.reshape(problem.batch, problem.query_groups, blocks, heads, len(CERTIFICATE_FIELDS))
    rows = jnp.swapaxes(rows, 2, 3)
    rows = rows.reshape(problem.batch, -1, blocks, len(CERTIFICATE_FIELDS))
    rows = rows[:, : problem.query_heads]
    recomputed = rows[..., :1] == theorem.RECOMPUTED
    lane = jnp.arange(len(CERTIFICATE_FIELDS)) == CERTIFICATE_FIELDS.index("error_bound")
    return jnp.where(recomputed & lane, 0.0, rows)


def exact_certificate(problem: Problem) -> jax.Array:
    """What is reported where the true row maximum is used: no bound is needed, none is claimed."""
    fields = {"verdict": float(theorem.EXACT), "error_bound": 0.0, "bound_used": 0.0}
    row = jnp.array([fields.get(name, jnp.nan) for name in CERTIFICATE_FIELDS], jnp.float32)
    shape = (problem.batch, problem.query_heads, problem.num_q_blocks, len(CERTIFICATE_FIELDS))
    return jnp.broadcast_to(row, shape)
