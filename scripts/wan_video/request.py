"""What one run is asked to do, checked before anything heavy is imported or loaded."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from command_line import UserError

ATTENTIONS = ("clis", "online", "native", "native-bfloat16")
CERTIFIED_ATTENTIONS = ("clis", "online")
DTYPES = ("bfloat16", "float32")
SIZE_MULTIPLE = 16
FRAME_MULTIPLE = 4
# A file is first written beside its final place under this prefix, a few random letters and the
# final suffix: a long final name does not make the temporary one too long.
STAGING_PREFIX = ".clis-"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Request:
    """One video to generate. Sizes in pixels, `num_frames` of the form 4k + 1.

    Raises:
        UserError: a field is out of range; the message names the option and the remedy.
    """

    model: str
    prompt: str
    output: Path
    negative_prompt: str = ""
    height: int = 480
    width: int = 832
    num_frames: int = 81
    steps: int = 50
    guidance_scale: float = 5.0
    seed: int = 0
    fps: int = 16
    dtype: str = "bfloat16"
    attention: str = "clis"
    report: Path | None = None
    record: Path | None = None
    keep_tensors: int = 0
    latents: Path | None = None
    compile_cache: Path | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_outputs()
        self._check_model()

    @property
    def contact_sheet(self) -> Path:
        return self.output.with_suffix(".png")

    @property
    def run_details(self) -> Path:
        return self.output.with_suffix(".json")

    @property
    def targets(self) -> tuple[Path, ...]:
        """Every file that the run writes."""
        optional = (self.report, self.record, self.latents)
        named = (self.output, self.contact_sheet, self.run_details)
        return named + tuple(path for path in optional if path is not None)

    @property
    def is_hub_id(self) -> bool:
        return not Path(self.model).expanduser().exists()

    def _check_choices(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UserError(
                f"--attention is {self.attention!r}; choose one of {', '.join(ATTENTIONS)}"
            )
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.attention == "native-bfloat16" and self.dtype != "bfloat16":
            raise UserError(
                f"--attention native-bfloat16 has no meaning with --dtype {self.dtype}; use "
                "--attention native or --dtype bfloat16"
            )
        for name in ("report", "record"):
            if getattr(self, name) is not None and self.attention not in CERTIFIED_ATTENTIONS:
                raise UserError(
                    f"--{name} needs certificates and --attention {self.attention} has none; "
                    f"use --attention clis or leave --{name} out"
                )

    def _check_numbers(self) -> None:
        for name in ("height", "width"):
            check_multiple(name, getattr(self, name), SIZE_MULTIPLE)
        if self.num_frames < 1 or self.num_frames % FRAME_MULTIPLE != 1:
            below = max(self.num_frames - 1, 0) // FRAME_MULTIPLE * FRAME_MULTIPLE + 1
            raise UserError(
                f"--num-frames is {self.num_frames}; it must be 4k + 1, such as {below} or "
                f"{below + FRAME_MULTIPLE}"
            )
        for name in ("steps", "fps"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}; give 1 or more")
        if self.keep_tensors < 0:
            raise UserError(f"--keep-tensors is {self.keep_tensors}; give 0 or more")
        if self.keep_tensors and self.record is None:
            raise UserError("--keep-tensors keeps them in a recording; give --record FILE as well")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed is {self.seed}; give 0 to 2**63 - 1")
        if not 0.0 <= self.guidance_scale < float("inf"):
            raise UserError(f"--guidance-scale is {self.guidance_scale}; give 0 or more (1 = off)")
        if not self.prompt.strip():
            raise UserError("--prompt is empty; describe the video")

    def _check_outputs(self) -> None:
        suffixes = {
            "output": ".mp4",
            "report": ".html",
            "record": ".safetensors",
            "latents": ".safetensors",
        }
        for name, suffix in suffixes.items():
            path: Path | None = getattr(self, name)
            if path is not None and path.suffix != suffix:
                raise UserError(f"--{name} is {str(path)!r}; its name must end in {suffix}")
        if len({path.resolve() for path in self.targets}) != len(self.targets):
            raise UserError("two outputs have the same name; give each its own")
        for path in self.targets:
            check_writable(path)
        if self.compile_cache is not None:
            check_writable(self.compile_cache / "entry")

    def _check_model(self) -> None:
        if not self.model.strip():
            raise UserError(
                "--model is empty; give the directory of a Wan checkpoint or a hub id such as "
                "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
            )
        if self.is_hub_id and not HUB_ID.fullmatch(self.model):
            raise UserError(
                f"--model: there is no directory {self.model!r}; give a downloaded Wan "
                "checkpoint, a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers, or write a tiny "
                "one with scripts/make_tiny_checkpoint.py"
            )


def check_multiple(name: str, value: int, multiple: int) -> None:
    """Refuse a size that the model cannot divide into patches."""
    if value < multiple or value % multiple:
        below = value // multiple * multiple
        nearest = " or ".join(str(size) for size in (below, below + multiple) if size > 0)
        raise UserError(
            f"--{name} is {value}; it must be a multiple of {multiple}, such as {nearest}"
        )


def check_writable(path: Path) -> None:
    """Try to make a file, named as `path` will be staged, in the nearest directory that exists.

    Raises:
        UserError: a directory of that name exists, a name is too long, or it cannot be written to.
    """
    parent = path.absolute().parent
    try:
        is_directory = path.is_dir()
        while not parent.exists():
            parent = parent.parent
        with tempfile.NamedTemporaryFile(dir=parent, prefix=STAGING_PREFIX, suffix=path.suffix):
            pass
        longest = os.pathconf(parent, "PC_NAME_MAX")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {parent}: {error.strerror}; choose a place you may write to, "
            "and a shorter name if it is too long"
        ) from error
    if is_directory:
        raise UserError(f"cannot write {path}: it is a directory; give a file name")
    for name in path.absolute().relative_to(parent).parts:
        if len(os.fsencode(name)) > longest:
            raise UserError(
                f"cannot write {path}: a name in it is longer than {longest} bytes; give a "
                "shorter one"
            )
