"""``certify record`` and other commands that packages above this one contribute."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import click
import typer

from certify.commands.common import fail

GROUP = "certify.commands"
"""Entry points of this group are commands: a name and a typer command function (or a typer app)."""

RECORD_HELP = "Record what the certificates need while a model runs (needs torch_clis)."


def contributed() -> dict[str, metadata.EntryPoint]:
    """Commands of installed packages by name; nothing is imported."""
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


class ContributedCommand(click.Command):
    """Stands for a command of another package, which is imported only when it is called."""

    def __init__(self, name: str, entry: metadata.EntryPoint | None, help_text: str) -> None:
        super().__init__(
            name,
            help=help_text,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        self._entry = entry

    def invoke(self, ctx: click.Context) -> Any:
        """Import the command and hand it every argument."""
        if self._entry is None:
            fail(
                f"certify {self.name}: comes with torch_clis, which is not installed. Run "
                "pip install 'torch-clis[xla]', then try again."
            )
        try:
            target = self._entry.load()
        except ImportError as error:
            fail(
                f"certify {self.name}: its package cannot be imported ({error}). Run "
                "pip install 'torch-clis[xla]', then try again."
            )
        command = _as_command(str(self.name), target)
        return command.main(ctx.args, prog_name=ctx.command_path, standalone_mode=True)


def _as_command(name: str, target: Any) -> click.Command:
    if isinstance(target, click.Command):
        return target
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    epilog = getattr(target, "EXAMPLE", None)
    app.command(name, epilog=epilog)(target)
    return typer.main.get_command(app)


def contributed_commands() -> dict[str, click.Command]:
    """ "record", installed or not, and whatever else is installed."""
    entries = contributed()
    commands: dict[str, click.Command] = {
        "record": ContributedCommand("record", entries.pop("record", None), RECORD_HELP)
    }
    for name, entry in entries.items():
        package = entry.value.split(":")[0].split(".")[0]
        commands[name] = ContributedCommand(name, entry, f"Comes with {package}.")
    return commands
