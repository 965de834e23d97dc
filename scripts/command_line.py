"""What the scripts' command lines share: one-line errors with exit code 2, and the console."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any, NoReturn

import typer
from rich.console import Console

# A log file or a pipe has no width; 80 columns would cut the tables' headings.
console = Console(width=None if sys.stdout.isatty() else 120)

USAGE_ERROR = 2
INTERRUPTED = 130
INTERRUPT_AGAIN_SECONDS = 0.05


class UserError(Exception):
    """Something the user can put right; its message is one line and says how."""


def fail(message: str) -> NoReturn:
    """Print one line on stderr and end with exit code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)


def interrupted() -> NoReturn:
    print("interrupted; unfinished files were not kept", file=sys.stderr)
    raise SystemExit(INTERRUPTED)


def repeat_swallowed_interrupts() -> None:
    """Send SIGINT once more where Python had to drop a KeyboardInterrupt.

    One that is raised within a garbage-collection callback, such as jax's, or a destructor has
    nowhere to go: Python prints it and the run would go on.
    """
    report = sys.unraisablehook
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report(unraisable)
            return
        # Later and from another thread: here, it would be raised within the callback again.
        timer = threading.Timer(
            INTERRUPT_AGAIN_SECONDS, signal.pthread_kill, (main_thread, signal.SIGINT)
        )
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def run(app: typer.Typer) -> NoReturn:
    """Run a command line; every error of the user's becomes one line and exit code 2."""
    repeat_swallowed_interrupts()
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        interrupted()
    except Exception as error:
        # Newer versions of typer vendor click: its errors are known by their method, not a class.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        fail(f"{format_message()} (see --help)")
    if code == INTERRUPTED:  # newer versions of typer return this instead of raising
        interrupted()
    raise SystemExit(code or 0)
