"""The attention layers of a checkpoint, and the bound that each one's norms prove."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from certify.checkpoint import Checkpoint
from certify.formats import Float32
from certify.static_bounds import (
    FORMATS,
    NormedHeads,
    Planes,
    channel_planes,
    half_planes,
    interleaved_planes,
    logit_bound,
    soft_cap_bound,
    unknown_planes,
)
from certify.static_families import (
    CHANNELS,
    FAMILIES,
    HALF,
    INTERLEAVED,
    Family,
    LayerRule,
    NormKind,
    class_name,
)

_PROJECTIONS = (
    "to_q",
    "q_proj",
    "query",
    "wq",
    "to_qkv",
    "to_qkv_mlp_proj",
    "qkv",
    "qkv_proj",
    "query_key_value",
    "Wqkv",
    "c_attn",
    "q_b_proj",
)
_NORMS = ("norm_q", "q_norm", "q_layernorm", "query_layernorm", "query_norm", "q_ln")
_LAYER_OF = re.compile(rf"^(.+)\.({'|'.join((*_PROJECTIONS, *_NORMS))})\.weight$")

SMALLEST_EPSILON = 2.0**-100
"""Below this a norm's eps no longer covers squares that are flushed: a vector of tiny numbers could
leave the norm longer than sqrt(N)."""

LARGEST_COUNT = 2**16
"""Of heads or channels: a larger number is damage, and would not fit into memory."""


@dataclass(frozen=True)
class AttentionLayer:
    """An attention module found in a checkpoint.

    Attributes:
        name: of the module.
        tensors: names of its tensors, without the module's own name.
        causal: some row may see a single key.
    """

    name: str
    tensors: frozenset[str]
    causal: bool


class _NoClaimError(Exception):
    """Why nothing is proved of a layer; never leaves this module."""


def find_layers(checkpoint: Checkpoint) -> list[AttentionLayer]:
    """Every module with a query projection or a query norm, in natural order."""
    names = {match[1] for match in map(_LAYER_OF.match, checkpoint.entries) if match is not None}
    members: dict[str, list[str]] = {name: [] for name in names}
    for tensor in checkpoint.entries:
        parts = tensor.split(".")
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length])
            if prefix in members:
                members[prefix].append(".".join(parts[length:]))
    family = FAMILIES.get(class_name(checkpoint.config))
    # Unlisted classes of transformers may be causal: one key is the safe assumption.
    causal = family.causal if family else "_class_name" not in checkpoint.config
    return [
        AttentionLayer(name, frozenset(members[name]), causal)
        for name in sorted(names, key=_natural_order)
    ]


def layer_bound(
    checkpoint: Checkpoint, layer: AttentionLayer, *, dtype: str
) -> tuple[Float32, str]:
    """Bits [H] that bound every logit of the layer, and what that rests on (inf: why not).

    Raises:
        ValueError: where a tensor's shape does not fit the config.
    """
    family = FAMILIES.get(class_name(checkpoint.config))
    if family is None:
        return _no_claim(_guess_heads(checkpoint.config), _unknown_class(checkpoint, layer))
    config = _family_config(checkpoint, family)
    reader = _LayerReader(checkpoint, config, layer, family)
    try:
        rule = reader.rule()
        if rule.norm is None or not reader.switched_on():
            raise _NoClaimError("no QK norm")
        bound, reason = reader.norm_bound(rule, rule.norm, dtype)
    except _NoClaimError as why:
        bound, reason = _no_claim(_guess_heads(config), str(why))
    cap = config.get(family.soft_cap) if family.soft_cap else None
    if cap is not None:
        capped = np.float32(soft_cap_bound(reader.number(family.soft_cap)))
        bound = np.minimum(bound, capped).astype(np.float32)
        reason = (
            f"soft cap of {cap:g}, if the call is given it and its products are finite; {reason}"
        )
    return bound, reason


def rotary_factor(config: Mapping[str, Any]) -> float | None:
    """What multiplies the cos and sin tables of a transformers model; None: cannot be told.

    The rules of transformers' ``modeling_rope_utils``: only yarn and longrope scale.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        return None
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    try:
        factors = [_attention_factor(part, config) for part in nested or [parameters]]
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    known = [factor for factor in factors if factor is not None]
    return max(known) if len(known) == len(factors) else None


def _attention_factor(parameters: dict[str, Any], config: Mapping[str, Any]) -> float | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", "linear", "dynamic", "llama3", "proportional", "mrope"):
        return 1.0
    if kind not in ("yarn", "longrope"):
        return None
    given = parameters.get("attention_factor")
    if given is not None:
        return abs(float(given))
    original = parameters.get(
        "original_max_position_embeddings", config.get("original_max_position_embeddings")
    )
    factor = parameters.get("factor")
    if factor is None and original:
        factor = config.get("max_position_embeddings", math.nan) / original
    if factor is None or math.isnan(factor):
        return None
    if kind == "longrope":
        if not original:
            return None
        return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")

    def magnitude(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)


@dataclass(frozen=True)
class _LayerReader:
    """One layer of a known family, read by its rule."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    layer: AttentionLayer
    family: Family

    def rule(self) -> LayerRule:
        for rule in self.family.rules:
            if re.search(rule.pattern, self.layer.name):
                return rule
        name = class_name(self.checkpoint.config)
        raise _NoClaimError(f"not one of the layers of {name} that are known")

    def switched_on(self) -> bool:
        if self.family.switch is None:
            return True
        key, on, off = self.family.switch
        if key not in self.config:
            raise _NoClaimError(f"config.json lacks {key}, which says which QK norm there is")
        setting = self.config[key]
        if setting not in on and setting not in off:
            raise _NoClaimError(f"{key} = {setting!r} is not a QK norm that is known")
        return setting in on

    def number(self, key: str) -> float:
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            where = self.checkpoint.path / "config.json"
            raise ValueError(f"{where}: {key} is {value!r}; it must be a number above 0.")
        return float(value)

    def count(self, expression: str) -> int | None:
        """A whole number of the config, or a quotient "A//B" of two; None where it is absent."""
        keys = expression.split("//")
        if any(self.config.get(key) is None for key in keys):
            return None
        numbers = [self._whole(key) for key in keys]
        return numbers[0] // numbers[1] if len(numbers) == 2 else numbers[0]

    def _whole(self, key: str) -> int:
        number = self.number(key)
        if number > LARGEST_COUNT:
            where = self.checkpoint.path / "config.json"
            raise ValueError(f"{where}: {key} is {number:g}; no model has above {LARGEST_COUNT}.")
        return int(number)

    def norm_bound(self, rule: LayerRule, norm: NormKind, dtype: str) -> tuple[Float32, str]:
        self._refuse_small_epsilon()
        self._refuse_other_norms(rule)
        heads, key_heads, head_dim = self._sizes(rule, norm)
        queries = self._read_norms(rule.query_norms, ("add_q_proj",), norm, heads, head_dim)
        keys = self._read_norms(rule.key_norms, ("add_k_proj",), norm, key_heads, head_dim)
        planes, pairing = self._planes(rule, head_dim)
        rotated = pairing != CHANNELS
        factor = rotary_factor(self.config) if rotated else 1.0
        if factor is None:
            raise _NoClaimError("the scaling of the rotary embedding is not known")
        scale = self.number(self.family.scale) ** -0.5 if self.family.scale else head_dim**-0.5
        bound = logit_bound(
            queries,
            [side.repeated(heads // key_heads) for side in keys],
            planes,
            scale=scale,
            dtype=dtype,
            rotated=rotated,
            rotary_factor=factor,
        )
        return bound, self._reason(norm, pairing, factor, len(queries) * len(keys))

    def _reason(self, norm: NormKind, pairing: str, factor: float, pairs: int) -> str:
        words = {
            CHANNELS: "no rotation after it",
            INTERLEAVED: "rotary pairs side by side",
            HALF: "rotary pairs half a head apart",
            "unknown": "rotary pairs not known",
        }
        parts = [norm.title, words[pairing]]
        if factor != 1.0:
            parts.append(f"rotary tables scaled by {factor:.4g}")
        if pairs > 1:
            parts.append("norms of added streams included")
        if norm.centered:
            parts.append("if its variance is computed to 1 in 128")
        return ", ".join(parts)

    def _refuse_small_epsilon(self) -> None:
        key = self.family.epsilon
        epsilon = self.config.get(key, 1.0)
        if not (isinstance(epsilon, (int, float)) and epsilon >= SMALLEST_EPSILON):
            raise _NoClaimError(f"{key} = {epsilon!r} does not cover squares that underflow")

    def _refuse_other_norms(self, rule: LayerRule) -> None:
        known = (*rule.query_norms, *rule.key_norms)
        others = {
            name.split(".")[0]
            for name in self.layer.tensors
            if re.search(r"norm|(^|\.)ln", name.split(".")[0]) and name.split(".")[0] not in known
        }
        if others:
            raise _NoClaimError(f"has a norm that is not known: {', '.join(sorted(others))}")

    def _sizes(self, rule: LayerRule, norm: NormKind) -> tuple[int, int, int]:
        """Query heads, key heads and head_dim, from the config and checked against the tensors."""
        head_dim = self.count(rule.head_dim)
        heads = self.count(rule.heads)
        if heads is None:
            raise _NoClaimError(f"config.json lacks {rule.heads}")
        stored = self._shape(f"{rule.query_norms[0]}.weight")
        if norm.learned and not norm.joint and stored:
            head_dim = stored[-1] if head_dim is None else head_dim
        if head_dim is None and "hidden_size" in self.config:
            head_dim = int(self.number("hidden_size")) // heads
        if head_dim is None:
            raise _NoClaimError(f"config.json lacks {rule.head_dim}")
        key_heads = self.count(self.family.key_heads) if self.family.key_heads else heads
        key_rows = self._rows("to_k", "k_proj")
        if key_heads is None:
            key_heads = heads if key_rows is None else key_rows // head_dim
        for rows, count, which in (
            (self._rows("to_q", "q_proj"), heads, "query"),
            (key_rows, key_heads, "key"),
        ):
            if rows is not None and rows != count * head_dim:
                raise ValueError(
                    f"{self.checkpoint.path}: {self.layer.name} projects to {rows} {which} "
                    f"channels; its config says {count} heads of {head_dim}. Config and weights "
                    "are not of one model."
                )
        if key_heads < 1 or heads % key_heads:
            raise ValueError(
                f"{self.checkpoint.path}: {self.layer.name} has {heads} query heads for "
                f"{key_heads} key heads, which do not divide. The config is damaged."
            )
        return heads, key_heads, head_dim

    def _read_norms(
        self,
        names: tuple[str, ...],
        added_projections: tuple[str, ...],
        norm: NormKind,
        heads: int,
        head_dim: int,
    ) -> list[NormedHeads]:
        """The norms of one side, that of an added stream included where the layer has one."""
        channels = heads * head_dim if norm.joint else head_dim
        if not norm.learned:
            present = [name for name in names if f"{name}.weight" in self.layer.tensors]
            if present:
                raise _NoClaimError(f"{present[0]} has weights, which its class should not have")
            plain = np.ones((heads, head_dim))
            return [NormedHeads(plain, np.zeros_like(plain), channels, norm.centered)]
        found = [name for name in names if f"{name}.weight" in self.layer.tensors]
        if names[0] not in found:
            raise _NoClaimError(f"no QK norm: the layer has no {names[0]}.weight")
        added = [name for name in added_projections if f"{name}.weight" in self.layer.tensors]
        if added and len(found) < 2:
            raise _NoClaimError(f"what {added[0]} projects is not normalised")
        return [self._read_norm(name, norm, heads, head_dim, channels) for name in found]

    def _read_norm(
        self, name: str, norm: NormKind, heads: int, head_dim: int, channels: int
    ) -> NormedHeads:
        weight = self._read_heads(f"{name}.weight", norm, heads, head_dim)
        # Casting w itself to a narrower dtype changes 1 + w by up to u |w|.
        cast = FORMATS["bfloat16"].roundoff * np.abs(weight) if norm.offset else 0.0
        gain = np.abs(norm.offset + weight) + cast
        biased = f"{name}.bias" in self.layer.tensors
        if biased and not norm.centered:
            raise _NoClaimError(f"{name} has a bias, which its class should not have")
        bias = np.zeros_like(gain)
        if biased:
            bias = np.abs(self._read_heads(f"{name}.bias", norm, heads, head_dim))
        return NormedHeads(gain, bias, channels, norm.centered, biased)

    def _read_heads(
        self, name: str, norm: NormKind, heads: int, head_dim: int
    ) -> npt.NDArray[np.float64]:
        """A tensor as [heads, head_dim]."""
        full = f"{self.layer.name}.{name}"
        expected: tuple[int, ...] = (head_dim,)
        if norm.joint:
            expected = (heads * head_dim,)
        elif norm.per_head_weights:
            expected = (heads, head_dim)
        stored = self.checkpoint.entries[full].shape
        if stored != expected:
            raise ValueError(
                f"{self.checkpoint.entries[full].file}: {full} has shape {list(stored)}; the "
                f"config's {norm.title} needs {list(expected)}. Config and weights are not of one "
                "model."
            )
        values = self.checkpoint.read(full)
        if norm.joint or norm.per_head_weights:
            return values.reshape(heads, head_dim)
        return np.broadcast_to(values, (heads, head_dim))

    def _planes(self, rule: LayerRule, head_dim: int) -> tuple[Planes, str]:
        pairing = rule.pairing
        if pairing.startswith("config:"):
            setting = self.config.get(pairing.removeprefix("config:"))
            pairing = {"interleaved": INTERLEAVED, "split": HALF}.get(str(setting), "unknown")
        if pairing == CHANNELS:
            return channel_planes(head_dim), pairing
        shares = _rotary_shares(self.config)
        if pairing == INTERLEAVED:
            # Channels that a partial rotation leaves alone are planes of any kind.
            return interleaved_planes(head_dim), pairing
        if pairing == HALF and len(shares) == 1:
            return half_planes(head_dim, int(head_dim * shares.pop())), pairing
        return unknown_planes(head_dim), "unknown"

    def _shape(self, name: str) -> tuple[int, ...]:
        entry = self.checkpoint.entries.get(f"{self.layer.name}.{name}")
        return entry.shape if entry else ()

    def _rows(self, *names: str) -> int | None:
        """Output channels of the first of these projections that is stored unquantised."""
        for name in names:
            entry = self.checkpoint.entries.get(f"{self.layer.name}.{name}.weight")
            if entry is not None and entry.dtype in ("F64", "F32", "F16", "BF16"):
                return entry.shape[0]
        return None


def _rotary_shares(config: Mapping[str, Any]) -> set[float]:
    """Every share of the channels that the config says is rotated; {1} where it says nothing."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    places = (
        [config, parameters, *parameters.values()] if isinstance(parameters, dict) else [config]
    )
    shares = [
        place["partial_rotary_factor"]
        for place in places
        if isinstance(place, Mapping) and "partial_rotary_factor" in place
    ]
    return {float(share) for share in shares if isinstance(share, (int, float))} or {1.0}


def _family_config(checkpoint: Checkpoint, family: Family) -> dict[str, Any]:
    config: Any = checkpoint.config
    if family.text_config:
        config = checkpoint.config.get(family.text_config)
        if not isinstance(config, dict):
            raise ValueError(
                f"{checkpoint.path / 'config.json'}: lacks {family.text_config}, the settings of "
                "the language model."
            )
    return {**family.defaults, **config}


def _unknown_class(checkpoint: Checkpoint, layer: AttentionLayer) -> str:
    name = class_name(checkpoint.config)
    norms = sorted(part for part in _NORMS if f"{part}.weight" in layer.tensors)
    if norms:
        return f"{name} is not a class whose QK norm ({norms[0]}) is known"
    return f"no QK norm found ({name} is not a class that is known)"


def _guess_heads(config: Mapping[str, Any]) -> int:
    """For layers without a claim: the number of heads where the config says it, else 1."""
    for key in ("num_attention_heads", "n_heads", "num_heads"):
        heads = config.get(key)
        if isinstance(heads, int) and heads > 0:
            return heads
    return 1


def _no_claim(heads: int, reason: str) -> tuple[Float32, str]:
    return np.full(heads, np.inf, np.float32), reason


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
