"""`oversmooth report` and `compare`: one page."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import completion
from oversmooth.commands.making_pages import (
    analysed,
    destination,
    losses_of,
    put_page,
    put_tables,
    run_folders,
    run_page,
)
from oversmooth.commands.options import (
    Base,
    DataOption,
    Device,
    Offload,
    RunDtype,
    TrustRemoteCode,
    WhatIfs,
    embedded_default,
)
from oversmooth.commands.reading import reads_data
from oversmooth.data.reading import ReadingOptions
from oversmooth.errors import BadValue, Conflict
from oversmooth.output.whole_files import require_writable, write_whole

Solve = Annotated[
    int,
    typer.Option(
        help="Number of sequences whose eigenvalue problems are solved; 0 writes the page without theory.", min=0
    ),
]
PageFormat = Annotated[
    str, typer.Option(help="html, or md for pull requests.", autocompletion=completion.values("page_format"))
]

Tables = Annotated[Path | None, typer.Option(help="Also write every table as CSV and Parquet into this folder.")]


@reads_data
def report(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Models, or analyses saved with --save. Default: the embedded MiniLM.", show_default=False),
    ] = None,
    base: Base = None,
    data: DataOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: report.html or report.md.")
    ] = None,
    format: PageFormat = "html",
    save: Annotated[
        Path | None, typer.Option(help="Also save the analysis as JSON; `report` and `compare` can open it again.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write PDF, PNG and SVG figures into this folder.")] = None,
    tables: Tables = None,
    solve: Solve = 2,
    what_if: WhatIfs = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Show training curves of a run's folder, or of the JSONL file of a monitor, instead."),
    ] = None,
    device: Device = None,
    dtype: RunDtype = None,
    offload: Offload = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    reading: ReadingOptions,
) -> None:
    """Write one self-contained page with the verdict, the curves, the spectra and the explanation."""
    from oversmooth.output.report.static import write_figures

    output = destination(output, "report", format, tables)
    require_writable(save)
    _require_one(targets or [], {"--save": save, "--figures": figures})
    if run is not None:
        if targets:
            raise Conflict(["a model", "--run"])
        page = run_page(run)
    else:
        how = {"base": base, "dtype": dtype, "offload": offload}
        options = {"device": device, "trust_remote_code": trust_remote_code, "solve": solve, "what_ifs": what_if}
        analyses, page = analysed(targets or [embedded_default()], how, data, reading, options)
        if save is not None:
            text = analyses[0].to_json(indent=1)
            write_whole(save, lambda partial: partial.write_text(text, encoding="utf-8"))
        if figures is not None:
            for path in write_figures(analyses[0], figures):
                typer.echo(path, err=True)
        put_tables(analyses, tables)
    put_page(page, output, format)


@reads_data
def compare(
    targets: Annotated[
        list[str],
        typer.Argument(help="Two or more models, analyses saved with `report --save`, or folders of training runs."),
    ],
    base: Base = None,
    data: DataOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: compare.html or compare.md.")
    ] = None,
    format: PageFormat = "html",
    tables: Tables = None,
    loss: Annotated[
        bool, typer.Option("--loss", help="Also show the loss of each, beside what it does to features.")
    ] = False,
    device: Device = None,
    dtype: RunDtype = None,
    offload: Offload = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    reading: ReadingOptions,
) -> None:
    """Compare models on one page, aligned by relative depth: before and after, checkpoints of one run, or trained runs."""
    from oversmooth.models.revisions import steps_of

    output = destination(output, "compare", format, tables)
    if runs := run_folders(targets):
        from oversmooth.output.report.run_pages import runs_page

        finished = [(run.analysis, run.where) for run in runs if run.analysis]
        put_tables([analysis for analysis, _ in finished], tables, [where for _, where in finished])
        put_page(runs_page(runs), output, format)
        return
    if len(targets) < 2 and not steps_of(targets[0]):
        raise BadValue("The number of targets", len(targets), "at least 2 (for one model: oversmooth report)")
    how = {"base": base, "dtype": dtype, "offload": offload}
    options = {"device": device, "trust_remote_code": trust_remote_code}
    if loss and any(steps_of(target) for target in targets):
        raise BadValue("--loss", "a series of checkpoints", "given with models one by one")
    losses = losses_of(targets, how, data, reading, options) if loss else []
    analyses, page = analysed(targets, how, data, reading, options, losses)
    put_tables(analyses, tables)
    put_page(page, output, format)


def _require_one(targets: list[str], given: dict[str, Path | None]) -> None:
    """Refuses options that write one analysis where there are several."""
    from oversmooth.models.revisions import steps_of

    for name, path in given.items():
        if path is not None and (len(targets) > 1 or any(steps_of(target) for target in targets)):
            raise BadValue(name, "several models", "given with one model at a time")
