"""What the scripts' command lines share: one-line errors with exit code 2, and the console."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from rich.console import Console

# A log file or a pipe has no width; 80 columns would cut the tables' headings.
console = Console(width=None if sys.stdout.isatty() else 120)

USAGE_ERROR = 2
INTERRUPTED = 130


class UserError(Exception):
    """Something the user can put right; its message is one line and says how."""


def fail(message: str) -> NoReturn:
    """Print one line on stderr and end with exit code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)


def run(app: typer.Typer) -> NoReturn:
    """Run a command line; every error of the user's becomes one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; nothing was written", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        # Newer versions of typer vendor click: its errors are known by their method, not a class.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        fail(f"{format_message()} (see --help)")
    raise SystemExit(code or 0)
