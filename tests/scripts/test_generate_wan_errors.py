"""Bad input to generate_wan.py: one line on stderr, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

RunScript = Callable[..., subprocess.CompletedProcess[str]]

PROMPT = ("--prompt", "a cat")


def assert_refused(
    done: subprocess.CompletedProcess[str], *words: str, empty: Path | None = None
) -> None:
    """Fault: a traceback, a boxed usage text, exit code 1, no remedy, a stray file."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    if empty is not None:
        assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--height", "100"), ("--height is 100", "multiple of 16", "96 or 112")),
        (("--width", "8"), ("--width is 8", "multiple of 16", "such as 16")),
        (("--width", "-16"), ("--width is -16", "multiple of 16")),
        (("--num-frames", "16"), ("--num-frames is 16", "4k + 1", "13 or 17")),
        (("--num-frames", "0"), ("--num-frames is 0", "4k + 1")),
        (("--steps", "0"), ("--steps is 0", "1 or more")),
        (("--fps", "0"), ("--fps is 0", "1 or more")),
        (("--seed", "-1"), ("--seed is -1",)),
        (("--guidance-scale", "nan"), ("--guidance-scale", "0 or more")),
        (("--attention", "flash"), ("'flash'", "clis, online, native")),
        (("--dtype", "float16"), ("'float16'", "bfloat16, float32")),
        (("--attention", "native", "--report", "r.html"), ("--report", "--attention clis")),
        (("--attention", "native-bfloat16", "--dtype", "float32"), ("native-bfloat16", "use")),
        (("--report", "r.txt"), ("--report", ".html")),
        (("--attention", "native", "--record", "r.safetensors"), ("--record", "--attention clis")),
        (("--record", "r.txt"), ("--record", ".safetensors")),
        (("--keep-tensors", "2"), ("--keep-tensors", "--record FILE")),
        (("--record", "r.safetensors", "--keep-tensors", "-1"), ("--keep-tensors is -1",)),
        (("--steps", "many"), ("--steps", "--help")),
        (("--unknown",), ("--unknown", "--help")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_bad_option(
    run_script: RunScript,
    tiny_wan: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    output = tmp_path / "video.mp4"
    done = run_script(
        "generate_wan.py", "--model", tiny_wan, *PROMPT, "--output", output, *arguments
    )
    assert_refused(done, *words, empty=tmp_path)


def test_missing_model_directory(run_script: RunScript, tmp_path: Path) -> None:
    done = run_script(
        "generate_wan.py", "--model", tmp_path / "absent", *PROMPT, "--output", tmp_path / "v.mp4"
    )
    assert_refused(done, "there is no directory", "make_tiny_checkpoint.py", empty=tmp_path)


def test_empty_model(run_script: RunScript, tmp_path: Path) -> None:
    """Fault: the empty name is taken for the current directory."""
    done = run_script("generate_wan.py", "--model", "", *PROMPT, "--output", tmp_path / "v.mp4")
    assert_refused(done, "--model is empty", "hub id", empty=tmp_path)


@pytest.mark.parametrize("name", ["v" * 252 + ".mp4", "new/" + "d" * 256 + "/v.mp4", "v" * 251])
def test_name_that_is_too_long(
    run_script: RunScript, tiny_wan: Path, tmp_path: Path, name: str
) -> None:
    """Fault: a traceback, at once or after denoising. The last name's .json is too long."""
    output = tmp_path / (name if name.endswith(".mp4") else f"{name}.mp4")
    done = run_script("generate_wan.py", "--model", tiny_wan, *PROMPT, "--output", output)
    assert_refused(done, "cannot write", "shorter", empty=tmp_path)


def test_hub_id_that_cannot_be_reached(run_script: RunScript, tmp_path: Path) -> None:
    """The tests run with the hub switched off, as on a machine without a network."""
    done = run_script(
        "generate_wan.py", "--model", "nobody/nothing", *PROMPT, "--output", tmp_path / "v.mp4"
    )
    assert_refused(done, "nobody/nothing", "check the name, the network", empty=tmp_path)


def test_output_below_a_file(run_script: RunScript, tiny_wan: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_script(
        "generate_wan.py",
        *("--model", tiny_wan, *PROMPT, "--output", tmp_path / "file" / "video.mp4"),
    )
    assert_refused(done, "cannot write", "choose a place")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("output", "word"), [("clip.avi", ".mp4"), ("folder.mp4", "is a directory")]
)
def test_output_of_the_wrong_kind(
    run_script: RunScript, tiny_wan: Path, tmp_path: Path, output: str, word: str
) -> None:
    (tmp_path / "folder.mp4").mkdir()
    done = run_script(
        "generate_wan.py", "--model", tiny_wan, *PROMPT, "--output", tmp_path / output
    )
    assert_refused(done, word)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.mp4"]


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def other_pipeline(model: Path) -> None:
    edit_json(model / "model_index.json", _class_name="LTXPipeline")


def other_transformer(model: Path) -> None:
    edit_json(model / "transformer" / "config.json", _class_name="LTXVideoTransformer3DModel")


def declares_other_transformer(model: Path) -> None:
    edit_json(model / "model_index.json", transformer=["diffusers", "FluxTransformer2DModel"])


def image_to_video(model: Path) -> None:
    edit_json(model / "transformer" / "config.json", in_channels=36)


def no_index(model: Path) -> None:
    (model / "model_index.json").unlink()


def broken_index(model: Path) -> None:
    (model / "model_index.json").write_text("{")


def no_weights(model: Path) -> None:
    (model / "transformer" / "diffusion_pytorch_model.safetensors").unlink()


def pickled_weights(model: Path) -> None:
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))


def truncated_weights(model: Path) -> None:
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def drop_weights(part: Path, prefix: str) -> None:
    (file,) = part.glob("*.safetensors")
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})


def text_encoder_lacks_weights(model: Path) -> None:
    drop_weights(model / "text_encoder", "encoder.block.1.")


def vae_lacks_weights(model: Path) -> None:
    drop_weights(model / "vae", "decoder.")


def transformer_lacks_weights(model: Path) -> None:
    edit_json(model / "transformer" / "config.json", num_layers=3)


def other_shapes(model: Path) -> None:
    edit_json(model / "transformer" / "config.json", ffn_dim=128)


def wrong_type(model: Path) -> None:
    edit_json(model / "transformer" / "config.json", num_layers="two")


def other_text_width(model: Path) -> None:
    """A text encoder that is complete, but of another model."""
    import torch

    from make_tiny_checkpoint import TinyWan, build_text_encoder

    with torch.random.fork_rng(devices=[]):
        encoder: Any = build_text_encoder(TinyWan(text_dim=64))
    encoder.save_pretrained(model / "text_encoder")


def short_statistics(model: Path) -> None:
    edit_json(model / "vae" / "config.json", latents_mean=[0.0])


def no_tokenizer(model: Path) -> None:
    shutil.rmtree(model / "tokenizer")


def no_channels(model: Path) -> None:
    path = model / "transformer" / "config.json"
    content = json.loads(path.read_text())
    del content["in_channels"]
    path.write_text(json.dumps(content))


def text_for_a_part(model: Path) -> None:
    edit_json(model / "model_index.json", transformer="x")


def no_text_encoder(model: Path) -> None:
    edit_json(model / "model_index.json", text_encoder=[None, None])


def text_for_a_ratio(model: Path) -> None:
    edit_json(model / "model_index.json", boundary_ratio="x")


def text_for_a_factor(model: Path) -> None:
    edit_json(model / "vae" / "config.json", scale_factor_spatial="x")


def finer_vae(model: Path) -> None:
    edit_json(model / "vae" / "config.json", scale_factor_spatial=16)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_pipeline, ("LTXPipeline", "WanPipeline")),
        (other_transformer, ("LTXVideoTransformer3DModel", "WanTransformer3DModel")),
        (declares_other_transformer, ("FluxTransformer2DModel", "WanTransformer3DModel")),
        (image_to_video, ("wants an image", "text-to-video")),
        (no_index, ("not a diffusers checkpoint",)),
        (broken_index, ("not a diffusers checkpoint",)),
        (no_weights, ("transformer has no .safetensors",)),
        (pickled_weights, ("vae has no .safetensors", "safe_serialization")),
        (truncated_weights, ("transformer cannot be loaded", "complete")),
        (text_encoder_lacks_weights, ("text_encoder lacks", "encoder.block.1.", "again")),
        (vae_lacks_weights, ("vae lacks", "decoder.", "again")),
        (transformer_lacks_weights, ("transformer lacks", "blocks.2.", "again")),
        (other_shapes, ("transformer cannot be loaded", "complete")),
        (wrong_type, ("transformer cannot be loaded", "complete")),
        (other_text_width, ("text_dim is 32", "d_model is 64", "belong together")),
        (short_statistics, ("latents_mean is 1", "z_dim is 16", "belong together")),
        (no_tokenizer, ("tokenizer", "cannot be loaded", "complete")),
        (no_channels, ("in_channels in transformer/config.json is None", "again")),
        (text_for_a_part, ("transformer in its model_index.json is 'x'", "again")),
        (no_text_encoder, ("has no text_encoder", "UMT5EncoderModel")),
        (text_for_a_ratio, ("boundary_ratio", "'x'", "a number or null")),
        (text_for_a_factor, ("scale_factor_spatial", "'x'", "positive integer")),
        (finer_vae, ("--height is 48", "multiple of 32")),
    ],
)
def test_model_that_is_not_a_wan_pipeline(
    run_script: RunScript,
    tiny_wan: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    words: tuple[str, ...],
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_wan, model)
    out.mkdir()
    spoil(model)
    size = ("--height", "48", "--width", "64", "--num-frames", "5", "--steps", "1")
    done = run_script(
        "generate_wan.py", "--model", model, *PROMPT, *size, "--output", out / "video.mp4"
    )
    assert_refused(done, *words, empty=out)


def test_help_shows_an_example_that_runs(run_script: RunScript) -> None:
    """Fault: the documented example names an option that does not exist."""
    done = run_script("generate_wan.py", "--help")
    assert done.returncode == 0
    example = done.stdout.split("Example: ", 1)[1].split("Options:")[0]
    for option in (word for word in example.split() if word.startswith("--")):
        assert option in done.stdout.split("Options:")[1]
