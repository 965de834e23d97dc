"""Named checks of what weights alone prove; ``test_static_mutants`` runs them on mutants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from certify import arithmetic, theorem
from certify.static import StaticCertificate
from certify.static_bounds import (
    NormedHeads,
    channel_planes,
    half_planes,
    interleaved_planes,
    logit_bound,
    round_up,
    soft_cap_bound,
    unknown_planes,
)
from tests.certify.static_cases import HEAD_DIM, SCENARIOS, certificate, hot, of
from tests.certify.static_oracle import exact, largest_logits, rounded


def bound_holds(name: str) -> None:
    """No input that a search finds exceeds the bound, exactly or in bfloat16; some come close."""
    scenario = SCENARIOS[name]()
    for dtype, to, steps in (("float32", exact, 200), ("bfloat16", rounded("bfloat16"), 60)):
        bound = of(scenario, dtype).logit_bound
        found = largest_logits(scenario.case, np.random.default_rng(1), to, steps)
        assert found.shape == bound.shape
        assert (found <= bound).all(), (dtype, found, bound)
        assert dtype != "float32" or (found >= scenario.reach * bound).all(), (found, bound)


def plain(weight: np.ndarray, channels: int = 0, **options: bool) -> NormedHeads:
    """One head; without a bias."""
    weight = np.atleast_2d(weight).astype(np.float64)
    return NormedHeads(weight, np.zeros_like(weight), channels or weight.shape[1], **options)


def worst_roundings() -> tuple[float, int, float]:
    """Relative growth, N and weight that three roundings to bfloat16 can do to one channel."""
    to = rounded("bfloat16")
    best = (0.0, 0, 0.0)
    for channels in range(4096, 4800):
        for step in range(1, 24):
            # Just above the middle of two bfloat16 numbers.
            weight = 1.0 + (step - 0.5) / 128.0 + 2.0**-20
            output = to(to(np.array([weight])) * to(np.array([math.sqrt(channels)])))[0]
            growth = output / (weight * math.sqrt(channels))
            best = max(best, (growth, channels, weight))
    return best


def check_roundings_of_the_norm() -> None:
    """Norm output, weight and product may all round up, on both sides."""
    growth, channels, weight = worst_roundings()
    side = plain(np.full(8, weight), channels)
    bound = logit_bound(
        [side], [side], channel_planes(8), scale=1.0, dtype="bfloat16", rotated=False
    )
    found = math.log2(math.e) * channels * (weight * growth) ** 2
    assert found <= bound[0]
    assert growth > 1.0 + 2.4 * 2.0**-8


def check_roundings_of_the_rotation() -> None:
    """Tables, products and sum may all round up."""
    to = rounded("bfloat16")
    rng = np.random.default_rng(3)
    x = to(rng.uniform(1.0, 2.0, (2, 400_000)) * rng.choice([-1.0, 1.0], (2, 400_000)))
    angles = rng.uniform(0.0, 2.0 * np.pi, 400_000)
    cos, sin = to(np.cos(angles)), to(np.sin(angles))
    turned = [to(to(x[0] * cos) - to(x[1] * sin)), to(to(x[0] * sin) + to(x[1] * cos))]
    growth = float(np.max(np.hypot(*turned) / np.hypot(*x)))
    assert growth > 1.0 + 2.0 * 2.0**-8
    bounds = [
        logit_bound(
            [plain(np.ones(2))],
            [plain(np.ones(2))],
            interleaved_planes(2),
            scale=1.0,
            dtype="bfloat16",
            rotated=rotated,
        )[0]
        for rotated in (False, True)
    ]
    assert bounds[1] / bounds[0] >= growth**2 * (1.0 - 1e-4)


def check_every_slack_is_there() -> None:
    """The bound of a plain head, put together by hand."""
    head_dim, unit = 128, 2.0**-8
    side = plain(np.ones(head_dim))
    bound = logit_bound(
        [side], [side], half_planes(head_dim), scale=1.0, dtype="bfloat16", rotated=True
    )[0]

    def gamma(length: int) -> float:
        return length * 2.0**-23

    expected = math.log2(math.e) * head_dim * (1.0 + unit) ** 14
    expected *= (1.0 + gamma(2 * head_dim)) * (1.0 + gamma(head_dim)) ** 2 * (1.0 + 2.0**-17)
    expected += arithmetic.EVALUATION_SLACK
    assert expected <= bound <= expected * (1.0 + 1e-4)
    for changed, steps in (
        (NormedHeads(side.weight, side.bias, head_dim, centered=True), 1),
        (NormedHeads(side.weight, side.bias, head_dim, biased=True), 1),
    ):
        more = logit_bound(
            [changed], [side], half_planes(head_dim), scale=1.0, dtype="bfloat16", rotated=True
        )[0]
        assert more >= bound * (1.0 + unit) ** steps * (1.0 - 1e-6)
    nothing = logit_bound(
        [plain(np.zeros(8))],
        [plain(np.zeros(8))],
        channel_planes(8),
        scale=1.0,
        dtype="bfloat16",
        rotated=False,
    )
    assert nothing[0] >= arithmetic.EVALUATION_SLACK


def check_flushed_products() -> None:
    """float16 that reads subnormal numbers as 0: losing one product makes a vector longer."""
    to = rounded("float16", flush=True)
    weight = np.array([2.0**-13 * 1.01, 2.0**-13 * 1.01])
    grid = np.linspace(0.0, 2.0 * np.pi, 2001)
    side = plain(weight)
    bound = logit_bound(
        [side], [side], interleaved_planes(2), scale=2.0**20, dtype="float16", rotated=True
    )
    found = 0.0
    for share in np.linspace(0.0, 2.0 * np.pi, 129):
        n = to(math.sqrt(2.0) * np.array([math.cos(share), math.sin(share)]))
        y = to(to(weight) * n)
        cos, sin = to(np.cos(grid)), to(np.sin(grid))
        turned = [to(to(y[0] * cos) - to(y[1] * sin)), to(to(y[0] * sin) + to(y[1] * cos))]
        found = max(found, float(np.max(turned[0] ** 2 + turned[1] ** 2)))
    assert math.log2(math.e) * 2.0**20 * found <= bound[0]
    exact_square = 2.0 * float(np.max(weight)) ** 2
    assert found > 1.1 * exact_square


def check_no_claim_beyond_the_format() -> None:
    """A norm that can overflow its dtype gives no claim; nor does a weight that is not a number."""
    large = plain(np.full(64, 9000.0))
    options: dict[str, Any] = {"planes": half_planes(64), "scale": 1e-9, "rotated": True}
    for dtype, claimed in (("float16", False), ("bfloat16", True), ("float32", True)):
        bound = logit_bound([large], [plain(np.ones(64))], dtype=dtype, **options)
        assert np.isfinite(bound).all() == claimed, dtype
    for bad in (np.nan, np.inf):
        for sides in ([plain(np.full(64, bad)), large], [large, plain(np.full(64, bad))]):
            bound = logit_bound([sides[0]], [sides[1]], dtype="bfloat16", **options)
            assert np.isposinf(bound).all()
    other = plain(np.ones(64))
    bound = logit_bound([other, plain(np.full(64, np.nan))], [other], dtype="bfloat16", **options)
    assert np.isposinf(bound).all()


def check_planes() -> None:
    """Who turns with whom."""
    assert interleaved_planes(6).tolist() == [0, 0, 1, 1, 2, 2]
    assert half_planes(6).tolist() == [0, 1, 2, 0, 1, 2]
    halves = half_planes(8, 4)
    assert halves[0] == halves[2] and halves[1] == halves[3]
    assert len(set(halves.tolist())) == 6
    assert channel_planes(3).tolist() == [0, 1, 2]
    assert unknown_planes(4).tolist() == [0, 0, 0, 0]


def check_unknown_pairs_are_safe() -> None:
    """A rope_type that is not known: whatever the pairs are."""
    weights = {"query": hot((HEAD_DIM,), 0), "key": hot((HEAD_DIM,), 5)}
    tensors = {
        "norm_q.weight": np.tile(weights["query"], 2),
        "norm_k.weight": np.tile(weights["key"], 2),
    }
    config = {
        "_class_name": "LTX2VideoTransformer3DModel",
        "num_attention_heads": 2,
        "attention_head_dim": HEAD_DIM,
        "qk_norm": "rms_norm_across_heads",
        "rope_type": "spiral",
    }
    bound = certificate(config, "transformer_blocks.0.attn1", tensors).logit_bound
    largest = math.log2(math.e) * HEAD_DIM**-0.5 * 2 * HEAD_DIM * 2.0 * 2.0
    assert (bound >= largest).all()


def check_rounding_is_outward() -> None:
    """float32 never below the number; exact numbers stay."""
    numbers = np.random.default_rng(5).uniform(1.0, 300.0, 1000)
    up = round_up(numbers)
    assert (up.astype(np.float64) >= numbers).all()
    assert (np.nextafter(up, np.float32(0)).astype(np.float64) < numbers).all()
    assert round_up(np.array([2.5, 1e300])).tolist() == [2.5, math.inf]


def check_soft_cap() -> None:
    """cap * tanh stays below cap, in bits; a QK norm that proves less than the cap counts."""
    assert soft_cap_bound(50.0) >= 50.0 * math.log2(math.e) + arithmetic.EVALUATION_SLACK
    assert soft_cap_bound(50.0) <= 50.0 * math.log2(math.e) + 0.01
    config = {"model_type": "gemma2", "num_attention_heads": 3, "attn_logit_softcapping": 20.0}
    tensors = {"q_proj.weight": np.zeros((48, 4))}
    found = certificate(config, "model.layers.0.self_attn", tensors)
    assert found.logit_bound.tolist() == [np.float32(soft_cap_bound(20.0))] * 3
    off = certificate(
        {**config, "attn_logit_softcapping": None}, "model.layers.0.self_attn", tensors
    )
    assert np.isposinf(off.logit_bound).all() and off.reason == "no QK norm"


def no_claim(
    scenario_name: str,
    words: str,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> None:
    """With this config or these tensors changed (None: taken away), nothing is proved."""
    scenario = SCENARIOS[scenario_name]()
    assert np.isfinite(of(scenario, "bfloat16").logit_bound).all()
    changed = {**scenario.tensors, **(tensors or {})}
    kept = {name: array for name, array in changed.items() if array is not None}
    settings = {**scenario.config, **(config or {})}
    found = certificate(settings, scenario.layer, kept)
    assert np.isposinf(found.logit_bound).all(), found.logit_bound
    assert words in found.reason, found.reason


ONES = np.ones(HEAD_DIM)

CLAIMS_NOT_MADE: dict[str, Callable[[], None]] = {
    "unknown_class": partial(
        no_claim, "qwen3", "not a class whose QK norm", config={"model_type": "qwen9"}
    ),
    "no_norm": partial(no_claim, "flux", "no norm_k.weight", tensors={"norm_k.weight": None}),
    "switched_off": partial(
        no_claim, "partial_rotary", "no QK norm", config={"use_qk_norm": False}
    ),
    "unknown_switch": partial(
        no_claim, "wan_self_attention", "qk_norm = 'l2'", config={"qk_norm": "l2"}
    ),
    "unknown_norm_beside": partial(
        no_claim, "flux", "q_img_norm", tensors={"q_img_norm.weight": ONES}
    ),
    "unknown_rotary": partial(
        no_claim, "qwen3", "scaling of the rotary", config={"rope_scaling": {"type": "twist"}}
    ),
    "damaged_rotary": partial(
        no_claim,
        "qwen3",
        "scaling of the rotary",
        config={"rope_scaling": {"type": "yarn", "factor": "much"}},
    ),
    "added_stream_without_norm": partial(
        no_claim,
        "wan_cross_attention",
        "what add_k_proj projects",
        tensors={"add_k_proj.weight": np.zeros((16, 3))},
    ),
    "added_queries_without_norm": partial(
        no_claim,
        "wan_cross_attention",
        "what add_q_proj projects",
        tensors={"add_q_proj.weight": np.zeros((16, 3))},
    ),
    "epsilon_too_small": partial(no_claim, "qwen3", "underflow", config={"rms_norm_eps": 0.0}),
    "bias_of_an_rms_norm": partial(no_claim, "flux", "a bias", tensors={"norm_q.bias": ONES}),
    "weights_where_none_belong": partial(
        no_claim, "no_weights", "should not have", tensors={"norm_q.weight": ONES}
    ),
}


def check_only_some_layers_of_a_family() -> None:
    """A layer that no rule names, as in a vision tower, is not claimed."""
    scenario = SCENARIOS["qwen3"]()
    for layer in ("visual.blocks.0.self_attn", "model.layers.0.attn"):
        found = certificate(scenario.config, layer, scenario.tensors)
        assert np.isposinf(found.logit_bound).all()


def example(bits: float = 60.0, fewest_keys: int | None = None) -> StaticCertificate:
    bound = np.array([bits, 80.0, 98.0, 99.5, np.inf], np.float32)
    return StaticCertificate("layer", bound, "example", "bfloat16", fewest_keys)


def check_certified_is_the_theorem() -> None:
    """Certified iff a row with S = B + log2 n and L = log2 n' - B takes a certified stabilizer."""
    for fewest in (None, 1, 64):
        cert = example(fewest_keys=fewest)
        for num_keys, low, high in ((2**17, 1.0, 1.0), (2048, 1e-3, 100.0), (64, 1e-30, 1e30)):
            head = theorem.limits(
                np.float32(high),
                num_keys=num_keys,
                tolerance=2.0**-12,
                kernel=arithmetic.BFLOAT16,
                xp=np,
                value_low=np.float32(low),
            )
            bound = cert.logit_bound.astype(np.float64)
            with np.errstate(invalid="ignore"):
                choice = theorem.choose_stabilizer(
                    bound + math.log2(num_keys) + arithmetic.EVALUATION_SLACK,
                    math.log2(fewest or num_keys) - bound - arithmetic.EVALUATION_SLACK,
                    np.zeros(5),
                    head,
                    xp=np,
                )
            got = cert.certified(num_keys, 2.0**-12, low, high)
            assert got.tolist() == choice.certified.tolist(), (fewest, num_keys, low, high)
    assert example().certified().any() and not example().certified().all()


def check_value_window() -> None:
    """Certified at both ends of the window and inside it, not just outside; empty where never."""
    cert = example()
    low, high = cert.value_window(2048)
    inside = np.isfinite(low)
    assert inside.any() and not inside.all()
    assert (low[~inside] == np.inf).all() and (high[~inside] == 0.0).all()
    for edge, outside in ((low, low * 0.999), (high, high * 1.001)):
        at = np.where(inside, edge, 1.0)
        assert (cert.certified(2048, value_low=at, value_high=at) == inside).all()
        beyond = np.where(inside & (outside < 2.0**127), outside, 1.0)
        ok = cert.certified(2048, value_low=beyond, value_high=beyond)
        limited = inside & (edge < 2.0**126) & (edge > 2.0**-112)
        assert limited.any() and not ok[limited].any()
    spread = np.geomspace(low[0], high[0], 50).astype(np.float32)
    for value in spread[1:-1]:
        assert cert.certified(2048, value_low=value, value_high=value)[0]


def check_gap() -> None:
    """Twice the bound, and log2 n / n' more where a row may see few keys."""
    slack = np.float32(2.0 * arithmetic.EVALUATION_SLACK)
    assert example().gap(1024)[0] == 120.0 + slack
    assert example(fewest_keys=1).gap(1024)[0] == 130.0 + slack
    assert example(fewest_keys=2048).gap(1024)[0] == 120.0 + slack


CHECKS: dict[str, Callable[[], None]] = {
    **{f"bound_holds_{name}": partial(bound_holds, name) for name in SCENARIOS},
    **{f"no_claim_{name}": check for name, check in CLAIMS_NOT_MADE.items()},
    **{
        name.removeprefix("check_"): function
        for name, function in list(globals().items())
        if name.startswith("check_")
    },
}
