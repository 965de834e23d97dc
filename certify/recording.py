"""What is recorded of a model's attention calls: the numbers behind every verdict, in a file.

A recording holds, per layer, call, batch element, head and query block, S and L of each family of
bounds for the block's worst row, what the theorem needs beside them (``certify.rows``), and the
certificate of the call as it ran. A few calls may keep query rows with all their keys, from which S
and L can be computed again.

The file, schema ``certify.recording`` version 1, is a .safetensors file. Its metadata are texts:
``schema``, ``version`` and ``layout``, a JSON object with ``families``, ``record_fields``,
``certificate_fields``, ``tolerance``, ``passes_not_recorded``, ``created_by``, ``settings`` and
``layers``: objects with the fields of ``LayerSettings``, ``name`` and ``kept``, the places
of kept rows. Tensors of layer i, float32 unless said otherwise:

    {i}.bounds        [P, B, H, Q, fields]      {i}.certificate   [P, B, H, Q, 7]
    {i}.pass          int32 [P]
    {i}.kept.{k}.query [R, D], .key [S_k, D]    in the layer's dtype, bfloat16 as its bits in uint16
    {i}.kept.{k}.value_max [S_k]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import save_file

from certify import arithmetic
from certify.files import parse_json, replacing
from certify.formats import FloatArray, bfloat16_to_float32, printable
from certify.recorded_layers import (
    CERTIFICATE_FIELDS,
    KeptRows,
    LayerPasses,
    LayerSettings,
    record_fields,
)

__all__ = [
    "CERTIFICATE_FIELDS",
    "KeptRows",
    "LayerPasses",
    "LayerSettings",
    "Recording",
    "is_recording",
    "merge_recordings",
    "read_recording",
    "record_fields",
    "write_recording",
]

SCHEMA = "certify.recording"
SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class Recording:
    """Layers, and what holds for all of them.

    Attributes:
        layers: may read each layer from a file when asked for it.
        families: names of the recorded families of bounds, first "auto", the best per row.
        tolerance: that the calls were made with.
        not_recorded: calls left out to bound the size.
        created_by: program and version.
        settings: JSON-able, shown in reports.

    Raises:
        ValueError: where a field is of the wrong kind.
    """

    layers: Sequence[LayerPasses]
    families: tuple[str, ...]
    tolerance: float
    not_recorded: int = 0
    created_by: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        arithmetic.validate_tolerance(self.tolerance)
        texts = all(isinstance(family, str) for family in self.families)
        if (
            not texts
            or self.families[:1] != ("auto",)
            or len({*self.families}) < len(self.families)
        ):
            raise ValueError(
                f"families: got {self.families!r}; give different names, 'auto' first."
            )
        if not isinstance(self.not_recorded, int) or self.not_recorded < 0:
            raise ValueError(f"not_recorded: got {self.not_recorded!r}; it must be 0 or more.")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the lanes of every layer's ``bounds``."""
        return record_fields(self.families)


def merge_recordings(recordings: Iterable[Recording]) -> Recording:
    """One recording of all the layers and calls of several, such as those of several hosts.

    Layers of the same name and settings become one, their calls side by side.

    Raises:
        ValueError: for no recordings, for different tolerances or families, and where two hold the
            same call of a layer.
    """
    parts = list(recordings)
    if not parts:
        raise ValueError("recordings: got none; pass at least one.")
    first = parts[0]
    for other in parts[1:]:
        for name in ("tolerance", "families"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(
                    f"recordings: {name} differs, {ours!r} and {theirs!r}. Merge recordings that "
                    "were made with the same settings."
                )
    groups: dict[tuple[str, LayerSettings, int], list[LayerPasses]] = {}
    for part in parts:
        for layer in part.layers:
            place = (layer.name, layer.settings, layer.bounds.shape[1])
            groups.setdefault(place, []).append(layer)
    settings: dict[str, Any] = {}
    for part in parts:
        settings |= part.settings
    return Recording(
        layers=[_merged(layers) for layers in groups.values()],
        families=first.families,
        tolerance=first.tolerance,
        not_recorded=sum(part.not_recorded for part in parts),
        created_by=", ".join(dict.fromkeys(part.created_by for part in parts)),
        settings=settings,
    )


def _merged(layers: list[LayerPasses]) -> LayerPasses:
    if len(layers) == 1:
        return layers[0]
    passes = np.concatenate([layer.passes for layer in layers])
    if np.unique(passes).size != passes.size:
        raise ValueError(
            f"recordings: two of them hold the same call of layer {layers[0].name!r}. Number the "
            "calls apart, or name the layers apart."
        )
    order = np.argsort(passes, kind="stable")
    return LayerPasses(
        name=layers[0].name,
        settings=layers[0].settings,
        bounds=np.concatenate([layer.bounds for layer in layers])[order],
        certificate=np.concatenate([layer.certificate for layer in layers])[order],
        passes=passes[order],
        kept=tuple(kept for layer in layers for kept in layer.kept),
    )


def write_recording(path: Path, recording: Recording) -> None:
    """Write the file, whole or not at all.

    Raises:
        ValueError: where a layer's lanes are not those of the recording.
        OSError: where it cannot be written.
    """
    tensors: dict[str, npt.NDArray[Any]] = {}
    layers = []
    for index, layer in enumerate(recording.layers):
        _check_lanes(layer, recording.fields)
        kept = []
        for number, rows in enumerate(layer.kept):
            prefix = f"{index}.kept.{number}."
            tensors[prefix + "query"] = _encoded(rows.query)
            tensors[prefix + "key"] = _encoded(rows.key)
            tensors[prefix + "value_max"] = np.ascontiguousarray(rows.value_max)
            place = {"pass": int(rows.pass_index), "batch": int(rows.batch), "head": int(rows.head)}
            kept.append({**place, "rows": rows.rows.tolist()})
        tensors[f"{index}.bounds"] = np.ascontiguousarray(layer.bounds)
        tensors[f"{index}.certificate"] = np.ascontiguousarray(layer.certificate)
        tensors[f"{index}.pass"] = np.ascontiguousarray(layer.passes)
        layers.append({"name": layer.name, **dataclasses.asdict(layer.settings), "kept": kept})
    layout = {
        "families": recording.families,
        "record_fields": recording.fields,
        "certificate_fields": CERTIFICATE_FIELDS,
        "tolerance": recording.tolerance,
        "passes_not_recorded": recording.not_recorded,
        "created_by": recording.created_by,
        "settings": recording.settings,
        "layers": layers,
    }
    metadata = {"schema": SCHEMA, "version": str(SCHEMA_VERSION), "layout": json.dumps(layout)}
    with replacing(Path(path)) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _check_lanes(layer: LayerPasses, fields: Sequence[str]) -> None:
    if layer.bounds.shape[-1] != len(fields):
        raise ValueError(
            f"bounds: layer {layer.name!r} has {layer.bounds.shape[-1]} lanes; the recording's "
            f"families need {len(fields)}."
        )


def _encoded(array: FloatArray) -> npt.NDArray[Any]:
    """In the dtype that the values came in; bfloat16 as bits, which every reader can read."""
    if array.dtype == "bfloat16":
        return (np.ascontiguousarray(array.values).view(np.uint32) >> np.uint32(16)).astype("<u2")
    return array.values.astype("<f2" if array.dtype == "float16" else "<f4")


def is_recording(path: Path) -> bool:
    """Whether a .safetensors file says that it is a recording, of whatever version.

    Raises:
        ValueError: where the file is missing, truncated or no safetensors file.
    """
    with _opened(Path(path)) as file:
        return bool((file.metadata() or {}).get("schema") == SCHEMA)


def read_recording(path: Path) -> Recording:
    """Open a recording. Every layer is read from the file when it is asked for.

    Raises:
        ValueError: in one line, where the file is missing, truncated, no recording, of a newer
            schema, or contradicts itself.
    """
    path = Path(path)
    with _opened(path) as file:
        metadata = file.metadata() or {}
        _check_schema(path, metadata)
        with _blaming(path):
            layout = parse_json(metadata["layout"])
            layers = _LayersInFile(path, layout["layers"])
            recording = Recording(
                layers=layers,
                families=tuple(layout["families"]),
                tolerance=layout["tolerance"],
                not_recorded=layout["passes_not_recorded"],
                created_by=printable(str(layout["created_by"])),
                settings=dict(layout["settings"]),
            )
            if tuple(layout["record_fields"]) != recording.fields:
                raise ValueError("record_fields are not those of its families")
            if tuple(layout["certificate_fields"]) != CERTIFICATE_FIELDS:
                raise ValueError(f"certificate_fields must be {', '.join(CERTIFICATE_FIELDS)}")
            for index in range(len(layers)):
                layers.check(file, index, len(recording.fields))
    return recording


def _check_schema(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: not a recording (no schema {SCHEMA!r} in its metadata). Make one with "
            "'certify record', or with 'certify audit QKV --save-recording FILE'."
        )
    version = metadata.get("version", "")
    if version.isdecimal() and int(version) > SCHEMA_VERSION:
        raise ValueError(
            f"{path}: written with schema version {version}; this release reads up to "
            f"{SCHEMA_VERSION}. Upgrade torch-clis."
        )
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"{path}: schema version {version!r} does not exist. Record it again.")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The mapped file; its errors in one line."""
    try:
        with open(path, "rb"):
            pass  # safe_open has one error for all that can be wrong with a path
        file = safetensors.safe_open(path, framework="np")
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}). Give a .safetensors file."
        ) from error
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete .safetensors file ({error}). It may be truncated or of "
            "another format."
        ) from error
    with file:
        yield file


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with the contents of a file into one line that names it."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}: a damaged recording: it lacks {error}.") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path}: a damaged recording: {error}") from error
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: a damaged recording: {error}") from error


class _LayersInFile(Sequence[LayerPasses]):
    """The layers of a file, each read when it is asked for and not kept."""

    def __init__(self, path: Path, entries: list[dict[str, Any]]) -> None:
        self._path = path
        self._entries = [dict(entry) for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> LayerPasses: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerPasses]: ...

    def __getitem__(self, index: int | slice) -> LayerPasses | Sequence[LayerPasses]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        with _opened(self._path) as file, _blaming(self._path):
            return self._read(file, index)

    def check(self, file: Any, index: int, lanes: int) -> None:
        """Settings, shapes and dtypes of a layer, without reading its numbers."""
        settings = _settings(self._entries[index])
        shape = file.get_slice(f"{index}.bounds").get_shape()
        if len(shape) != 5 or shape[-1] != lanes:
            raise ValueError(f"{index}.bounds has shape {shape}; expected {lanes} lanes in 5-D")
        calls, batch = shape[:2]
        blocks = [calls, batch, settings.heads, settings.num_blocks]
        expected = {
            "bounds": ("F32", [*blocks, lanes]),
            "certificate": ("F32", [*blocks, len(CERTIFICATE_FIELDS)]),
            "pass": ("I32", [calls]),
        }
        for name, (dtype, wanted) in expected.items():
            entry = file.get_slice(f"{index}.{name}")
            if entry.get_dtype() != dtype or entry.get_shape() != wanted:
                raise ValueError(
                    f"{index}.{name} is {entry.get_dtype()} of shape {entry.get_shape()}; expected "
                    f"{dtype} of shape {wanted}"
                )

    def _read(self, file: Any, index: int) -> LayerPasses:
        entry = self._entries[index]
        settings, name = _settings(entry), entry["name"]
        return LayerPasses(
            name=printable(name) if isinstance(name, str) else name,
            settings=settings,
            bounds=file.get_tensor(f"{index}.bounds"),
            certificate=file.get_tensor(f"{index}.certificate"),
            passes=file.get_tensor(f"{index}.pass"),
            kept=tuple(
                _kept_rows(file, f"{index}.kept.{number}.", place, settings.dtype)
                for number, place in enumerate(entry["kept"])
            ),
        )


def _settings(entry: dict[str, Any]) -> LayerSettings:
    return LayerSettings(
        **{field.name: entry[field.name] for field in dataclasses.fields(LayerSettings)}
    )


def _kept_rows(file: Any, prefix: str, place: dict[str, Any], dtype: str) -> KeptRows:
    return KeptRows(
        pass_index=int(place["pass"]),
        batch=int(place["batch"]),
        head=int(place["head"]),
        rows=np.asarray(place["rows"], np.int64),
        query=_decoded(file.get_tensor(prefix + "query"), dtype),
        key=_decoded(file.get_tensor(prefix + "key"), dtype),
        value_max=file.get_tensor(prefix + "value_max"),
    )


def _decoded(array: npt.NDArray[Any], dtype: str) -> FloatArray:
    stored = "uint16" if dtype == "bfloat16" else dtype
    if array.dtype.name != stored:
        raise ValueError(f"kept rows are {array.dtype.name}; {dtype} is stored as {stored}")
    if dtype == "bfloat16":
        return FloatArray(bfloat16_to_float32(array), dtype)
    return FloatArray(array.astype(np.float32), dtype)
