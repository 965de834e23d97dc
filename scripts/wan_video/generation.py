"""Denoising on the XLA device; text encoder and decoder on the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
from diffusers import WanPipeline

from wan_video import attention, runtime
from wan_video.host_scheduler import HostScheduler
from wan_video.request import Request

MAX_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Step:
    """One denoising step: wall-clock seconds, `compile_seconds` of them compiling, and counts."""

    expert: str
    seconds: float
    compile_seconds: float
    compilations: int
    executions: int
    device_to_host: int
    fallbacks: int


@dataclass(frozen=True)
class Result:
    """`frames` uint8 [F, H, W, 3]; `latents` float32 [1, C, F', H/8, W/8], not denormalised.

    `seconds` per stage; `processor` holds the certificates, None for native attention.
    """

    frames: np.ndarray
    latents: torch.Tensor
    steps: tuple[Step, ...]
    seconds: dict[str, float]
    processor: Any | None


def generate(
    pipeline: WanPipeline, request: Request, on_step: Callable[[int, Step], None]
) -> Result:
    """Run all stages.

    Text encoder and VAE stay on the host: XLA cannot trace the VAE's caching decoder.
    """
    seconds = {}
    begin = time.perf_counter()
    prompt_embeds, negative_embeds = encode(pipeline, request)
    seconds["encode_prompt"] = time.perf_counter() - begin

    begin = time.perf_counter()
    vae = pipeline.vae
    experts = move_experts(pipeline)
    processor = attention.install(request, experts)
    seconds["move_to_device"] = time.perf_counter() - begin

    def after_step(index: int, step: Step) -> None:
        if processor is not None and processor.recorder is not None:
            processor.recorder.flush()  # the device holds one step's recording, not all
        on_step(index, step)

    begin = time.perf_counter()
    latents, steps = denoise(pipeline, request, prompt_embeds, negative_embeds, after_step)
    seconds["denoise"] = time.perf_counter() - begin

    begin = time.perf_counter()
    frames = decode(vae, pipeline.video_processor, latents)
    seconds["decode"] = time.perf_counter() - begin
    return Result(frames, latents, steps, seconds, processor)


def encode(pipeline: WanPipeline, request: Request) -> tuple[torch.Tensor, torch.Tensor | None]:
    with torch.no_grad():
        return pipeline.encode_prompt(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=request.guidance_scale > 1.0,
            max_sequence_length=MAX_PROMPT_TOKENS,
            device=torch.device("cpu"),
            dtype=getattr(torch, request.dtype),
        )


def move_experts(pipeline: WanPipeline) -> dict[str, torch.nn.Module]:
    """The transformers on the XLA device, the rest let go, so that the pipeline works there."""
    device = torch_xla.device()
    pipeline.text_encoder = None
    pipeline.vae = None
    gc.collect()
    experts = {}
    for name in ("transformer", "transformer_2"):
        model = getattr(pipeline, name)
        if model is not None:
            experts[name] = model.eval().to(device)
    torch_xla.sync()
    return experts


class StepRecorder:
    """Turns the pipeline's end-of-step callback into `Step` records."""

    def __init__(self, boundary: float | None, on_step: Callable[[int, Step], None]) -> None:
        self.steps: list[Step] = []
        self._boundary = boundary
        self._on_step = on_step
        self._activity = runtime.activity()
        self._time = time.perf_counter()

    def __call__(
        self, pipeline: WanPipeline, index: int, timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        now, done = time.perf_counter(), runtime.activity()
        first = self._boundary is None or timestep >= self._boundary
        step = Step(
            expert="transformer" if first else "transformer_2",
            seconds=now - self._time,
            **asdict(done - self._activity),
        )
        self.steps.append(step)
        self._time, self._activity = now, done
        self._on_step(index, step)
        return {}


def denoise(
    pipeline: WanPipeline,
    request: Request,
    prompt_embeds: torch.Tensor,
    negative_embeds: torch.Tensor | None,
    on_step: Callable[[int, Step], None],
) -> tuple[torch.Tensor, tuple[Step, ...]]:
    """The pipeline's own loop, on the device; latents come back to the host."""
    device = torch_xla.device()
    training_steps = pipeline.scheduler.config.num_train_timesteps
    ratio = pipeline.config.boundary_ratio
    recorder = StepRecorder(None if ratio is None else ratio * training_steps, on_step)
    scheduler = HostScheduler(pipeline.scheduler, device)
    pipeline.scheduler = scheduler
    pipeline.set_progress_bar_config(disable=True)
    with attention.context(request.attention):
        latents = pipeline(
            prompt_embeds=prompt_embeds.to(device),
            negative_prompt_embeds=None if negative_embeds is None else negative_embeds.to(device),
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type="latent",
            callback_on_step_end=recorder,
            max_sequence_length=MAX_PROMPT_TOKENS,
        ).frames
    return latents.cpu().float(), tuple(recorder.steps)


def decode(vae: Any, video_processor: Any, latents: torch.Tensor) -> np.ndarray:
    """Latents to uint8 frames [F, H, W, 3] in float32 on the host."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape)
    deviation = torch.tensor(vae.config.latents_std).view(shape)
    with torch.no_grad():
        video = vae.decode(latents * deviation + mean, return_dict=False)[0]
    frames = video_processor.postprocess_video(video, output_type="np")[0]
    return np.round(frames * 255).astype(np.uint8)
