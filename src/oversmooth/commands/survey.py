"""`oversmooth survey`: many models into one table."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import Json


def survey(
    targets: Annotated[
        str | None,
        typer.Argument(
            metavar="[LIST]",
            help="Text file of targets, .csv or .parquet table, folder of models, or hf://owner/name@first..last.",
            show_default=False,
            autocompletion=completion.targets,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the table; one that was begun is continued.")] = Path("survey"),
    column: Annotated[str | None, typer.Option(help="Column of a table that holds the targets.")] = None,
    author: Annotated[str | None, typer.Option(help="Ask the hub: models of this user or organisation.")] = None,
    pipeline_tag: Annotated[str | None, typer.Option(help="Ask the hub: models for this task.")] = None,
    top: Annotated[int | None, typer.Option(help="Ask the hub: so many models, by downloads.", min=1)] = None,
    extremes: Annotated[
        bool, typer.Option("--extremes/--all-eigenvalues", help="The extremes of each spectrum, or all of it.")
    ] = True,
    heads: Annotated[bool, typer.Option("--heads", help="Also a row per head.")] = False,
    dtype: Annotated[str, typer.Option(help="Precision of the eigenvalues: auto, float64 or float32.")] = "auto",
    engine: Annotated[
        str, typer.Option(help="auto, serial, process or ray.", autocompletion=completion.values("engine"))
    ] = "auto",
    workers: Annotated[int, typer.Option(help="How many models at a time.", min=1)] = 1,
    address: Annotated[str | None, typer.Option(help="With --engine ray: a cluster; without it, this machine.")] = None,
    requests_per_second: Annotated[
        float,
        typer.Option(help="Most requests to the hub, all workers together; 10 is what it allows without a token."),
    ] = 10.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed for the network or the machine.")
    ] = False,
    json: Json = False,
) -> None:
    """Inspect every model of a list into one table of Parquet files; what cannot be read is a row with the reason."""
    from oversmooth.output.console import say_counts, survey_bar
    from oversmooth.surveys.survey import survey as survey_

    # Ray prints what happens to its processes, wherever the results of a program go.
    with redirect_stdout(sys.stderr), survey_bar() as progress:
        counts = survey_(
            targets,
            out,
            column=column,
            author=author,
            pipeline_tag=pipeline_tag,
            top=top,
            extremes=extremes,
            heads=heads,
            dtype=dtype,
            engine=engine,
            workers=workers,
            address=address,
            requests_per_second=requests_per_second,
            retry_failed=retry_failed,
            progress=progress,
        )
    if json:
        import dataclasses
        import json as json_module

        typer.echo(json_module.dumps(dataclasses.asdict(counts), indent=2))
        return
    typer.echo(say_counts(counts, str(out)))
