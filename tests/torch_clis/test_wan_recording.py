"""`CLiSProcessor(record=...)` in a Wan transformer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_clis
from certify.recording import CERTIFICATE_FIELDS, read_recording
from tests.torch_clis.helpers import on_host
from tests.torch_clis.test_wan_processor import _inputs, _run, _transformer
from torch_clis import CLiSProcessor, Recorder
from torch_clis.diffusers import processor as processor_module

LAYERS = [f"blocks.{block}.{kind}" for block in (0, 1) for kind in ("attn1", "attn2")]


def test_certificates_are_those_of_the_op(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: certificates of another layer or step, or of a call that was made again differently.

    The latents have 1,152 tokens, more than one block of keys, so the kernel judges them on XLA.
    """
    calls: list[tuple[torch.Tensor, ...]] = []
    plain = processor_module.attention_op

    def watched(*args: Any) -> Any:
        calls.append(args[:3])
        return plain(*args)

    monkeypatch.setattr(processor_module, "attention_op", watched)
    path = tmp_path / "calls.safetensors"
    processor = CLiSProcessor(record=path)
    model = _transformer()
    model.set_attn_processor(processor)
    processor.name_layers(model)
    model = model.to(device)
    inputs = _inputs()
    inputs["hidden_states"] = torch.randn(
        2, 4, 2, 48, 48, generator=torch.Generator().manual_seed(9)
    )
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    for _ in range(2):
        _run(model, inputs)
    assert processor.save_recording() == path
    monkeypatch.undo()
    layers = {layer.name: layer for layer in read_recording(path).layers}
    assert list(layers) == LAYERS
    judged = 0
    for index, (query, key, value) in enumerate(calls):
        layer = layers[LAYERS[index % len(LAYERS)]]
        step = layer.passes.tolist().index(index // len(LAYERS))
        _, fields = torch_clis.attention(query, key, value, return_certificate=True)
        wanted = on_host(*(fields[name].float() for name in CERTIFICATE_FIELDS))
        got = layer.certificate[step]
        exact = wanted[0] == 3
        for lane, field in enumerate(wanted):
            expected = torch.where(exact & field.isnan(), torch.zeros(()), field)
            assert torch.equal(torch.from_numpy(got[..., lane]), expected)
        judged += int((~exact).sum())
    assert (judged > 0) == (device.type == "xla")


@pytest.mark.parametrize("keep_tensors", [0, 2])
def test_steps_compile_once(xla_device: torch.device, keep_tensors: int) -> None:
    """Fault: the first step's kept rows, or its zeros, are another program than the second step's.

    Two transformer calls a step, as guidance makes them: one program for both, the same each step.
    """
    import torch_xla
    from torch_xla.debug import metrics

    model = _transformer()
    recorder = Recorder(keep_tensors=keep_tensors)
    processor = CLiSProcessor(record=recorder)
    model.set_attn_processor(processor)
    processor.name_layers(model)
    model = model.to(xla_device)
    inputs = {name: tensor.to(xla_device) for name, tensor in _inputs().items()}
    other = {name: tensor * 1.5 for name, tensor in inputs.items() if tensor.is_floating_point()}
    torch_xla.sync()

    def step() -> int:
        outs = [_run(model, inputs), _run(model, {**inputs, **other})]
        torch_xla.sync()
        assert {out.shape for out in outs} == {inputs["hidden_states"].shape}
        return int(metrics.counter_value("UncachedCompile"))

    transfers = metrics.metric_data("TransferFromDeviceTime")
    first = step()
    counts = [step()]
    assert metrics.metric_data("TransferFromDeviceTime") == transfers
    for _ in range(2):
        recorder.flush()
        counts.append(step())
    assert counts == [first] * 3
    layers = {layer.name: layer for layer in recorder.recording().layers}
    assert int(metrics.counter_value("UncachedCompile")) == first
    assert list(layers) == LAYERS
    for layer in layers.values():
        assert layer.passes.tolist() == list(range(8))
        assert [kept.pass_index for kept in layer.kept] == [0] * keep_tensors
        # The same inputs in every step, and not in both calls of one.
        assert np.array_equal(layer.bounds[:2], layer.bounds[-2:], equal_nan=True)
        assert not np.array_equal(layer.bounds[0], layer.bounds[1], equal_nan=True)
        for kept in layer.kept:
            assert np.abs(kept.query.values).max() > 0


@pytest.mark.parametrize("image", [False, True])
def test_same_bits(image: bool, device: torch.device) -> None:
    """Fault: recording changes what is computed. Parts of a layer are recorded under its name."""
    results = []
    recorder = Recorder(keep_tensors=1)
    for record in (None, recorder):
        model = _transformer(image=image)
        model.set_attn_processor(CLiSProcessor(record=record))
        model = model.to(device)
        inputs = {name: tensor.to(device) for name, tensor in _inputs(image).items()}
        results += on_host(_run(model, inputs))
    assert torch.equal(*results)
    parts = [f"attention.{i}{part}" for i in range(4) for part in ("", ".image")]
    expected = [name for name in parts if image or not name.endswith(".image")]
    names = [layer.name for layer in recorder.recording().layers]
    assert sorted(names) == sorted(
        name for name in expected if not name.endswith((".0.image", ".2.image"))
    )


def test_naming_may_come_later() -> None:
    """Fault: calls before name_layers stand apart from those after it, or keep their numbers."""
    recorder = Recorder()
    model, inputs = _transformer(), _inputs()
    processor = CLiSProcessor(record=recorder)
    model.set_attn_processor(processor)
    _run(model, inputs)
    processor.name_layers(model, prefix="net.")
    _run(model, inputs)
    passes = {layer.name: layer.passes.tolist() for layer in recorder.recording().layers}
    assert passes == {f"net.{name}": [0, 1] for name in LAYERS}
    processor.reset()
    assert recorder.passes_recorded == 0


def test_copies_do_not_record(tmp_path: Path) -> None:
    """Fault: a copied processor overwrites the recording of the first."""
    processor = CLiSProcessor(record=tmp_path / "calls.safetensors")
    assert copy.deepcopy(processor).recorder is None
    with pytest.raises(ValueError, match=r"does not record.*CLiSProcessor\(record=FILE\)"):
        CLiSProcessor().save_recording()
    with pytest.raises(ValueError, match=r"no attention call was recorded"):
        processor.save_recording()
    with pytest.raises(ValueError, match=r"path: got None and the recorder has none"):
        Recorder().save()
