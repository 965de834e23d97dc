"""Compile the op ahead of time for a TPU and print what the compiled module holds, as JSON.

Run as a program: the compiler reads its settings from the environment before jax is imported.

    python compile_for_tpu.py TARGET S_q S_k HEADS HEAD_DIM DTYPE PATH

PATH is one of the op's, or "promise": "auto" with a bound on every logit of 60 bits.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from typing import Any

TOPOLOGIES = {"v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}

BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


def large_operations(text: str, at_least: int) -> list[str]:
    """Transposes, pads and copies of ``at_least`` bytes or more in a compiled module.

    An asynchronous copy between HBM and on-chip memory (``S(1)``) in one layout is how the compiler
    stages an operand; it is not a copy in HBM, and is left out.
    """
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(", line)
        if match is None:
            continue
        name, shapes, operation = match.groups()
        kind = re.search(r"copy|transpose|pad", f"{operation} {name}")
        if kind is None or operation in ("get-tuple-element", "bitcast", "parameter", "copy-done"):
            continue
        arrays = re.findall(r"\b(\w+)\[([\d,]*)\]\{([\d,]*)(:[^}]*)?\}", shapes)
        sizes = [
            BYTES.get(dtype, 4) * math.prod(int(d) for d in dims.split(",") if d)
            for dtype, dims, _, _ in arrays
        ]
        if operation == "copy-start":
            spaces = ["S(1)" in (tiling or "") for *_, tiling in arrays[:2]]
            layouts = {(dims, order) for _, dims, order, _ in arrays[:2]}
            if spaces[0] != spaces[1] and len(layouts) == 1:
                continue
        if max(sizes, default=0) >= at_least:
            found.append(f"{operation} {name} {shapes}")
    return found


def compile_op(
    target: str, lengths: tuple[int, int], heads: int, head_dim: int, dtype: str, path: str
) -> dict[str, Any]:
    """Compile ``attention`` on inputs [1, S, heads * head_dim], as projections leave them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    from jax_kernels import attention

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target])
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])

    promise = np.full(heads, 60.0, np.float32) if path == "promise" else None

    def op(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        split = (x.reshape(1, x.shape[1], heads, head_dim) for x in (query, key, value))
        out, lse, certificate = attention(
            *split,
            return_lse=True,
            return_certificate=True,
            path="auto" if path == "promise" else path,
            promise=promise,
            interpret=False,
        )
        return out.reshape(query.shape), lse, certificate

    width = heads * head_dim
    arguments = [
        jax.ShapeDtypeStruct((1, length, width), jnp.dtype(dtype), sharding=sharding)
        for length in (lengths[0], lengths[1], lengths[1])
    ]
    lowered = jax.jit(op).trace(*arguments).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    smallest = min(lengths) * width * jnp.dtype(dtype).itemsize
    text = compiled.as_text()
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "large_operations": large_operations(text, smallest),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "query_bytes": lengths[0] * width * jnp.dtype(dtype).itemsize,
    }


def main() -> None:
    target, query_length, key_length, heads, head_dim, dtype, path = sys.argv[1:]
    lengths = (int(query_length), int(key_length))
    print(json.dumps(compile_op(target, lengths, int(heads), int(head_dim), dtype, path)))


if __name__ == "__main__":
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v6e-1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    main()
