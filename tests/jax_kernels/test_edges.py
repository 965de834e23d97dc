"""Corners: global modes, phantom heads, extreme logits, peaked gradients, float16 under masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from certify import theorem
from jax_kernels import BlockSizes, attention, forward, reference_attention
from tests.jax_kernels.oracle import float64_attention, random_inputs

SMALL = BlockSizes(128, 128)


@pytest.mark.parametrize("peak", [1.0, 4.0, 10.0, 30.0])
@pytest.mark.parametrize("masked", [False, True], ids=["kernel", "masked"])
def test_bfloat16_gradients_of_peaked_rows(peak: float, masked: bool) -> None:
    """Catches: the rounded output in place of the mean of dP: up to 25 times plain's error."""
    query, key, value = random_inputs((1, 200, 200, 2, 2, 64), "bfloat16")
    query, key = query * peak, key * peak
    weight = random_inputs((1, 200, 200, 2, 2, 64), "bfloat16", seed=1)[0]
    arguments: dict[str, Any] = {"causal": True} if masked else {"block_sizes": SMALL}

    def gradients(function: Any, *inputs: Any, **kwargs: Any) -> list[np.ndarray]:
        def loss(*arrays: Any) -> Any:
            out = function(*arrays, **kwargs).astype(jnp.float32)
            return jnp.sum(out * weight.astype(jnp.float32))

        return [np.asarray(g, np.float32) for g in jax.grad(loss, argnums=(0, 1, 2))(*inputs)]

    def plain(query: Any, key: Any, value: Any) -> Any:
        logits = jnp.einsum("bqhd,bkhd->bhqk", query.astype(jnp.float32), key.astype(jnp.float32))
        logits = logits * 64**-0.5
        if masked:
            logits = jnp.where(jnp.tril(jnp.ones((200, 200), bool)), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1).astype(jnp.bfloat16)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return out.astype(jnp.bfloat16)

    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    exact = gradients(reference_attention, *wide, causal=masked)
    ours = gradients(attention, query, key, value, **arguments)
    theirs = gradients(plain, query, key, value)
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        error, yardstick = (np.sqrt(np.mean((g - right) ** 2)) for g in (mine, other))
        assert error <= 2 * yardstick + 2.0**-9 * np.sqrt(np.mean(right**2))


@pytest.mark.parametrize("argument", ["key_lengths", "attn_mask"])
def test_float16_under_a_mask_is_computed_in_float32(argument: str) -> None:
    """Catches: probabilities cast to float16, where 60,000 small ones vanish."""
    count = 60_000
    query = np.zeros((1, 1, 1, 64), np.float16)
    query[..., 0] = 8
    key = np.zeros((1, count, 1, 64), np.float16)
    key[:, 1:, 0, 0] = -18
    value = np.ones_like(key)
    value[:, 0] = 0
    mask: dict[str, Any] = {"key_lengths": np.array([count])}
    if argument == "attn_mask":
        mask = {"attn_mask": np.ones((1, count), bool)}
    inputs: list[Any] = [jnp.asarray(x) for x in (query, key, value)]
    out = attention(*inputs, **mask)
    exact, _ = float64_attention(*inputs)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2.0**-10)

    def total(function: Any, first: Any, second: Any, third: Any, **kwargs: Any) -> Any:
        return function(first, second, third, **kwargs).astype(jnp.float32).sum()

    grads = jax.grad(lambda v: total(attention, inputs[0], inputs[1], v, **mask))
    wide = [x.astype(jnp.float32) for x in inputs]
    right = jax.grad(lambda v: total(reference_attention, wide[0], wide[1], v))(wide[2])
    got = np.asarray(grads(inputs[2]), np.float32)
    np.testing.assert_allclose(got, np.asarray(right), rtol=2.0**-9, atol=2.0**-24)


def test_the_half_that_is_no_head_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an odd number of heads of 64 recomputed on every call, at online softmax's price."""
    query, key, value = random_inputs((2, 200, 300, 5, 5, 64), "bfloat16")
    seen: list[np.ndarray] = []
    original = forward.failed_blocks

    def watched(rows: Any, problem: Any) -> Any:
        failed = original(rows, problem)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), failed)
        return failed

    monkeypatch.setattr(forward, "failed_blocks", watched)
    jax.clear_caches()
    attention(query, key, value, block_sizes=SMALL).block_until_ready()
    jax.effects_barrier()
    jax.clear_caches()
    assert len(seen) == 1 and seen[0].shape == (2 * 3 * 2,) and not seen[0].any()


@pytest.mark.parametrize("peak", [1.0, 1000.0], ids=["certified", "recomputed"])
def test_the_x64_mode_changes_nothing(peak: float) -> None:
    """Catches: numbers of no stated dtype, which become float64 in jax's x64 mode."""
    inputs = random_inputs((1, 130, 300, 2, 2, 64), "float32", query_scale=peak)
    expected = np.asarray(attention(*inputs, block_sizes=SMALL))
    with jax.experimental.enable_x64():
        out, lse = attention(*inputs, block_sizes=SMALL, return_lse=True)
        grad = jax.grad(lambda q: attention(q, *inputs[1:], block_sizes=SMALL).sum())(inputs[0])
    assert out.dtype == lse.dtype == grad.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("path", ["auto", "online"])
def test_logits_far_below_every_sentinel_value(path: str, dtype: str) -> None:
    """Catches: a first row maximum that real logits can undercut, which gives 0 / 0."""
    _, key, value = random_inputs((1, 130, 300, 1, 1, 128), dtype)
    key = (-(jnp.abs(key) + 1) * 1e30).astype(dtype)
    query = jnp.ones((1, 130, 1, 128), dtype)
    out = attention(query, key, value, path=path, block_sizes=SMALL)
    exact, _ = float64_attention(query, key, value)
    assert np.abs(np.asarray(out).astype(np.float64) - exact).max() <= 2.0**-7 * 4


@pytest.mark.parametrize("shape", [(0, 5, 7, 2, 2, 16), (2, 0, 7, 2, 2, 16), (2, 5, 0, 2, 2, 16)])
def test_empty_problems_have_empty_gradients(shape: Any) -> None:
    """Catches: a division by zero where there is nothing to do."""
    inputs = random_inputs(shape, "float32")
    out, lse, certificate = attention(*inputs, return_lse=True, return_certificate=True)
    assert out.shape == inputs[0].shape and (np.asarray(out) == 0).all()
    assert lse.shape == (shape[0], shape[3], shape[1]) and np.isneginf(np.asarray(lse)).all()
    assert (np.asarray(certificate["verdict"]) == theorem.EXACT).all()
    grads = jax.grad(lambda *x: attention(*x, causal=True).sum(), argnums=(0, 1, 2))(*inputs)
    assert all((np.asarray(grad) == 0).all() for grad in grads)


@pytest.mark.parametrize("hide", ["lengths", "rows", "full", "segments"])
def test_keys_and_values_that_no_query_sees_may_be_anything(hide: str) -> None:
    """Catches: 0 * NaN of padding, in the output and in the gradient of the query."""
    query, key, value = random_inputs((2, 20, 40, 2, 1, 16), "float32")
    visible = jnp.arange(40) < 30
    cases: dict[str, dict[str, Any]] = {
        "lengths": {"key_lengths": jnp.asarray([30, 30])},
        "rows": {"attn_mask": visible},
        "full": {"attn_mask": jnp.broadcast_to(visible, (2, 2, 20, 40))},
        "segments": {
            "segment_ids": (jnp.zeros((2, 20), int), jnp.tile(jnp.where(visible, 0, 1), (2, 1)))
        },
    }
    arguments = cases[hide]
    key, value = (jnp.where(visible[None, :, None, None], x, jnp.nan) for x in (key, value))

    def loss(*inputs: Any) -> Any:
        return (attention(*inputs, **arguments) ** 2).sum()

    def right(query: Any) -> Any:
        out: Any = reference_attention(query, key[:, :30], value[:, :30])
        return (out**2).sum()

    grads = jax.grad(loss, argnums=(0, 1, 2))(query, key, value)
    expected = np.asarray(jax.grad(right)(query))
    np.testing.assert_allclose(np.asarray(grads[0]), expected, atol=3e-6 * np.abs(expected).max())
    assert all(np.isfinite(np.asarray(grad)).all() for grad in grads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 1e39}, "scale: got"),
        ({"window": True}, "window: got"),
        ({"segment_ids": jnp.zeros((1, 20))}, "segment_ids: got float32"),
        ({"block_sizes": (128, 128)}, "block_sizes: got"),
    ],
)
def test_more_errors_name_the_argument(changes: dict[str, Any], message: str) -> None:
    """Catches: settings of a wrong kind that fail later or are taken for something else."""
    inputs = random_inputs((1, 20, 20, 2, 2, 16), "float32")
    with pytest.raises(ValueError, match=message):
        attention(*inputs, **changes)


def test_numbers_of_numpy_are_numbers() -> None:
    """Catches: settings read from arrays refused for their type."""
    inputs = random_inputs((1, 20, 20, 2, 2, 16), "float32")
    arguments: dict[str, Any] = {"tolerance": np.float32(2.0**-12), "window": np.int64(3)}
    out = attention(*inputs, **arguments)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(attention(*inputs, window=3)))
