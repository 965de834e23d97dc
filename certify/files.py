"""Files that appear whole or not at all, and what is read from files of anyone."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside the target to write; it takes the target's place when the block ends well.

    Raises:
        OSError: where the directory is missing or cannot be written; nothing is left behind.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".certify-", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write text so that the file appears whole or not at all.

    Raises:
        OSError: where the directory is missing or cannot be written; nothing is left behind.
    """
    with replacing(path) as temporary:
        # Newlines as they are: a CSV writer ends its lines itself.
        temporary.write_text(text, encoding="utf-8", newline="")


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: where it is no JSON, or nested deeper than any file of ours.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
