"""Checkpoints of a few tensors, each beside the oracle of what its model does with them."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from certify.static import StaticCertificate, static_certificates
from tests.certify.static_oracle import Array, Case, Side

HEADS, HEAD_DIM = 2, 8


@dataclass(frozen=True)
class Scenario:
    """One attention layer.

    Attributes:
        config: contents of config.json.
        layer: its name.
        tensors: below the layer's name.
        case: the oracle's view of it.
        reach: share of the float32 bound that the oracle's search comes to.
    """

    config: dict[str, Any]
    layer: str
    tensors: Mapping[str, Array]
    case: Case
    reach: float = 0.98


def write_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], name: str = "model"
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stored = {key: np.ascontiguousarray(array, np.float32) for key, array in tensors.items()}
    save_file(stored, path / f"{name}.safetensors")
    return path


def certificate(
    config: Mapping[str, Any], layer: str, tensors: Mapping[str, Array], dtype: str = "bfloat16"
) -> StaticCertificate:
    """What the package proves of this layer, from files."""
    with tempfile.TemporaryDirectory() as directory:
        named = {f"{layer}.{key}": array for key, array in tensors.items()}
        write_checkpoint(Path(directory), config, named)
        (found,) = static_certificates(directory, dtype=dtype)
    assert found.layer == layer
    return found


def of(scenario: Scenario, dtype: str) -> StaticCertificate:
    return certificate(scenario.config, scenario.layer, scenario.tensors, dtype)


def hot(shape: tuple[int, ...], *channels: int, others: float = 0.25) -> Array:
    """Small alternating numbers, and ever larger ones in these channels of the last axis."""
    values = np.full(shape, others)
    values[..., ::2] *= -1.0
    for rank, channel in enumerate(channels):
        values[..., channel] = 2.0 + rank
    return values


def _language(model_type: str, query: Side, key: Side, case: Case, **config: Any) -> Scenario:
    heads, head_dim = case.shape
    stored = {"q_norm": query, "k_norm": key}
    tensors = {f"{name}.weight": side.weight[0] for name, side in stored.items()}
    settings = {
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": key.weight.shape[0],
        "head_dim": head_dim,
        **config,
    }
    return Scenario(settings, "model.layers.0.self_attn", tensors, case)


def _same(heads: int, weight: Array) -> Array:
    return np.broadcast_to(weight, (heads, weight.size))


def _per_head(pairing: str = "half", **options: Any) -> tuple[Side, Side, Case]:
    """Four query heads, two key heads; the largest weights meet in channels 1 and 5."""
    query = Side(_same(4, hot((HEAD_DIM,), 1)), **options)
    key = Side(_same(2, hot((HEAD_DIM,), 5)), **options)
    return query, key, Case((query,), (key,), pairing, scale=HEAD_DIM**-0.5)


def qwen3() -> Scenario:
    return _language("qwen3", *_per_head())


def qwen3_yarn() -> Scenario:
    """factor 8: tables times 0.1 ln 8 + 1."""
    query, key, case = _per_head()
    scaled = Case(case.queries, case.keys, case.pairing, 0, case.scale, 0.1 * math.log(8.0) + 1.0)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    return _language("qwen3", query, key, scaled, rope_scaling=yarn)


def longrope() -> Scenario:
    query, key, case = _per_head()
    factor = math.sqrt(1.0 + math.log(8.0) / math.log(4096.0))
    scaled = Case(case.queries, case.keys, case.pairing, 0, case.scale, factor)
    rope = {"type": "longrope", "original_max_position_embeddings": 4096}
    return _language(
        "qwen3", query, key, scaled, rope_scaling=rope, max_position_embeddings=8 * 4096
    )


def partial_rotary() -> Scenario:
    """Half of the channels turn: pairs (0, 2) and (1, 3)."""
    query = Side(_same(2, hot((HEAD_DIM,), 1)))
    key = Side(_same(2, hot((HEAD_DIM,), 3)))
    case = Case((query,), (key,), "half", 4, HEAD_DIM**-0.5)
    return _language("glm4_moe", query, key, case, partial_rotary_factor=0.5, use_qk_norm=True)


def gemma3() -> Scenario:
    """(1 + w), and logits scaled by 4 ** -0.5 whatever the head_dim."""
    query = Side(_same(2, hot((HEAD_DIM,), 1, others=-0.75)), offset=1.0)
    key = Side(_same(2, hot((HEAD_DIM,), 5, others=-0.75)), offset=1.0)
    case = Case((query,), (key,), "half", scale=0.5)
    return _language("gemma3_text", query, key, case, query_pre_attn_scalar=4)


def after_rotation() -> Scenario:
    """HunYuan normalises after the rotation: every channel by itself."""
    query = Side(_same(2, hot((HEAD_DIM,), 1)))
    key = Side(_same(2, hot((HEAD_DIM,), 1)))
    case = Case((query,), (key,), "none", scale=HEAD_DIM**-0.5)
    found = _language("hunyuan_v1_dense", query, key, case)
    tensors = {
        name.replace("q_norm", "query_layernorm").replace("k_norm", "key_layernorm"): array
        for name, array in found.tensors.items()
    }
    return Scenario(found.config, found.layer, tensors, case)


def olmo2() -> Scenario:
    """All heads together, fewer key heads than query heads."""
    query = Side(hot((4, HEAD_DIM), 1) * np.arange(1.0, 5.0)[:, None], joint=True)
    key = Side(hot((2, HEAD_DIM), 5) * np.array([[3.0], [1.0]]), joint=True)
    case = Case((query,), (key,), "half", scale=HEAD_DIM**-0.5)
    found = _language("olmo2", query, key, case)
    tensors = {"q_norm.weight": query.weight.ravel(), "k_norm.weight": key.weight.ravel()}
    return Scenario(found.config, found.layer, tensors, case)


def cohere() -> Scenario:
    """LayerNorm per head, weights of every head's own."""
    query = Side(hot((4, HEAD_DIM), 2) * np.arange(1.0, 5.0)[:, None], centered=True)
    key = Side(hot((2, HEAD_DIM), 3) * np.array([[3.0], [1.0]]), centered=True)
    case = Case((query,), (key,), "interleaved", scale=HEAD_DIM**-0.5)
    found = _language("cohere", query, key, case, use_qk_norm=True)
    tensors = {"q_norm.weight": query.weight, "k_norm.weight": key.weight}
    # One channel alone has no mean of 0: sqrt(1 - 1/D) of the norm on either side.
    return Scenario(found.config, found.layer, tensors, case, reach=0.85)


def _biased(query_bias: Array, key_bias: Array) -> Scenario:
    weight = hot((HEAD_DIM,), 2)
    query = Side(_same(2, weight), _same(2, query_bias), centered=True)
    key = Side(_same(2, weight), _same(2, key_bias), centered=True)
    case = Case((query,), (key,), "interleaved", scale=HEAD_DIM**-0.5)
    tensors = {
        "norm_q.weight": weight,
        "norm_k.weight": weight,
        "norm_q.bias": query_bias,
        "norm_k.bias": key_bias,
    }
    config = {"_class_name": "CogVideoXTransformer3DModel"}
    sizes = {"num_attention_heads": 2, "attention_head_dim": HEAD_DIM}
    # One channel alone has no mean of 0, and not every term takes its maximum at one input.
    return Scenario(config | sizes, "transformer_blocks.0.attn1", tensors, case, reach=0.7)


def bias_of_queries() -> Scenario:
    return _biased(hot((HEAD_DIM,), 2, 3, others=0.1) * 5.0, np.zeros(HEAD_DIM))


def bias_of_keys() -> Scenario:
    return _biased(np.zeros(HEAD_DIM), hot((HEAD_DIM,), 2, 3, others=0.1) * 5.0)


def biases_alone() -> Scenario:
    """Weights near 0: what is left is bias times bias."""
    found = _biased(*(hot((HEAD_DIM,), 2, 3) * 2.0 for _ in range(2)))
    tiny = {name: 1e-3 * array for name, array in found.tensors.items() if "weight" in name}
    sides = [
        Side(_same(2, tiny[f"norm_{x}.weight"]), _same(2, found.tensors[f"norm_{x}.bias"]), 0, True)
        for x in "qk"
    ]
    case = Case((sides[0],), (sides[1],), "interleaved", scale=HEAD_DIM**-0.5)
    return Scenario(found.config, found.layer, {**found.tensors, **tiny}, case, reach=0.7)


def wan_self_attention() -> Scenario:
    return _wan("blocks.0.attn1", "interleaved", 5)


def wan_cross_attention() -> Scenario:
    return _wan("blocks.0.attn2", "none", 4)


def _wan(layer: str, pairing: str, key_channel: int) -> Scenario:
    query = Side(hot((HEADS, HEAD_DIM), 4), joint=True)
    key = Side(hot((HEADS, HEAD_DIM), key_channel), joint=True)
    case = Case((query,), (key,), pairing, scale=HEAD_DIM**-0.5)
    tensors = {"norm_q.weight": query.weight.ravel(), "norm_k.weight": key.weight.ravel()}
    return Scenario(_diffusers("WanTransformer3DModel"), layer, tensors, case)


def flux() -> Scenario:
    """Text queries and keys have norms of their own, larger ones."""
    sides = {
        name: Side(_same(HEADS, factor * hot((HEAD_DIM,), channel)))
        for name, factor, channel in (
            ("norm_q", 1.0, 2),
            ("norm_added_q", 4.0, 3),
            ("norm_k", 1.0, 2),
            ("norm_added_k", 5.0, 2),
        )
    }
    queries, keys = ((sides[f"norm_{side}"], sides[f"norm_added_{side}"]) for side in ("q", "k"))
    case = Case(queries, keys, "interleaved", scale=HEAD_DIM**-0.5)
    tensors = {f"{name}.weight": side.weight[0] for name, side in sides.items()}
    return Scenario(
        _diffusers("FluxTransformer2DModel"), "transformer_blocks.0.attn", tensors, case
    )


def no_weights() -> Scenario:
    """AuraFlow: a LayerNorm without weights; the layer is known by its projection."""
    plain = Side(np.ones((HEADS, HEAD_DIM)), centered=True)
    case = Case((plain,), (plain,), "none", scale=HEAD_DIM**-0.5)
    tensors = {"to_q.weight": np.zeros((HEADS * HEAD_DIM, 3))}
    config = _diffusers("AuraFlowTransformer2DModel")
    return Scenario(config, "joint_transformer_blocks.0.attn", tensors, case)


def _diffusers(class_name: str, **config: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
    norm = {"qk_norm": "rms_norm_across_heads"} if class_name.startswith("Wan") else {}
    return {"_class_name": class_name, **sizes, **norm, **config}


SCENARIOS = {
    function.__name__: function
    for function in (
        qwen3,
        qwen3_yarn,
        longrope,
        partial_rotary,
        gemma3,
        after_rotation,
        olmo2,
        cohere,
        bias_of_queries,
        bias_of_keys,
        biases_alone,
        wan_self_attention,
        wan_cross_attention,
        flux,
        no_weights,
    )
}
