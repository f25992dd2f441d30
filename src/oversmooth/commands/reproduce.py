"""`oversmooth reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import completion
from oversmooth.output.terminal.progress_bars import stages


def reproduce(
    claim: Annotated[
        str,
        typer.Argument(
            help="all, a number from 1 to 8, or: similarity eigenvalue skip norm-signs parametrization vision language "
            "baselines.",
            autocompletion=completion.values("claim"),
        ),
    ] = "all",
    scale: Annotated[
        str,
        typer.Option(
            help="cpu: run it here, scaled down. full: print the GPU commands of the paper's own scale.",
            autocompletion=completion.values("scale"),
        ),
    ] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for results and runs; a stopped run continues there.")] = Path(
        "reproduction"
    ),
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Also survey this pretrained model; repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per variant.", min=2)] = 3,
) -> None:
    """Check the paper's claims: confirmed, refuted or undecided, with the tables that decide."""
    from oversmooth.errors import UnknownName
    from oversmooth.training.reproduce.claims import chosen

    claims = chosen(claim)
    if scale not in ("cpu", "full"):
        raise UnknownName("scale", scale, ("cpu", "full"))
    if scale == "full":
        for each in claims:
            typer.echo(f"# {each.number} {each.name}: {each.statement}\n# cost: {each.cost['full']}")
            typer.echo("\n".join(each.commands) + "\n")
        return
    import shlex
    import sys

    from oversmooth.training.reproduce.reproduction import found_models
    from oversmooth.training.reproduce.reproduction import reproduce as reproduce_
    from oversmooth.training.reproduce.workshop import Workshop

    with stages() as stage:
        workshop = Workshop(out=out, targets=(*found_models(), *(model or ())), seeds=tuple(range(seeds)), stage=stage)
        checked = reproduce_(claims, workshop, shlex.join(["oversmooth", *sys.argv[1:]]))
    for each, finding in checked:
        typer.echo(f"{each.number} {each.name:16}{finding.judgement:10} {finding.because}")
    typer.echo(f"page: {(out / 'claims.html').absolute()}\ntable: {(out / 'claims.md').absolute()}")
