"""``certify record``: records the attention of a checkpoint, on the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from torch_clis.recorder import Recorder

USAGE_ERROR = 2

EXAMPLE = """\b
Example, with a tiny random model made on the spot:
  python -c "from tokenizers import Tokenizer, models, pre_tokenizers; \\
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast; \\
    LlamaModel(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=64, \\
    num_hidden_layers=2, num_attention_heads=4)).save_pretrained('tiny-llama'); \\
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()); \\
    tokens = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, [])); \\
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(); \\
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained('tiny-llama')"
  certify record tiny-llama --prompt "a cat sat on a mat" --keep-tensors 1 -o calls.safetensors
  certify audit calls.safetensors
"""


def record(
    model: Annotated[
        str,
        typer.Argument(
            help="Directory of a transformers text model or of a diffusers pipeline (only "
            ".safetensors weights are read), or its name on the hub.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.")],
    prompt: Annotated[
        str | None,
        typer.Option(help="What the model reads, or the pipeline shows.", show_default=False),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file that the model reads instead.", show_default=False),
    ] = None,
    keep_tensors: Annotated[
        int, typer.Option(help="Heads per layer whose Q and K a sample is kept of.", min=0)
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option(help="Text models: tokens read at once.", min=1)
    ] = 2048,
    passes: Annotated[
        int, typer.Option(help="Text models: pieces of that many tokens to read.", min=1)
    ] = 1,
    steps: Annotated[
        int | None,
        typer.Option(help="Pipelines: denoising steps.", min=1, show_default="2"),
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Pipelines: pixels.", min=1, show_default="256")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Pipelines: pixels.", min=1, show_default="256")
    ] = None,
    num_frames: Annotated[
        int | None, typer.Option(help="Video pipelines: frames.", min=1, show_default="17")
    ] = None,
    seed: Annotated[int, typer.Option(help="Pipelines: seed of the initial noise.", min=0)] = 0,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")
    ] = "auto",
) -> None:
    """Record the attention of a checkpoint: what `certify audit` and `certify report` read.

    The model runs once on the CPU with PyTorch's own attention, beside which the bounds of every
    family are computed.
    """
    # Nothing here runs on a TPU; diffusers imports torch_xla, which would look for one.
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sizes = {
        name: size
        for name, size in {
            "num_inference_steps": steps,
            "height": height,
            "width": width,
            "num_frames": num_frames,
        }.items()
        if size is not None
    }
    try:
        from torch_clis.record_models import (
            DTYPES,
            ModelError,
            PipelineRun,
            TextRun,
            is_pipeline,
            record_pipeline,
            record_text_model,
        )
    except ImportError as error:
        _fail(f"certify record needs more than is installed ({error}); {_INSTALL}")
    if dtype not in DTYPES:
        _fail(f"--dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    try:
        recorder = _recorder(output, keep_tensors)
        pipeline = is_pipeline(model)
        if pipeline and (prompt is None or text is not None):
            _fail("--prompt: a pipeline needs one, and takes no --text")
        if not pipeline and (prompt is None) == (text is None):
            _fail("--prompt or --text: give one of them, what the model reads")
        if not pipeline and sizes:
            _fail("--steps, --height, --width, --num-frames: a text model takes none of them")
        with _progress(recorder) as progress:
            task = progress.add_task("recording", total=None)

            def on_pass(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            if pipeline:
                assert prompt is not None
                shown = PipelineRun(prompt, sizes, seed)
                record_pipeline(model, shown, recorder, dtype=dtype, on_pass=on_pass)
            else:
                read = TextRun(prompt if prompt is not None else _read(text), max_tokens, passes)
                record_text_model(model, read, recorder, dtype=dtype, on_pass=on_pass)
        recorder.save(model=model, prompt=prompt, text=None if text is None else str(text))
    except ImportError as error:
        _fail(f"{model} needs more than is installed ({error}); {_INSTALL}")
    except (ModelError, ValueError, OSError) as error:
        _fail(str(error))
    _report(recorder, output)


def _recorder(output: Path, keep_tensors: int) -> Recorder:
    from torch_clis.recorder import Recorder

    try:
        return Recorder(output, keep_tensors=keep_tensors)
    except ValueError as error:
        raise ValueError(str(error).replace("path:", "--output:", 1)) from error


_INSTALL = "pip install 'torch-clis[diffusers]'"


def _read(text: Path | None) -> str:
    assert text is not None
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ValueError(f"--text {text}: cannot be read ({reason}); give a text file") from error


class _Calls(TextColumn):
    """Attention calls recorded so far."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__("")
        self._recorder = recorder

    def render(self, task: object) -> str:  # type: ignore[override]
        return f"{self._recorder.passes_recorded} attention calls"


def _progress(recorder: Recorder) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    return Progress(
        *columns, TimeElapsedColumn(), _Calls(recorder), console=console, transient=True
    )


def _report(recorder: Recorder, output: Path) -> None:
    size = output.stat().st_size / 2**20
    left_out = recorder.passes_not_recorded
    rest = f", {left_out} left out" if left_out else ""
    typer.echo(f"wrote {output}: {recorder.passes_recorded} attention calls{rest}, {size:.1f} MB")
    typer.echo(f"next: certify audit {output}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(USAGE_ERROR)
