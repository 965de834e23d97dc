"""Checks of what a bound saves where few keys lie at the edge of their row's reach."""

from __future__ import annotations

import numpy as np

import certify
from certify.formats import Float32
from certify.keys import head_keys
from tests.certify import emulator
from tests.certify.families import SCALE
from tests.certify.measures import bound_rows, kernel_logits, kernel_query

BLOCK = 512
REACHES = np.array([1, 3, 10, 30, 100, 150, 192, 250, 1000], np.float32)
"""Bits between the logits at the edge and the middle, one query each."""


def _shells() -> dict[str, Float32]:
    """Positions of blocks of keys on one axis, as far to one side as to the other."""
    sign = np.where(np.arange(2 * BLOCK) % 2, -1.0, 1.0)
    edge = np.arange(2 * BLOCK) % BLOCK < 2
    uniform = np.random.default_rng(27).uniform(0.0, 1.0, 2 * BLOCK)
    nearest = np.arange(2 * BLOCK) % BLOCK < 128
    run = np.where(np.arange(2 * BLOCK) < BLOCK, 1.0, -1.0)
    shells = {
        "one far pair": sign * np.where(edge, 1.0, 0.2),
        "others near": sign * np.where(edge, 1.0, 0.9),
        "all at the edge": sign,
        "some at the edge": sign * np.where(nearest, 0.5, 1.0),
        "uniform": sign * uniform,
        "two runs": run + 0.01 * sign,
        "a wide block between runs": np.concatenate([run, np.where(edge, 0.9 * sign, 0.0)[:BLOCK]]),
    }
    return {name: radius.astype(np.float32) for name, radius in shells.items()}


def _on_axis(position: Float32) -> Float32:
    vectors = np.zeros((position.size, 8), np.float32)
    vectors[:, 0] = position
    return vectors


QUERY = _on_axis(REACHES / np.float32(SCALE * np.log2(np.e)))


def _log_sum(position: Float32, dtype: str) -> np.ndarray:
    return emulator.log_sum_exp(
        kernel_logits(kernel_query(QUERY, dtype), _on_axis(position), "exact")
    )


def check_saved_bits() -> None:
    """S is above the log-sum-exp at every reach, however the keys are spread below the edge.

    Queries and keys lie on one line, where Cauchy-Schwarz is exact: S has one bit to spare, for the
    keys on the other side.
    """
    for name, position in _shells().items():
        exact = _log_sum(position, "float32")
        for family in ("ball", "blocks", "scaled"):
            for bound in (family, family + "+sentinels"):
                row = bound_rows(
                    QUERY, _on_axis(position), "float32", bound, statistics_block=BLOCK
                )
                short = np.max(exact - row.upper)
                assert short <= 0.0, f"S is {short} too low: {name}, {bound}"


def check_saving_is_had() -> None:
    """Few keys at the edge: S is as near as if they were counted. Eight bits lie between.

    One bit to spare is for the keys on the other side, 2^-9 of the reach for the rounding of
    squares to bfloat16.
    """
    position = _shells()["one far pair"]
    exact = _log_sum(position, "float32")
    for bound in ("ball", "blocks", "scaled"):
        row = bound_rows(QUERY, _on_axis(position), "float32", bound, statistics_block=BLOCK)
        spare = (row.upper - exact)[(REACHES >= 192) & (REACHES <= 250)]
        assert np.max(spare) < 1.6, f"S is {np.max(spare)} too high: {bound}"


def check_saving_of_whole_blocks() -> None:
    """A row that sees the far keys alone saves nothing. Its sum is that of two keys at the edge.

    Every other row sees all keys: what no row sees has no part in the statistics.
    """
    position = _shells()["one far pair"]
    query = np.repeat(QUERY, 2, axis=0)
    far_alone = np.arange(len(query))[:, None] % 2 == 0
    mask = np.where(far_alone, np.arange(2 * BLOCK) < 2, True)
    key, logits = _on_axis(position), query[:, :1] * np.float32(SCALE * np.log2(np.e)) * position
    exact = emulator.log_sum_exp(np.where(mask, logits, -np.inf).astype(np.float64))
    arrays = (query[None, :, None], key[None, :, None], key[None, :, None])
    for bound in ("ball", "blocks", "scaled", "auto"):
        found = certify.certify(
            *arrays, scale=SCALE, bounds=bound, attn_mask=mask, statistics_block=BLOCK
        )
        assert np.all(found.upper[0, 0] >= exact - 1e-3), f"S is too low: {bound}"


def check_saving_under_a_cap() -> None:
    """A cap of 20 bits lifts every key to the edge: nothing is saved there."""
    position, cap = _shells()["others near"], 20.0
    key, logits = _on_axis(position), QUERY[:, :1] * np.float32(SCALE * np.log2(np.e)) * position
    exact = emulator.log_sum_exp((cap * np.tanh(logits / cap)).astype(np.float64))
    arrays = (QUERY[None, :, None], key[None, :, None], key[None, :, None])
    for bound in ("ball", "blocks", "scaled", "auto"):
        found = certify.certify(
            *arrays,
            scale=SCALE,
            bounds=bound,
            logits_soft_cap=cap / np.log2(np.e),
            statistics_block=BLOCK,
        )
        assert np.all(found.upper[0, 0] >= exact - 1e-3), f"S is too low: {bound}"


def check_groups() -> None:
    """Every key that is no sentinel is in one group of its block, none beyond the group's largest.

    Also where a block is no multiple of 128 keys, and where its last keys are missing.
    """
    rng = np.random.default_rng(28)
    for num_keys, block in ((1000, 512), (300, 300), (500, 200), (5, 5)):
        key = rng.standard_normal((num_keys, 4)).astype(np.float32)
        for sentinels in (True, False):
            head = head_keys(key, "float32", statistics_block=block, sentinels=sentinels)
            position = head.position[head.rows.log2_count[: head.num_sentinels] == 0]
            rest = np.setdiff1d(np.arange(num_keys), position)
            counts = np.bincount(rest // block, minlength=head.num_blocks)
            assert np.array_equal(head.rest, counts), "a key is counted twice or not at all"
            center = (head.rows.high + head.rows.low)[head.num_sentinels :]
            first, reach = head.num_sentinels, head.rows.reach_up[head.num_sentinels :]
            members = [rest[rest // block == row] for row in range(head.num_blocks)] + [rest]
            for row, inside in enumerate(members):
                if not inside.size:
                    continue
                apart = np.linalg.norm(key[inside].astype(np.float64) - center[row], axis=1)
                for bits in (20.0, 192.0, 400.0):
                    total = np.log2(np.sum(np.exp2(bits * (apart / reach[row] - 1.0))))
                    saved = min(bits / 192.0, 1.0) * head.rows.saved[first + row]
                    most = head.rows.log2_count[first + row] - saved
                    assert total <= most, f"{num_keys} keys, row {row}, {bits} bits"
