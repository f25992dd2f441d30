"""`oversmooth compare`."""

from typing import Annotated, Any

import typer

from oversmooth.commands.options import DataOption, PairPages, Tables, WithLoss, reads_data, runs_model
from oversmooth.commands.report import (
    _readings,
    analysed,
    destinations,
    logs_of,
    losses_of,
    put_page,
    put_tables,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.errors import BadValue


@runs_model
@reads_data
def compare(
    targets: Annotated[
        list[str],
        typer.Argument(help="Two or more models, saved analyses (.json), or logs of training runs."),
    ],
    data: DataOption = None,
    loss: WithLoss = False,
    output: PairPages = None,
    tables: Tables = None,
    *,
    load: dict[str, Any],
    reading: ReadingOptions,
) -> None:
    """Compare models on one page, aligned by relative depth: before and after, checkpoints of one run, or trained runs."""
    from oversmooth.models.revisions import steps_of

    files = destinations(output, "compare.html", (".html", ".md"), tables)
    if runs := logs_of(targets):
        from oversmooth.output.run_pages import runs_page

        finished = [(run.analysis, run.where) for run in runs if run.analysis]
        put_tables([analysis for analysis, _ in finished], tables, [where for _, where in finished])
        put_page(runs_page(runs), files)
        return
    if len(targets) < 2 and not steps_of(targets[0]):
        raise BadValue("The number of targets", len(targets), "at least 2 (for one model: oversmooth report)")
    if loss and any(steps_of(target) for target in targets):
        raise BadValue("--loss", "a series of checkpoints", "given with models one by one")
    readings = _readings(targets, load, data, reading)
    losses = losses_of(targets, load, data, readings) if loss else []
    analyses, page = analysed(targets, load, data, readings, {}, losses)
    put_tables(analyses, tables)
    put_page(page, files)
