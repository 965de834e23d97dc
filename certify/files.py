"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
