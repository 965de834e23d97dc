"""Is this a Wan text-to-video checkpoint? Its JSON files tell, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command_line import UserError
from wan_video.request import Request, check_multiple

PIPELINE_CLASS = "WanPipeline"
TRANSFORMER_CLASS = "WanTransformer3DModel"
WEIGHTED_PARTS = ("transformer", "transformer_2", "text_encoder", "vae")
# Loaded are safetensors and JSON only; pickled weights can run code.
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")


def find(request: Request) -> Path:
    """The directory of a checked checkpoint; one on the hub is downloaded after the check.

    Raises:
        UserError: not a Wan text-to-video pipeline, not reachable, or a size that it cannot divide.
    """
    if not request.is_hub_id:
        root = Path(request.model).expanduser()
        check(root, request)
    else:
        check(_download(request.model, ("*.json",)), request)
        root = _download(request.model, HUB_FILES)
    check_weights(root, request)
    return root


def _download(hub_id: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many unrelated classes for "not there"
        raise UserError(
            f"--model: there is no directory {hub_id!r} and the hub has not given it "
            f"({type(error).__name__}); check the name, the network and your access"
        ) from error


def check(root: Path, request: Request) -> None:
    index = read_json(root / "model_index.json", "is not a diffusers checkpoint")
    found = index.get("_class_name")
    if found != PIPELINE_CLASS:
        raise UserError(
            f"--model {request.model} is a {found}; give a Wan text-to-video checkpoint "
            f"({PIPELINE_CLASS})"
        )
    for name in ("transformer", "transformer_2"):
        if name == "transformer" or _has(index, name):
            _check_transformer(root, name, index, request)
    vae = read_json(root / "vae" / "config.json", "has no VAE")
    for size in ("height", "width"):
        check_multiple(size, getattr(request, size), 2 * int(vae.get("scale_factor_spatial") or 8))


def _check_transformer(root: Path, name: str, index: dict[str, Any], request: Request) -> None:
    config = read_json(root / name / "config.json", f"has no {name}")
    declared = (index.get(name) or (None, None))[1]
    for found in (declared, config.get("_class_name")):
        if found != TRANSFORMER_CLASS:
            raise UserError(
                f"--model {request.model}: its {name} is a {found}, not a {TRANSFORMER_CLASS}; "
                "give a Wan checkpoint"
            )
    if config.get("image_dim") is not None or config["in_channels"] != config["out_channels"]:
        raise UserError(
            f"--model {request.model}: its {name} wants an image; give a text-to-video checkpoint"
        )


def check_weights(root: Path, request: Request) -> None:
    """Every part that has a configuration must have its weights as safetensors."""
    for name in WEIGHTED_PARTS:
        part = root / name
        if (part / "config.json").is_file() and not any(part.glob("*.safetensors")):
            raise UserError(
                f"--model {request.model}: {name} has no .safetensors file; complete the download, "
                "or convert pickled weights with save_pretrained(safe_serialization=True)"
            )


def _has(index: dict[str, Any], name: str) -> bool:
    return bool(index.get(name)) and index[name][0] is not None


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model {path.parent if path.name == 'model_index.json' else path.parent.parent} "
            f"{otherwise} ({path.name} missing or unreadable); give a directory written by "
            "save_pretrained or scripts/make_tiny_checkpoint.py"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object; download the checkpoint again")
    return content
