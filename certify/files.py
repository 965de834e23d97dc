"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write text to a file beside the target, then put it in the target's place.

    Raises:
        OSError: where the directory is missing or cannot be written; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".certify-", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
