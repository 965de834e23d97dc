"""The tiny checkpoint: complete, deterministic, and alive."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

RunScript = Callable[..., subprocess.CompletedProcess[str]]


def checksums(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_same_seed_gives_the_same_bytes(tiny_wan: Path, tmp_path: Path) -> None:
    """Fault: a weight, a tokenizer merge or a file name that depends on anything but the seed."""
    from make_tiny_checkpoint import TinyWan, write_checkpoint

    write_checkpoint(tmp_path / "again", seed=0, two_experts=False, sizes=TinyWan())
    write_checkpoint(tmp_path / "other", seed=1, two_experts=False, sizes=TinyWan())
    first = checksums(tiny_wan)
    assert checksums(tmp_path / "again") == first
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert checksums(tmp_path / "other")[weights] != first[weights]


def test_holds_no_pickle(tiny_wan_two_experts: Path) -> None:
    """Fault: a part saved by torch.save."""
    suffixes = {path.suffix for path in tiny_wan_two_experts.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_loads_as_a_wan_pipeline_and_reads_any_prompt(tiny_wan: Path) -> None:
    """Fault: a part missing or of another class; a tokenizer that reads every prompt alike."""
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(tiny_wan, use_safetensors=True)
    assert type(pipeline).__name__ == "WanPipeline"
    assert pipeline.transformer_2 is None
    prompts = ["a cat", "ein Käse 🧀 \n 漢字"]
    tokens = [pipeline.tokenizer(prompt).input_ids for prompt in prompts]
    assert tokens[0] != tokens[1]
    assert all(ids[-1] == pipeline.tokenizer.eos_token_id for ids in tokens)
    decoded = pipeline.tokenizer.decode(tokens[1], skip_special_tokens=True)
    assert decoded.strip() == prompts[1].strip()
    embeds, negative = pipeline.encode_prompt("a cat", "a dog", max_sequence_length=32)
    assert embeds.shape == (1, 32, 32)
    assert not torch.equal(embeds, negative)


def test_two_experts_hand_over(tiny_wan_two_experts: Path) -> None:
    """Fault: the second expert missing, equal to the first, or without a boundary."""
    from diffusers import WanPipeline

    index = json.loads((tiny_wan_two_experts / "model_index.json").read_text())
    assert index["boundary_ratio"] == 0.875
    pipeline = WanPipeline.from_pretrained(tiny_wan_two_experts, use_safetensors=True)
    first, second = pipeline.transformer.proj_out.weight, pipeline.transformer_2.proj_out.weight
    assert not torch.equal(first, second)


def test_refuses_a_directory_in_use(run_script: RunScript, tmp_path: Path) -> None:
    """Fault: somebody's files overwritten."""
    (tmp_path / "mine.txt").write_text("mine")
    done = run_script("make_tiny_checkpoint.py", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "give a new one" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
