"""`oversmooth verify`."""

from typing import Annotated, Any

import typer

from oversmooth.commands.options import Seed, Showing, TargetArgument, example_target, runs_model, show, shows_rows


@runs_model
@shows_rows
def verify(
    target: TargetArgument = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error of a fit. Default: what rounding explains.", min=0.0)
    ] = None,
    seed: Seed = 0,
    print_declaration: Annotated[
        bool,
        typer.Option("--print-declaration", help="Find the value path by a run; print it as Python."),
    ] = False,
    *,
    load: dict[str, Any],
    showing: Showing,
) -> None:
    """Check that oversmooth reads this model's weights and features correctly; exit code 1 if it does not."""
    from oversmooth.models.verify import verify as verify_
    from oversmooth.output import tables

    if print_declaration:
        _print_declaration(target or example_target())
        return

    showing.require_page_free()
    result = verify_(target or example_target(), tolerance=tolerance, seed=seed, **load)
    show(result, lambda: tables.show_verification(result), showing)
    if not result.passed:
        raise typer.Exit(1)


def _print_declaration(target: str) -> None:
    """What `osm.discover` finds, as code for `arch=`."""
    from oversmooth.models.verify import discover

    found = discover(target)
    typer.echo(f"# {found.target}: found by running it, error {found.largest_error:.0e}")
    for one in found.left_out:
        typer.echo(f"# left out: {one.where}: {one.reason}")
    typer.echo(found.code())
