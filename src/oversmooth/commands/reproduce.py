"""`oversmooth reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.output.console import stages


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
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke check in minutes: everything runs, nothing converges, no evidence.")
    ] = False,
    train: Annotated[
        bool, typer.Option(help="Train what is missing; without, what rests on missing runs counts as not run.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what a stopped run left in the folder.")] = False,
) -> None:
    """Check the paper's claims by protocols that were written before: verdicts, effects with intervals, what they rest on."""
    from oversmooth.claims.reproduce import chosen
    from oversmooth.errors import Conflict, UnknownName

    claims = chosen(claim)
    if scale not in ("cpu", "full"):
        raise UnknownName("scale", scale, ("cpu", "full"))
    if scale == "full":
        given = {"--quick": quick, "--model": model, "--no-train": not train, "--resume": resume}
        if surplus := [name for name, value in given.items() if value]:
            raise Conflict(["--scale full", *surplus])
        typer.echo("# For GPUs, at the recipes' own learning rates. Nothing here is judged: compare what comes out.\n")
        shown: set[str] = set()
        for each in claims:
            new = [command for command in each.commands if command not in shown]
            above = len(each.commands) - len(new)
            typer.echo(f"# {each.number} {each.name}: {each.statement}\n# cost: {each.cost['full']}")
            typer.echo("\n".join([*([f"# and {above} commands that stand above"] if above else []), *new]) + "\n")
            shown |= set(new)
        return
    import shlex
    import sys

    from oversmooth.claims.context import ClaimContext
    from oversmooth.claims.reproduce import found_models
    from oversmooth.claims.reproduce import reproduce as reproduce_
    from oversmooth.output.claims_page import claims_pages

    with stages() as stage:
        materials = ClaimContext(
            out=out, targets=(*found_models(), *(model or ())), is_quick=quick, trains=train, stage=stage
        )
        materials.require_place(resume)
        findings = reproduce_(claims, materials, claims_pages, shlex.join(["oversmooth", *sys.argv[1:]]))
    if quick:
        typer.echo("A smoke check: nothing has converged, and no verdict below is evidence.")
    for each in claims:
        verdict = findings[each.name].verdict
        typer.echo(f"{each.number} {each.name}: {verdict.judgement}. {verdict.because}")
    typer.echo(f"page: {(out / 'claims.html').absolute()}\ntable: {(out / 'claims.md').absolute()}")
