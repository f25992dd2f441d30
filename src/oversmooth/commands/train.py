"""`oversmooth train`."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.output.console import one_bar


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="images (with --data), digits, cifar100, cifar100-deep, imagenet-deit-ti, imagenet-deit-s, ... or a TOML "
            "file.",
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
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: section.key=value; repeatable.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Archive, folder or hub id to train on. Default: the recipe's own source.", metavar="PATH"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the run. Default: RECIPE-VARIANT-seedN in the current folder.", show_default=False
        ),
    ] = None,
    fraction: Annotated[float, typer.Option(help="Train on this fraction of every class.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for weights, data order and augmentation.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder.")] = False,
    analyze: Annotated[
        bool,
        typer.Option(help="Analyse the trained model; without, only its scores and smoothing curves are kept."),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Train a model with a recipe: from a seed to an ordinary checkpoint and its analysis."""
    import shlex
    import sys

    from oversmooth.recipes.train import RunRequest, is_first_process, process_group_ends
    from oversmooth.recipes.train import train as train_

    folder = out or Path(f"{Path(recipe).stem}-{variant}-seed{seed}")
    request = RunRequest(
        name=recipe,
        out=folder,
        variant=variant,
        seed=seed,
        fraction=fraction,
        overrides=tuple(set_ or ()),
        resume=resume,
        analyzes=analyze,
        command=shlex.join(["oversmooth", *sys.argv[1:]]),
        say=lambda line: typer.echo(line, err=True),
    )
    with process_group_ends(), one_bar("Training steps") as progress:
        finished = train_(request, data, progress)
    if not is_first_process():
        return
    if json:
        typer.echo(finished.manifest.model_dump_json(indent=2))
        return
    for name, value in finished.results.items():
        typer.echo(f"{name} {value:.4f}")
    for name, words in finished.manifest.read_back.items():
        typer.echo(f"{name}: {words}")
    typer.echo(f"run: {folder.absolute()}")
