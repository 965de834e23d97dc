"""``certify record`` as a user runs it: text models, pipelines, and ways to get it wrong."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from certify.recording import read_recording
from torch_clis import record_command, record_models

ROOT = Path(__file__).parent.parent.parent

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Run:
    """The command in this process."""
    app = typer.Typer()
    app.command("record")(record_command.record)

    def invoke(*arguments: str | Path) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random text model, with fewer key heads, that reads 64 tokens at most."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("models") / "tiny llama"
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaModel(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).save_pretrained(directory)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from make_tiny_checkpoint import TinyWan, write_checkpoint

    directory = tmp_path_factory.mktemp("pipelines") / "tiny-wan"
    write_checkpoint(directory, seed=0, two_experts=True, sizes=TinyWan())
    return directory


def test_text_model(run: Run, llama: Path, tmp_path: Path) -> None:
    """Fault: text beyond the model's positions, a piece dropped, causal models without a mask."""
    text, path = tmp_path / "text.txt", tmp_path / "calls.safetensors"
    text.write_text("a cat sat on a mat; " * 10, encoding="utf-8")
    options = ("--passes", "3", "--keep-tensors", "1", "-o", path)
    done = run(llama, "--text", text, *options)
    assert done.exit_code == 0, done.output
    assert "6 attention calls" in done.output and f"certify audit {path}" in done.output
    found = read_recording(path)
    assert found.settings["model"] == str(llama)
    layers = {layer.name: layer for layer in found.layers}
    assert list(layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    for layer in layers.values():
        assert layer.passes.tolist() == [0, 1, 2]
        assert layer.settings.num_queries == layer.settings.num_keys == 64
        assert (layer.settings.heads, layer.settings.key_heads) == (4, 2)
        assert layer.settings.causal and not layer.settings.masked
        assert len(layer.kept) == 1


def test_pipeline(run: Run, wan: Path, tmp_path: Path) -> None:
    """Fault: the second expert or cross-attention is left out; sizes are not passed on."""
    path = tmp_path / "calls.safetensors"
    sizes = ("--steps", "4", "--height", "64", "--width", "64", "--num-frames", "9")
    done = run(wan, "--prompt", "a cat", *sizes, "-o", path)
    assert done.exit_code == 0, done.output
    layers = {layer.name: layer for layer in read_recording(path).layers}
    kinds = [f"blocks.{block}.{kind}" for block in (0, 1) for kind in ("attn1", "attn2")]
    assert sorted(layers) == sorted([*kinds, *(f"transformer_2.{kind}" for kind in kinds)])
    steps = len(layers["blocks.0.attn1"].passes)
    assert (
        steps + len(layers["transformer_2.blocks.0.attn1"].passes) == 2 * 4
    )  # guidance: two calls
    tokens = 3 * 4 * 4  # 9 frames are 3 latent ones; 64 pixels are 8 latent ones, in patches of 2
    assert layers["blocks.0.attn1"].settings.num_keys == tokens


def test_a_pipeline_of_nothing_said_is_small(wan: Path) -> None:
    """Fault: the pipeline's own defaults, which take hours on a CPU."""
    pipeline = type("Pipeline", (), {"__call__": lambda self, prompt, height, num_frames: None})()
    run = record_models.PipelineRun("a cat", {"height": 64}, 0)
    arguments = record_models._call_arguments(pipeline, run)
    assert (arguments["height"], arguments["num_frames"]) == (64, 17)
    assert "width" not in arguments
    with pytest.raises(record_models.ModelError, match=r"--width: Pipeline does not take it"):
        record_models._call_arguments(pipeline, record_models.PipelineRun("", {"width": 8}, 0))


ERRORS: dict[str, tuple[tuple[str, ...], str]] = {
    "nowhere": (("nowhere", "--prompt", "a"), r"nowhere: is no directory; give .* hub name"),
    "no-model": (("{tmp}", "--prompt", "a"), r"holds neither model_index.json"),
    "no-prompt": (("{llama}",), r"--prompt or --text: give one of them"),
    "both": (("{llama}", "--prompt", "a", "--text", "x"), r"--prompt or --text: give one of them"),
    "empty": (("{llama}", "--prompt", ""), r"holds no token"),
    "no-text": (("{llama}", "--text", "no.txt"), r"--text no.txt: cannot be read \(No such file"),
    "steps": (("{llama}", "--prompt", "a", "--steps", "2"), r"a text model takes none of them"),
    "pipeline-text": (("{wan}", "--prompt", "a", "--text", "x"), r"takes no --text"),
    "dtype": (("{llama}", "--prompt", "a", "--dtype", "int8"), r"--dtype is 'int8'; choose"),
    "output": (("{llama}", "--prompt", "a", "-o", "{tmp}"), r"--output: .* is a directory"),
    "broken": (("{broken}", "--prompt", "a"), r"broken: cannot be loaded or run .*safetensors"),
    "partial": (("{partial}", "--prompt", "a"), r"partial: lacks 2 of the weights .*q_proj"),
    "pickle": (("{pickle}", "--prompt", "a"), r"pickle: cannot be loaded or run .*safetensors"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_one_line(kind: str, run: Run, llama: Path, wan: Path, tmp_path: Path) -> None:
    """Fault: a traceback, exit code 1, no remedy, a half-written file; a pickle is loaded."""
    arguments, message = ERRORS[kind]
    places = {"llama": llama, "wan": wan, "tmp": tmp_path}
    if kind in ("broken", "partial", "pickle"):
        places[kind] = tmp_path / kind
        places[kind].mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (places[kind] / name).write_bytes((llama / name).read_bytes())
        if kind == "broken":
            weights = (llama / "model.safetensors").read_bytes()
            (places[kind] / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        elif kind == "partial":
            kept = load_file(llama / "model.safetensors")
            kept = {name: tensor for name, tensor in kept.items() if "q_proj" not in name}
            save_file(kept, places[kind] / "model.safetensors", metadata={"format": "pt"})
        else:
            torch.save({"weight": torch.zeros(1)}, places[kind] / "pytorch_model.bin")
    before = sorted(tmp_path.rglob("*"))
    given = [argument.format(**places) for argument in arguments]
    output = () if "-o" in given else ("-o", tmp_path / "calls.safetensors")
    done = run(*given, *output)
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert re.search(message, lines[0])
    assert sorted(tmp_path.rglob("*")) == before


def test_example_runs_as_printed(tmp_path: Path) -> None:
    """Fault: --help shows an example that does not run, or the entry point names nothing."""
    installed = tmp_path / "installed" / "torch_clis-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-clis\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(_entry_points())
    paths = [str(installed.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120"}
    python = shlex.quote(sys.executable)

    def shell(commands: str) -> str:
        commands = f'set -e; certify() {{ {python} -m certify.cli "$@"; }}\n{commands}'
        done = subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = shell("certify record --help").split("Example", 1)[1].splitlines()[1:]
    example = "\n".join(line.strip() for line in shown)
    out = shell(re.sub(r"^python ", f"{python} ", example, flags=re.MULTILINE))
    assert "layers.1.self_attn" in out and (tmp_path / "calls.safetensors").is_file()


def _entry_points() -> str:
    """What setup.py declares, as an installation writes it."""
    import ast

    call = next(
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "entry_points"
    )
    groups = ast.literal_eval(call.value)
    return "".join(f"[{group}]\n" + "\n".join(lines) + "\n" for group, lines in groups.items())
