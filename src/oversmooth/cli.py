"""The command line. Results go to stdout, everything else to stderr; an error is its message and exit code 2."""

import io
import sys
from typing import Annotated

import typer

from oversmooth.commands.edit import edit
from oversmooth.commands.features import measure, predict
from oversmooth.commands.finetune import finetune
from oversmooth.commands.pages import compare, report
from oversmooth.commands.reproduce import reproduce
from oversmooth.commands.train import train
from oversmooth.commands.weights import architectures, inspect, verify
from oversmooth.errors import OversmoothError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Inspect, measure, predict and control oversmoothing in any Transformer.",
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from oversmooth import __version__

        typer.echo(f"oversmooth {__version__}")
        raise typer.Exit


for command in (
    inspect,
    verify,
    measure,
    predict,
    report,
    compare,
    edit,
    train,
    finetune,
    reproduce,
    architectures,
):
    app.command()(command)


def main() -> None:
    """Entry point: our own errors end in one message, never in a traceback; typer sees to Ctrl-C and closed pipes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a file name beyond its encoding is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OversmoothError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
