"""A certificate from weights handed to the kernel: what it claims is what the kernel finds."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from certify.static import StaticCertificate
from certify.theorem import CERTIFIED
from jax_kernels import BlockSizes, attention
from tests.certify.static_cases import Scenario, certificate, hot
from tests.certify.static_oracle import Case, Side, rounded

HEAD_DIM, QUERIES, KEYS = 64, 256, 1100
BLOCKS = BlockSizes(block_q=128, block_kv=512)


def layer() -> Scenario:
    """One query head over one key head, logits up to some 80 bits."""
    sides = [Side(hot((1, HEAD_DIM), channel), epsilon=1e-6) for channel in (1, 33)]
    case = Case((sides[0],), (sides[1],), "half", scale=HEAD_DIM**-0.5)
    config = {"model_type": "qwen3", "num_attention_heads": 1, "num_key_value_heads": 1}
    tensors = {"q_norm.weight": sides[0].weight[0], "k_norm.weight": sides[1].weight[0]}
    return Scenario(config, "model.layers.0.self_attn", tensors, case)


def draw(case: Case, side: Side, tokens: int, rng: np.random.Generator) -> jnp.ndarray:
    """[1, tokens, 1, D]: half of the tokens lie in the plane of the largest weights."""
    to = rounded("bfloat16")
    x = rng.standard_normal((tokens, 1, HEAD_DIM))
    x[::2] *= 1e-3
    x[::2, :, 1::32] += 100.0 * rng.standard_normal((x[::2].shape[0], 1, 2))
    angles = rng.uniform(0.0, 2.0 * np.pi, (tokens, HEAD_DIM // 2))
    return jnp.asarray(case.rotate(side.normed(x, to), angles, to)[None], jnp.bfloat16)


def run(value_size: float) -> tuple[StaticCertificate, dict[str, np.ndarray], float]:
    scenario, rng = layer(), np.random.default_rng(11)
    claim = certificate(scenario.config, scenario.layer, scenario.tensors)
    query = draw(scenario.case, scenario.case.queries[0], QUERIES, rng)
    key = draw(scenario.case, scenario.case.keys[0], KEYS, rng)
    value = np.clip(rng.standard_normal((1, KEYS, 1, HEAD_DIM)), -1.0, 1.0) * value_size
    _, found = attention(
        query,
        key,
        jnp.asarray(value, jnp.bfloat16),
        promise=claim,
        block_sizes=BLOCKS,
        return_certificate=True,
    )
    scale = np.log2(np.e) * scenario.case.scale
    logits = scale * np.asarray(query, np.float64)[0, :, 0] @ np.asarray(key, np.float64)[0, :, 0].T
    return claim, {name: np.asarray(part) for name, part in found.items()}, np.abs(logits).max()


def test_the_kernel_certifies_what_the_weights_certify() -> None:
    """Catches a gap, a budget or a window in which kernel and certificate differ."""
    claim, found, largest = run(1.0)
    (bound,) = claim.logit_bound
    assert 0.9 * bound <= largest <= bound
    # The call is not causal: every row sees every key.
    every = StaticCertificate(claim.layer, claim.logit_bound, claim.reason)
    assert every.certified(KEYS)[0]
    assert (found["verdict"] == CERTIFIED).all()
    np.testing.assert_allclose(found["gap"], every.gap(KEYS)[0], atol=1e-3)
    np.testing.assert_allclose(found["budget"], every.budget(KEYS), atol=1e-3)
    low, high = every.value_window(KEYS)
    for size, certified in ((2 * low, True), (low / 2, False), (high / 2, True), (high * 2, False)):
        _, found, _ = run(float(size[0]))
        assert (found["verdict"] == CERTIFIED).all() == certified, size
