"""Checkpoint directories: what is read of them, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from certify.checkpoint import Checkpoint, open_checkpoints
from certify.static import static_certificates
from tests.certify.static_cases import SCENARIOS, certificate, write_checkpoint
from tests.certify.static_models import MODELS, make, save


def read_norms(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: checkpoint.read(name) for name in checkpoint.entries if "_norm." in name}


@pytest.fixture
def model() -> Any:
    return make(MODELS["Qwen3Model"])


def bounds_of(path: Path) -> list[list[float]]:
    return [found.logit_bound.tolist() for found in static_certificates(path)]


def test_every_float_format_is_read(model: Any, tmp_path: Path) -> None:
    """Catches bytes read as another type, or from another place of the file."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        path = save(model.to(dtype), tmp_path / str(dtype))
        (checkpoint,) = open_checkpoints(path)
        stored = model.state_dict()
        norms = read_norms(checkpoint)
        assert len(norms) == 4
        for name, values in norms.items():
            assert np.array_equal(values, stored[name].double().numpy()), (dtype, name)


def test_shards_are_one_checkpoint(model: Any, tmp_path: Path) -> None:
    """Catches a tensor looked for in another shard."""
    whole = save(model, tmp_path / "whole")
    parts = save(model, tmp_path / "parts", max_shard_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 3
    assert bounds_of(whole) == bounds_of(parts) != []


def test_only_norms_are_read(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a checkpoint of 30 GB being read to look at kilobytes."""
    path = save(model, tmp_path)
    read: list[str] = []
    original = Checkpoint.read

    def reading(checkpoint: Checkpoint, name: str) -> Any:
        read.append(name)
        return original(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "read", reading)
    assert len(static_certificates(path)) == 2
    assert len(read) == 4 and all(name.endswith("_norm.weight") for name in read)


def test_pipelines_give_both_transformers(tmp_path: Path) -> None:
    """Catches a second expert left out, and a text encoder certified as part of a pipeline."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    scenario = SCENARIOS["wan_self_attention"]()
    tensors = {f"{scenario.layer}.{name}": array for name, array in scenario.tensors.items()}
    for part in ("transformer", "transformer_2", "text_encoder"):
        write_checkpoint(tmp_path / part, scenario.config, tensors, name="diffusion_pytorch_model")
    layers = [found.layer for found in static_certificates(tmp_path)]
    assert layers == ["transformer.blocks.0.attn1", "transformer_2.blocks.0.attn1"]


def test_layers_come_in_natural_order(tmp_path: Path) -> None:
    """Catches layer 10 before layer 2."""
    scenario = SCENARIOS["qwen3"]()
    tensors = {
        f"model.layers.{index}.self_attn.{name}": array
        for index in (10, 2, 0)
        for name, array in scenario.tensors.items()
    }
    write_checkpoint(tmp_path, scenario.config, tensors)
    layers = [found.layer.split(".")[2] for found in static_certificates(tmp_path)]
    assert layers == ["0", "2", "10"]


def truncate(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])


def garbage(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.write_bytes(b"PK\x03\x04 not what its name says")


def pickle_only(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.rename(path / "pytorch_model.bin")


def no_weights_at_all(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    file.unlink()


def several_variants(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    for name in ("a.fp16.safetensors", "a.safetensors"):
        (path / name).write_bytes(file.read_bytes())
    file.unlink()


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def write_index(weight_map: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (file,) = path.glob("*.safetensors")
        file.rename(path / "part.safetensors")
        text = json.dumps({"weight_map": weight_map})
        (path / "model.safetensors.index.json").write_text(text)

    return write


NORM = "model.layers.0.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "not a complete .safetensors file"),
        (garbage, "not a complete .safetensors file"),
        (pickle_only, "a pickle, which is not opened"),
        (no_weights_at_all, "has no .safetensors file"),
        (several_variants, "holds 2 .safetensors files"),
        (lambda path: (path / "config.json").unlink(), "config.json: cannot be read"),
        (lambda path: (path / "config.json").write_text("{"), "not JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "not a JSON object"),
        (lambda path: (path / "config.json").write_bytes(b"\xff\xfe\x00"), "not JSON"),
        (change_config(head_dim=16), r"needs \[16\]"),
        (change_config(num_attention_heads=3), "do not divide"),
        (change_config(num_attention_heads="many"), "must be a number above 0"),
        (change_config(num_attention_heads=-4), "must be a number above 0"),
        (change_config(num_attention_heads=10**9), "no model has above"),
        (change_config(num_attention_heads=float("inf")), "no model has above"),
        (change_config(rope_scaling=5, head_dim=-1), "must be a number above 0"),
        (write_index({NORM: "gone.safetensors"}), "shard gone.safetensors is missing"),
        (write_index({NORM: "../part.safetensors"}), "not a file beside it"),
        (write_index({"a.b": "part.safetensors"}), "lacks a.b"),
        (write_index({}), "no weight_map"),
        (write_index(["part.safetensors"]), "no weight_map"),
    ],
)
def test_damaged_checkpoints_are_refused(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    """Catches a traceback, an unpickled file, and a claim from half a checkpoint."""
    scenario = SCENARIOS["qwen3"]()
    tensors = {f"{scenario.layer}.{name}": array for name, array in scenario.tensors.items()}
    write_checkpoint(tmp_path, scenario.config, tensors)
    assert static_certificates(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=words) as raised:
        static_certificates(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["nowhere", "a_file", "pipeline"])
def test_paths_that_are_no_checkpoint(name: str, tmp_path: Path) -> None:
    """Catches an error that does not say what to give instead."""
    (tmp_path / "a_file").write_text("")
    (tmp_path / "pipeline" / "unet").mkdir(parents=True)
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match=name):
        static_certificates(tmp_path / name)


@pytest.mark.parametrize(
    ("scenario_name", "tensors"),
    [
        ("qwen3", {"q_proj.weight": np.zeros((33, 4))}),
        ("qwen3", {"k_proj.weight": np.zeros((32, 4))}),
        ("qwen3", {"k_norm.weight": np.zeros(16)}),
        ("olmo2", {"q_norm.weight": np.zeros(16)}),
        ("cohere", {"q_norm.weight": np.zeros(8)}),
        ("bias_of_keys", {"norm_k.bias": np.zeros(9)}),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    scenario_name: str, tensors: dict[str, np.ndarray]
) -> None:
    """Catches a weight spread over heads that it was not stored for."""
    scenario = SCENARIOS[scenario_name]()
    with pytest.raises(ValueError, match="not of one model"):
        certificate(scenario.config, scenario.layer, {**scenario.tensors, **tensors})


def test_quantised_norms_are_refused(tmp_path: Path) -> None:
    """Catches integers read as weights."""
    scenario = SCENARIOS["qwen3"]()
    write_checkpoint(tmp_path, scenario.config, {NORM: np.zeros(8)})
    file = tmp_path / "model.safetensors"
    data = file.read_bytes().replace(b'"F32"', b'"I32"')
    file.write_bytes(data)
    (checkpoint,) = open_checkpoints(tmp_path)
    with pytest.raises(ValueError, match="dtype I32"):
        checkpoint.read(NORM)
    with pytest.raises(ValueError, match="no tensor missing"):
        checkpoint.read("missing")
