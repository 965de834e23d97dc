"""Tiny random models of diffusers and transformers, driven to large logits and watched.

What their query and key projections give out is replaced by vectors that put everything into one
channel or one pair of channels, at every magnitude: the model's own norm and rotary embedding then
do what they do. The logits are taken where the model hands query and key to torch's attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

HEADS, HEAD_DIM = 2, 16
WIDTH = HEADS * HEAD_DIM
AXES = (4, 6, 6)
TOKENS = 24

PROJECTIONS = ("to_q", "to_k", "q_proj", "k_proj", "add_q_proj", "add_k_proj", "to_qkv_mlp_proj")
DIFFUSERS_HEADS: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}


@dataclass(frozen=True)
class TinyModel:
    """How to build one model and call it once.

    Attributes:
        reach: share of the bound that the search must come to in float32. It is 1 where planes
            can turn by any angle; few positions turn the slow planes of a tiny model but little.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], dict[str, Any]]
    reach: float = 0.4


def draw(*shape: int) -> Callable[[torch.dtype], torch.Tensor]:
    return lambda dtype: torch.randn(shape).to(dtype)


def inputs(**parts: Any) -> Callable[[torch.dtype], dict[str, Any]]:
    """Callables are drawn in the dtype of the run, all else is passed as it is."""
    return lambda dtype: {
        name: part(dtype) if callable(part) else part for name, part in parts.items()
    }


def _gemma3_with_images() -> nn.Module:
    text = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
    config = transformers.Gemma3Config(
        text_config={**text, "query_pre_attn_scalar": 4},
        vision_config={**vision, "num_attention_heads": 2},
        image_token_id=63,
    )
    return transformers.Gemma3Model(config)


def _qwen3_with_images() -> nn.Module:
    config = transformers.Qwen3VLConfig(
        text_config={
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "vocab_size": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    )
    return transformers.Qwen3VLModel(config)


def _diffusers(class_name: str, call: Any, *, reach: float = 0.4, **config: Any) -> TinyModel:
    return TinyModel(class_name, lambda: getattr(diffusers, class_name)(**config), call, reach)


def _language(model_class: str, config_class: str, name: str = "", **config: Any) -> TinyModel:
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        **config,
    }

    def build() -> nn.Module:
        made = getattr(transformers, config_class)(**settings)
        made._attn_implementation = "sdpa"
        return getattr(transformers, model_class)(made)

    ids = torch.arange(1, 2 * TOKENS + 1).reshape(2, TOKENS)
    return TinyModel(name or model_class, build, inputs(input_ids=ids))


def _ltx2(rope_type: str) -> TinyModel:
    call = inputs(
        hidden_states=draw(1, TOKENS, 4),
        audio_hidden_states=draw(1, TOKENS, 4),
        encoder_hidden_states=draw(1, 8, 16),
        audio_encoder_hidden_states=draw(1, 8, 16),
        timestep=torch.tensor([3.0]),
        encoder_attention_mask=torch.ones(1, 8),
        audio_encoder_attention_mask=torch.ones(1, 8),
        num_frames=2,
        height=3,
        width=4,
        audio_num_frames=TOKENS,
    )
    config = {
        **DIFFUSERS_HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "cross_attention_dim": WIDTH,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": HEADS,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 1,
        "caption_channels": 16,
        "rope_type": rope_type,
    }
    return TinyModel(
        f"LTX-2 {rope_type}", lambda: diffusers.LTX2VideoTransformer3DModel(**config), call
    )


_WAN: dict[str, Any] = {
    **DIFFUSERS_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 1,
}
_WAN_CALL = {
    "hidden_states": draw(1, 4, 2, 8, 8),
    "timestep": torch.tensor([3]),
    "encoder_hidden_states": draw(1, 12, 16),
}
_FLUX: dict[str, Any] = {
    **DIFFUSERS_HEADS,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 16,
}
_IDS: dict[str, Any] = {
    "img_ids": torch.arange(3.0 * TOKENS).reshape(TOKENS, 3),
    "txt_ids": torch.zeros(8, 3),
}
_HUNYUAN: dict[str, Any] = {
    **DIFFUSERS_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "rope_axes_dim": AXES,
}
_MASK = torch.ones(1, 8, dtype=torch.bool)
_LONG_MASK = torch.ones(1, 8, dtype=torch.long)

DIFFUSERS_MODELS = (
    _diffusers("WanTransformer3DModel", inputs(**_WAN_CALL), **_WAN),
    TinyModel(
        "Wan image-to-video",
        lambda: diffusers.WanTransformer3DModel(**_WAN, image_dim=16, added_kv_proj_dim=WIDTH),
        inputs(
            **{
                **_WAN_CALL,
                "encoder_hidden_states": draw(1, 512, 16),
                "encoder_hidden_states_image": draw(1, 9, 16),
            }
        ),
    ),
    _diffusers(
        "WanVACETransformer3DModel",
        inputs(**_WAN_CALL, control_hidden_states=draw(1, 4, 2, 8, 8)),
        **_WAN,
        vace_layers=[0],
        vace_in_channels=4,
    ),
    _diffusers("SkyReelsV2Transformer3DModel", inputs(**_WAN_CALL), **_WAN),
    _diffusers("ChronoEditTransformer3DModel", inputs(**_WAN_CALL), **_WAN),
    _diffusers(
        "FluxTransformer2DModel",
        inputs(
            hidden_states=draw(1, TOKENS, 4),
            encoder_hidden_states=draw(1, 8, 16),
            pooled_projections=draw(1, 16),
            timestep=torch.tensor([1.0]),
            **_IDS,
        ),
        **_FLUX,
        pooled_projection_dim=16,
        axes_dims_rope=AXES,
    ),
    _diffusers(
        "ChromaTransformer2DModel",
        inputs(
            hidden_states=draw(1, TOKENS, 4),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=lambda dtype: torch.tensor([1.0], dtype=dtype),
            **_IDS,
        ),
        **_FLUX,
        axes_dims_rope=AXES,
        approximator_num_channels=16,
        approximator_hidden_dim=16,
        approximator_layers=1,
    ),
    _diffusers(
        "Flux2Transformer2DModel",
        inputs(
            hidden_states=draw(1, TOKENS, 4),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=torch.tensor([1.0]),
            guidance=torch.tensor([1.0]),
            img_ids=torch.arange(4.0 * TOKENS).reshape(TOKENS, 4),
            txt_ids=torch.zeros(8, 4),
        ),
        **_FLUX,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    ),
    _diffusers(
        "HunyuanVideoTransformer3DModel",
        inputs(
            hidden_states=draw(1, 4, 2, 8, 8),
            timestep=torch.tensor([3]),
            encoder_hidden_states=draw(1, 8, 16),
            encoder_attention_mask=_MASK,
            pooled_projections=draw(1, 16),
            guidance=torch.tensor([1.0]),
        ),
        **_HUNYUAN,
        num_single_layers=1,
        pooled_projection_dim=16,
    ),
    _diffusers(
        "HunyuanVideoFramepackTransformer3DModel",
        inputs(
            hidden_states=draw(1, 4, 2, 8, 8),
            timestep=torch.tensor([3]),
            encoder_hidden_states=draw(1, 8, 16),
            encoder_attention_mask=_MASK,
            pooled_projections=draw(1, 16),
            image_embeds=draw(1, 5, 16),
            indices_latents=torch.tensor([0, 1]),
            guidance=torch.tensor([1.0]),
            latents_clean=draw(1, 4, 1, 8, 8),
            indices_latents_clean=torch.tensor([2]),
            latents_history_2x=draw(1, 4, 2, 8, 8),
            indices_latents_history_2x=torch.tensor([3, 4]),
            latents_history_4x=draw(1, 4, 4, 8, 8),
            indices_latents_history_4x=torch.tensor([5, 6, 7, 8]),
        ),
        **_HUNYUAN,
        has_clean_x_embedder=True,
        has_image_proj=True,
        image_proj_dim=16,
        num_single_layers=1,
        pooled_projection_dim=16,
    ),
    _diffusers(
        "HunyuanVideo15Transformer3DModel",
        inputs(
            hidden_states=draw(1, 4, 2, 4, 4),
            timestep=lambda dtype: torch.tensor([3.0], dtype=dtype),
            encoder_hidden_states=draw(1, 8, 16),
            encoder_attention_mask=_LONG_MASK,
            encoder_hidden_states_2=draw(1, 8, 16),
            encoder_attention_mask_2=_LONG_MASK,
            image_embeds=draw(1, 5, 16),
        ),
        **_HUNYUAN,
        text_embed_2_dim=16,
        image_embed_dim=16,
    ),
    _diffusers(
        "QwenImageTransformer2DModel",
        inputs(
            hidden_states=draw(1, 16, 16),
            encoder_hidden_states=draw(1, 8, 16),
            encoder_hidden_states_mask=_MASK,
            timestep=torch.tensor([1.0]),
            img_shapes=[[(1, 4, 4)]],
        ),
        **DIFFUSERS_HEADS,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        joint_attention_dim=16,
        axes_dims_rope=AXES,
    ),
    _diffusers(
        "SD3Transformer2DModel",
        inputs(
            hidden_states=draw(1, 4, 8, 8),
            encoder_hidden_states=draw(1, 8, 16),
            pooled_projections=draw(1, 16),
            timestep=torch.tensor([3]),
        ),
        **DIFFUSERS_HEADS,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=16,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ),
    _diffusers(
        "LTXVideoTransformer3DModel",
        inputs(
            hidden_states=draw(1, TOKENS, 4),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=torch.tensor([3]),
            encoder_attention_mask=torch.ones(1, 8),
            num_frames=2,
            height=3,
            width=4,
        ),
        **DIFFUSERS_HEADS,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=WIDTH,
        num_layers=1,
        caption_channels=16,
    ),
    _ltx2("interleaved"),
    _ltx2("split"),
    _diffusers(
        "CogVideoXTransformer3DModel",
        inputs(
            hidden_states=draw(1, 2, 4, 8, 8),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=torch.tensor([3]),
            image_rotary_emb=lambda _: _rotary_tables(32),
        ),
        **DIFFUSERS_HEADS,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=16,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    ),
    _diffusers(
        "CogView4Transformer2DModel",
        inputs(
            hidden_states=draw(1, 4, 8, 8),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=torch.tensor([3]),
            original_size=torch.tensor([[8.0, 8.0]]),
            target_size=torch.tensor([[8.0, 8.0]]),
            crop_coords=torch.tensor([[0.0, 0.0]]),
        ),
        **DIFFUSERS_HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
        rope_axes_dim=(16, 16),
    ),
    _diffusers(
        "CogView3PlusTransformer2DModel",
        inputs(
            hidden_states=draw(1, 4, 8, 8),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=torch.tensor([3]),
            original_size=torch.tensor([[8.0, 8.0]]),
            target_size=torch.tensor([[8.0, 8.0]]),
            crop_coords=torch.tensor([[0.0, 0.0]]),
        ),
        **DIFFUSERS_HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
    ),
    _diffusers(
        "AuraFlowTransformer2DModel",
        inputs(
            hidden_states=draw(1, 4, 8, 8),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=torch.tensor([0.5]),
        ),
        **DIFFUSERS_HEADS,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=16,
        caption_projection_dim=WIDTH,
        pos_embed_max_size=16,
    ),
    _diffusers(
        "MochiTransformer3DModel",
        inputs(
            hidden_states=draw(1, 4, 2, 8, 8),
            encoder_hidden_states=draw(1, 8, 16),
            timestep=torch.tensor([3]),
            encoder_attention_mask=_MASK,
        ),
        **DIFFUSERS_HEADS,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=8,
    ),
    _diffusers(
        "Lumina2Transformer2DModel",
        inputs(
            hidden_states=draw(1, 4, 8, 8),
            timestep=torch.tensor([0.5]),
            encoder_hidden_states=draw(1, 8, 16),
            encoder_attention_mask=_MASK,
        ),
        sample_size=8,
        in_channels=4,
        hidden_size=64,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(32, 32, 32),
        cap_feat_dim=16,
    ),
    _diffusers(
        "ZImageTransformer2DModel",
        inputs(
            x=lambda dtype: [torch.randn(4, 1, 8, 8).to(dtype)],
            t=torch.tensor([0.5]),
            cap_feats=lambda dtype: [torch.randn(8, 16).to(dtype)],
        ),
        in_channels=4,
        dim=WIDTH,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=16,
        axes_dims=list(AXES),
        axes_lens=[64, 64, 64],
    ),
    _diffusers(
        "CosmosTransformer3DModel",
        inputs(
            hidden_states=draw(1, 4, 2, 8, 8),
            timestep=torch.tensor([3]),
            encoder_hidden_states=draw(1, 8, 16),
        ),
        **DIFFUSERS_HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(8, 8, 8),
        concat_padding_mask=False,
    ),
)

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
LANGUAGE_MODELS = (
    _language("Qwen3Model", "Qwen3Config"),
    _language("Qwen3Model", "Qwen3Config", "Qwen3 with YaRN", rope_parameters=_YARN),
    _language("Gemma3TextModel", "Gemma3TextConfig", query_pre_attn_scalar=4),
    TinyModel(
        "Qwen3 with images",
        _qwen3_with_images,
        inputs(input_ids=torch.arange(1, 2 * TOKENS + 1).reshape(2, TOKENS)),
    ),
    TinyModel(
        "Gemma3 with images",
        _gemma3_with_images,
        inputs(input_ids=torch.arange(1, 2 * TOKENS + 1).reshape(2, TOKENS)),
        reach=0.2,
    ),
    _language("Olmo2Model", "Olmo2Config"),
    _language("Olmo3Model", "Olmo3Config"),
    _language("OlmoeModel", "OlmoeConfig", num_experts=2, num_experts_per_tok=1),
    _language("CohereModel", "CohereConfig", use_qk_norm=True),
    _language("Glm4MoeModel", "Glm4MoeConfig", use_qk_norm=True, first_k_dense_replace=2),
    _language("Lfm2Model", "Lfm2Config", layer_types=["full_attention", "full_attention"]),
    _language("HunYuanDenseV1Model", "HunYuanDenseV1Config"),
    _language(
        "HunYuanMoEV1Model", "HunYuanMoEV1Config", num_experts=2, moe_topk=1, num_shared_expert=1
    ),
    _language(
        "ChameleonModel",
        "ChameleonConfig",
        vq_config={"base_channels": 32, "num_res_blocks": 1, "channel_multiplier": [1]},
        vocabulary_map={"<image>": 60},
    ),
    _language("NanoChatModel", "NanoChatConfig"),
    _language("PhiModel", "PhiConfig", qk_layernorm=True),
    _language("Exaone4Model", "Exaone4Config"),
    _language("ApertusModel", "ApertusConfig"),
    _language("Dots1Model", "Dots1Config", first_k_dense_replace=2),
    _language(
        "Qwen3MoeModel",
        "Qwen3MoeConfig",
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
    ),
)

MODELS = {model.name: model for model in (*DIFFUSERS_MODELS, *LANGUAGE_MODELS)}


def _rotary_tables(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = (torch.rand(tokens, HEAD_DIM // 2) * 6.3).repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


def make(model: TinyModel, seed: int = 0) -> nn.Module:
    """The model with norm weights that differ from channel to channel, some of them negative."""
    torch.manual_seed(seed)
    built = model.build().eval()
    for name, parameter in built.named_parameters():
        if "norm" in name.rpartition(".")[0].rpartition(".")[2]:
            signs = torch.where(torch.rand(parameter.shape) < 0.5, -1.0, 1.0)
            spread = torch.exp(torch.randn(parameter.shape)) * signs
            parameter.data = 0.7 * spread if name.endswith("weight") else 0.3 * spread
    return built


def save(built: Any, path: Path, **options: Any) -> Path:
    built.save_pretrained(path, **options)
    return path


def adversarial(shape: tuple[int, ...], dtype: torch.dtype, hot: int) -> torch.Tensor:
    """[..., C]: everything in one pair of channels, near or far, at any magnitude.

    Most rows take channel ``hot`` of some head, so that query and key meet there.
    """
    width = shape[-1]
    rows = math.prod(shape[:-1])
    output = 1e-3 * torch.randn(rows, width) * (torch.rand(rows, 1) < 0.2)
    first = torch.randint(0, width, (rows,))
    same = first // HEAD_DIM * HEAD_DIM + hot % HEAD_DIM
    first = torch.where(torch.rand(rows) < 0.8, same, first).clamp(max=width - 1)
    distance = torch.tensor([1, 4, 8])[torch.randint(0, 3, (rows,))]
    second = torch.where(torch.rand(rows) < 0.5, first ^ distance, first)
    for channel in (first, second.clamp(max=width - 1)):
        value = torch.randn(rows) * 10.0 ** (3 * torch.rand(rows))
        output[torch.arange(rows), channel] += value
    return output.reshape(shape).to(dtype)


@dataclass
class Watch:
    """Largest |logit| (bits, unmasked or not) per layer and head; ``hot`` directs the search."""

    largest: dict[str, torch.Tensor] = field(default_factory=dict)
    current: str = ""
    hot: int = 0

    def attention(self, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        if not self.current:
            return _ATTENTION(query, key, value, *rest, **options)
        heads = query.shape[1]
        scale = options.get("scale") or query.shape[-1] ** -0.5
        keys = key.double().repeat_interleave(heads // key.shape[1], dim=1)
        logits = math.log2(math.e) * scale * query.double() @ keys.transpose(-1, -2)
        here = logits.abs().amax(dim=(0, 2, 3))
        before = self.largest.get(self.current, torch.zeros(heads, dtype=torch.float64))
        self.largest[self.current] = torch.maximum(before, here)
        return _ATTENTION(query, key, value, *rest, **options)


_ATTENTION: Callable[..., torch.Tensor] = nn.functional.scaled_dot_product_attention


@contextmanager
def watching(built: nn.Module, layers: list[str]) -> Iterator[Watch]:
    """Replace projections of these layers by adversarial vectors; note every logit."""
    watch = Watch()
    handles = []
    modules = dict(built.named_modules())

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            watch.current = name

        return hook

    def replace(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return adversarial(tuple(output.shape), output.dtype, watch.hot)

    for layer in layers:
        # transformers writes some modules under the names of earlier releases.
        attention = (
            modules.get(layer) or modules[layer.replace("language_model.model", "language_model")]
        )
        handles.append(attention.register_forward_pre_hook(enter(layer)))
        handles.append(attention.register_forward_hook(enter("")))
        for name, module in attention.named_modules():
            if name in PROJECTIONS:
                handles.append(module.register_forward_hook(replace))
    nn.functional.scaled_dot_product_attention = watch.attention
    try:
        with torch.no_grad():
            yield watch
    finally:
        nn.functional.scaled_dot_product_attention = _ATTENTION
        for handle in handles:
            handle.remove()
