"""Is this a Wan text-to-video checkpoint? Its JSON files tell, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command_line import UserError
from wan_video.request import Request, check_multiple

PIPELINE_CLASS = "WanPipeline"
TRANSFORMER_CLASS = "WanTransformer3DModel"
PART_CLASSES = {
    "transformer": TRANSFORMER_CLASS,
    "transformer_2": TRANSFORMER_CLASS,
    "text_encoder": "UMT5EncoderModel",
    "vae": "AutoencoderKLWan",
}
OPTIONAL_PART = "transformer_2"
DEFAULT_SPATIAL_FACTOR = 8
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
    for name, wanted in PART_CLASSES.items():
        declared = declared_class(index, name)
        if declared is None and name == OPTIONAL_PART:
            continue
        if declared != wanted:
            raise _other_class(request, name, declared, wanted)
        config = read_json(root / name / "config.json", f"has no {name}")
        if wanted == TRANSFORMER_CLASS:
            _check_transformer(name, config, request)
    ratio = index.get("boundary_ratio")
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float))):
        raise _bad_entry(request, "model_index.json", "boundary_ratio", ratio, "a number or null")
    vae = read_json(root / "vae" / "config.json", "has no vae")
    factor = vae.get("scale_factor_spatial")
    if factor is None:
        factor = DEFAULT_SPATIAL_FACTOR
    elif not _is_size(factor):
        raise _bad_entry(
            request, "vae/config.json", "scale_factor_spatial", factor, "a positive integer"
        )
    for size in ("height", "width"):
        check_multiple(size, getattr(request, size), 2 * factor)


def declared_class(index: dict[str, Any], name: str) -> str | None:
    """The class that model_index.json gives a part; None where it says that there is none.

    Raises:
        UserError: the entry is neither missing nor a list of a library and a class.
    """
    entry = index.get(name)
    if entry is None:
        return None
    if (
        not isinstance(entry, list)
        or len(entry) != 2
        or not all(item is None or isinstance(item, str) for item in entry)
    ):
        raise UserError(
            f"--model: {name} in its model_index.json is {entry!r}, not a library and a class; "
            "download the checkpoint again"
        )
    return entry[1]


def _check_transformer(name: str, config: dict[str, Any], request: Request) -> None:
    found = config.get("_class_name")
    if found != TRANSFORMER_CLASS:
        raise _other_class(request, name, found, TRANSFORMER_CLASS)
    for channels in ("in_channels", "out_channels"):
        if not _is_size(config.get(channels)):
            raise _bad_entry(
                request, f"{name}/config.json", channels, config.get(channels), "a positive integer"
            )
    if config.get("image_dim") is not None or config["in_channels"] != config["out_channels"]:
        raise UserError(
            f"--model {request.model}: its {name} wants an image; give a text-to-video checkpoint"
        )


def _other_class(request: Request, name: str, found: object, wanted: str) -> UserError:
    described = f"has no {name}" if found is None else f"its {name} is a {found}"
    return UserError(
        f"--model {request.model}: {described}, where a {wanted} is needed; give a Wan checkpoint"
    )


def _bad_entry(request: Request, file: str, name: str, found: object, wanted: str) -> UserError:
    return UserError(
        f"--model {request.model}: {name} in {file} is {found!r}, not {wanted}; download that file "
        "again"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_weights(root: Path, request: Request) -> None:
    """Every part that has a configuration must have its weights as safetensors."""
    for name in PART_CLASSES:
        part = root / name
        if (part / "config.json").is_file() and not any(part.glob("*.safetensors")):
            raise UserError(
                f"--model {request.model}: {name} has no .safetensors file; complete the download, "
                "or convert pickled weights with save_pretrained(safe_serialization=True)"
            )


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
