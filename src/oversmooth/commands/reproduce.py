"""`oversmooth reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.help import command_line
from oversmooth.commands.options import NewFolder, Resume
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
    output: Annotated[Path, NewFolder(help="Folder for results and runs.")] = Path("reproduction"),
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Also survey this pretrained model; repeatable.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke check in minutes; nothing converges, no evidence.")
    ] = False,
    train: Annotated[
        bool, typer.Option(help="Train the runs that are missing, or count their claims as not run.")
    ] = True,
    resume: Resume = False,
) -> None:
    """Check the paper's claims with pre-registered protocols: verdicts, and effects with intervals."""
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
    from oversmooth.claims.context import ClaimContext
    from oversmooth.claims.reproduce import found_models
    from oversmooth.claims.reproduce import reproduce as reproduce_
    from oversmooth.output.claims_page import claims_pages

    with stages() as stage:
        materials = ClaimContext(
            out=output, targets=(*found_models(), *(model or ())), is_quick=quick, trains=train, stage=stage
        )
        materials.require_place(resume)
        findings = reproduce_(claims, materials, claims_pages, command_line())
    if quick:
        typer.echo("A smoke check: nothing has converged, and no verdict below is evidence.")
    for each in claims:
        verdict = findings[each.name].verdict
        typer.echo(f"{each.number} {each.name}: {verdict.judgement}. {verdict.because}")
    typer.echo(f"page: {(output / 'claims.html').absolute()}\ntable: {(output / 'claims.md').absolute()}")
