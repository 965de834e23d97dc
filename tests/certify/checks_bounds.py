"""Checks of S and L: enclosure of the log-sum-exp and every slack."""

from __future__ import annotations

import numpy as np

import certify
from certify import keys
from certify import summary as summary_of
from certify.arithmetic import BFLOAT16
from certify.formats import round_to_bfloat16, split_bfloat16
from tests.certify import emulator, families
from tests.certify.families import FAMILIES
from tests.certify.measures import (
    bound_rows,
    enclosure,
    kernel_logits,
    kernel_query,
)


def check_norms_are_upper_bounds() -> None:
    """norm_above >= |x| whatever underflows: 1e-25 has square 0 in float32."""
    rng = np.random.default_rng(17)
    for size in (1e-40, 1e-30, 1e-25, 1e-22, 1e-19, 1e-3, 1.0, 1e18):
        for dim in (1, 8, 64, 128, 256):
            vector = (size * rng.standard_normal((200, dim))).astype(np.float32)
            exact = np.linalg.norm(vector.astype(np.float64), axis=1)
            flushed = np.where(np.abs(vector) < 2.0**-126, 0.0, vector).astype(np.float32)
            squares = flushed * flushed
            squares = np.where(squares < 2.0**-126, np.float32(0.0), squares)
            total = np.sum(squares, axis=1, dtype=np.float32)
            above = summary_of.root_above(total, dim, xp=np)
            assert np.all(above >= exact), f"norm of size {size}, dim {dim}"
            assert np.all(summary_of.norm_above(vector, xp=np) >= exact), (
                f"norm of size {size}, dim {dim}"
            )


UNCAPPED = certify.BOUND_NAMES[1:9]
"""Every family that needs no soft cap."""


def check_enclosure(bound: str = "all", seed: int = 18) -> None:
    """L <= log2 sum 2^logit <= S for every family, length, head dimension, dtype and bound."""
    rng = np.random.default_rng(seed)
    names = UNCAPPED if bound == "all" else (bound,)
    for index, (name, family) in enumerate(FAMILIES.items()):
        for turn, (num_keys, dim) in enumerate(((1000, 64), (3, 8), (300, 64), (130, 256))):
            dtype = ("bfloat16", "float32")[(index + turn + turn // 2) % 2]
            for each in names:
                above, below = enclosure(
                    family, rng, keys_=num_keys, dim=dim, dtype=dtype, bound=each
                )
                place = f"{name}, {num_keys} keys, dim {dim}, {dtype}, {each}"
                assert np.all(above >= 0), f"S is {-np.min(above)} too low: {place}"
                assert np.all(below >= 0), f"L is {-np.min(below)} too high: {place}"


def check_rounding_slack() -> None:
    """Identical large keys, S = L but for slack: the kernel's rounding must fit between."""
    rng = np.random.default_rng(19)
    for bits in (3e3, 3e4, 3e5):
        for num_keys, bound in (
            (200, "ball"),
            (200, "blocks"),
            (200, "box"),
            (200, "scaled"),
            (3, "ball+sentinels"),
        ):
            for dtype in ("float32", "bfloat16"):
                for family in (families.identical(bits), families.constant(bits)):
                    above, below = enclosure(
                        family, rng, keys_=num_keys, dim=256, dtype=dtype, bound=bound
                    )
                    assert np.all(above >= 0) and np.all(below >= 0), f"{bits} bits, {bound}"


def check_moved_center() -> None:
    """Taking sentinels out moves a block's center, and its radius must follow.

    128 keys (0.9, 2) are the sentinels and pull the mean of 512 towards themselves; the rest lie at
    0 but for one at (1, 0), nearer to the old mean than to the new one. Queries point to that one.
    """
    key = np.zeros((512, 8), np.float32)
    key[:128, 0], key[:128, 1] = 0.9, 2.0
    key[300, 0] = 1.0
    query = np.zeros((4, 8), np.float32)
    query[:, 0] = 1000.0
    summary = keys.head_keys(key, "float32", statistics_block=512)
    assert np.array_equal(summary.rows.high[:128], key[:128]), "the sentinels are others"
    for bound in ("ball+sentinels", "blocks+sentinels", "box+sentinels", "scaled+sentinels"):
        row = bound_rows(query, key, "float32", bound, statistics_block=512)
        exact = emulator.log_sum_exp(kernel_logits(kernel_query(query, "float32"), key, "exact"))
        assert np.all(row.upper >= exact), f"S is too low by {np.max(exact - row.upper)}: {bound}"


def check_error_of_the_mean() -> None:
    """The mean may be as wrong as float32 sums in the worst order are, and L must allow for it.

    Once all keys are equal, once they are opposite, so that their size does not show in the mean.
    """
    num_keys, dim = 1000, 4
    wrong = np.float32(0.4 * num_keys * 2.0**-24)
    for mean, spread in ((1.0, dim * wrong**2), (0.0, dim * 1.0)):
        summary = summary_of.summarize_keys(
            block_mean=np.full((1, dim), mean, np.float32) + wrong,
            block_count=np.full(1, num_keys, np.float32),
            group_count=np.full((1, 1), num_keys - 3, np.float32),
            distance_squared=np.full((1, 1), spread, np.float32),
            spread_squared=np.full(1, spread, np.float32),
            scaled_squared=np.full((1, 1), spread, np.float32),
            channel_scale=np.ones(dim, np.float32),
            sentinels=np.full((3, dim), mean, np.float32),
            membership=np.ones((1, 3), np.float32),
            keys_per_block=num_keys,
            kernel=BFLOAT16,
            split=split_bfloat16,
            matmul=np.matmul,
            xp=np,
        )
        center = (summary.high + summary.low)[3:].astype(np.float64)
        error = np.linalg.norm(center - mean, axis=1)
        assert np.all(error > 1e-6), "the mean is not wrong"
        assert np.all(summary.reach_down[3:] >= error), "L does not allow for the error of the mean"


def check_center_is_rounded() -> None:
    """Whatever a center loses when it is split into the kernel's halves, L allows for.

    With a split that keeps one half only, so that no other slack can stand in for this one.
    """
    rng = np.random.default_rng(25)
    mean = rng.uniform(1.0, 2.0, (40, 1)).astype(np.float32)
    nothing = np.zeros(40, np.float32)
    rows = summary_of.summarize_keys(
        block_mean=mean,
        block_count=nothing + 1.0,
        group_count=nothing[:, None] + 1.0,
        distance_squared=nothing[:, None],
        spread_squared=nothing,
        scaled_squared=nothing[:, None],
        channel_scale=np.ones(1, np.float32),
        sentinels=np.zeros((0, 1), np.float32),
        membership=np.zeros((40, 0), np.float32),
        keys_per_block=1,
        kernel=BFLOAT16,
        split=lambda values: (round_to_bfloat16(values), np.zeros_like(values)),
        matmul=np.matmul,
        xp=np,
    )
    center = (rows.high + rows.low)[:, 0].astype(np.float64)
    exact = mean[:, 0].astype(np.float64)
    assert np.all(rows.reach_down[:-1] >= np.abs(center[:-1] - exact)), "a center is rounded"
    ball_error = np.abs(center[-1] - np.mean(center[:-1]))
    largest = np.max(np.abs(center[:-1] - exact))
    assert rows.reach_down[-1] >= ball_error + largest, "the ball's center is rounded"


def check_evaluation_slack() -> None:
    """All logits 0: log2 n in float32 is rounded one way or the other, and both must be covered."""
    for num_keys in range(1, 200):
        for bound in ("ball", "blocks", "auto"):
            rng = np.random.default_rng(num_keys)
            above, below = enclosure(
                families.zeros, rng, keys_=num_keys, dim=8, dtype="float32", bound=bound
            )
            assert np.all(above >= 0) and np.all(below >= 0), f"n = {num_keys}, {bound}"


def check_scaled_ball() -> None:
    """The ball's scaled radius reaches every key from the center of all: blocks far apart."""
    rng = np.random.default_rng(26)
    size = np.array([0.01, 0.01, 100.0, 30.0, 1.0, 1.0, 1e-3, 1e-3], np.float32)
    key = size * rng.standard_normal((1024, 8)).astype(np.float32)
    key[512:, 0] += 10.0
    head = keys.head_keys(key, "float32", statistics_block=512)
    center = (head.rows.high + head.rows.low)[-1]
    others = np.delete(key, head.position, axis=0).astype(np.float64)
    exact = np.linalg.norm((others - center) / head.rows.channel_scale, axis=1)
    assert head.rows.scaled_radius[-1] >= np.max(exact), "the ball's scaled radius is too small"
    for block in range(2):
        place = slice(512 * block, 512 * (block + 1))
        inside = np.setdiff1d(np.arange(1024)[place], head.position)
        center = (head.rows.high + head.rows.low)[128 + block]
        apart = (key[inside].astype(np.float64) - center) / head.rows.channel_scale
        assert head.rows.scaled_radius[128 + block] >= np.max(np.linalg.norm(apart, axis=1))


def check_rounded_squares() -> None:
    """Distances whose squares were rounded down to bfloat16 are still bounded from above."""
    distance = np.sqrt(1.0 + 2.0**-8 - 2.0**-20).astype(np.float32)
    nothing = np.zeros((1, 1), np.float32)
    summary = summary_of.summarize_keys(
        block_mean=nothing,
        block_count=np.ones(1, np.float32),
        group_count=np.ones((1, 1), np.float32),
        distance_squared=round_to_bfloat16(distance * distance).reshape(1, 1),
        spread_squared=round_to_bfloat16(distance * distance).reshape(1),
        scaled_squared=round_to_bfloat16(distance * distance).reshape(1, 1),
        channel_scale=np.ones(1, np.float32),
        sentinels=np.zeros((0, 1), np.float32),
        membership=np.zeros((1, 0), np.float32),
        keys_per_block=1,
        kernel=BFLOAT16,
        split=split_bfloat16,
        matmul=np.matmul,
        xp=np,
    )
    assert summary.reach_up[0] >= distance and summary.scaled_radius[0] >= distance


def check_flushed_squares_are_scaled() -> None:
    """Squares that were flushed before a power of two multiplied them count that much."""
    vector = np.full(16, 2.0**-64, np.float64)
    scale = 2.0**20
    flushed = np.float32(0.0)
    above = summary_of.root_above(flushed, 16, xp=np, scale=scale)
    assert above >= scale * np.linalg.norm(vector), "a flushed square was scaled up"


def check_split_squares() -> None:
    """A square held as two bfloat16 halves can be low by 2^-15 of itself, a sum by its rounding."""
    for dim in (1, 2, 4096):
        held = np.float32(dim * (1.0 - 2.0**-15) * (1.0 - dim * 2.0**-24))
        assert summary_of.root_above(held, dim, xp=np) >= np.sqrt(dim)
