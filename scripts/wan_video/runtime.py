"""Which XLA device to use, and what torch_xla did on it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from command_line import UserError

PACKAGES = (
    "torch-clis",
    "torch",
    "torch_xla",
    "jax",
    "jaxlib",
    "libtpu",
    "diffusers",
    "transformers",
)
MODULES = ("torch", "torch_xla", "jax", "diffusers", "transformers", "imageio", "torch_clis")
# torch_xla names an operation that it runs on the host, outside XLA, by a counter of this prefix.
FALLBACK_PREFIX = "aten::"


def check_installed() -> None:
    """Refuse early, and say how to install, where a package is missing.

    Raises:
        UserError: names what is missing.
    """
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"not installed here: {', '.join(missing)}; run bash scripts/demo.sh once and use "
            ".venv/bin/python, or pip install -e '.[diffusers]'"
        )


def prepare_environment() -> None:
    """Choose the device unless the user did; call before torch_xla makes its first tensor.

    jax only traces and lowers here. Kept on the CPU, it never competes with torch_xla for the TPU.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "PJRT_DEVICE" in os.environ:
        return
    # Set before the import: torch_xla otherwise warns and chooses the CPU by itself.
    os.environ["PJRT_DEVICE"] = "CPU"
    from torch_xla._internal import tpu

    if tpu.num_available_chips() > 0:
        os.environ["PJRT_DEVICE"] = "TPU"


def use_compile_cache(directory: Path) -> bool:
    """Keep compiled programs in `directory` from run to run; False where the device cannot.

    The XLA CPU device writes programs but cannot load them ("Deserializing serialized executable
    not supported", torch_xla 2.9).
    """
    import torch_xla.runtime

    if os.environ["PJRT_DEVICE"] == "CPU":
        return False
    directory.mkdir(parents=True, exist_ok=True)
    torch_xla.runtime.initialize_cache(str(directory), readonly=False)
    return True


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Activity:
    """Running totals of torch_xla, or the difference of two of them.

    `compilations` counts XLA programs compiled or taken from the persistent cache,
    `compile_seconds` their time; `executions` counts runs of a program, `device_to_host` transfers
    of tensors to the host, and `fallbacks` operations that XLA did not run.
    """

    compilations: int
    compile_seconds: float
    executions: int
    device_to_host: int
    fallbacks: int

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(
            self.compilations - earlier.compilations,
            self.compile_seconds - earlier.compile_seconds,
            self.executions - earlier.executions,
            self.device_to_host - earlier.device_to_host,
            self.fallbacks - earlier.fallbacks,
        )


def activity() -> Activity:
    """What torch_xla has done in this process so far."""
    from torch_xla.debug import metrics

    def samples_and_seconds(name: str) -> tuple[int, float]:
        data = metrics.metric_data(name)
        return (int(data[0]), data[1] * 1e-9) if data else (0, 0.0)

    def count(name: str) -> int:
        return int(metrics.counter_value(name) or 0)

    compilations, compile_seconds = samples_and_seconds("CompileTime")
    fallbacks = [name for name in metrics.counter_names() if name.startswith(FALLBACK_PREFIX)]
    return Activity(
        compilations=compilations,
        compile_seconds=compile_seconds,
        # Counted where a program is launched; the samples of ExecuteTime arrive later, from another
        # thread.
        executions=count("CachedCompile") + count("UncachedCompile"),
        device_to_host=samples_and_seconds("TransferFromDeviceTime")[0],
        fallbacks=sum(map(count, fallbacks)),
    )
