"""`Recorder`: what it holds against the model's real logits, and how much of it."""

from __future__ import annotations

import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from certify import RECORD_FIELDS
from certify.bounds import RECORDED_BOUNDS
from certify.recording import CERTIFICATE_FIELDS, LayerPasses, read_recording
from tests.torch_clis.helpers import definition, moved, random_inputs
from torch_clis import Recorder
from torch_clis.ops import attention_op

TOLERANCE = 2.0**-12
BYTES_PER_BLOCK = 4 * (len(RECORD_FIELDS) + len(CERTIFICATE_FIELDS))


def _lanes(layer: LayerPasses) -> dict[str, np.ndarray]:
    return {name: layer.bounds[..., lane] for lane, name in enumerate(RECORD_FIELDS)}


def _call(recorder: Recorder, inputs: Any, name: str = "layer", **options: Any) -> torch.Tensor:
    """Attend on [B, S, H, D] by the op, and record it."""
    masks = (options.get("attn_mask"), options.get("key_lengths"))
    settings = (options.get("scale"), options.get("causal", False), TOLERANCE, "auto")
    out, lse, certificate = attention_op(*inputs, *masks, *settings)
    recorder.add(name, *inputs, lse=lse, certificate=certificate, **options)
    assert isinstance(out, torch.Tensor)
    return out


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 1.5},
    "causal": {"causal": True},
    "lengths": {"key_lengths": torch.tensor([37, 70])},
    "bool": {"attn_mask": torch.arange(90) % 3 > 0},
    "additive": {"attn_mask": torch.linspace(-9, 4, 90).masked_fill(torch.arange(90) < 7, -1e30)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_the_real_log_sum_exp(
    kind: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Fault: a mask, scale, head or batch element of another call; bits for nats; S and L swapped.

    One query, so that the block's worst row is that query: L <= log2 sum 2^logit <= S must hold.
    """
    inputs = random_inputs(generator, (2, 1, 4, 32), (2, 90, 2, 32), dtype)
    options = dict(KINDS[kind])
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].view(1, 1, 1, 90)
    definitions = {"is_causal" if name == "causal" else name: o for name, o in options.items()}
    _, lse = definition(*inputs, **definitions)
    bits = (lse / math.log(2)).squeeze(-1).numpy()
    recorder = Recorder()
    on_device: dict[str, Any] = {
        name: option.to(device) if isinstance(option, torch.Tensor) else option
        for name, option in options.items()
    }
    _call(recorder, moved(inputs, device), **on_device)
    (layer,) = recorder.recording().layers
    lanes = _lanes(layer)
    held = 0
    for family in RECORDED_BOUNDS:
        upper, lower = lanes[f"upper:{family}"][0, ..., 0], lanes[f"lower:{family}"][0, ..., 0]
        if family == "soft cap":
            assert np.isnan(upper).all()
            continue
        # A family without a bound on one side, under a mask, says so by a huge number.
        assert (lower <= bits).all() and (bits <= upper).all(), family
        held += int((upper - lower < 60).all())
    assert held >= 2
    assert (lanes["visible_rows"] == 1).all() and (lanes["num_keys"] <= 90).all()
    assert layer.settings.masked == (kind in ("lengths", "bool", "additive"))
    assert layer.settings.causal == (kind == "causal")


def test_row_sums_are_those_of_the_kernel(
    xla_device: torch.device, generator: torch.Generator
) -> None:
    """Fault: the log-sum-exp is not handed over, or another stabilizer's row sums are recorded."""
    inputs = moved(random_inputs(generator, (1, 70, 2, 64), (1, 1500, 2, 64)), xla_device)
    recorder = Recorder()
    _call(recorder, inputs)
    (layer,) = recorder.recording().layers
    certificate = dict(zip(CERTIFICATE_FIELDS, np.moveaxis(layer.certificate, -1, 0), strict=True))
    assert (certificate["verdict"] == 0).all()
    lanes = _lanes(layer)
    for side in ("min", "max"):
        measured = np.log2(certificate[f"row_sum_{side}"])
        # The recorded bounds and the kernel's may round to neighbouring stabilizers.
        assert np.abs(lanes[f"row_sum_log2_{side}"] - measured).max() <= 1.01


def test_both_devices_record_the_same(xla_device: torch.device, generator: torch.Generator) -> None:
    """Fault: the lowered function gets its arrays in another order, or drops one."""
    inputs = random_inputs(generator, (2, 40, 4, 32), (2, 90, 2, 32))
    mask = torch.rand(2, 1, 40, 90, generator=generator) < 0.7
    layers = []
    for device in (torch.device("cpu"), xla_device):
        recorder = Recorder()
        _call(recorder, moved(inputs, device), attn_mask=mask.to(device), scale=0.4)
        (layer,) = recorder.recording().layers
        layers.append(layer)
    host, lazy = layers
    assert host.settings == lazy.settings
    np.testing.assert_allclose(lazy.bounds, host.bounds, rtol=1e-3, atol=1e-2)


def test_kept_rows_are_the_first_call(device: torch.device, generator: torch.Generator) -> None:
    """Fault: rows of another head, batch element or call; another dtype; keys in another order."""
    calls = [
        random_inputs(generator, (2, 130, 4, 32), (2, 50, 2, 32), torch.bfloat16) for _ in range(3)
    ]
    recorder = Recorder(keep_tensors=3)
    for call in calls:
        _call(recorder, moved(call, device), causal=True)
    (layer,) = recorder.recording().layers
    query, key, value = calls[0]
    places = [(kept.batch, kept.head) for kept in layer.kept]
    assert len(set(places)) == 3 and {batch for batch, _ in places} == {0, 1}
    for kept in layer.kept:
        assert kept.pass_index == 0 and kept.query.dtype == "bfloat16"
        assert 30 < len(kept.rows) <= 64
        rows = query[kept.batch, torch.from_numpy(kept.rows), kept.head].float()
        assert torch.equal(torch.from_numpy(kept.query.values), rows)
        keys = key[kept.batch, :, kept.head // 2].float()
        assert torch.equal(torch.from_numpy(kept.key.values), keys)
        largest = value[kept.batch, :, kept.head // 2].float().abs().amax(-1)
        assert torch.equal(torch.from_numpy(kept.value_max), largest)


def test_masked_calls_keep_no_rows(generator: torch.Generator) -> None:
    """Fault: S and L are computed again without the mask, and the recording is called wrong."""
    inputs = random_inputs(generator, (1, 20, 2, 16))
    recorder = Recorder(keep_tensors=1)
    _call(recorder, inputs, key_lengths=torch.tensor([9]))
    (layer,) = recorder.recording().layers
    assert layer.kept == ()


def test_shapes_of_a_layer_are_told_apart(tmp_path: Path, generator: torch.Generator) -> None:
    """Fault: a call of another shape breaks the file, or calls are numbered per shape."""
    recorder = Recorder(tmp_path / "calls.safetensors")
    for length in (20, 30, 20):
        _call(recorder, random_inputs(generator, (1, length, 2, 16)))
    found = read_recording(recorder.save(model="a test"))
    layers = {layer.settings.num_queries: layer for layer in found.layers}
    assert {layer.name for layer in found.layers} == {"layer"}
    assert layers[20].passes.tolist() == [0, 2] and layers[30].passes.tolist() == [1]
    assert found.settings == {"model": "a test"} and found.tolerance == TOLERANCE


def test_size_is_bounded(tmp_path: Path, generator: torch.Generator) -> None:
    """Fault: a long run fills memory; what is left out is not said, or said at every call."""
    inputs = random_inputs(generator, (1, 20, 2, 16))
    of_call = 2 * BYTES_PER_BLOCK
    recorder = Recorder(tmp_path / "calls.safetensors", max_bytes=3 * of_call + of_call // 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            _call(recorder, inputs)
    assert [str(warning.message) for warning in caught] == [
        f"attention call not recorded: the recording has reached max_bytes ({recorder.max_bytes}); "
        "it counts what it leaves out."
    ]
    assert (recorder.passes_recorded, recorder.passes_not_recorded) == (3, 7)
    found = read_recording(recorder.save())
    assert found.not_recorded == 7
    assert next(iter(found.layers)).bounds.nbytes <= recorder.max_bytes


def test_kept_rows_count_too(generator: torch.Generator) -> None:
    """Fault: the keys of long sequences are kept whatever max_bytes says, or silently not."""
    recorder = Recorder(keep_tensors=2, max_bytes=2 * BYTES_PER_BLOCK + 1000)
    _call(recorder, random_inputs(generator, (1, 64, 2, 16)))
    found = recorder.recording()
    (layer,) = found.layers
    assert layer.kept == () and found.settings == {"heads_not_kept": 2}


def test_threads_do_not_mix_calls_up(generator: torch.Generator) -> None:
    """Fault: two threads take one index, or one's bounds stand beside the other's certificate."""
    recorder = Recorder()
    inputs = random_inputs(generator, (1, 8, 1, 16))

    def work(scale: float) -> None:
        for _ in range(5):
            _call(recorder, inputs, name=f"layer {scale}", scale=scale)
            _call(recorder, inputs, name="shared", scale=0.25)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (0.1, 0.2, 0.3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passes = {layer.name: layer.passes.tolist() for layer in recorder.recording().layers}
    assert passes.pop("shared") == list(range(15))
    assert passes == {f"layer {scale}": list(range(5)) for scale in (0.1, 0.2, 0.3)}


def test_recorder_goes_on_after_saving(tmp_path: Path, generator: torch.Generator) -> None:
    """Fault: what was moved to the host is lost, or recorded twice, by the next save."""
    inputs = random_inputs(generator, (1, 8, 1, 16))
    recorder = Recorder()
    for saves in (1, 2, 3):
        _call(recorder, inputs)
        recorder.flush()
        (layer,) = read_recording(recorder.save(tmp_path / "calls.safetensors")).layers
        assert layer.passes.tolist() == list(range(saves))
    recorder.reset()
    assert recorder.passes_recorded == 0


def test_renaming(generator: torch.Generator) -> None:
    """Fault: a part of the layer keeps the old name; a name that only begins alike changes too."""
    inputs = random_inputs(generator, (1, 8, 1, 16))
    recorder = Recorder()
    for name in ("attention.1", "attention.1.image", "attention.10"):
        _call(recorder, inputs, name=name)
    recorder.rename("attention.1", "blocks.0.attn2")
    _call(recorder, inputs, name="blocks.0.attn2")
    passes = {layer.name: layer.passes.tolist() for layer in recorder.recording().layers}
    assert passes == {
        "blocks.0.attn2": [0, 1],
        "blocks.0.attn2.image": [0],
        "attention.10": [0],
    }
    with pytest.raises(ValueError, match=r"'attention.10' is already the name"):
        recorder.rename("blocks.0.attn2", "attention.10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "."}, r"path: \. is a directory"),
        ({"path": "no/such/place.safetensors"}, r"path: no/such.*lies in none"),
        ({"keep_tensors": -1}, r"keep_tensors: got -1; give 0"),
        ({"keep_tensors": True}, r"keep_tensors: got True"),
        ({"max_bytes": 1.5}, r"max_bytes: got 1.5"),
        ({"tolerance": 0.0}, r"tolerance: got 0.0"),
    ],
)
def test_settings_are_validated(options: dict[str, Any], message: str) -> None:
    """Fault: a wrong path or number costs the run whose recording cannot be written."""
    with pytest.raises(ValueError, match=message):
        Recorder(**options)


def test_nothing_to_save(tmp_path: Path) -> None:
    """Fault: an empty file that later looks like a perfect model."""
    with pytest.raises(ValueError, match=r"no attention call was recorded"):
        Recorder(tmp_path / "calls.safetensors").save()
    with pytest.raises(ValueError, match=r"no attention call was recorded"):
        Recorder().recording()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("aspect", ["test_schema", "test_faketensor"])
def test_opcheck(aspect: str, device: torch.device, generator: torch.Generator) -> None:
    """Fault: the fake's shape differs from the kernel's, so that tracing goes wrong."""
    inputs = moved(random_inputs(generator, (1, 24, 4, 64), (1, 33, 2, 64)), device)
    arguments = (*inputs, None, None, None, None, True, TOLERANCE)
    torch.library.opcheck(torch.ops.clis.record_bounds, arguments, test_utils=aspect)
