"""All commands under one name, with what they share."""

from typing import Annotated

import typer

from oversmooth.commands.card import card
from oversmooth.commands.edit import edit, edit_curve
from oversmooth.commands.examples import epilog
from oversmooth.commands.features import measure, predict
from oversmooth.commands.finetune import finetune
from oversmooth.commands.gate import gate
from oversmooth.commands.pages import compare, report
from oversmooth.commands.plugins import plugins
from oversmooth.commands.reproduce import reproduce
from oversmooth.commands.survey import atlas, survey
from oversmooth.commands.train import train
from oversmooth.commands.watch import watch
from oversmooth.commands.weights import architectures, discover, inspect, verify
from oversmooth.commands.worth import ablate, loss, prune

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Inspect, measure, predict and control oversmoothing in any Transformer.",
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"oversmooth {version_of('oversmooth')}")
        raise typer.Exit


for command in (
    inspect,
    discover,
    verify,
    measure,
    predict,
    report,
    compare,
    card,
    gate,
    edit,
    edit_curve,
    loss,
    ablate,
    prune,
    train,
    watch,
    finetune,
    reproduce,
    survey,
    atlas,
    architectures,
    plugins,
):
    app.command(epilog=epilog(command.__name__))(command)
