"""Which attention the transformers run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from wan_video.request import CERTIFIED_ATTENTIONS, Request


def install(request: Request, experts: dict[str, Any]) -> Any | None:
    """Set one CLiSProcessor on all experts and return it; None for native attention.

    Layers of the second expert carry its name.
    """
    if request.attention not in CERTIFIED_ATTENTIONS:
        return None
    from torch_clis import CLiSProcessor, Recorder

    processor = CLiSProcessor(
        path="auto" if request.attention == "clis" else "online",
        record=None if request.record is None else Recorder(keep_tensors=request.keep_tensors),
    )
    for name, transformer in experts.items():
        transformer.set_attn_processor(processor)
        processor.name_layers(transformer, prefix="" if name == "transformer" else f"{name}.")
    return processor


@contextlib.contextmanager
def context(attention: str) -> Iterator[None]:
    """What must hold while the transformers run.

    torch widens bfloat16 to float32 inside its attention. `native-bfloat16` forbids that: a
    yardstick, which differs from `native` by the dtype of accumulation and by nothing else.
    """
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(attention == "native-bfloat16")
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
