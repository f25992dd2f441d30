"""`oversmooth loss`, `ablate` and `prune`: what parts of a model are worth."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import completion
from oversmooth.commands.options import (
    DataOption,
    Device,
    LossTask,
    TargetArgument,
    TrustRemoteCode,
    embedded_default,
)
from oversmooth.commands.reading import reads_data
from oversmooth.commands.showing import Showing, show, shows_rows
from oversmooth.data.reading import ReadingOptions
from oversmooth.output.terminal.progress_bars import one_bar


@reads_data
@shows_rows
def loss(
    target: TargetArgument = None,
    data: DataOption = None,
    task: LossTask = None,
    original: Annotated[
        str | None, typer.Option(help="The model whose similarities an embedding model is compared with.")
    ] = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Show how well a model does what it was trained for: its loss on data."""
    from oversmooth.output.terminal.worth_tables import show_loss
    from oversmooth.worth.task_loss import task_loss

    with one_bar("Running sequences") as progress:
        result = task_loss(
            target or embedded_default(),
            data,
            task=task,
            original=original,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
            **reading,
        )
    show(result, lambda: show_loss(result), showing)


@reads_data
@shows_rows
def ablate(
    target: TargetArgument = None,
    data: DataOption = None,
    task: LossTask = None,
    parts: Annotated[
        str, typer.Option(help="What is removed, with commas.", autocompletion=completion.values("part"))
    ] = "attention,feed-forward,block",
    theory: Annotated[
        bool, typer.Option(help="Also show the tendency of the weights and the rungs, for one more pass.")
    ] = True,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Remove each attention, feed-forward and block in turn and show what that costs, beside numbers that are cheap."""
    from oversmooth.output.terminal.worth_tables import show_ablation
    from oversmooth.worth.ablation import ablate as ablate_

    with one_bar("Running sequences") as progress:
        result = ablate_(
            target or embedded_default(),
            data,
            task=task,
            parts=parts.split(","),
            theory=theory,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
            **reading,
        )
    show(result, lambda: show_ablation(result), showing)


@reads_data
@shows_rows
def prune(
    target: Annotated[
        str,
        typer.Argument(help="Local checkpoint: a folder.", show_default=False, autocompletion=completion.targets),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to; must be new or empty.")],
    blocks: Annotated[str | None, typer.Option(help="Blocks to remove, such as 9-11.")] = None,
    budget: Annotated[float | None, typer.Option(help="Share of the blocks to remove, such as 0.25.")] = None,
    by: Annotated[
        str,
        typer.Option(
            help="With --budget, remove those of the lowest influence, or whose removal costs least loss.",
            autocompletion=completion.values("prune_by"),
        ),
    ] = "influence",
    max_loss_increase: Annotated[
        float | None, typer.Option(help="Write nothing if the loss grows by more than this.")
    ] = None,
    data: DataOption = None,
    task: LossTask = None,
    *,
    showing: Showing,
    reading: ReadingOptions,
) -> None:
    """Write a checkpoint without some of its blocks, with its loss before and after."""
    from oversmooth.output.terminal.worth_tables import show_pruning
    from oversmooth.worth.pruning import prune as prune_

    with one_bar("Running sequences") as progress:
        result = prune_(
            target,
            out,
            data,
            blocks=blocks,
            budget=budget,
            by=by,
            max_loss_increase=max_loss_increase,
            task=task,
            progress=progress,
            **reading,
        )
    show(result, lambda: show_pruning(result), showing)
