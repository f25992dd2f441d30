"""`oversmooth train`."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.help import command_line
from oversmooth.commands.options import VALUES, NewFolder, Override, Resume, Seed, ShortFormat, require_format
from oversmooth.output.console import one_bar


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="digits, images (with --data), cifar100, ... (oversmooth list recipes), or a TOML file.",
            show_default=False,
            autocompletion=completion.recipes,
        ),
    ],
    variant: Annotated[
        str,
        typer.Option(
            help="vanilla, sharpen, smooth; a control: free, matched, sharpen-start, smooth-start, no-identity, "
            "sharpen-measured, smooth-measured; or a baseline: attnscale, featscale, neutreno, ...",
            autocompletion=completion.values("variant"),
        ),
    ] = "vanilla",
    set_: Override = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Archive, folder or hub id to train on. Default: the recipe's own source.", rich_help_panel="Data"
        ),
    ] = None,
    output: Annotated[Path | None, NewFolder(help="Folder for the run. Default: RECIPE-VARIANT-seedN.")] = None,
    fraction: Annotated[
        float, typer.Option(help="Train on this fraction of every class.", rich_help_panel="Data")
    ] = 1.0,
    seed: Seed = 0,
    resume: Resume = False,
    analyze: Annotated[
        bool, typer.Option(help="Analyse the trained model, or keep only scores and curves.", hidden=True)
    ] = True,
    format: ShortFormat = "table",
) -> None:
    """Train a model with a recipe: from a seed to an ordinary checkpoint and its analysis."""
    from oversmooth.recipes.train import RunRequest, is_first_process, process_group_ends
    from oversmooth.recipes.train import train as train_

    require_format(format, VALUES["short_format"])
    folder = output or Path(f"{Path(recipe).stem}-{variant}-seed{seed}")
    request = RunRequest(
        name=recipe,
        out=folder,
        variant=variant,
        seed=seed,
        fraction=fraction,
        overrides=tuple(set_ or ()),
        resume=resume,
        analyzes=analyze,
        command=command_line(),
        say=lambda line: typer.echo(line, err=True),
    )
    with process_group_ends(), one_bar("Training steps") as progress:
        finished = train_(request, data, progress)
    if not is_first_process():
        return
    if format == "json":
        typer.echo(finished.manifest.model_dump_json(indent=2))
        return
    for name, value in finished.results.items():
        typer.echo(f"{name} {value:.4f}")
    for name, words in finished.manifest.read_back.items():
        typer.echo(f"{name}: {words}")
    typer.echo(f"run: {folder.absolute()}")
