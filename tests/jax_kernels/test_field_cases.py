"""Faults met in public by people running attention kernels, as small inputs; one test a case.

Each runs through every path that can take it: the certified kernel, online softmax, one key block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import certify
from jax_kernels import BlockSizes, attention
from tests.jax_kernels.oracle import assert_as_good_as_plain, float64_attention, random_inputs

PATHS: dict[str, dict[str, Any]] = {
    "certified": {"block_sizes": BlockSizes(128, 128)},
    "online": {"path": "online", "block_sizes": BlockSizes(128, 128)},
    "one block": {},
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PATHS[request.param]


def test_case_1_length_not_a_multiple_of_the_block(path: dict[str, Any]) -> None:
    """Catches: the tail computed from out-of-bounds rows."""
    inputs = random_inputs((1, 192, 192, 16, 16, 8), "bfloat16")
    assert_as_good_as_plain(attention(*inputs, **path), *inputs)


def test_case_2_the_first_call_equals_the_tenth() -> None:
    """Catches: uninitialised memory and state kept between calls."""
    inputs = random_inputs((1, 4092, 4092, 1, 1, 32), "bfloat16")
    run = jax.jit(attention)
    results = [np.asarray(run(*inputs)) for _ in range(10)]
    assert np.isfinite(results[0].astype(np.float32)).all()
    for result in results[1:]:
        np.testing.assert_array_equal(results[0], result)


@pytest.mark.parametrize(
    "shape", [(1, 128, 2048, 1, 1, 64), (1, 2048, 8192, 1, 1, 96)], ids=["cross", "long keys"]
)
@pytest.mark.parametrize("name", ["auto", "online"])
def test_case_3_different_lengths(shape: Any, name: str) -> None:
    """Catches: a kernel that takes S_q for S_k."""
    inputs = random_inputs(shape, "bfloat16")
    assert_as_good_as_plain(attention(*inputs, path=name), *inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("keys", [600, 1111])
def test_case_4_zero_padding_stays_out_of_the_softmax(
    path: dict[str, Any], dtype: str, keys: int
) -> None:
    """Catches: pad keys of logit 0 beside real ones of logit -4 nats (0.041 instead of 1)."""
    unit = np.zeros(128, np.float32)
    unit[0] = 1.0
    query = jnp.asarray(np.broadcast_to(unit * 128**0.5, (1, 64, 2, 128))).astype(dtype)
    key = jnp.asarray(np.broadcast_to(-4 * unit, (1, keys, 2, 128))).astype(dtype)
    value = jnp.ones((1, keys, 2, 128), dtype)
    out = np.asarray(attention(query, key, value, **path)).astype(np.float64)
    assert np.abs(out - 1).max() <= 2.0**-23


def test_case_5_explicit_scale(path: dict[str, Any]) -> None:
    """Catches: scale ignored."""
    inputs = random_inputs((1, 577, 577, 16, 16, 64), "bfloat16", query_scale=0.1)
    assert_as_good_as_plain(attention(*inputs, scale=1.0, **path), *inputs, scale=1.0)


def test_case_6_mask_dropped(path: dict[str, Any]) -> None:
    """Catches: masked keys that hold V = 100 let in."""
    query, key, _ = random_inputs((1, 10, 10, 2, 2, 16), "float32")
    value = jnp.ones((1, 10, 2, 16)).at[:, 5:].set(100.0)
    mask = jnp.arange(10) < 5
    hidden: list[dict[str, Any]] = [{"attn_mask": mask}, {"key_lengths": jnp.asarray([5])}]
    for arguments in hidden:
        out = attention(query, key, value, **arguments, **path)
        np.testing.assert_allclose(np.asarray(out), 1.0, atol=2e-7)


def test_case_7_gapped_mask(path: dict[str, Any]) -> None:
    """Catches: a left-padded mask read as a length (1.5 instead of 3.5)."""
    value = jnp.broadcast_to(jnp.arange(6.0)[None, :, None, None], (1, 6, 1, 8))
    query = jnp.zeros((1, 4, 1, 8))
    mask = jnp.asarray([False, False, True, True, True, True])
    out = attention(query, value, value, attn_mask=mask, **path)
    np.testing.assert_allclose(np.asarray(out), 3.5, rtol=1e-6)


def test_case_8_boolean_mask_is_not_a_bias(path: dict[str, Any]) -> None:
    """Catches: True / False added to logits as 1 / 0 (2.08 instead of 1)."""
    value = jnp.broadcast_to(jnp.asarray([1.0, 1, 5, 5])[None, :, None, None], (1, 4, 1, 8))
    query = jnp.zeros((1, 4, 1, 8))
    mask = jnp.asarray([True, True, False, False])
    out = attention(query, value, value, attn_mask=mask, **path)
    np.testing.assert_allclose(np.asarray(out), 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_case_9_large_values(path: dict[str, Any], dtype: str) -> None:
    """Catches: sums of values that overflow a 16-bit type."""
    query, key, value = random_inputs((1, 200, 300, 2, 2, 64), dtype)
    value = jnp.full(value.shape, 6e4, dtype)
    out = np.asarray(attention(query, key, value, **path)).astype(np.float64)
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert np.abs(out / float(value[0, 0, 0, 0]) - 1).max() <= ulp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_case_10_constant_offset_of_the_keys(path: dict[str, Any], dtype: str) -> None:
    """Catches: smoothing of K that changes the caller's K or the answer."""
    query, key, value = random_inputs((1, 200, 300, 2, 2, 64), dtype)
    shifted = key.at[..., 0].add(300)
    before = np.asarray(shifted).copy()
    out = attention(query, shifted, value, **path)
    np.testing.assert_array_equal(before, np.asarray(shifted))
    assert_as_good_as_plain(out, query, shifted, value)
    if dtype == "float32":
        without = attention(query, key, value, **path)
        assert float(jnp.abs(out - without).max()) <= 1e-3


def test_case_11_one_bad_head() -> None:
    """Catches: a certificate pooled over heads; one head has logits of +-5,000 bits."""
    query, key, value = random_inputs((1, 256, 300, 24, 24, 64), "bfloat16")
    query = query.at[:, :, 7].multiply(4000)
    out, certificate = attention(query, key, value, **PATHS["certified"], return_certificate=True)
    verdict = np.asarray(certificate["verdict"])
    certified = np.ones(24, bool)
    certified[7] = False
    assert (verdict[0, certified] == certify.VERDICTS.index("certified")).all()
    assert (verdict[0, 7] != certify.VERDICTS.index("certified")).all()
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_case_13_batch_elements_are_certified_apart() -> None:
    """Catches: certificates pooled over the batch of classifier-free guidance."""
    query, key, value = random_inputs((2, 200, 300, 2, 2, 64), "bfloat16")
    query = query.at[1, :, 1].multiply(4000)
    _, certificate = attention(query, key, value, **PATHS["certified"], return_certificate=True)
    certified = np.asarray(certificate["verdict"]) == certify.VERDICTS.index("certified")
    np.testing.assert_array_equal(certified.all(axis=-1), [[True, True], [True, False]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_case_14_small_values_beside_orthogonal_outliers(path: dict[str, Any], dtype: str) -> None:
    """Catches: products p*v that all flush to 0 because two outliers raise the stabilizer."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 128, 1, 128)).astype(np.float32)
    query[..., 0] = 0
    key = rng.standard_normal((1, 512, 1, 128)).astype(np.float32)
    key *= 0.2 / np.linalg.norm(key, axis=-1, keepdims=True)
    key[:, 100], key[:, 300] = 0.0, 0.0
    key[:, 100, :, 0], key[:, 300, :, 0] = 300.0, -300.0
    value = 0.02 * np.sign(rng.standard_normal((1, 512, 1, 128)))
    inputs = [jnp.asarray(x, dtype) for x in (query, key, value)]
    out = np.asarray(attention(*inputs, **path)).astype(np.float64)
    exact, _ = float64_attention(*inputs)
    assert np.abs(out - exact).max() <= 1e-3 * 0.02 * (8 if dtype == "bfloat16" else 1)
