"""``certify record`` and other commands that packages above this one contribute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import typer

from certify.commands.common import fail

GROUP = "certify.commands"
"""Entry points of this group are commands: a name and a typer command function (or a typer app)."""

RECORD_HELP = "Record while a model runs (with torch_clis)."

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Every argument, --help too, is the other package's."""


def add_contributed(app: typer.Typer) -> None:
    """Add "record", installed or not, and whatever else is installed. Nothing is imported yet."""
    entries: dict[str, metadata.EntryPoint | None] = {"record": None}
    entries |= {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    for name, entry in entries.items():
        help_text = RECORD_HELP
        if name != "record" and entry is not None:
            help_text = f"Comes with {entry.value.split(':')[0].split('.')[0]}."
        app.command(name, help=help_text, context_settings=PASSED_ON)(_command(name, entry))


def _command(name: str, entry: metadata.EntryPoint | None) -> Callable[[typer.Context], None]:
    """A stand-in that imports the command when it is called, and hands it every argument."""

    def run(ctx: typer.Context) -> None:
        if entry is None:
            fail(
                f"certify {name}: comes with torch_clis, which is not installed. Run "
                "pip install 'torch-clis[xla]', then try again."
            )
        try:
            target = entry.load()
        except ImportError as error:
            fail(
                f"certify {name}: its package cannot be imported ({error}). Run "
                "pip install 'torch-clis[xla]', then try again."
            )
        command = typer.main.get_command(_as_app(name, target))
        command.main(args=ctx.args, prog_name=f"certify {name}")

    return run


def _as_app(name: str, target: Any) -> typer.Typer:
    """An app as it is, or a command function with its module's EXAMPLE as epilog."""
    if isinstance(target, typer.Typer):
        return target
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    example = getattr(sys.modules.get(target.__module__), "EXAMPLE", None)
    app.command(name, epilog=example)(target)
    return app
