"""The ``certify`` command: its sub-commands are in ``certify.commands``."""

from __future__ import annotations

import click
import typer

from certify.commands import audit, explain, report, weights
from certify.commands.record import contributed_commands


class _Commands(typer.core.TyperGroup):
    """The sub-commands of this package, and those that others contribute."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or contributed_commands().get(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in contributed_commands() if name not in own)]


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def commands() -> None:
    """What can be proved about attention whose softmax stabilizer is fixed before the KV loop."""


app.command(epilog=audit.EXAMPLE)(audit.audit)
app.command(epilog=report.EXAMPLE)(report.report)
app.command(epilog=explain.EXAMPLE)(explain.explain)
app.command(epilog=weights.EXAMPLE)(weights.weights)


def main() -> None:
    """Entry point of the ``certify`` command."""
    app()


if __name__ == "__main__":
    main()
