"""`Recorder`: collects what lies behind the verdict of every attention call, and writes it."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

from certify import DEFAULT_TOLERANCE, RECORD_FIELDS
from certify.arithmetic import validate_tolerance
from certify.bounds import RECORDED_BOUNDS
from certify.recording import (
    CERTIFICATE_FIELDS,
    LayerPasses,
    LayerSettings,
    Recording,
    write_recording,
)
from torch_clis.host import on_host
from torch_clis.kept import KeptHeads, Sample
from torch_clis.record_ops import block_q_of, record_bounds_op
from torch_clis.validation import validate_attention

DEFAULT_MAX_BYTES = 2**31
"""Room for the self- and cross-attention of 40 layers of 40 heads over 80 calls at 75,600 tokens,
1.1 GB, and for a few kept heads."""

BYTES_PER_NUMBER = 4


class _Call(NamedTuple):
    """One call of a layer; tensors where it was made, until they are moved to the host."""

    number: int
    bounds: torch.Tensor
    certificate: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [part for part in (self.bounds, self.certificate) if part is not None]


@dataclass
class _Layer:
    """Recorded calls of one layer, all of one shape."""

    name: str
    settings: LayerSettings
    batch: int
    calls: list[_Call] = field(default_factory=list)
    kept: KeptHeads | None = None


class Recorder:
    """Collects, per attention call, its certificate and the bounds of every family.

    The numbers stay where the call was made, a few kilobytes each, until `flush`, `recording` or
    `save`. Nothing waits for the device, and the graph of every denoising step is the same. As a
    context manager it saves when the block ends without an error::

        with Recorder("calls.safetensors") as recorder:
            pipe.transformer.set_attn_processor(CLiSProcessor(record=recorder))
            pipe(...)

    Args:
        path: of the file, usually ``*.safetensors``; None: give it to `save`.
        keep_tensors: heads per layer of which the first call keeps up to 64 query rows, all keys,
            and max|v| of every key, so that ``certify audit`` can compute S and L again. Calls with
            a mask other than causal keep none.
        max_bytes: what the recording may hold. Calls beyond it are counted and left out, which is
            said in the file and, once, in a warning; XLA then compiles the changed step once more.
        tolerance: proven ``|o - o_exact| / max|v|`` that the bounds are judged by.

    Raises:
        ValueError: a path that is a directory or lies in none, or a number out of range.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        keep_tensors: int = 0,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> None:
        self.path = None if path is None else _checked_path(path)
        self.keep_tensors = _checked_count("keep_tensors", keep_tensors)
        self.max_bytes = _checked_count("max_bytes", max_bytes)
        self.tolerance = validate_tolerance(tolerance)
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything recorded."""
        self._layers: dict[tuple[str, LayerSettings, int], _Layer] = {}
        self._calls: dict[str, int] = {}
        self._bytes = 0
        self._full = False
        self._not_recorded = 0
        self._heads_not_kept = 0
        self._warned: set[str] = set()

    @property
    def passes_recorded(self) -> int:
        """Attention calls recorded."""
        return sum(len(layer.calls) for layer in list(self._layers.values()))

    @property
    def passes_not_recorded(self) -> int:
        """Attention calls seen and left out."""
        return self._not_recorded

    def add(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        lse: torch.Tensor | None = None,
        certificate: torch.Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
        attn_mask: torch.Tensor | None = None,
        key_lengths: torch.Tensor | None = None,
    ) -> None:
        """Record one call of the layer ``name``; arguments as in ``torch.ops.clis.attention``.

        Args:
            lse: float32 ``[B, H, S_q]``, nats, the op's second result; without it the recording
                has no row sums.
            certificate: the op's third result; None where another implementation ran.

        Raises:
            ValueError, NotImplementedError: as the op, for arguments that it does not take.
        """
        validate_attention(query, key, value, attn_mask, key_lengths, scale, self.tolerance, "auto")
        settings = _settings(query, key, scale, causal, attn_mask, key_lengths)
        if 0 in (*query.shape, *key.shape):
            self.leave_out("it has no query or no key")
            return
        admitted = self._admit(name, settings, query, key)
        if admitted is None:
            return
        layer, index = admitted
        with torch.no_grad():
            query, key, value = query.detach(), key.detach(), value.detach()
            bounds = record_bounds_op(
                query, key, value, lse, attn_mask, key_lengths, scale, causal, self.tolerance
            )
            with self._lock:
                verdicts = None if certificate is None else certificate.detach()
                layer.calls.append(_Call(index, bounds, verdicts))
                if layer.kept is not None:
                    layer.kept.update(query, key, value)

    def leave_out(self, reason: str) -> None:
        """Count a call that cannot be recorded; warns once for each reason."""
        with self._lock:
            self._not_recorded += 1
            known = reason in self._warned
            self._warned.add(reason)
        if not known:
            warnings.warn(f"attention call not recorded: {reason}.", UserWarning, stacklevel=3)

    def rename(self, old: str, new: str) -> None:
        """Give a layer, and its parts ``old.something``, another name.

        Raises:
            ValueError: where the new name is another layer's.
        """
        with self._lock:
            if old != new and new in self._calls and old in self._calls:
                raise ValueError(f"new: {new!r} is already the name of another recorded layer.")
            self._calls = {_renamed(name, old, new): n for name, n in self._calls.items()}
            for layer in self._layers.values():
                layer.name = _renamed(layer.name, old, new)
            self._layers = {
                (layer.name, settings, batch): layer
                for (_, settings, batch), layer in self._layers.items()
            }

    def flush(self) -> None:
        """Move what was recorded to the host, in one transfer. Call it between steps.

        It frees memory of the device; `save` does it as well.
        """
        with self._lock:
            calls = [call for layer in self._layers.values() for call in layer.calls]
            moved = iter(on_host([part for call in calls for part in call.tensors]))
            for layer in self._layers.values():
                layer.calls = [
                    call._replace(
                        bounds=next(moved),
                        certificate=None if call.certificate is None else next(moved),
                    )
                    for call in layer.calls
                ]

    def recording(self, **settings: Any) -> Recording:
        """Everything recorded so far, on the host; ``settings`` (JSON-able) are shown in reports.

        Raises:
            ValueError: where nothing was recorded.
        """
        self.flush()
        with self._lock:
            if not self._layers:
                raise ValueError(
                    "recording: no attention call was recorded. Run the model before saving; it "
                    f"must have calls that fit into max_bytes ({self.max_bytes})."
                )
            if self._heads_not_kept:
                settings = {**settings, "heads_not_kept": self._heads_not_kept}
            return Recording(
                layers=[_layer_passes(layer) for layer in self._layers.values() if layer.calls],
                families=RECORDED_BOUNDS,
                tolerance=self.tolerance,
                not_recorded=self._not_recorded,
                created_by=_created_by(),
                settings=settings,
            )

    def save(self, path: str | Path | None = None, **settings: Any) -> Path:
        """Write the recording so far; recording may go on afterwards.

        Args:
            path: None: the recorder's own.
            settings: JSON-able, shown in reports.

        Raises:
            ValueError: where nothing was recorded or no path is known.
            OSError: where the file cannot be written; what was recorded is kept.
        """
        target = self.path if path is None else _checked_path(path)
        if target is None:
            raise ValueError("path: got None and the recorder has none; give the file to write.")
        write_recording(target, self.recording(**settings))
        return target

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.save()

    def _admit(
        self, name: str, settings: LayerSettings, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[_Layer, int] | None:
        """The layer to add a call to, and the call's index; None if there is no room."""
        batch = int(query.shape[0])
        numbers = batch * settings.heads * settings.num_blocks
        size = numbers * (len(RECORD_FIELDS) + len(CERTIFICATE_FIELDS)) * BYTES_PER_NUMBER
        with self._lock:
            index = self._calls.get(name, 0)
            self._calls[name] = index + 1
            self._full = self._full or self._bytes + size > self.max_bytes
            if not self._full:
                self._bytes += size
                place = (name, settings, batch)
                layer = self._layers.get(place)
                if layer is None:
                    layer = _Layer(name, settings, batch)
                    layer.kept = self._kept(settings, index, query, key)
                    self._layers[place] = layer
                return layer, index
        self.leave_out(
            f"the recording has reached max_bytes ({self.max_bytes}); it counts what it leaves out"
        )
        return None

    def _kept(
        self, settings: LayerSettings, index: int, query: torch.Tensor, key: torch.Tensor
    ) -> KeptHeads | None:
        if not self.keep_tensors or settings.masked:
            return None
        sample = Sample.choose(query, self.keep_tensors)
        size = sample.size(query, key)
        if self._bytes + size > self.max_bytes:
            self._heads_not_kept += len(sample.places)
            return None
        self._bytes += size
        return KeptHeads(sample, index)


def _settings(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float | None,
    causal: bool,
    attn_mask: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
) -> LayerSettings:
    _, num_queries, heads, head_dim = query.shape
    return LayerSettings(
        head_dim=head_dim,
        dtype=str(query.dtype).removeprefix("torch."),
        scale=float(head_dim) ** -0.5 if scale is None else float(scale),
        num_queries=num_queries,
        num_keys=key.shape[1],
        heads=heads,
        key_heads=key.shape[2],
        block_q=block_q_of(query, key),
        causal=bool(causal),
        masked=attn_mask is not None or key_lengths is not None,
    )


def _layer_passes(layer: _Layer) -> LayerPasses:
    """Of tensors on the host."""
    calls = sorted(layer.calls, key=lambda call: call.number)
    bounds = np.stack([call.bounds.numpy() for call in calls])
    certificate = np.full((*bounds.shape[:4], len(CERTIFICATE_FIELDS)), np.nan, np.float32)
    for place, call in enumerate(calls):
        if call.certificate is not None:
            certificate[place] = call.certificate.numpy()
    return LayerPasses(
        name=layer.name,
        settings=layer.settings,
        bounds=bounds,
        certificate=certificate,
        passes=np.array([call.number for call in calls], np.int32),
        kept=() if layer.kept is None else layer.kept.rows(),
    )


def _renamed(name: str, old: str, new: str) -> str:
    if name == old or name.startswith(f"{old}."):
        return new + name[len(old) :]
    return name


def _checked_path(path: str | Path) -> Path:
    found = Path(path)
    if found.is_dir() or not found.absolute().parent.is_dir():
        raise ValueError(
            f"path: {found} is a directory or lies in none; give a file in a directory that exists."
        )
    return found


def _checked_count(name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 0:
        raise ValueError(f"{name}: got {number!r}; give 0 or a positive integer.")
    return int(number)


def _created_by() -> str:
    try:
        return f"torch-clis {metadata.version('torch-clis')}"
    except metadata.PackageNotFoundError:
        return "torch-clis"
