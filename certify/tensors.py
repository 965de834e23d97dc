"""Read query, key and value from a .safetensors file; bfloat16 needs no further library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from certify.formats import FloatArray, bfloat16_to_float32, read_array

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, FloatArray]:
    """The named tensors of a file.

    Raises:
        ValueError: where the file is missing, truncated or no safetensors file, where a tensor is
            missing, and for a dtype other than bfloat16, float16 and float32. One line each.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}). Give a .safetensors file."
        ) from error
    try:
        entries = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete .safetensors file ({error}). It may be truncated or of "
            "another format; write it with safetensors.numpy.save_file."
        ) from error
    missing = [name for name in names if name not in entries]
    if missing:
        found = ", ".join(sorted(entries)) or "nothing"
        raise ValueError(
            f"{path}: lacks {', '.join(missing)}; it holds {found}. Name the tensors "
            f"{', '.join(names)}, each [B, S, H, D]."
        )
    return {name: _decode(path, name, entries[name]) for name in names}


def _decode(path: Path, name: str, entry: dict[str, Any]) -> FloatArray:
    code, shape, data = entry["dtype"], entry["shape"], entry["data"]
    if code == "BF16":
        bits = np.frombuffer(data, np.dtype("<u2")).astype(np.uint16)
        return FloatArray(bfloat16_to_float32(bits).reshape(shape), "bfloat16")
    if code not in _DTYPES:
        raise ValueError(f"{path}: {name} has dtype {code}; it must be BF16, F16 or F32.")
    return read_array(name, np.frombuffer(data, _DTYPES[code]).reshape(shape))
