"""The ``certify`` command: its sub-commands are in ``certify.commands``."""

from __future__ import annotations

import typer

from certify.commands import audit, explain, report, weights
from certify.commands.record import add_contributed

app = typer.Typer(
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
add_contributed(app)


def main() -> None:
    """Entry point of the ``certify`` command."""
    app()


if __name__ == "__main__":
    main()
