"""`oversmooth verify` and `discover`."""

from typing import Annotated, Any

import typer

from oversmooth.commands.options import Seed, Showing, TargetArgument, embedded_default, runs_model, show, shows_rows


@runs_model
@shows_rows
def verify(
    target: TargetArgument = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error of a fit. Default: what rounding explains.", min=0.0)
    ] = None,
    seed: Seed = 0,
    *,
    load: dict[str, Any],
    showing: Showing,
) -> None:
    """Run the equal-token check: does the declared layout fit this very model? Exit code 1 if it does not."""
    from oversmooth.models.verify import verify as verify_
    from oversmooth.output import tables

    result = verify_(target or embedded_default(), tolerance=tolerance, seed=seed, **load)
    show(result, lambda: tables.show_verification(result), showing)
    if not result.passed:
        raise typer.Exit(1)


def discover(target: TargetArgument = None) -> None:
    """Find the value path of a checkpoint by running a small model of its config; prints the declaration as Python."""
    from oversmooth.models.verify import discover as discover_

    found = discover_(target or embedded_default())
    typer.echo(f"# {found.target}: found by running it, error {found.largest_error:.0e}")
    for one in found.left_out:
        typer.echo(f"# left out: {one.where}: {one.reason}")
    typer.echo(found.code())
