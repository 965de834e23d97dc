"""Trained heads on text, with a tiny encoder made here in place of a trained one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch

import certify
from certify import theorem
from evidence import trained

Run = Callable[..., CompletedProcess[str]]
WORDS = ("attention", "is", "a", "weighted", "mean", "of", "values")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of three heads; the second layer's logits are beyond any grid of stabilizers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel

    directory = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    encoder = BertModel(config)
    with torch.no_grad():
        encoder.encoder.layer[1].attention.self.query.weight *= 1e12
    encoder.save_pretrained(directory, safe_serialization=True)
    vocabulary = {word: index for index, word in enumerate(("[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_windows_of_tokens(model: Path) -> None:
    """Whole windows between the special tokens. Catches a tail of padding, and truncation."""
    tokens = trained.token_windows(model, [" ".join(WORDS * 3), "mean of values"], 12)
    assert tokens.shape == (2, 12)
    assert np.all(tokens[:, 0] == 1) and np.all(tokens[:, -1] == 2)
    expected = [3 + index % 7 for index in range(20)]
    assert tokens[:, 1:-1].ravel().tolist() == expected
    with pytest.raises(ValueError, match="--text"):
        trained.token_windows(model, ["mean"], 12)


def test_calls_are_those_of_the_model(model: Path) -> None:
    """Softmax of the recorded calls gives the layer's output. Catches heads or scale mixed up."""
    from transformers import BertModel

    tokens = trained.token_windows(model, [" ".join(WORDS * 5)], 32)
    (calls,) = trained.layer_calls(model, tokens, "float32")
    encoder = BertModel.from_pretrained(model, attn_implementation="eager").eval()
    seen: list[torch.Tensor] = []
    attention = encoder.encoder.layer[0].attention.self
    attention.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    with torch.no_grad():
        encoder(input_ids=torch.from_numpy(tokens))
    call = calls[0]
    logits = call.logits("exact")[0] * np.log(2.0)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ call.row_values()[0].astype(np.float64)
    assert np.allclose(np.moveaxis(out, 0, 1).reshape(32, 24), seen[0][0].numpy(), atol=1e-5)


def test_audit_tells_layers_apart(model: Path) -> None:
    """The ordinary layer is certified, the wild one is not. Catches a verdict of another layer."""
    tokens = trained.token_windows(model, [" ".join(WORDS * 20)], 36)
    heads = trained.audit(model, tokens, dtype="bfloat16", tolerance=certify.DEFAULT_TOLERANCE)
    assert heads.verdict.shape == (2, len(tokens), 3)
    assert np.all(heads.verdict[0] == theorem.CERTIFIED)
    assert np.all(heads.gap[1] > heads.gap[0].max())
    assert heads.worst[0] == 1 and heads.share_certified < 1.0


def test_command(model: Path, run_script: Run, tmp_path: Path) -> None:
    """The command's table and JSON; a window longer than the model reads is refused by name."""
    text, path = tmp_path / "text.txt", tmp_path / "heads.json"
    text.write_text(" ".join(WORDS * 20), encoding="utf-8")
    arguments = ("certificate_evidence.py", "minilm", "--model", model, "--text", text)
    done = run_script(*arguments, "--length", "36", "--json", path)
    assert done.returncode == 0, done.stderr
    assert "worst head: layer 1" in done.stdout
    assert json.loads(path.read_text())["share_certified"] < 1.0
    refused = run_script(*arguments, "--length", "41")
    assert refused.returncode == 2 and "--length" in refused.stderr
