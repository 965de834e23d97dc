"""Which attention the transformers run."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from wan_video.request import CERTIFIED_ATTENTIONS


class Float32Attention(TorchFunctionMode):
    """Runs `torch.nn.functional.scaled_dot_product_attention` in float32 and casts the result back.

    A yardstick: it differs from plain native attention by the dtype of accumulation and by nothing else.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        dtype = (args[0] if args else kwargs["query"]).dtype

        def widen(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.float() if floating else value

        wide = {name: widen(value) for name, value in kwargs.items()}
        return func(*map(widen, args), **wide).to(dtype)


def install(attention: str, experts: dict[str, Any]) -> dict[str, Any]:
    """Set the processors of each expert; the CLiS processors by expert's name, none for native attention."""
    if attention not in CERTIFIED_ATTENTIONS:
        return {}
    from torch_clis import CLiSProcessor

    processors = {}
    for name, transformer in experts.items():
        processor = CLiSProcessor(path="auto" if attention == "clis" else "online")
        transformer.set_attn_processor(processor)
        processor.name_layers(transformer)
        processors[name] = processor
    return processors


def context(attention: str) -> contextlib.AbstractContextManager[Any]:
    """What must be active while the transformers run."""
    return Float32Attention() if attention == "native-float32" else contextlib.nullcontext()


def certificate_rows(processors: dict[str, Any]) -> list[dict[str, Any]]:
    """The totals of all processors; layers of the second expert carry its name."""
    rows = []
    for name, processor in processors.items():
        prefix = "" if name == "transformer" else f"{name}."
        rows += [{**row, "layer": f"{prefix}{row['layer']}"} for row in processor.totals()]
    return rows
