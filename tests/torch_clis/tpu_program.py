"""Traces the op or a Wan attention layer for TPU, compiles it ahead of time, prints its HLO text.

Run as a program: libtpu reads its environment before jax is imported, once per process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v6e-1",
    JAX_PLATFORMS="cpu",
    PJRT_DEVICE="CPU",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import torch
import torch_xla
from jax.experimental import topologies
from jaxlib import _jax, xla_client

import torch_clis
from torch_clis import lowering

HEADS, HEAD_DIM = 5, 128


def op_program(length: int) -> list[torch.Tensor]:
    """The op on ``[B, S, H * D]`` as projections leave it, and its verdicts."""
    flat = (
        torch.zeros(1, length, HEADS * HEAD_DIM, dtype=torch.bfloat16).to(torch_xla.device())
        for _ in range(3)
    )
    query, key, value = (tensor.unflatten(2, (HEADS, HEAD_DIM)) for tensor in flat)
    out, certificate = torch_clis.attention(query, key, value, return_certificate=True)
    return [out.flatten(2), certificate["verdict"]]


def layer_program(length: int, recorder: torch_clis.Recorder | None = None) -> list[torch.Tensor]:
    """A Wan self-attention layer with its norms and rotary embedding."""
    from diffusers.models.transformers.transformer_wan import WanAttention

    device = torch_xla.device()
    processor = torch_clis.CLiSProcessor(record=recorder)
    dim = HEADS * HEAD_DIM
    layer = WanAttention(dim=dim, heads=HEADS, dim_head=HEAD_DIM, processor=processor)
    layer = layer.to(torch.bfloat16).to(device).eval()
    hidden_states = torch.zeros(1, length, dim, dtype=torch.bfloat16).to(device)
    tables = tuple(torch.zeros(1, length, 1, HEAD_DIM).to(device) for _ in range(2))
    return [layer(hidden_states, None, None, tables)]


def recorded_layer_program(length: int) -> list[torch.Tensor]:
    """The same, and what is recorded of it."""
    recorder = torch_clis.Recorder(keep_tensors=1)
    tensors = layer_program(length, recorder)
    (layer,) = recorder._layers.values()
    assert layer.kept is not None
    return [*tensors, *layer.calls[0].tensors, *layer.kept._state]


def compiled_text(tensors: list[torch.Tensor], topology: str) -> str:
    """HLO text of the program that computes ``tensors``, compiled for one device of a topology."""
    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(tensors)
    module = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(proto))
    device: Any = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    options = xla_client.CompileOptions()
    options.executable_build_options.use_shardy_partitioner = False
    executable = device.client.compile(
        module.encode(), executable_devices=_jax.DeviceList((device,)), compile_options=options
    )
    return str(executable.hlo_modules()[0].to_string())


def main() -> None:
    program, length, topology = sys.argv[1:]
    programs: dict[str, Callable[[int], list[torch.Tensor]]] = {
        "op": op_program,
        "layer": layer_program,
        "recorded": recorded_layer_program,
    }
    with torch.no_grad(), lowering.target_platform("tpu"):
        tensors = programs[program](int(length))
    print(compiled_text(tensors, topology))


if __name__ == "__main__":
    main()
