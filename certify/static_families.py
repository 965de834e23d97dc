"""Which model classes normalise queries and keys, how, and how they rotate them.

Every row was read off the class in diffusers 0.42 or transformers 5. A class that is not listed
here gives no claim, whatever its tensors are called: a norm's weights do not say what the norm does
with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NormKind:
    """What a norm does with the channels of a vector.

    Attributes:
        title: in words.
        joint: all heads are normalised together; the weight is [H * D].
        centered: the mean is taken off first (LayerNorm); a bias may be stored.
        offset: the factor is offset + weight: 1 in Gemma, which stores w of (1 + w).
        learned: there is a weight in the checkpoint.
        per_head_weights: the weight is [H, D] though each head is normalised alone.
    """

    title: str
    joint: bool = False
    centered: bool = False
    offset: float = 0.0
    learned: bool = True
    per_head_weights: bool = False


RMS_PER_HEAD = NormKind("RMSNorm per head")
RMS_JOINT = NormKind("RMSNorm over all heads", joint=True)
RMS_PLAIN = NormKind("RMSNorm per head, no weights", learned=False)
RMS_OFFSET = NormKind("RMSNorm per head, (1 + w)", offset=1.0)
LAYER_PER_HEAD = NormKind("LayerNorm per head", centered=True)
LAYER_HEAD_WEIGHTS = NormKind(
    "LayerNorm per head, own weights", centered=True, per_head_weights=True
)
LAYER_PLAIN = NormKind("LayerNorm per head, no weights", centered=True, learned=False)

INTERLEAVED, HALF, CHANNELS = "interleaved", "half", "channels"
"""Rotary pairs (2i, 2i + 1); (i, i + r/2); no rotation after the norm."""


@dataclass(frozen=True)
class LayerRule:
    """How the attention layers whose name matches ``pattern`` treat queries and keys.

    Attributes:
        pattern: regular expression, searched in the layer's name.
        norm: None where these layers have none.
        pairing: "interleaved", "half", "channels", or "config:KEY" where the config names it.
        query_norms, key_norms: modules inside the layer; the second, where there is one, belongs
            to an added text or image stream.
        heads, head_dim: keys of the config; "A//B" is a quotient of two.
    """

    pattern: str
    norm: NormKind | None
    pairing: str = CHANNELS
    query_norms: tuple[str, ...] = ("norm_q", "norm_added_q")
    key_norms: tuple[str, ...] = ("norm_k", "norm_added_k")
    heads: str = "num_attention_heads"
    head_dim: str = "attention_head_dim"


@dataclass(frozen=True)
class Family:
    """Model classes that share rules.

    Attributes:
        classes: values of the config's _class_name or model_type.
        rules: the first that matches a layer's name holds.
        switch: key of the config that turns the norm on, with the values that mean it is on as in
            the rules and those that mean it is off; any other value gives no claim.
        key_heads: config key of the number of key heads; "" where it equals that of query heads.
        scale: config key c where logits are scaled by c ** -0.5; "": head_dim ** -0.5.
        soft_cap: config key of the cap on attention logits, natural units.
        epsilon: config key of the norm's eps; "" where the class fixes it.
        text_config: the rules are about this part of the config.
        causal: a row may see a single key.
        defaults: of config keys that a checkpoint may leave out.
    """

    classes: tuple[str, ...]
    rules: tuple[LayerRule, ...]
    switch: tuple[str, tuple[Any, ...], tuple[Any, ...]] | None = None
    key_heads: str = ""
    scale: str = ""
    soft_cap: str = ""
    epsilon: str = ""
    text_config: str = ""
    causal: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _language_rule(
    norm: NormKind | None,
    pairing: str = HALF,
    *,
    names: tuple[str, str] = ("q_norm", "k_norm"),
    head_dim: str = "head_dim",
) -> tuple[LayerRule, ...]:
    return (
        LayerRule(
            r"^(?!.*(vision|visual|audio)).*self_attn$",
            norm,
            pairing,
            (names[0],),
            (names[1],),
            head_dim=head_dim,
        ),
    )


_JOINT_SWITCH = ("qk_norm", ("rms_norm_across_heads",), (None,))
_HEAD_SWITCH = ("qk_norm", ("rms_norm",), (None,))

DIFFUSERS_FAMILIES = (
    Family(
        (
            "WanTransformer3DModel",
            "WanVACETransformer3DModel",
            "SkyReelsV2Transformer3DModel",
            "ChronoEditTransformer3DModel",
        ),
        (
            LayerRule(r"\.attn1$", RMS_JOINT, INTERLEAVED),
            LayerRule(r"\.attn2$", RMS_JOINT),
        ),
        switch=_JOINT_SWITCH,
        epsilon="eps",
    ),
    Family(
        ("FluxTransformer2DModel", "ChromaTransformer2DModel", "Flux2Transformer2DModel"),
        (LayerRule(r"\.attn$", RMS_PER_HEAD, INTERLEAVED),),
        epsilon="eps",
        defaults={"eps": 1e-6},
    ),
    Family(
        (
            "HunyuanVideoTransformer3DModel",
            "HunyuanVideoFramepackTransformer3DModel",
            "HunyuanVideo15Transformer3DModel",
        ),
        (
            LayerRule(
                r"^(single_)?transformer_blocks\.\d+\.attn$",
                RMS_PER_HEAD,
                INTERLEAVED,
            ),
            LayerRule(r"refiner.*\.attn$", None),
        ),
        switch=_HEAD_SWITCH,
    ),
    Family(
        ("QwenImageTransformer2DModel",),
        (LayerRule(r"^transformer_blocks\.\d+\.attn$", RMS_PER_HEAD, INTERLEAVED),),
    ),
    Family(
        ("SD3Transformer2DModel",),
        (LayerRule(r"^transformer_blocks\.\d+\.attn2?$", RMS_PER_HEAD),),
        switch=_HEAD_SWITCH,
        defaults={"qk_norm": None},
    ),
    Family(
        ("LTXVideoTransformer3DModel",),
        (
            LayerRule(r"\.attn1$", RMS_JOINT, INTERLEAVED),
            LayerRule(r"\.attn2$", RMS_JOINT),
        ),
        switch=_JOINT_SWITCH,
    ),
    Family(
        ("LTX2VideoTransformer3DModel",),
        (
            LayerRule(r"\.attn1$", RMS_JOINT, "config:rope_type"),
            LayerRule(r"\.attn2$", RMS_JOINT),
            LayerRule(
                r"\.(audio_attn1|audio_to_video_attn|video_to_audio_attn)$",
                RMS_JOINT,
                "config:rope_type",
                heads="audio_num_attention_heads",
                head_dim="audio_attention_head_dim",
            ),
            LayerRule(
                r"\.audio_attn2$",
                RMS_JOINT,
                heads="audio_num_attention_heads",
                head_dim="audio_attention_head_dim",
            ),
        ),
        switch=_JOINT_SWITCH,
        epsilon="norm_eps",
        defaults={"rope_type": INTERLEAVED, "norm_eps": 1e-6},
    ),
    Family(
        ("CogVideoXTransformer3DModel",),
        (LayerRule(r"^transformer_blocks\.\d+\.attn1$", LAYER_PER_HEAD, INTERLEAVED),),
    ),
    Family(
        ("CogView4Transformer2DModel",),
        (LayerRule(r"^transformer_blocks\.\d+\.attn1$", LAYER_PLAIN, HALF),),
    ),
    Family(
        ("CogView3PlusTransformer2DModel",),
        (LayerRule(r"^transformer_blocks\.\d+\.attn1$", LAYER_PLAIN),),
    ),
    Family(
        ("AuraFlowTransformer2DModel",),
        (LayerRule(r"^(single|joint)_transformer_blocks\.\d+\.attn$", LAYER_PLAIN),),
    ),
    Family(
        ("MochiTransformer3DModel",),
        (LayerRule(r"^transformer_blocks\.\d+\.attn1$", RMS_PER_HEAD, INTERLEAVED),),
        switch=_HEAD_SWITCH,
    ),
    Family(
        ("Lumina2Transformer2DModel",),
        (
            LayerRule(
                r"^(layers|noise_refiner|context_refiner)\.\d+\.attn$",
                RMS_PER_HEAD,
                INTERLEAVED,
                head_dim="hidden_size//num_attention_heads",
            ),
        ),
        key_heads="num_kv_heads",
    ),
    Family(
        ("ZImageTransformer2DModel",),
        (
            LayerRule(
                r"\.attention$",
                RMS_PER_HEAD,
                INTERLEAVED,
                heads="n_heads",
                head_dim="dim//n_heads",
            ),
        ),
        switch=("qk_norm", (True,), (False,)),
    ),
    Family(
        ("CosmosTransformer3DModel",),
        (
            LayerRule(r"^transformer_blocks\.\d+\.attn1$", RMS_PER_HEAD, HALF),
            LayerRule(r"^transformer_blocks\.\d+\.attn2$", RMS_PER_HEAD),
        ),
    ),
)

TRANSFORMERS_FAMILIES = (
    Family(
        ("qwen3", "qwen3_moe", "dots1", "apertus", "exaone4"),
        _language_rule(RMS_PER_HEAD),
        key_heads="num_key_value_heads",
        epsilon="rms_norm_eps",
        causal=True,
    ),
    Family(
        ("glm4_moe",),
        _language_rule(RMS_PER_HEAD),
        switch=("use_qk_norm", (True,), (False,)),
        key_heads="num_key_value_heads",
        epsilon="rms_norm_eps",
        causal=True,
        defaults={"partial_rotary_factor": 0.5, "use_qk_norm": False},
    ),
    Family(
        ("lfm2",),
        _language_rule(RMS_PER_HEAD, names=("q_layernorm", "k_layernorm")),
        key_heads="num_key_value_heads",
        epsilon="norm_eps",
        causal=True,
    ),
    Family(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        # The norm comes after the rotary embedding.
        _language_rule(RMS_PER_HEAD, CHANNELS, names=("query_layernorm", "key_layernorm")),
        key_heads="num_key_value_heads",
        epsilon="rms_norm_eps",
        causal=True,
    ),
    Family(
        ("nanochat",),
        _language_rule(RMS_PLAIN, CHANNELS),
        key_heads="num_key_value_heads",
        epsilon="rms_norm_eps",
        causal=True,
    ),
    Family(
        ("phi",),
        _language_rule(LAYER_PER_HEAD, names=("q_layernorm", "k_layernorm")),
        switch=("qk_layernorm", (True,), (False,)),
        key_heads="num_key_value_heads",
        epsilon="layer_norm_eps",
        causal=True,
        defaults={"partial_rotary_factor": 0.5, "qk_layernorm": False},
    ),
    Family(
        ("qwen3_vl",),
        _language_rule(RMS_PER_HEAD),
        key_heads="num_key_value_heads",
        epsilon="rms_norm_eps",
        text_config="text_config",
        causal=True,
    ),
    *(
        Family(
            (model_type,),
            _language_rule(RMS_OFFSET),
            key_heads="num_key_value_heads",
            scale="query_pre_attn_scalar",
            epsilon="rms_norm_eps",
            text_config=text_config,
            causal=True,
            defaults={
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "rms_norm_eps": 1e-6,
            },
        )
        # Its config has attn_logit_softcapping, but Gemma3Attention does not pass it on.
        for model_type, text_config in (("gemma3_text", ""), ("gemma3", "text_config"))
    ),
    Family(
        ("gemma2", "vaultgemma"),
        _language_rule(None),
        soft_cap="attn_logit_softcapping",
        causal=True,
        defaults={"attn_logit_softcapping": 50.0, "num_attention_heads": 8},
    ),
    Family(
        ("olmo2", "olmo3", "olmoe"),
        _language_rule(RMS_JOINT),
        key_heads="num_key_value_heads",
        epsilon="rms_norm_eps",
        causal=True,
    ),
    Family(
        ("cohere",),
        _language_rule(LAYER_HEAD_WEIGHTS, INTERLEAVED),
        switch=("use_qk_norm", (True,), (False,)),
        key_heads="num_key_value_heads",
        epsilon="layer_norm_eps",
        causal=True,
        defaults={"use_qk_norm": False},
    ),
    Family(
        ("chameleon",),
        _language_rule(LAYER_HEAD_WEIGHTS),
        key_heads="num_key_value_heads",
        causal=True,
    ),
)

FAMILIES = {
    name: family
    for family in (*DIFFUSERS_FAMILIES, *TRANSFORMERS_FAMILIES)
    for name in family.classes
}


def class_name(config: Mapping[str, Any]) -> str:
    """The class that a config is for: diffusers' _class_name or transformers' model_type."""
    name = config.get("_class_name") or config.get("model_type")
    return str(name) if name else "(config.json names no class)"
