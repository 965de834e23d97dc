"""JAX function -> HLO computation -> XLA user computation, cached.

PyTorch/XLA can put a finished HLO computation into a lazy graph. This module makes one from a JAX
function and the shapes of its inputs, once, and inserts it on every call. It needs no device: a
program for TPU can be traced on a machine that has none (`target_platform`).

Note [JAX never touches the chip]
    A TPU belongs to one runtime, here PyTorch/XLA's, and a JAX that starts its own TPU backend in
    the same process hangs or fails. Two things in JAX 0.7 start backends while lowering: the search
    for a default device (``jax.export`` does it as well, hence plain ``jit(...).lower`` here), and,
    on a TPU VM, ``is_cloud_tpu_older_than``, which asks the backend for libtpu's build date; with
    ``JAX_PLATFORMS=cpu`` it gets no date and refuses every Pallas kernel. So lowering runs under
    the only device of a CPU client of its own, which JAX's backend registry never sees, and with
    the cloud-VM flag down. What JAX is configured to use elsewhere in the process does not change.

Note [One program for every libtpu]
    JAX writes a Mosaic kernel either in its newest serialization, which libtpu 0.0.21 (what
    torch_xla 2.9 asks for) refuses, or, exporting, in the one before it, but then with exp2 as
    exp(ln2 x), a third slower. We write the older serialization and keep exp2: libtpu 0.0.21 and
    0.0.52 compile that alike.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

PLATFORMS = ("tpu", "cpu")
CACHE_CAPACITY = 512
"""Programs kept. One is a few hundred kB at most; a pipeline uses a handful of shapes."""

MOSAIC_VERSION = 7
"""Serialization of Mosaic kernels, see Note [One program for every libtpu]."""

_LOWERING_LOCK = threading.Lock()
"""Held while JAX's settings are replaced."""

_SUPPORTED_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.bool: "bool",
}

_target_platform: ContextVar[str | None] = ContextVar("target_platform", default=None)


@dataclass(frozen=True)
class CacheInfo:
    """State of the program cache: calls served from it, programs lowered, programs held."""

    hits: int
    misses: int
    size: int


@contextmanager
def target_platform(platform: str) -> Iterator[None]:
    """Lower for ``platform`` ("tpu" or "cpu") inside the block, whatever the device is.

    Needed to trace for TPU on a machine without one. A tensor traced that way can have its HLO
    extracted; it must never be materialised on the CPU device. The setting is a context variable:
    other threads and tasks do not see it.

    Raises:
        ValueError: for another platform.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform: got {platform!r}; give one of {', '.join(PLATFORMS)}.")
    token = _target_platform.set(platform)
    try:
        yield
    finally:
        _target_platform.reset(token)


def platform_of(device: torch.device) -> str:
    """Platform to lower for: the override of `target_platform`, else what the XLA device is.

    Raises:
        NotImplementedError: when the XLA device is neither a TPU nor a CPU.
    """
    override = _target_platform.get()
    return override if override is not None else _device_platform(str(device))


@lru_cache(maxsize=64)
def _device_platform(device: str) -> str:
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    if xr.is_spmd():  # the virtual device has no hardware of its own
        hardware = str(xr.global_runtime_device_attributes()[0]["name"]).split(":")[0]
    else:
        hardware = xm.xla_device_hw(device)
    platform = hardware.lower()
    if platform not in PLATFORMS:
        raise NotImplementedError(
            f"device: {device} is a {hardware}; attention is lowered for TPU and CPU only. "
            "Move the tensors to one of those."
        )
    return platform


class ProgramCache:
    """Thread-safe, bounded (least recently used) map from call signatures to XLA computations.

    A program that is lowered again hashes differently and so makes XLA compile again, which is why
    programs are kept for the life of the process.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._programs: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._build_lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def get(self, key: Any, build: Callable[[], Any]) -> Any:
        """The program of ``key``, built by ``build`` unless held; concurrent callers build once."""
        program = self._find(key)
        if program is not None:
            return program
        with self._build_lock:
            program = self._find(key)
            if program is not None:
                return program
            program = build()
            with self._lock:
                self._misses += 1
                self._programs[key] = program
                if len(self._programs) > self._capacity:
                    self._programs.popitem(last=False)
        return program

    def _find(self, key: Any) -> Any:
        with self._lock:
            program = self._programs.get(key)
            if program is not None:
                self._programs.move_to_end(key)
                self._hits += 1
            return program

    def info(self) -> CacheInfo:
        """Hits, misses and size so far."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._programs))


_PROGRAMS = ProgramCache(CACHE_CAPACITY)


def cache_info() -> CacheInfo:
    """Hits, misses and size of the process-wide program cache."""
    return _PROGRAMS.info()


def call(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    *,
    name: str,
    **static: Any,
) -> list[torch.Tensor]:
    """Put ``function(*arrays, platform=..., **static)`` into the lazy graph of ``tensors``.

    Args:
        function: a module-level JAX function (it is part of the cache key, so a fresh lambda would
            be lowered on every call); returns an array or a flat tuple of arrays.
        tensors: XLA tensors, all on one device, of dtype float32, bfloat16, float16, int32, int8
            or bool.
        name: what the node is called in the graph, ``"xla::something"``.
        static: hashable arguments. ``platform`` ("tpu" or "cpu") is added to them.

    Returns:
        The outputs, one tensor each, lazily.

    Raises:
        TypeError: for another dtype.
    """
    import torch_xla

    platform = platform_of(tensors[0].device)
    signature = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    key = (function, signature, tuple(static.items()), platform)
    computation = _PROGRAMS.get(key, partial(_build, function, signature, static, platform, name))
    return list(torch_xla._XLAC._xla_user_computation(name, list(tensors), computation))


def _build(
    function: Callable[..., Any],
    signature: Sequence[tuple[tuple[int, ...], torch.dtype]],
    static: dict[str, Any],
    platform: str,
    name: str,
) -> Any:
    import torch_xla.core.xla_builder as xla_builder

    proto = lower_to_hlo_proto(partial(function, **static, platform=platform), signature, platform)
    return xla_builder.computation_from_module_proto(name.rpartition("::")[2], proto)


def lower_to_hlo_proto(
    function: Callable[..., Any],
    signature: Sequence[tuple[tuple[int, ...], torch.dtype]],
    platform: str,
) -> bytes:
    """Serialized HLO module of a JAX function for inputs of the given shapes and dtypes."""
    import jax

    arguments = [jax.ShapeDtypeStruct(shape, _jax_dtype_name(dtype)) for shape, dtype in signature]
    with _portable_lowering():
        traced = jax.jit(function, keep_unused=True).trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
        return bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


def _jax_dtype_name(dtype: torch.dtype) -> str:
    try:
        return _SUPPORTED_DTYPES[dtype]
    except KeyError:
        supported = ", ".join(_SUPPORTED_DTYPES.values())
        raise TypeError(
            f"dtype: got {dtype}; a lowered function takes {supported}. Cast the tensor."
        ) from None


@contextmanager
def _portable_lowering() -> Iterator[None]:
    """See the notes [JAX never touches the chip] and [One program for every libtpu]."""
    import jax
    import jax.experimental
    from jax._src import cloud_tpu_init, tpu_custom_call

    with (
        _LOWERING_LOCK,
        _replaced(cloud_tpu_init, "running_in_cloud_tpu_vm", False),
        _replaced(tpu_custom_call, "get_ir_version", lambda _: MOSAIC_VERSION),
        jax.default_device(_private_cpu_device()),
        jax.experimental.disable_x64(),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    saved = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)


@lru_cache(maxsize=1)
def _private_cpu_device() -> Any:
    from jaxlib import xla_client

    client: Any = xla_client.make_cpu_client()
    return client.local_devices()[0]
