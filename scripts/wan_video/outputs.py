"""The files of a run. They are written under temporary names and renamed together at the end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHEET_COLUMNS = 4
SHEET_FRAMES = 12
SHEET_TILE_WIDTH = 320
SHEET_LABEL_HEIGHT = 28
SHEET_FONT_SIZE = 18


class Staging:
    """Hands out a temporary sibling for each final path; `commit` renames them all."""

    def __init__(self) -> None:
        self._pending: dict[Path, Path] = {}

    def path(self, final: Path) -> Path:
        final.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=final.parent, prefix=f".{final.stem}-", suffix=final.suffix
        )
        os.close(handle)
        self._pending[final] = Path(name)
        return self._pending[final]

    def commit(self) -> None:
        for final, temporary in self._pending.items():
            temporary.chmod(0o644)
            temporary.replace(final)
        self._pending.clear()

    def discard(self) -> None:
        for temporary in self._pending.values():
            temporary.unlink(missing_ok=True)
        self._pending.clear()


@contextlib.contextmanager
def staged() -> Iterator[Staging]:
    """All files appear when the block ends well, none otherwise."""
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
