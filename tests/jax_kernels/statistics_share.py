"""What statistics of K and V cost beside the attention, by the TPU compiler's schedule, as JSON.

    python statistics_share.py TARGET S HEADS HEAD_DIM

A program of its own, since the compiler reads its settings before jax is imported. It compiles the
whole op ahead of time and reads the schedule of each kernel: the core issues one bundle a cycle, so
that the bundles which a grid step runs are its cycles, waits for memory aside. Everything outside
the kernels, as the compiler estimates it, is counted as statistics. An estimate, not a run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

KERNELS = ("clis_statistics", "clis_sentinels", "clis_fixed")


@dataclass
class Region:
    """Bundles from ``start`` to ``end`` that a branch can skip, and the regions inside."""

    start: int
    end: int
    inside: list[Region] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def own(self) -> int:
        return self.size - sum(part.size for part in self.inside)

    def place(self, part: Region) -> None:
        """Put a region where it belongs among those inside."""
        for other in self.inside:
            if other.start <= part.start and part.end <= other.end:
                other.place(part)
                return
        self.inside.append(part)


def read_schedule(text: str) -> Region:
    """The nested regions of a kernel's final bundles, in order; regions under 64 bundles aside."""
    bundles = [line for line in text.splitlines() if re.match(r"\s*0x[0-9a-f]+", line)]
    whole = Region(0, len(bundles))
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for index, line in enumerate(bundles):
        branch = re.search(r"sbr\.rel .*?target = \$region(\d+)", line)
        if branch:
            starts[int(branch.group(1))] = index
        for region in re.findall(r"End (?:empty )?region (\d+)", line):
            ends.setdefault(int(region), index)
    found = [Region(starts[name], ends[name]) for name in starts if name in ends]
    for region in sorted(found, key=lambda part: (part.start, -part.end)):
        if region.size >= 64:
            whole.place(region)
    return whole


def main_body(whole: Region) -> tuple[int, list[Region]]:
    """Bundles that every grid step may run, and the bodies that some steps run, in order."""
    body = max(whole.inside, key=lambda region: region.size)
    bodies = [part for part in body.inside if part.size > 400]
    return whole.size - sum(part.size for part in bodies), bodies


def cycles(schedules: list[Region], groups: int, length: int) -> dict[str, int]:
    """Cycles of each kernel over its whole grid, by the schedule."""
    from jax_kernels.config import choose_block_sizes
    from jax_kernels.statistics import (
        BLOCKS_PER_STEP,
        KEYS_PER_BLOCK,
        NUM_SENTINELS,
        SENTINELS_PER_STEP,
    )

    statistics, sentinels, fixed = schedules
    steps = -(-length // (BLOCKS_PER_STEP * KEYS_PER_BLOCK))
    every, (full, tail) = main_body(statistics)
    scan = groups * (steps * every + full.size + (steps - 2) * full.own + tail.own)
    gather = groups * (NUM_SENTINELS // SENTINELS_PER_STEP) * sentinels.size
    sizes = choose_block_sizes(length, length, 128)
    query_blocks, kv_blocks = -(-length // sizes.block_q), -(-length // sizes.block_kv)
    _, (begin, body, end) = main_body(fixed)
    every = fixed.own  # less than it takes, so that the share is no better than it is
    query_block = kv_blocks * every + begin.size + (kv_blocks - 1) * body.size + end.size
    attention = groups * query_blocks * query_block
    return dict(zip(KERNELS, (scan, gather, attention), strict=True))


def estimated_cycles(text: str) -> int:
    """What the compiler estimates for everything in the entry computation but the kernels."""
    entry = text[text.index("\nENTRY ") :]
    return sum(int(number) for number in re.findall(r'"estimated_cycles":"(\d+)"', entry))


def final_bundles(directory: Path) -> Iterator[str]:
    """Schedules of the kernels, in the order in which the program runs them."""
    files = [path for path in directory.iterdir() if "schedule" not in path.name]
    numbered = {}
    for path in files:
        match = re.search(r"-_differentiable\.(\d+)-\d+-final_bundles\.txt$", path.name)
        if match:
            numbered[int(match.group(1))] = path
    for _, path in sorted(numbered.items()):
        yield path.read_text()


def measure(
    target: str, length: int, heads: int, head_dim: int, directory: Path
) -> dict[str, object]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from jax_kernels import attention
    from tests.jax_kernels.compile_for_tpu import TOPOLOGIES

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target])
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def op(query: jax.Array, key: jax.Array, value: jax.Array) -> object:
        split = (x.reshape(1, length, heads, head_dim) for x in (query, key, value))
        return attention(*split, interpret=False).reshape(query.shape)

    shape = jax.ShapeDtypeStruct((1, length, heads * head_dim), jnp.bfloat16, sharding=sharding)
    lowered = jax.jit(op).trace(shape, shape, shape).lower(lowering_platforms=("tpu",))
    text = lowered.compile().as_text()
    schedules = [read_schedule(each) for each in final_bundles(directory)]
    found = cycles(schedules, heads, length)
    outside = estimated_cycles(text)
    statistics = found["clis_statistics"] + found["clis_sentinels"] + outside
    total = statistics + found["clis_fixed"]
    return {**found, "outside": outside, "total": total, "share": statistics / total}


def main() -> None:
    target, length, heads, head_dim = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        found = measure(target, int(length), int(heads), int(head_dim), Path(directory))
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v6e-1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    main()
