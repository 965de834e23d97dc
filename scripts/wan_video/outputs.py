"""The files of a run. They are written under temporary names and renamed together at the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from command_line import UserError
from wan_video.request import STAGING_PREFIX

SHEET_COLUMNS = 4
SHEET_FRAMES = 12
SHEET_TILE_WIDTH = 320
SHEET_LABEL_HEIGHT = 28
SHEET_FONT_SIZE = 18


class Staging:
    """Writes each file under a temporary name beside the final one; `commit` renames them all.

    A file that cannot be written is set aside, so that a full disk does not cost the whole run.
    """

    def __init__(self) -> None:
        self._pending: dict[Path, Path] = {}
        self._failures: dict[Path, Exception] = {}

    def write(self, final: Path, writer: Callable[[Path], object]) -> None:
        """Let `writer` write a file; its errors of writing, and only these, wait for `commit`."""
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(
                dir=final.parent, prefix=STAGING_PREFIX, suffix=final.suffix
            )
            os.close(handle)
            self._pending[final] = Path(name)
            writer(self._pending[final])
        except (OSError, SafetensorError) as error:
            self._set_aside(final, error)

    def _set_aside(self, final: Path, error: Exception) -> None:
        self._failures[final] = error
        temporary = self._pending.pop(final, None)
        if temporary is not None:
            temporary.unlink(missing_ok=True)

    def commit(self) -> None:
        """Rename all.

        Raises:
            UserError: some could not be written; it names these and those that were.
        """
        written = []
        for final, temporary in list(self._pending.items()):
            try:
                temporary.chmod(0o644)
                temporary.replace(final)
            except OSError as error:
                self._set_aside(final, error)
            else:
                written.append(str(final))
                del self._pending[final]
        if self._failures:
            failed = "; ".join(
                f"cannot write {final} ({getattr(error, 'strerror', None) or error})"
                for final, error in self._failures.items()
            )
            raise UserError(
                f"{failed}; written all the same: {', '.join(written) or 'nothing'}; make room or "
                "choose another place"
            )

    def discard(self) -> None:
        for temporary in self._pending.values():
            temporary.unlink(missing_ok=True)
        self._pending.clear()


@contextlib.contextmanager
def staged() -> Iterator[Staging]:
    """Every file that could be written appears when the block ends; none if it is interrupted."""
    staging = Staging()
    try:
        yield staging
        staging.commit()
    finally:
        staging.discard()


def write_video(path: Path, frames: np.ndarray, fps: int) -> None:
    """H.264 mp4 of uint8 frames [F, H, W, 3]."""
    import imageio.v2

    with imageio.v2.get_writer(path, fps=fps, codec="libx264", quality=8) as writer:
        for frame in frames:
            writer.append_data(frame)


def write_contact_sheet(path: Path, frames: np.ndarray, fps: int, title: str) -> None:
    """A PNG of evenly spaced frames [F, H, W, 3], each labelled with its number and time."""
    from PIL import Image, ImageDraw, ImageFont

    chosen = np.unique(np.linspace(0, len(frames) - 1, SHEET_FRAMES).round().astype(int))
    columns = min(SHEET_COLUMNS, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    width = SHEET_TILE_WIDTH
    height = round(width * frames.shape[1] / frames.shape[2])
    cell = height + SHEET_LABEL_HEIGHT
    sheet = Image.new("RGB", (columns * width, rows * cell + SHEET_LABEL_HEIGHT), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=SHEET_FONT_SIZE)
    draw.text((6, 4), title, fill="black", font=font)
    for position, index in enumerate(chosen):
        left = position % columns * width
        top = SHEET_LABEL_HEIGHT + position // columns * cell
        label = f"frame {index}, {index / fps:.2f} s"
        draw.text((left + 6, top + 4), label, fill="black", font=font)
        tile = Image.fromarray(frames[index]).resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(tile, (left, top + SHEET_LABEL_HEIGHT))
    sheet.save(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_latents(path: Path, latents: Any) -> None:
    """float32 latents [1, C, F, H, W] under the name `latents`."""
    from safetensors.torch import save_file

    save_file({"latents": latents.contiguous()}, path)
