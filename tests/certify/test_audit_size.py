"""A recording of a whole Wan 2.2 run, 40 layers x 40 heads x 80 calls at 75,600 tokens: 568 MB.

Run with ``-m slow -s`` to see the seconds and the memory.
"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from certify.recording import CERTIFICATE_FIELDS, LayerPasses, LayerSettings, write_recording
from tests.certify.recordings import CERTIFIED, block, recording_of

LAYERS, HEADS, CALLS, BLOCKS, TOKENS = 40, 40, 80, 37, 75_600

AUDIT = """
import resource, sys, time
from certify.audit import audit_recording
started = time.perf_counter()
result = audit_recording(sys.argv[1], tolerance=2**-11)
seconds = time.perf_counter() - started
print(sum(result.counts), seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def write_wan(path: Path) -> None:
    """Gaps, row sums and verdicts that belong together, of every size."""
    rng = np.random.default_rng(0)
    settings = LayerSettings(
        head_dim=128,
        dtype="bfloat16",
        scale=128**-0.5,
        num_queries=TOKENS,
        num_keys=TOKENS,
        heads=HEADS,
        key_heads=HEADS,
        block_q=-(-TOKENS // BLOCKS),
    )
    layers = []
    for index in range(LAYERS):
        lanes = np.array(list(block(num_keys=TOKENS).values()), np.float32)
        shape = (CALLS, 1, HEADS, BLOCKS)
        bounds = np.tile(lanes, (*shape, 1))
        gap = rng.gamma(3.0, 12.0 * (1 + index / 10), (CALLS, 1, HEADS, 1)).astype(np.float32)
        gap = gap + rng.gamma(2.0, 3.0, shape).astype(np.float32)
        for family in range(8):
            bounds[..., 2 * family] = bounds[..., 2 * family + 1] + gap * (1.0 + family / 10)
        certificate = np.full((*shape, len(CERTIFICATE_FIELDS)), np.nan, np.float32)
        certificate[..., 0] = CERTIFIED
        certificate[..., 5:] = 1.0
        passes = np.arange(CALLS, dtype=np.int32)
        layers.append(LayerPasses(f"blocks.{index}.attn1", settings, bounds, certificate, passes))
    write_recording(path, recording_of(*layers))


@pytest.mark.slow
def test_a_whole_wan_recording(tmp_path: Path) -> None:
    """Under 10 s and 1 GB. Catches a recording that is read whole, or block by block."""
    path = tmp_path / "wan.safetensors"
    # In a process of its own, so that its memory is not this one's.
    writer = get_context("spawn").Process(target=write_wan, args=(path,))
    writer.start()
    writer.join()
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, str(path)], capture_output=True, text=True, check=True
    )
    count, seconds, gigabytes = (float(number) for number in done.stdout.split())
    print(f"{path.stat().st_size / 1e6:.0f} MB: {seconds:.1f} s, {gigabytes:.2f} GB at most")
    assert count == LAYERS * HEADS * CALLS * BLOCKS
    assert seconds < 10.0 and gigabytes < 1.0
