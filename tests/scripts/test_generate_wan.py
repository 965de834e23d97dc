"""generate_wan.py end to end on the tiny checkpoint, on the XLA CPU device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio.v2
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from certify.recording import read_recording

# 1,280 video tokens: more than one block of keys, so the fixed-stabilizer kernel runs.
CLIP = {"height": 256, "width": 256, "num_frames": 17, "steps": 3}
TOLERANCE = 1e-5
SMALL = {"height": 64, "width": 96, "num_frames": 9, "steps": 4}


@dataclass(frozen=True)
class Outcome:
    directory: Path
    latents: np.ndarray
    record: dict[str, Any]


def generate(directory: Path, model: Path, **options: Any) -> Outcome:
    """The script's command in this process; starting a new one would cost more than the run."""
    import generate_wan

    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "prompt": "a cat walks over the snow",
        "negative_prompt": "",
        "guidance_scale": 5.0,
        "seed": 0,
        "fps": 8,
        "dtype": "float32",
        "attention": "clis",
        "report": None,
        "record": None,
        "keep_tensors": 0,
        "compile_cache": None,
        **options,
    }
    generate_wan.main(
        model=str(model),
        output=directory / "video.mp4",
        latents=directory / "latents.safetensors",
        **settings,
    )
    record = json.loads((directory / "video.json").read_text())
    return Outcome(directory, load_file(directory / "latents.safetensors")["latents"], record)


@pytest.fixture(scope="module")
def runs(tiny_wan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The same clip with each attention, float32."""
    root = tmp_path_factory.mktemp("runs")
    files = {
        "report": root / "clis" / "report.html",
        "record": root / "clis" / "calls.safetensors",
        "keep_tensors": 1,
    }
    return {
        name: generate(
            root / name, tiny_wan, attention=name, **CLIP, **(files if name == "clis" else {})
        )
        for name in ("clis", "online", "native")
    }


def relative(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).max() / np.abs(second).max())


@pytest.mark.parametrize("attention", ["clis", "online"])
def test_latents_equal_native_attention(runs: dict[str, Outcome], attention: str) -> None:
    """Fault: a wrong scale, stabilizer, rotary embedding or head order. Measured: 4e-6."""
    assert np.isfinite(runs["native"].latents).all()
    assert relative(runs[attention].latents, runs["native"].latents) < TOLERANCE


def test_attention_matters_to_the_latents(
    tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a checkpoint whose attention hardly counts, so that the comparison proves little.

    Attention with a scale wrong by 1% must miss the tolerance by far; measured: 36 times.
    """
    import torch
    from torch.nn import functional

    right = generate(tmp_path / "right", tiny_wan, attention="native", **SMALL)
    plain = functional.scaled_dot_product_attention

    def slightly_wrong(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(query * 1.01, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", slightly_wrong)
    wrong = generate(tmp_path / "wrong", tiny_wan, attention="native", **SMALL)
    assert relative(wrong.latents, right.latents) > 10 * TOLERANCE


@pytest.mark.parametrize("attention", ["clis", "online", "native"])
def test_nothing_is_compiled_after_the_first_step(runs: dict[str, Outcome], attention: str) -> None:
    """Fault: a constant of the step in the graph, or totals whose first graph differs."""
    assert runs[attention].record["compilations_per_step"][1:] == [0] * (CLIP["steps"] - 1)


@pytest.mark.parametrize("attention", ["clis", "online", "native"])
def test_a_warm_step_is_one_program_and_one_transfer(
    runs: dict[str, Outcome], attention: str
) -> None:
    """Fault: a host sync inside a transformer call, an operation that falls back to the host.

    A recording is moved to the host after each step, in one more transfer.
    """
    recorded = runs[attention].record["settings"]["record"] is not None
    for step in runs[attention].record["steps"][1:]:
        assert step["executions"] == 1
        assert step["device_to_host"] == 1 + recorded
        assert step["fallbacks"] == 0


def test_every_query_block_has_a_verdict(runs: dict[str, Outcome]) -> None:
    """Fault: a layer, a head or a step that is not counted; guidance makes two calls a step."""
    rows = runs["clis"].record["certificates"]
    self_attention = [row for row in rows if row["layer"].endswith("attn1")]
    assert {row["layer"] for row in self_attention} == {"blocks.0.attn1", "blocks.1.attn1"}
    calls = 2 * CLIP["steps"]
    verdicts = ("certified", "verified", "recomputed", "exact")
    for row in rows:
        assert row["blocks"] > 0
        assert row["blocks"] % calls == 0
        assert sum(row[verdict] for verdict in verdicts) == row["blocks"]


def test_all_three_verdicts_occur(runs: dict[str, Outcome]) -> None:
    """Fault: a path that is never taken; the heads of the checkpoint range from smooth to sharp."""
    rows = runs["clis"].record["certificates"]
    for verdict in ("certified", "verified", "recomputed"):
        assert sum(row[verdict] for row in rows) > 0, verdict


def test_recording_is_that_of_the_run(runs: dict[str, Outcome]) -> None:
    """Fault: a step, guidance's second call, a layer or a verdict that is not recorded."""
    rows = runs["clis"].record["certificates"]
    recording = read_recording(runs["clis"].directory / "calls.safetensors")
    assert recording.settings["prompt"] == runs["clis"].record["settings"]["prompt"]
    assert recording.not_recorded == 0
    counted = {}
    for layer in recording.layers:
        assert layer.passes.tolist() == list(range(2 * CLIP["steps"]))
        assert len(layer.kept) == 1
        for head in range(layer.settings.heads):
            verdicts = layer.certificate[:, :, head, :, 0]
            counted[layer.name, head] = [int((verdicts == code).sum()) for code in range(4)]
    names = ("certified", "verified", "recomputed", "exact")
    assert counted == {(row["layer"], row["head"]): [row[name] for name in names] for row in rows}


def test_files_are_what_they_say(runs: dict[str, Outcome]) -> None:
    """Fault: a wrong number of frames, size or rate; a report without content; a stray file."""
    outcome = runs["clis"]
    names = {path.name for path in outcome.directory.iterdir()}
    expected = {"video.mp4", "video.png", "video.json", "latents.safetensors", "report.html"}
    assert names == expected | {"calls.safetensors"}
    with imageio.v2.get_reader(outcome.directory / "video.mp4") as reader:
        frames = [np.asarray(frame) for frame in reader]
        assert reader.get_meta_data()["fps"] == 8
    assert len(frames) == CLIP["num_frames"]
    assert frames[0].shape == (CLIP["height"], CLIP["width"], 3)
    assert np.std(frames[-1]) > 10
    assert np.abs(frames[0].astype(int) - frames[-1]).mean() > 5
    with Image.open(outcome.directory / "video.png") as sheet:
        assert sheet.width > 2 * CLIP["width"]
    assert "blocks.1.attn1" in (outcome.directory / "report.html").read_text()
    assert outcome.record["versions"]["torch"]
    assert len(outcome.record["steps"]) == CLIP["steps"]


def test_two_experts(tiny_wan_two_experts: Path, tmp_path: Path) -> None:
    """Fault: the second expert not run, not certified, or compiled again at every step.

    It has the first one's architecture, so even its first step needs no new program.
    """
    clis = generate(tmp_path / "clis", tiny_wan_two_experts, **SMALL)
    native = generate(tmp_path / "native", tiny_wan_two_experts, attention="native", **SMALL)
    experts = [step["expert"] for step in clis.record["steps"]]
    assert set(experts) == {"transformer", "transformer_2"}
    first_of_second = experts.index("transformer_2")
    compilations = clis.record["compilations_per_step"]
    later = compilations[1:first_of_second] + compilations[first_of_second + 1 :]
    assert later == [0] * (SMALL["steps"] - 2)
    layers = {row["layer"] for row in clis.record["certificates"]}
    assert {"blocks.0.attn1", "transformer_2.blocks.0.attn1"} <= layers
    assert relative(clis.latents, native.latents) < TOLERANCE


def test_bfloat16_keeps_rotary_tables_in_float32(tiny_wan: Path) -> None:
    """Fault: positions rounded to 8 bits, which shifts the video's geometry."""
    import torch

    from wan_video import loading

    pipeline = loading.load(tiny_wan, "bfloat16")
    assert pipeline.transformer.rope.freqs_cos.dtype == torch.float32
    assert pipeline.transformer.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert next(pipeline.vae.parameters()).dtype == torch.float32


def test_failed_write_keeps_the_other_files(
    tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a full disk at the very end loses the run, or leaves half a file."""
    from command_line import UserError
    from wan_video import outputs

    def fail(path: Path, content: dict[str, Any]) -> None:
        path.write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "write_json", fail)
    with pytest.raises(UserError, match=r"cannot write .*video\.json .No space left.*video\.mp4"):
        generate(tmp_path / "out", tiny_wan, attention="native", **{**SMALL, "steps": 1})
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"video.mp4", "video.png", "latents.safetensors"}


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    """Fault: Ctrl-C while writing leaves some of the files, or temporary ones."""
    from wan_video import outputs

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), outputs.staged() as staging:
        staging.write(tmp_path / "a.txt", lambda path: path.write_text("whole"))
        staging.write(tmp_path / "b.txt", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_longest_name_can_be_written(tmp_path: Path) -> None:
    """Fault: a temporary name longer than the final one, refused only after denoising."""
    from wan_video import outputs, request

    path = tmp_path / f"{'v' * 251}.mp4"
    request.check_writable(path)
    with outputs.staged() as staging:
        staging.write(path, lambda path: path.write_text("whole"))
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
