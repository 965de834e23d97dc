"""Ctrl-C, whatever the interpreter is doing at that moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
PROGRAM = """
import gc, signal, sys, time
import typer
from command_line import run

# A job started in the background inherits that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
app = typer.Typer()

def interrupt(phase, information):
    gc.callbacks.remove(interrupt)
    signal.raise_signal(signal.SIGINT)
    time.sleep(0)

@app.command()
def main(place: str) -> None:
    if place == "callback":
        gc.callbacks.append(interrupt)
        gc.collect()
    else:
        signal.raise_signal(signal.SIGINT)
    time.sleep(5)
    print("finished")

run(app)
"""


@pytest.mark.parametrize("place", ["body", "callback"])
def test_an_interrupt_ends_the_run(place: str) -> None:
    """Fault: Ctrl-C during garbage collection is printed and forgotten; the run goes on."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, place],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("interrupted; ") and len(done.stderr.splitlines()) == 1
