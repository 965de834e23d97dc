"""The kernels against the float64 definition: shapes, dtypes, verdicts, gradients, errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import certify
from certify import theorem
from jax_kernels import BlockSizes, attention, num_query_blocks, reference_attention
from tests.jax_kernels.oracle import (
    assert_as_good_as_plain,
    float64_attention,
    plain_low_precision,
    random_inputs,
)

SMALL = BlockSizes(block_q=256, block_kv=256)
VERDICT = {name: code for code, name in enumerate(certify.VERDICTS)}

SHAPES = {
    "one block": (1, 128, 256, 2, 2, 128),
    "tail of 4 keys": (1, 300, 516, 2, 2, 128),
    "tail not a multiple of 8": (2, 257, 523, 1, 1, 128),
    "grouped keys": (1, 300, 700, 4, 2, 128),
    "more keys than queries": (1, 64, 1100, 1, 1, 128),
    "more queries than keys": (1, 900, 300, 1, 1, 128),
    "pairs of 64": (1, 300, 700, 2, 2, 64),
    "odd number of heads of 64": (1, 300, 700, 3, 3, 64),
    "grouped keys of 64": (1, 300, 700, 4, 2, 64),
    "head size 80": (1, 300, 700, 2, 1, 80),
    "head size 96": (1, 300, 700, 1, 1, 96),
    "head size 8": (1, 192, 700, 3, 3, 8),
    "head size 256": (1, 130, 520, 1, 1, 256),
}


@pytest.mark.parametrize("path", ["auto", "online"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_dtypes_and_paths(shape: Any, dtype: str, path: str) -> None:
    """Catches: tail rows dropped or counted twice, heads mixed up, a pad in the softmax."""
    query, key, value = random_inputs(shape, dtype)
    out, lse = attention(query, key, value, path=path, block_sizes=SMALL, return_lse=True)
    assert out.dtype == query.dtype
    assert_as_good_as_plain(out, query, key, value)
    _, exact = float64_attention(query, key, value)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(lse), exact, atol=3e-5, rtol=1e-6)


@pytest.mark.parametrize("path", ["auto", "online"])
def test_float16_is_computed_in_float32(path: str) -> None:
    """Catches: float16 exponents, which overflow at 65,504, used inside the kernel."""
    query, key, value = random_inputs((1, 200, 600, 2, 2, 64), "float16")
    value = value * 1e4
    out = attention(query, key, value, path=path, block_sizes=SMALL)
    exact, _ = float64_attention(query, key, value)
    assert out.dtype == jnp.float16
    limit = 2.0**-11 * np.abs(exact) + 2.0**-20 * 5e4
    assert (np.abs(np.asarray(out, np.float64) - exact) <= limit).all()


@pytest.mark.parametrize("bits", [3.0, 30.0, 60.0])
@pytest.mark.parametrize("path", ["auto", "online"])
def test_scale_is_exact(bits: float, path: str) -> None:
    """Catches: q rounded a second time after scaling, 2 to 7 times plain attention's error."""
    query, key, value = random_inputs((1, 256, 700, 2, 2, 128), "bfloat16")
    scale = bits / (128**0.5 * 1.4427)
    out = attention(query, key, value, scale=scale, path=path, block_sizes=SMALL)
    exact, _ = float64_attention(query, key, value, scale=scale)
    plain = plain_low_precision(query, key, value, scale)

    def rms(array: Any) -> float:
        return float(np.sqrt(np.mean((np.asarray(array, np.float64) - exact) ** 2)))

    assert rms(out) <= 1.5 * rms(plain) + 2.0**-9 * float(np.sqrt(np.mean(exact**2)))


def _heads_of_every_verdict(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Head 0 certifies, head 1 (40 bits) is verified, head 2 (thousands of bits) is recomputed."""
    query, key, value = random_inputs((1, 600, 1100, 3, 3, 128), dtype)
    spread = jnp.asarray([1.0, 20.0, 2000.0]).astype(dtype)
    return query * spread[None, None, :, None], key, value


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_three_verdicts_per_head_and_block(dtype: str) -> None:
    """Catches: verdicts pooled over heads or blocks, a failed block left as it is or misplaced."""
    query, key, value = _heads_of_every_verdict(dtype)
    out, certificate = attention(
        query, key, value, block_sizes=BlockSizes(256, 512), return_certificate=True
    )
    verdict = np.asarray(certificate["verdict"])
    assert verdict.shape == (1, 3, 3)
    assert (verdict == np.array([0, 1, 2])[None, :, None]).all()
    online = attention(query, key, value, path="online", block_sizes=BlockSizes(256, 512))
    np.testing.assert_array_equal(np.asarray(out[:, :, 2]), np.asarray(online[:, :, 2]))
    for part in (slice(0, 1), slice(1, 2)):
        assert_as_good_as_plain(
            out[:, :, part], query[:, :, part], key[:, :, part], value[:, :, part]
        )
    error = np.asarray(certificate["error_bound"])
    assert (error[:, :2] <= certify.DEFAULT_TOLERANCE).all() and (error[:, 2] == 0).all()
    assert (np.asarray(certificate["gap"])[:, 0] <= np.asarray(certificate["budget"])[:, 0]).all()


def test_one_failed_block_of_queries() -> None:
    """Catches: the recomputation writing over blocks that passed, or at the wrong place."""
    query, key, value = random_inputs((2, 700, 600, 3, 3, 64), "bfloat16")
    query = query.at[1, 300:310, 1].multiply(4000)
    out, certificate = attention(query, key, value, block_sizes=SMALL, return_certificate=True)
    verdict = np.asarray(certificate["verdict"])
    expected = np.zeros((2, 3, 3), int)
    expected[1, 1, 1] = VERDICT["recomputed"]
    np.testing.assert_array_equal(verdict, expected)
    calm = np.ones(700, bool)
    calm[300:310] = False
    assert_as_good_as_plain(out[:, calm], query[:, calm], key, value)
    online = attention(query, key, value, path="online", block_sizes=SMALL)
    np.testing.assert_array_equal(np.asarray(out[1, 256:512, 1]), np.asarray(online[1, 256:512, 1]))


def test_single_block_of_keys_is_exact() -> None:
    """Catches: statistics computed for problems that need none."""
    query, key, value = random_inputs((1, 300, 600, 2, 2, 128), "bfloat16")
    out, certificate = attention(query, key, value, return_certificate=True)
    assert (np.asarray(certificate["verdict"]) == VERDICT["exact"]).all()
    assert_as_good_as_plain(out, query, key, value)


def test_sink_heads_certify() -> None:
    """Catches: a sink left in its block's mean or radius; Gaussian values, logits of +-500 bits."""
    query, key, value = random_inputs((1, 512, 2048, 2, 2, 128), "bfloat16")
    key = key.at[:, 777].set((query.mean(axis=1) * 40).astype(key.dtype) + 15)
    out, certificate = attention(query, key, value, block_sizes=SMALL, return_certificate=True)
    assert (np.asarray(certificate["verdict"]) == VERDICT["certified"]).all()
    assert_as_good_as_plain(out, query, key, value)


def test_tolerance_decides_monotonically() -> None:
    """Catches: a tolerance that does not reach the budget, or moves it the wrong way."""
    query, key, value = random_inputs((1, 256, 2048, 1, 1, 128), "bfloat16")
    budgets = [
        float(
            attention(
                query, key, value, tolerance=tolerance, block_sizes=SMALL, return_certificate=True
            )[1]["budget"][0, 0, 0]
        )
        for tolerance in (2.0**-15, 2.0**-12, 2.0**-6)
    ]
    assert budgets[0] < budgets[1] - 2 and budgets[1] < budgets[2] - 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_not_finite_inputs_are_recomputed(bad: float, where: str) -> None:
    """Catches: NaN or inf that certifies or verifies, or that is hidden; online softmax decides."""
    inputs: dict[str, Any] = dict(
        zip(
            ("query", "key", "value"),
            random_inputs((1, 300, 700, 2, 2, 128), "bfloat16"),
            strict=True,
        )
    )
    inputs[where] = inputs[where].at[0, 299, 1, 5].set(bad)
    out, certificate = attention(**inputs, block_sizes=SMALL, return_certificate=True)
    online = attention(**inputs, path="online", block_sizes=SMALL)
    verdict = np.asarray(certificate["verdict"])
    assert (verdict[0, 0] == VERDICT["certified"]).all()
    affected = verdict[0, 1] if where != "query" else verdict[0, 1, 1:]
    assert (affected == VERDICT["recomputed"]).all()
    rows = slice(256, None) if where == "query" else slice(None)
    np.testing.assert_array_equal(
        np.asarray(out[:, rows, 1], np.float32), np.asarray(online[:, rows, 1], np.float32)
    )
    assert np.isfinite(np.asarray(out[:, :, 0], np.float32)).all()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1e30, 3e38])
def test_value_sizes(size: float) -> None:
    """Catches: products that flush for tiny V, sums that overflow for huge V, 0/0 for V = 0."""
    query, key, value = random_inputs((1, 256, 1100, 1, 1, 128), "bfloat16")
    value = (jnp.clip(value, -1, 1) * size).astype(jnp.bfloat16)
    out, certificate = attention(query, key, value, block_sizes=SMALL, return_certificate=True)
    exact, _ = float64_attention(query, key, value)
    error = np.abs(np.asarray(out).astype(np.float64) - exact).max()
    assert error <= 2.0**-7 * size
    assert (np.asarray(certificate["verdict"]) != VERDICT["exact"]).all()


def _masks(shape: tuple[int, int, int, int]) -> dict[str, tuple[dict[str, Any], np.ndarray]]:
    """Mask arguments and the bias in nats that they stand for."""
    batch, heads, queries, keys = shape
    rng = np.random.default_rng(5)
    rows, columns = np.arange(queries)[:, None], np.arange(keys)[None, :]

    def hide(visible: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.where(visible, 0.0, -np.inf), shape)

    boolean = rng.random(shape) < 0.5
    boolean[:, :, 3] = False
    per_head = rng.random((1, heads, 1, keys)) < 0.5
    additive = rng.standard_normal((batch, 1, queries, keys)).astype(np.float32)
    additive[..., 5] = -np.inf
    additive[..., 6] = np.finfo(np.float32).min
    hidden = np.where(additive < -1e30, -np.inf, additive)
    lengths = np.array([0, keys - 3])
    segments = (rng.integers(0, 3, (batch, queries)), rng.integers(0, 3, (batch, keys)))
    return {
        "causal": ({"causal": True}, hide(columns <= rows + keys - queries)),
        "window": ({"window": 7}, hide(abs(columns - rows - keys + queries) <= 7)),
        "boolean": ({"attn_mask": jnp.asarray(boolean)}, hide(boolean)),
        "per head": ({"attn_mask": jnp.asarray(per_head)}, hide(per_head)),
        "two-dimensional": ({"attn_mask": jnp.asarray(boolean[0, 0])}, hide(boolean[:1, :1])),
        "additive": ({"attn_mask": jnp.asarray(additive)}, np.broadcast_to(hidden, shape)),
        "lengths": (
            {"key_lengths": jnp.asarray(lengths)},
            hide(columns < lengths[:, None, None, None]),
        ),
        "segments": (
            {"segment_ids": tuple(map(jnp.asarray, segments))},
            hide(segments[0][:, None, :, None] == segments[1][:, None, None, :]),
        ),
        "causal and boolean": (
            {"causal": True, "attn_mask": jnp.asarray(boolean)},
            hide((columns <= rows + keys - queries) & boolean),
        ),
    }


MASK_SHAPE = (2, 4, 60, 75)
MASKS = _masks(MASK_SHAPE)


@pytest.mark.parametrize("path", ["auto", "online"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a mask dropped, inverted, shifted or cut wrongly; rows that see nothing."""
    monkeypatch.setattr("jax_kernels.exact.CHUNK_ELEMENTS", 2 * 4 * 75 * 16)
    arguments, bias = MASKS[name]
    batch, heads, queries, keys = MASK_SHAPE
    inputs = random_inputs((batch, queries, keys, heads, 2, 16), "float32")
    out, lse, certificate = attention(
        *inputs, **arguments, path=path, return_lse=True, return_certificate=True
    )
    exact, exact_lse = float64_attention(*inputs, bias=bias)
    np.testing.assert_allclose(np.asarray(out), exact, atol=2e-6)
    np.testing.assert_allclose(np.asarray(lse), exact_lse, atol=2e-6, rtol=1e-6)
    assert (np.asarray(certificate["verdict"]) == VERDICT["exact"]).all()
    reference, reference_lse = reference_attention(*inputs, **arguments, return_lse=True)
    np.testing.assert_allclose(np.asarray(reference), exact, atol=2e-6)
    np.testing.assert_allclose(np.asarray(reference_lse), exact_lse, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "padding",
    [
        {"key_lengths": jnp.asarray([30])},
        {"attn_mask": jnp.arange(40) < 30},
        {"attn_mask": jnp.where(jnp.arange(40) < 30, 0.0, -jnp.inf)[None, None, None]},
    ],
    ids=["lengths", "boolean", "additive"],
)
def test_values_that_no_query_sees_may_be_anything(padding: dict[str, Any]) -> None:
    """Catches: 0 * NaN from padding, in the output or in a gradient."""
    query, key, value = random_inputs((1, 20, 40, 1, 1, 16), "float32")
    spoiled = value.at[:, 30:].set(jnp.nan)
    out = attention(query, key, spoiled, **padding)
    exact, _ = float64_attention(query, key[:, :30], value[:, :30])
    np.testing.assert_allclose(np.asarray(out), exact, atol=2e-6)
    grad = jax.grad(lambda k: attention(query, k, spoiled, **padding).sum())(key)
    assert np.isfinite(np.asarray(grad)).all()


def test_soft_cap() -> None:
    """Catches: the cap ignored or applied after the mask."""
    inputs = random_inputs((1, 33, 50, 2, 2, 16), "float32", query_scale=8.0)
    out = attention(*inputs, logits_soft_cap=2.0)
    exact, _ = float64_attention(*inputs, soft_cap=2.0)
    np.testing.assert_allclose(np.asarray(out), exact, atol=2e-6)


GRADIENT_CASES: dict[str, dict[str, Any]] = {
    "kernel": {"block_sizes": SMALL},
    "causal": {"causal": True},
    "soft cap": {"logits_soft_cap": 3.0},
    "boolean mask": {
        "attn_mask": jnp.asarray(np.random.default_rng(1).random((1, 1, 130, 600)) < 0.3)
    },
}


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a missing scale, a wrong head group, padded rows leaking into sums over queries."""
    monkeypatch.setattr("jax_kernels.exact.CHUNK_ELEMENTS", 4 * 600 * 48)
    arguments = dict(GRADIENT_CASES[name])
    plain = {k: v for k, v in arguments.items() if k != "block_sizes"}
    inputs = random_inputs((1, 130, 600, 4, 2, 64), "float32")
    weight = jax.random.normal(jax.random.key(3), inputs[0].shape)

    def loss(function: Any, **kwargs: Any) -> Any:
        def value(query: Any, key: Any, value: Any) -> Any:
            out, lse = function(query, key, value, return_lse=True, **kwargs)
            seen = jnp.where(jnp.isfinite(lse), lse, 0)
            return (out * weight).sum() + jnp.sin(seen).sum()

        return jax.grad(value, argnums=(0, 1, 2))(*inputs)

    for ours, theirs in zip(
        loss(attention, **arguments), loss(reference_attention, **plain), strict=True
    ):
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=3e-6 * scale)


@pytest.mark.parametrize("mask_shape", [(1, 1, 1, 40), (1, 2, 33, 40), (2, 1, 33, 1), (33, 40)])
def test_gradient_of_an_additive_mask(mask_shape: tuple[int, ...]) -> None:
    """Catches: a learnt bias that silently gets no gradient, or a sum over the wrong dimensions."""
    inputs = random_inputs((2, 33, 40, 2, 2, 16), "float32")
    mask = jax.random.normal(jax.random.key(0), mask_shape)

    def loss(function: Any) -> Any:
        return jax.grad(lambda m: (function(*inputs, attn_mask=m) ** 2).sum())(mask)

    np.testing.assert_allclose(
        np.asarray(loss(attention)), np.asarray(loss(reference_attention)), atol=1e-5
    )


def test_empty_and_tiny_problems() -> None:
    """Catches: a crash on no keys, no queries, one key."""
    query, key, value = random_inputs((1, 5, 1, 2, 2, 16), "float32")
    np.testing.assert_allclose(
        np.asarray(attention(query, key, value)), np.broadcast_to(value, query.shape), rtol=1e-6
    )
    out, lse = attention(query, key[:, :0], value[:, :0], return_lse=True)
    assert (np.asarray(out) == 0).all() and np.isneginf(np.asarray(lse)).all()
    assert attention(query[:, :0], key, value).shape == (1, 0, 2, 16)


def test_inputs_are_left_alone_and_calls_repeat() -> None:
    """Catches: donated or overwritten inputs, uninitialised scratch, state between calls."""
    query, key, value = _heads_of_every_verdict("bfloat16")
    before = [np.asarray(x).copy() for x in (query, key, value)]
    results = [np.asarray(attention(query, key, value, block_sizes=SMALL)) for _ in range(3)]
    for saved, array in zip(before, (query, key, value), strict=True):
        np.testing.assert_array_equal(saved, np.asarray(array))
    for again in results[1:]:
        np.testing.assert_array_equal(results[0], again)


def test_clis_path_never_recomputes_and_stays_finite_in_the_stabilizer() -> None:
    """Catches: a fixed stabilizer that is inf or NaN where nothing is certified."""
    query, key, value = _heads_of_every_verdict("bfloat16")
    _, certificate = attention(
        query, key, value, path="clis", block_sizes=SMALL, return_certificate=True
    )
    assert (np.asarray(certificate["verdict"])[0, 2] == VERDICT["recomputed"]).all()


def test_number_of_query_blocks() -> None:
    """Catches: certificates whose shape disagrees with what callers allocate."""
    for lengths in ((1, 1), (300, 2100), (2049, 77), (5000, 5000)):
        shape, key_shape = (1, lengths[0], 1, 128), (1, lengths[1], 1, 128)
        query, key = jnp.zeros(shape), jnp.zeros(key_shape)
        result = jax.eval_shape(
            lambda q, k: attention(q, k, k, return_certificate=True, interpret=True), query, key
        )
        assert result[1]["verdict"].shape == (1, 1, num_query_blocks(shape, key_shape))


def _inputs_with(**changes: Any) -> dict[str, Any]:
    query, key, value = random_inputs((1, 20, 30, 4, 2, 16), "float32")
    return {"query": query, "key": key, "value": value, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": jnp.zeros((20, 4, 16))}, "query: got shape"),
        ({"value": jnp.zeros((1, 31, 2, 16))}, "value: got shape"),
        ({"query": jnp.zeros((2, 20, 4, 16))}, "key: got batch"),
        ({"query": jnp.zeros((1, 20, 4, 8))}, "key: got head_dim"),
        ({"query": jnp.zeros((1, 20, 3, 16))}, "key: got 2 heads for 3"),
        ({"query": jnp.zeros((1, 20, 4, 16), jnp.bfloat16)}, "value: dtypes"),
        ({"tolerance": 1e-9}, "tolerance: got"),
        ({"tolerance": float("nan")}, "tolerance: got"),
        ({"path": "fast"}, "path: got 'fast'"),
        ({"scale": float("nan")}, "scale: got nan"),
        ({"attn_mask": jnp.zeros((7, 7))}, "attn_mask: got shape"),
        ({"attn_mask": jnp.zeros((20, 30), jnp.int32)}, "attn_mask: got dtype"),
        ({"key_lengths": jnp.zeros((3,), jnp.int32)}, "key_lengths: got"),
        ({"segment_ids": jnp.zeros((1, 3), jnp.int32)}, "segment_ids: got int32"),
        ({"window": -1}, "window: got"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap: got"),
        ({"promise": object()}, "promise: got"),
        ({"promise": np.zeros(7, np.float32)}, "promise: got logit bounds of shape"),
        ({"promise": np.zeros(4, np.int32)}, "promise: got"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], message: str) -> None:
    """Catches: bad input that is accepted, or an error from deep inside."""
    with pytest.raises(ValueError, match=message):
        attention(**_inputs_with(**changes))


@pytest.mark.parametrize("sizes", [(100, 128), (128, 0), (128, -128), (1.5, 128)])
def test_block_sizes_are_validated(sizes: Any) -> None:
    """Catches: tiles that the compiler would refuse with an error of its own."""
    with pytest.raises(ValueError, match="block_sizes: block_"):
        BlockSizes(*sizes)


@pytest.mark.parametrize("size", [1e-36, 1e-34])
@pytest.mark.parametrize("path", ["auto", "online"])
def test_small_values_keep_the_room_of_plain_online_softmax(path: str, size: float) -> None:
    """Catches: a row maximum raised where nothing can overflow, so that small products flush."""
    query, key, value = random_inputs((1, 256, 1100, 1, 1, 128), "bfloat16", query_scale=8.0)
    value = (jnp.clip(value, -1, 1) * size).astype(jnp.bfloat16)
    out = attention(query, key, value, path=path, block_sizes=SMALL)
    exact, _ = float64_attention(query, key, value)
    error = np.abs(np.asarray(out).astype(np.float64) - exact).max()
    assert error <= 2.0**-7 * size + 1100 * 2.0**-126


LOOKS = {
    "row sums": ("certify.theorem.ROW_SUM_MAX", float("inf"), 127.5),
    "numerator and output": ("jax_kernels.forward.FLOAT32_LARGEST", float("inf"), 122.0),
}


@pytest.mark.parametrize("mutated", [False, True], ids=["checked", "mutant"])
@pytest.mark.parametrize("look", LOOKS)
def test_every_look_of_the_check_is_needed(
    look: str, mutated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look catches stabilizers that no other look catches; without it the test fails.

    Stabilizers are set so low that row sums (first) or only numerators (second) overflow.
    """
    name, blind, height = LOOKS[look]

    def too_low(upper: Any, lower: Any, origin: Any, head: Any, *, xp: Any) -> theorem.Choice:
        del upper, origin, head
        return theorem.Choice(lower - height, xp.zeros(lower.shape, bool))

    query, key, value = random_inputs((1, 256, 1100, 1, 1, 128), "bfloat16", query_scale=1e-3)
    value = jnp.full_like(value, 200.0 if look.startswith("numerator") else 1e-3)
    monkeypatch.setattr("certify.theorem.choose_stabilizer", too_low)
    if mutated:
        monkeypatch.setattr(name, blind)
        if look.startswith("numerator"):
            monkeypatch.setattr("jax_kernels.forward.largest_output", lambda dtype: blind)
    jax.clear_caches()
    out, certificate = attention(query, key, value, block_sizes=SMALL, return_certificate=True)
    jax.clear_caches()
    recomputed = (np.asarray(certificate["verdict"]) == VERDICT["recomputed"]).all()
    exact, _ = float64_attention(query, key, value)
    right = np.allclose(np.asarray(out).astype(np.float64), exact, rtol=2.0**-7)
    assert (recomputed and right) != mutated
