"""`oversmooth survey`: many models into one table."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    VALUES,
    HeadRows,
    NewFolder,
    Precision,
    ShortFormat,
    SpectrumKind,
    require_format,
)


def survey(
    targets: Annotated[
        str | None,
        typer.Argument(
            metavar="LIST",
            help="Text file of targets, .csv or .parquet table, folder of models, or hf://owner/name@first..last.",
            show_default=False,
            autocompletion=completion.targets,
        ),
    ] = None,
    output: Annotated[Path, NewFolder(help="Folder of the table; one that was begun is continued.")] = Path("survey"),
    column: Annotated[str | None, typer.Option(help="Column of a table that holds the targets.")] = None,
    author: Annotated[str | None, typer.Option(help="Ask the hub: models of this user or organisation.")] = None,
    pipeline_tag: Annotated[str | None, typer.Option(help="Ask the hub: models for this task.")] = None,
    top: Annotated[int | None, typer.Option(help="Ask the hub: this many models, by downloads.", min=1)] = None,
    spectrum: SpectrumKind = "extremes",
    heads: HeadRows = False,
    precision: Precision = "auto",
    engine: Annotated[
        str, typer.Option(help="auto, serial, process or ray.", autocompletion=completion.values("engine"))
    ] = "auto",
    workers: Annotated[int, typer.Option(help="Models at a time.", min=1)] = 1,
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster. Default: this machine.", hidden=True)] = None,
    requests_per_second: Annotated[
        float,
        typer.Option(help="Limit of requests to the hub, over all workers.", hidden=True),
    ] = 10.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what the network or the machine made fail.")
    ] = False,
    format: ShortFormat = "table",
) -> None:
    """Inspect every model of a list into one table; models that cannot be read are rows with the reason."""
    from oversmooth.output.console import say_counts, survey_bar
    from oversmooth.surveys.survey import survey as survey_

    require_format(format, VALUES["short_format"])
    # Ray prints what happens to its processes, wherever the results of a program go.
    with redirect_stdout(sys.stderr), survey_bar() as progress:
        counts = survey_(
            targets,
            output,
            column=column,
            author=author,
            pipeline_tag=pipeline_tag,
            top=top,
            spectrum=spectrum,
            heads=heads,
            precision=precision,
            engine=engine,
            workers=workers,
            address=address,
            requests_per_second=requests_per_second,
            retry_failed=retry_failed,
            progress=progress,
        )
    if format == "json":
        import dataclasses
        import json

        typer.echo(json.dumps(dataclasses.asdict(counts), indent=2))
        return
    typer.echo(say_counts(counts, str(output)))
