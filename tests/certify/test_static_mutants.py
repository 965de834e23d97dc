"""One mutant per clause of the certificates from weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from certify import static_bounds, static_layers
from certify.static import StaticCertificate
from tests.certify.checks_static import CHECKS
from tests.certify.mutation import SourceMutant as Mutant

READER = static_layers._LayerReader
PACKAGES = ("certify", "tests.certify.checks_static", "tests.certify.static_cases")
CLASSES = (READER, StaticCertificate, static_bounds.NormedHeads)


def bounds(fault: str, function: Callable[..., Any], old: str, new: str, check: str) -> Mutant:
    return Mutant(fault, function, old, new, check)


def layer(fault: str, function: str, old: str, new: str, check: str) -> Mutant:
    return Mutant(fault, vars(READER)[function], old, new, check)


def cert(fault: str, function: str, old: str, new: str, check: str) -> Mutant:
    return Mutant(fault, vars(StaticCertificate)[function], old, new, check)


MUTANTS = [
    # The bound's terms.
    bounds(
        "planes by their first channel",
        static_bounds._reach,
        "np.max(np.where(members, stored",
        "np.min(np.where(members, stored",
        "bound_holds_qwen3",
    ),
    bounds(
        "maximum over planes left out",
        static_bounds._product,
        "np.max(x.weight * y.weight",
        "np.mean(x.weight * y.weight",
        "bound_holds_wan_cross_attention",
    ),
    bounds(
        "N of the keys left out",
        static_bounds._product,
        "(x.root * y.root)",
        "x.root",
        "bound_holds_qwen3",
    ),
    bounds(
        "bias of keys left out",
        static_bounds._product,
        "cross = x.root * np.linalg.norm(x.weight * y.bias, axis=-1)",
        "cross = 0.0",
        "bound_holds_bias_of_keys",
    ),
    bounds(
        "bias of queries left out",
        static_bounds._product,
        "cross + y.root * np.linalg.norm(y.weight * x.bias, axis=-1)",
        "cross",
        "bound_holds_bias_of_queries",
    ),
    bounds(
        "bias times bias left out",
        static_bounds._product,
        "+ np.sum(x.bias * y.bias, axis=-1)",
        "",
        "bound_holds_biases_alone",
    ),
    bounds(
        "N is not the number of channels",
        static_bounds._reach,
        "math.sqrt(norm.channels)",
        "math.sqrt(planes.size)",
        "bound_holds_olmo2",
    ),
    bounds(
        "only the first pair of streams",
        static_bounds.logit_bound,
        "for x in sides[0] for y in sides[1]",
        "for x in sides[0][:1] for y in sides[1][:1]",
        "bound_holds_flux",
    ),
    bounds(
        "rotary factor left out",
        static_bounds.logit_bound,
        "rotary_factor if rotated else 1.0",
        "1.0",
        "bound_holds_qwen3_yarn",
    ),
    bounds(
        "rotary factor on one table only",
        static_bounds._reach,
        "stored[:, None, :], 0.0), axis=-1) * factor",
        "stored[:, None, :], 0.0), axis=-1)",
        "bound_holds_qwen3_yarn",
    ),
    bounds(
        "scale left out",
        static_bounds.logit_bound,
        "arithmetic.query_factor(abs(scale))",
        "arithmetic.query_factor(0.1)",
        "bound_holds_gemma3",
    ),
    # Rounding.
    bounds(
        "roundings left out",
        static_bounds._reach,
        "(1.0 + model.roundoff) ** _count_roundings(norm, rotated)",
        "1.0",
        "roundings_of_the_norm",
    ),
    bounds(
        "roundings of the rotation left out",
        static_bounds._count_roundings,
        "ROTATION_ROUNDINGS if rotated else {}",
        "{}",
        "roundings_of_the_rotation",
    ),
    bounds(
        "rounding of the bias left out",
        static_bounds._count_roundings,
        "BIAS_ROUNDINGS if norm.biased else {}",
        "{}",
        "every_slack_is_there",
    ),
    bounds(
        "error of the variance left out",
        static_bounds._reach,
        "math.sqrt(1.0 - VARIANCE_ERROR) if norm.centered else 1.0",
        "1.0",
        "every_slack_is_there",
    ),
    bounds(
        "rounding of the sum of squares left out",
        static_bounds._reach,
        "1.0 + arithmetic.dot_slack(norm.channels + 8)",
        "1.0",
        "every_slack_is_there",
    ),
    bounds(
        "the kernel's dot product is exact",
        static_bounds.logit_bound,
        "arithmetic.dot_slack(kernel.contraction_length(head_dim)) * (1.0 + 2.0**-6)",
        "0.0",
        "every_slack_is_there",
    ),
    bounds(
        "half of the contraction",
        static_bounds.logit_bound,
        "kernel.contraction_length(head_dim)",
        "head_dim",
        "every_slack_is_there",
    ),
    bounds(
        "split of the query is exact",
        static_bounds.logit_bound,
        "(1.0 + QUERY_SPLIT)",
        "1.0",
        "every_slack_is_there",
    ),
    bounds(
        "evaluation slack left out",
        static_bounds.logit_bound,
        "+ arithmetic.EVALUATION_SLACK",
        "",
        "every_slack_is_there",
    ),
    bounds(
        "nothing is flushed",
        static_bounds.underflow,
        "model.smallest_normal *",
        "0.0 *",
        "flushed_products",
    ),
    bounds(
        "nothing overflows",
        static_bounds._reach,
        "> model.largest",
        "> np.inf",
        "no_claim_beyond_the_format",
    ),
    bounds(
        "NaN is a bound",
        static_bounds.logit_bound,
        "np.where(np.isnan(bits), np.inf, bits)",
        "np.where(np.isnan(bits), 0.0, bits)",
        "no_claim_beyond_the_format",
    ),
    bounds(
        "rounded to nearest",
        static_bounds.round_up,
        "nearest < numbers",
        "nearest < numbers - 1e9",
        "rounding_is_outward",
    ),
    bounds(
        "cap in nats",
        static_bounds.soft_cap_bound,
        "* math.log2(math.e)",
        "",
        "soft_cap",
    ),
    # Pairs of channels.
    bounds(
        "halves taken for neighbours",
        static_bounds.half_planes,
        "np.arange(rotary_dim // 2)",
        "np.arange(rotary_dim // 2)[::-1]",
        "planes",
    ),
    bounds(
        "neighbours taken for single channels",
        static_bounds.interleaved_planes,
        "// 2",
        "// 1",
        "bound_holds_wan_self_attention",
    ),
    layer(
        "halves taken for neighbours by the rule",
        "_planes",
        "if pairing == INTERLEAVED:",
        "if pairing in (INTERLEAVED, HALF):",
        "bound_holds_qwen3",
    ),
    layer(
        "rotation left out by the rule",
        "_planes",
        "if pairing == CHANNELS:",
        "if True:",
        "bound_holds_wan_self_attention",
    ),
    layer(
        "partial rotation taken for a whole one",
        "_planes",
        "int(head_dim * shares.pop())",
        "head_dim",
        "bound_holds_partial_rotary",
    ),
    layer(
        "unknown pairs taken for neighbours",
        "_planes",
        'str(setting), "unknown")',
        "str(setting), INTERLEAVED)",
        "unknown_pairs_are_safe",
    ),
    # Norms.
    layer(
        "w in place of (1 + w)",
        "_read_norm",
        "norm.offset + weight",
        "weight",
        "bound_holds_gemma3",
    ),
    layer(
        "bias of a LayerNorm left out",
        "_read_norm",
        'biased = f"{name}.bias" in self.layer.tensors',
        "biased = False",
        "bound_holds_bias_of_keys",
    ),
    layer(
        "bias of an RMSNorm accepted",
        "_read_norm",
        "biased and not norm.centered",
        "False",
        "no_claim_bias_of_an_rms_norm",
    ),
    layer(
        "H left out of a joint norm",
        "_read_norms",
        "heads * head_dim if norm.joint else head_dim",
        "head_dim",
        "bound_holds_wan_cross_attention",
    ),
    layer(
        "added norms ignored",
        "_read_norms",
        "for name in found]",
        "for name in found[:1]]",
        "bound_holds_flux",
    ),
    layer(
        "added stream without a norm accepted",
        "_read_norms",
        "if added and len(found) < 2",
        "if False",
        "no_claim_added_stream_without_norm",
    ),
    layer(
        "weights where none belong accepted",
        "_read_norms",
        "if present:",
        "if False:",
        "no_claim_weights_where_none_belong",
    ),
    layer(
        "a norm that is not known accepted",
        "_refuse_other_norms",
        "if others:",
        "if False:",
        "no_claim_unknown_norm_beside",
    ),
    layer(
        "any eps accepted",
        "_refuse_small_epsilon",
        "epsilon >= SMALLEST_EPSILON",
        "True",
        "no_claim_epsilon_too_small",
    ),
    layer(
        "any switch accepted",
        "switched_on",
        "setting not in on and setting not in off",
        "False",
        "no_claim_unknown_switch",
    ),
    layer(
        "norm taken for on",
        "switched_on",
        "return setting in on",
        "return True",
        "no_claim_switched_off",
    ),
    layer(
        "any layer accepted",
        "rule",
        "if re.search(rule.pattern, self.layer.name):",
        "if True:",
        "only_some_layers_of_a_family",
    ),
    layer(
        "the model's own scale left out",
        "norm_bound",
        "self.number(self.family.scale) ** -0.5 if self.family.scale else head_dim**-0.5",
        "head_dim**-0.5",
        "bound_holds_gemma3",
    ),
    layer(
        "unknown rotary scaling taken for none",
        "norm_bound",
        "if factor is None:",
        "factor = factor or 1.0\n    if factor is None:",
        "no_claim_unknown_rotary",
    ),
    Mutant(
        "grouped keys in turn",
        static_bounds.NormedHeads.repeated,
        "np.repeat(part, groups, axis=0)",
        "np.tile(part, (groups, 1))",
        "bound_holds_olmo2",
    ),
    Mutant(
        "YaRN does not scale",
        static_layers._attention_factor,
        'if kind not in ("yarn", "longrope"):\n        return None',
        'if kind != "longrope":\n        return 1.0',
        "bound_holds_qwen3_yarn",
    ),
    Mutant(
        "LongRoPE does not scale",
        static_layers._attention_factor,
        "math.sqrt(1.0 + math.log(factor) / math.log(original))",
        "1.0",
        "bound_holds_longrope",
    ),
    Mutant(
        "damaged rotary settings taken for none",
        static_layers.rotary_factor,
        "return None\n    known",
        "return 1.0\n    known",
        "no_claim_damaged_rotary",
    ),
    Mutant(
        "the larger of cap and norm",
        static_layers.layer_bound,
        "np.minimum(bound, capped)",
        "np.maximum(bound, capped)",
        "soft_cap",
    ),
    # The certificate.
    cert("one side of the gap", "gap", "rows.upper - rows.lower", "rows.upper", "gap"),
    cert("rows that see few keys", "gap", "max(unseen, 0.0)", "0.0", "certified_is_the_theorem"),
    cert(
        "the largest value alone",
        "budget",
        "value_low=low",
        "value_low=high",
        "certified_is_the_theorem",
    ),
    cert("the smallest value alone", "budget", "high,\n", "low,\n", "certified_is_the_theorem"),
    cert(
        "window rounded outward",
        "value_window",
        "np.nextafter(low, np.float32(np.inf))",
        "low * np.float32(0.999)",
        "value_window",
    ),
    cert(
        "window of a head without a claim",
        "value_window",
        "np.where(some, edges[0], np.inf)",
        "edges[0]",
        "value_window",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_mutant_fails_its_check(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.install(monkeypatch, PACKAGES, *CLASSES)
    with pytest.raises(AssertionError):
        CHECKS[mutant.check]()


@pytest.mark.parametrize(
    ("steps", "step", "check"),
    [
        (static_bounds.ROUNDINGS, "norm output", "roundings_of_the_norm"),
        (static_bounds.ROUNDINGS, "cast of the weight", "roundings_of_the_norm"),
        (static_bounds.ROUNDINGS, "product with the weight", "roundings_of_the_norm"),
        (static_bounds.ROTATION_ROUNDINGS, "two products", "roundings_of_the_rotation"),
    ],
)
def test_uncounted_rounding_fails_its_check(
    steps: dict[str, int], step: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(steps, step, 0)
    with pytest.raises(AssertionError):
        CHECKS[check]()


def test_faults_are_named_once() -> None:
    """Two mutants of one name would hide that a clause has none."""
    names = [mutant.fault for mutant in MUTANTS]
    assert len(names) == len(set(names))
