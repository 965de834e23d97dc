"""Generate a video with a Wan checkpoint in diffusers on PyTorch/XLA, with certified attention.

Example:  python scripts/generate_wan.py --model build/tiny-wan --prompt "a cat" --height 64 \\
              --width 64 --num-frames 9 --steps 4 --output video.mp4
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from command_line import console, run
from wan_video import checkpoint, outputs, runtime
from wan_video.request import ATTENTIONS, DTYPES, Request

if TYPE_CHECKING:
    from wan_video.generation import Result, Step

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def quiet_libraries() -> None:
    """Loading bars only where someone watches."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        import diffusers.utils.logging
        import transformers.utils.logging

        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()


def generate_with_progress(root: Path, request: Request) -> Result:
    runtime.prepare_environment()
    with console.status("loading torch, torch_xla and diffusers"):
        quiet_libraries()
        from wan_video import generation, loading
    if request.compile_cache is not None and not runtime.use_compile_cache(request.compile_cache):
        console.print("--compile-cache has no effect: the XLA CPU device cannot load its programs")
    begin = time.perf_counter()
    with console.status(f"loading {request.model}"):
        pipeline = loading.load(root, request.dtype)
    load_seconds = time.perf_counter() - begin

    with Progress(
        TextColumn("denoising ({task.fields[attention]})"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
        console=console,
    ) as progress:
        task = progress.add_task(
            "", total=request.steps, attention=request.attention, last="compiling"
        )

        def on_step(index: int, step: Step) -> None:
            compiled = f", {step.compile_seconds:.1f} s of it compiling"
            last = f"{step.seconds:.2f} s/step{compiled if step.compilations else ''}"
            progress.update(task, completed=index + 1, last=last)

        result = generation.generate(pipeline, request, on_step)
    result.seconds["load"] = load_seconds
    return result


def settings_of(request: Request) -> dict[str, Any]:
    """JSON-able."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(request).items()
    }


def run_details(request: Request, result: Result, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON beside the video."""
    compiled = sum(step.compile_seconds for step in result.steps)
    return {
        "settings": settings_of(request),
        "versions": {"python": sys.version.split()[0], **runtime.versions()},
        "device": os.environ["PJRT_DEVICE"],
        "seconds": {**result.seconds, "compile_within_denoise": compiled},
        "steps": [asdict(step) for step in result.steps],
        "compilations_per_step": [step.compilations for step in result.steps],
        "certificates": rows,
    }


def write_outputs(request: Request, result: Result, rows: list[dict[str, Any]]) -> None:
    content = run_details(request, result, rows)
    title = (
        f"{request.prompt}   {request.width}x{request.height}, {request.steps} steps, "
        f"seed {request.seed}, {request.attention}, {request.dtype}"
    )
    frames, fps = result.frames, request.fps
    with outputs.staged() as staging:
        staging.write(request.output, lambda path: outputs.write_video(path, frames, fps))
        staging.write(
            request.contact_sheet,
            lambda path: outputs.write_contact_sheet(path, frames, fps, title),
        )
        staging.write(request.run_details, lambda path: outputs.write_json(path, content))
        if request.record is not None and result.processor is not None:
            recorder, about_run = result.processor.recorder, settings_of(request)
            staging.write(request.record, lambda path: recorder.save(path, **about_run))
        if request.latents is not None:
            staging.write(request.latents, lambda path: outputs.write_latents(path, result.latents))
        if request.report is not None:
            from certify.report import write_html

            about = {**content["settings"], **content["versions"]}
            staging.write(
                request.report,
                lambda path: write_html(path, title=title, rows=rows, settings=about),
            )


def print_summary(request: Request, result: Result) -> None:
    if result.processor is not None:
        console.print(result.processor.summary())
    warm = [step.seconds for step in result.steps if not step.compilations]
    per_step = f"{sum(warm) / len(warm):.2f} s per step" if warm else "one step"
    compilations = ", ".join(str(step.compilations) for step in result.steps)
    console.print(f"{per_step} without compiling; XLA compilations per step: {compilations}")
    for path in request.targets:
        console.print(f"wrote {path}", soft_wrap=True)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Directory of a Wan checkpoint, or its hub id.")],
    prompt: Annotated[str, typer.Option(help="What the video shows.")],
    output: Annotated[
        Path, typer.Option(help="The video (.mp4); a .png and a .json go beside it.")
    ],
    negative_prompt: Annotated[str, typer.Option(help="What it must not show.")] = "",
    height: Annotated[int, typer.Option(help="Pixels, a multiple of 16.")] = Request.height,
    width: Annotated[int, typer.Option(help="Pixels, a multiple of 16.")] = Request.width,
    num_frames: Annotated[int, typer.Option(help="Frames, 4k + 1.")] = Request.num_frames,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = Request.steps,
    guidance_scale: Annotated[
        float, typer.Option(help="Classifier-free guidance; 1 turns it off.")
    ] = Request.guidance_scale,
    seed: Annotated[int, typer.Option(help="Seed of the initial noise.")] = Request.seed,
    fps: Annotated[int, typer.Option(help="Frames per second of the file.")] = Request.fps,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = Request.dtype,
    attention: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(ATTENTIONS)}; the last accumulates native attention in "
            "bfloat16 too, a yardstick for rounding."
        ),
    ] = Request.attention,
    report: Annotated[Path | None, typer.Option(help="HTML report of the certificates.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Recording (.safetensors) for certify audit, report and explain."),
    ] = None,
    keep_tensors: Annotated[
        int, typer.Option(help="Heads per layer whose Q and K the recording keeps a sample of.")
    ] = Request.keep_tensors,
    latents: Annotated[
        Path | None, typer.Option(help="Final latents, float32, as .safetensors.")
    ] = None,
    compile_cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory that keeps compiled programs for the next run (not on the CPU)."
        ),
    ] = None,
) -> None:
    """Generate a video with Wan and certified attention on PyTorch/XLA (TPU; CPU without one).

    Example: python scripts/generate_wan.py --model build/tiny-wan --prompt "a cat"
    --height 64 --width 64 --num-frames 9 --steps 4 --output video.mp4
    """
    request = Request(
        model=model,
        prompt=prompt,
        output=output,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        steps=steps,
        guidance_scale=guidance_scale,
        seed=seed,
        fps=fps,
        dtype=dtype,
        attention=attention,
        report=report,
        record=record,
        keep_tensors=keep_tensors,
        latents=latents,
        compile_cache=compile_cache,
    )
    runtime.check_installed()
    root = checkpoint.find(request)
    result = generate_with_progress(root, request)
    rows = [] if result.processor is None else result.processor.totals()
    write_outputs(request, result, rows)
    print_summary(request, result)


if __name__ == "__main__":
    run(app)
