"""Wan: what its attention module computes around the attention itself.

Semantics of ``WanAttnProcessor`` of diffusers 0.42: RMSNorm over all heads together, then heads,
then interleaved rotary embedding; with image keys, a second attention over them that is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TEXT_LENGTH = 512
"""Text tokens in the context of an image-to-video model; what comes before them is the image."""

IMAGE_PART = ".image"

Attend = Callable[..., torch.Tensor]


def wan_attention(
    attn: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
    attend: Attend,
) -> torch.Tensor:
    """``[B, S_q, C]`` -> ``[B, S_q, C]``; ``attend(query, key, value, ...)`` is on [B, S, H, D].

    Raises:
        ValueError: with image keys, when the context is missing or shorter than the text.
    """
    image_context = None
    if attn.add_k_proj is not None:
        image_context, encoder_hidden_states = _split_context(encoder_hidden_states)

    query, key, value = _project(attn, hidden_states, encoder_hidden_states)
    query, key = attn.norm_q(query), attn.norm_k(key)
    if rotary_emb is not None:
        cosine, sine = _flat_tables(rotary_emb, attn.heads)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
    query = _split_heads(attn, query)

    out = attend(query, _split_heads(attn, key), _split_heads(attn, value), attention_mask)
    out = out.flatten(2, 3)
    if image_context is not None:
        key, value = _project_image(attn, image_context)
        key = _split_heads(attn, attn.norm_added_k(key))
        image_out = attend(query, key, _split_heads(attn, value), part=IMAGE_PART)
        out = out + image_out.flatten(2, 3)

    projection, dropout = attn.to_out
    return dropout(projection(out))


def _split_context(
    context: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Image and text parts of an image-to-video context ``[B, image tokens + 512, C]``.

    The boundary is wherever 512 tokens remain, so only a context below 512 shows that the text was
    shorter; a text of another length beside enough image tokens cannot be told from a right one.
    """
    if context is None or context.shape[1] < TEXT_LENGTH:
        given = "none" if context is None else f"{context.shape[1]} tokens"
        raise ValueError(
            f"encoder_hidden_states: got {given}; a Wan image-to-video transformer takes its image "
            f"tokens followed by exactly {TEXT_LENGTH} text tokens. Encode the prompt with "
            f"max_sequence_length={TEXT_LENGTH}."
        )
    image_length = context.shape[1] - TEXT_LENGTH
    if image_length == 0:
        return None, context
    return context[:, :image_length], context[:, image_length:]


def _project(
    attn: Any, hidden_states: torch.Tensor, context: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = hidden_states if context is None else context
    if not getattr(attn, "fused_projections", False):
        return attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
    if attn.is_cross_attention:
        key, value = attn.to_kv(source).chunk(2, dim=-1)
        return attn.to_q(hidden_states), key, value
    query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    return query, key, value


def _project_image(attn: Any, image_context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_added_kv(image_context).chunk(2, dim=-1)
        return key, value
    return attn.add_k_proj(image_context), attn.add_v_proj(image_context)


def _split_heads(attn: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(2, (attn.heads, -1))


def _flat_tables(
    rotary_emb: tuple[torch.Tensor, torch.Tensor], heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine for every channel, ``[1, S, 1, D]`` -> ``[1, S, H * D]``.

    A pair (x1, x2) of channels becomes (x1 cos - x2 sin, x1 sin + x2 cos), with the cosine of the
    pair's first entry in the table and the sine of its second.
    """
    cosine, sine = (table.flatten(2) for table in rotary_emb)
    first = _first_of_pair(cosine)
    cosine = torch.where(first, cosine, _shifted(cosine, 1))
    sine = torch.where(first, -_shifted(sine, -1), sine)
    return torch.cat([cosine] * heads, dim=-1), torch.cat([sine] * heads, dim=-1)


def _rotate(tensor: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Interleaved rotary embedding on ``[B, S, H * D]``.

    The partner of a channel comes from a shift and a select, which need no copy on a TPU where
    slices with a stride of two do.
    """
    partner = torch.where(_first_of_pair(tensor), _shifted(tensor, -1), _shifted(tensor, 1))
    return (tensor * cosine + partner * sine).type_as(tensor)


def _first_of_pair(tensor: torch.Tensor) -> torch.Tensor:
    lane = torch.arange(tensor.shape[-1], dtype=torch.int32, device=tensor.device)
    return lane & 1 == 0


def _shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Channels moved up by ``by``; what moves in is 0 and, for pairs, never used."""
    return torch.nn.functional.pad(tensor, (by, -by))
