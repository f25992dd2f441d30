"""`oversmooth ablate`."""

from typing import Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    DataOption,
    LossTask,
    Showing,
    TargetArgument,
    example_target,
    reads_data,
    runs_model,
    show,
    shows_rows,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.output.console import one_bar


@runs_model
@reads_data
@shows_rows
def ablate(
    target: TargetArgument = None,
    data: DataOption = None,
    task: LossTask = None,
    parts: Annotated[
        str, typer.Option(help="What to remove, comma-separated.", autocompletion=completion.values("part"))
    ] = "attention,feed-forward,block",
    theory: Annotated[
        bool,
        typer.Option(help="Also show what weights and theory say of each layer, for one more pass.", hidden=True),
    ] = True,
    details: Annotated[
        bool, typer.Option("--details", help="Also print cheap proxies of each part, and how well they rank the costs.")
    ] = False,
    *,
    load: dict[str, Any],
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Measure the loss increase when each sub-block is removed, next to cheap proxies."""
    from oversmooth.output.tables import show_ablation
    from oversmooth.worth.ablate import ablate as ablate_

    showing.require_page_free()
    with one_bar("Running sequences") as progress:
        result = ablate_(
            target or example_target(),
            data,
            task=task,
            parts=parts.split(","),
            theory=theory,
            progress=progress,
            **load,
            **reading,
        )
    show(result, lambda: show_ablation(result, details=details), showing)
