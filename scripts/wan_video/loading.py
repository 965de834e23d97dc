"""The pipeline on the host, complete and consistent, or one line that says which part is not."""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError

from command_line import UserError
from wan_video.checkpoint import PART_CLASSES, declared_class

# What the libraries raise for a file that is damaged, incomplete or of another architecture.
LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)
SHOWN_NAMES = 2


def load(root: Path, dtype: str) -> diffusers.WanPipeline:
    """All parts in `dtype`, the VAE in float32.

    Loading with a dtype, unlike casting afterwards, leaves the RoPE tables in float32.

    Raises:
        UserError: a part cannot be loaded, lacks weights, or does not fit the others.
    """
    index = json.loads((root / "model_index.json").read_text(encoding="utf-8"))
    with _quiet():
        parts = {
            name: _load_part(root, name, torch.float32 if name == "vae" else getattr(torch, dtype))
            for name in PART_CLASSES
            if declared_class(index, name) is not None
        }
        with _reported("tokenizer, scheduler or model_index.json"):
            pipeline = diffusers.WanPipeline.from_pretrained(root, local_files_only=True, **parts)
    _check_fit(pipeline)
    return pipeline


def _load_part(root: Path, name: str, dtype: torch.dtype) -> torch.nn.Module:
    library = transformers if name == "text_encoder" else diffusers
    # diffusers 0.42 renamed the argument; 0.41 (Python 3.10) knows the old name only.
    dtype_name = "dtype" if library is transformers else "torch_dtype"
    options: dict[str, Any] = {
        dtype_name: dtype,
        "use_safetensors": True,
        "local_files_only": True,
        "output_loading_info": True,
    }
    with _reported(name):
        model, information = getattr(library, PART_CLASSES[name]).from_pretrained(
            root / name, **options
        )
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    missing = {key for key, tensor in tensors if tensor.is_meta} | set(information["missing_keys"])
    if missing:
        shown = ", ".join(sorted(missing)[:SHOWN_NAMES])
        raise UserError(
            f"--model: {name} lacks {len(missing)} of the weights that its config.json asks for "
            f"({shown}{', ...' if len(missing) > SHOWN_NAMES else ''}); download {name} again"
        )
    return model


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    try:
        yield
    except LOADING_ERRORS as error:
        lines = str(error).strip().splitlines()
        raise UserError(
            f"--model: {name} cannot be loaded ({type(error).__name__}: "
            f"{lines[0] if lines else 'no reason given'}); check that the checkpoint is complete "
            "and in safetensors format"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Missing weights are refused here, so the libraries need not print tables about them."""
    loggers = (diffusers.utils.logging, transformers.utils.logging)
    before = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity(logger.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            yield
    finally:
        for logger, verbosity in zip(loggers, before, strict=True):
            logger.set_verbosity(verbosity)


def _check_fit(pipeline: diffusers.WanPipeline) -> None:
    """Sizes that must agree between parts; otherwise the run would fail after denoising."""
    vae = pipeline.vae.config
    sizes = [
        ("vae: length of latents_mean", len(vae.latents_mean), "its z_dim", vae.z_dim),
        ("vae: length of latents_std", len(vae.latents_std), "its z_dim", vae.z_dim),
    ]
    for name in ("transformer", "transformer_2"):
        expert = getattr(pipeline, name)
        if expert is None:
            continue
        width = pipeline.text_encoder.config.d_model
        sizes += [
            (f"{name}: in_channels", expert.config.in_channels, "the VAE's z_dim", vae.z_dim),
            (f"{name}: text_dim", expert.config.text_dim, "the text encoder's d_model", width),
        ]
    for what, found, other, wanted in sizes:
        if found != wanted:
            raise UserError(
                f"--model: {what} is {found} and {other} is {wanted}; give a checkpoint whose "
                "parts belong together"
            )
