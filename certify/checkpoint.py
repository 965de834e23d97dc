"""Checkpoints as diffusers and transformers save them, read lazily and without torch.

Only headers are read until a tensor is asked for. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from certify.files import parse_json
from certify.formats import bfloat16_to_float32

PIPELINE_PARTS = ("transformer", "transformer_2")
"""Parts of a diffusers pipeline whose attention is certified."""

STANDARD_NAMES = ("diffusion_pytorch_model", "model")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("<f8", 8),
    "F32": ("<f4", 4),
    "F16": ("<f2", 2),
    "BF16": ("<u2", 2),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: ``size`` bytes of ``file`` from ``start``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """One model: its config and where its tensors lie.

    Attributes:
        path: directory.
        prefix: what is put before its layers' names: "" or the part of a pipeline, "transformer.".
        config: contents of config.json.
        entries: by tensor name.
    """

    path: Path
    prefix: str
    config: dict[str, Any]
    entries: dict[str, TensorEntry]

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """The values of one tensor.

        Raises:
            ValueError: where it is missing, cannot be read, or is neither float nor bfloat16.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise ValueError(
                f"{self.path}: there is no tensor {name}; the checkpoint is incomplete."
            )
        if entry.dtype not in _DTYPES:
            raise ValueError(
                f"{entry.file}: {name} has dtype {entry.dtype}; a norm must be one of "
                f"{', '.join(_DTYPES)}. Give the checkpoint before quantisation."
            )
        code, width = _DTYPES[entry.dtype]
        if entry.size != width * math.prod(entry.shape):
            raise ValueError(f"{entry.file}: {name} does not fill its shape {list(entry.shape)}.")
        try:
            with entry.file.open("rb") as file:
                file.seek(entry.start)
                data = file.read(entry.size)
        except OSError as error:
            raise ValueError(f"{entry.file}: cannot be read ({error.strerror}).") from error
        values = np.frombuffer(data, code)
        if entry.dtype == "BF16":
            values = bfloat16_to_float32(values.astype(np.uint16))
        return values.astype(np.float64).reshape(entry.shape)


def open_checkpoints(path: Path) -> list[Checkpoint]:
    """The models of a directory: one, or the transformers of a diffusers pipeline.

    Raises:
        ValueError: where it is no such directory, or a file of it is missing, truncated or of
            another format. One line each.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(
            f"{path}: {what}. Give a directory with config.json and .safetensors files, or a "
            "diffusers pipeline with model_index.json."
        )
    if not (path / "model_index.json").is_file():
        return [_open_model(path, "")]
    parts = [part for part in PIPELINE_PARTS if (path / part).is_dir()]
    if not parts:
        raise ValueError(
            f"{path}: the pipeline has no {' or '.join(PIPELINE_PARTS)} directory. Only "
            "transformers are certified; give the directory of another model itself."
        )
    return [_open_model(path / part, f"{part}.") for part in parts]


def _open_model(path: Path, prefix: str) -> Checkpoint:
    config = _read_json(path / "config.json", "Give a directory that save_pretrained wrote.")
    return Checkpoint(path, prefix, config, _find_tensors(path))


def _find_tensors(path: Path) -> dict[str, TensorEntry]:
    for name in STANDARD_NAMES:
        index = path / f"{name}.safetensors.index.json"
        if index.is_file():
            return _read_shards(index)
        if (path / f"{name}.safetensors").is_file():
            return _read_header(path / f"{name}.safetensors")
    indices = sorted(path.glob("*.safetensors.index*.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return _read_shards(indices[0])
    if len(files) == 1 and not indices:
        return _read_header(files[0])
    raise ValueError(_what_is_wrong(path, [file.name for file in indices + files]))


def _what_is_wrong(path: Path, found: list[str]) -> str:
    if found:
        return (
            f"{path}: holds {len(found)} .safetensors files ({', '.join(found[:3])}...) but "
            f"neither {STANDARD_NAMES[0]}.safetensors nor the one index of its shards. Complete "
            "the download, or keep one variant."
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"{path}: has weights only as {pickles[0]}, a pickle, which is not opened. Save the "
            "model with save_pretrained(..., safe_serialization=True)."
        )
    return f"{path}: has no .safetensors file. Complete the download."


def _read_shards(index: Path) -> dict[str, TensorEntry]:
    weight_map = _read_json(index, "Download it again.").get("weight_map")
    if not (
        isinstance(weight_map, dict)
        and weight_map
        and all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ValueError(f"{index}: has no weight_map from tensors to files. Download it again.")
    files = sorted(set(weight_map.values()))
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{index}: names {name!r}, which is not a file beside it.")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent}: shard {name} is missing. Complete the download.")
    shards = {name: _read_header(index.parent / name) for name in files}
    entries = {}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise ValueError(f"{index.parent / name}: lacks {tensor}, which the index puts there.")
        entries[tensor] = shards[name][tensor]
    return entries


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Positions of all tensors; the library checks header and length of the file first."""
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{file}: not a complete .safetensors file ({error}). It may be truncated or of "
            "another format; download it again."
        ) from error
    entries = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            start = 8 + length + begin
            entries[name] = TensorEntry(file, entry["dtype"], shape, start, end - begin)
    return entries


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}). {advice}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}). {advice}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: not a JSON object. {advice}")
    return document
