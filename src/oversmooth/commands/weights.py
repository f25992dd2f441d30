"""`oversmooth inspect`, `discover`, `verify` and `architectures`: what the weights say, and how they are laid out."""

from typing import Annotated

import typer

from oversmooth.commands.options import (
    Base,
    Heads,
    Json,
    ModelType,
    Seed,
    TargetArgument,
    TrustRemoteCode,
    ValueHeads,
    embedded_default,
)
from oversmooth.commands.showing import Showing, show, shows_rows
from oversmooth.output.terminal.progress_bars import one_bar


@shows_rows
def inspect(
    target: TargetArgument = None,
    base: Base = None,
    full: Annotated[
        bool, typer.Option(help="Compute every eigenvalue of wide layers too, not just the extremes.")
    ] = False,
    extremes: Annotated[
        bool,
        typer.Option("--extremes", help="Only the extreme eigenvalues, certified by residuals, and no heads."),
    ] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Also print a table with one row per head.")] = False,
    model_type: ModelType = None,
    n_heads: Heads = None,
    n_kv: ValueHeads = None,
    dtype: Annotated[str, typer.Option(help="Precision of the eigenvalues: auto, float64 or float32.")] = "auto",
    *,
    showing: Showing,
) -> None:
    """Eigenvalues of the value map of every layer, from weights alone: which layers could smooth, which sharpen."""
    from oversmooth.output.terminal import tables
    from oversmooth.spectra.inspection import inspect as inspect_

    with one_bar("Reading layers") as progress:
        result = inspect_(
            target or embedded_default(),
            base=base,
            full=full,
            extremes=extremes,
            heads=heads or None,
            dtype=dtype,
            model_type=model_type,
            n_heads=n_heads,
            n_kv=n_kv,
            progress=progress,
        )
    rows = result.head_rows() if heads else None
    show(result, lambda: tables.show_inspection(result, heads=heads), showing, rows)


@shows_rows
def verify(
    target: TargetArgument = None,
    base: Base = None,
    model_type: ModelType = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error of a fit. Default: what rounding explains.", min=0.0)
    ] = None,
    seed: Seed = 0,
    trust_remote_code: TrustRemoteCode = False,
    *,
    showing: Showing,
) -> None:
    """Run the equal-token check: does the declared layout fit this very model? Exit code 1 if it does not."""
    from oversmooth.models.verify import verify as verify_
    from oversmooth.output.terminal import tables

    result = verify_(
        target or embedded_default(),
        base=base,
        model_type=model_type,
        tolerance=tolerance,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    show(result, lambda: tables.show_verification(result), showing)
    if not result.passed:
        raise typer.Exit(1)


def discover(target: TargetArgument = None) -> None:
    """Find the value path of a checkpoint by running a small model of its config; prints the declaration as Python."""
    from oversmooth.models.discovery.discover import discover as discover_

    found = discover_(target or embedded_default())
    typer.echo(f"# {found.target}: found by running it, error {found.largest_error:.0e}")
    for one in found.left_out:
        typer.echo(f"# left out: {one.where}: {one.reason}")
    typer.echo(found.code())


def architectures(
    all_: Annotated[bool, typer.Option("--all", help="Every model type of transformers and timm family.")] = False,
    json: Json = False,
) -> None:
    """List the declared families, what else is covered, and what is refused and why."""
    from oversmooth.models.coverage import coverage
    from oversmooth.models.families import REFUSED
    from oversmooth.models.identify import architectures as declared
    from oversmooth.output.terminal import tables

    if json:
        import dataclasses
        import json as json_module

        rows = [
            {"family": arch.name, "model_types": list(arch.model_types), "residual": arch.residual, "norm": arch.norm}
            for arch in declared().values()
        ]
        found = [dataclasses.asdict(row) for row in coverage()]
        typer.echo(json_module.dumps({"declared": rows, "refused": dict(REFUSED), "covered": found}, indent=2))
        return
    shown = [
        {
            "family": arch.name,
            "model types": ", ".join(arch.model_types),
            "residual": arch.residual,
            "norm": arch.norm,
            "attention": ("causal" if arch.is_causal else "bidirectional") + (", hybrid" if arch.is_hybrid else ""),
        }
        for arch in declared().values()
    ]
    if not all_:
        tables.show_architectures(shown, REFUSED)
    tables.show_coverage(coverage_counts(), coverage_rows() if all_ else [])


def coverage_rows() -> list[dict[str, object]]:
    """One line per model type."""
    from oversmooth.models.coverage import coverage

    return [
        {"library": row.library, "model": row.name, "state": row.state, "error": row.error, "why": row.reason}
        for row in coverage()
    ]


def coverage_counts() -> list[dict[str, object]]:
    """How many model types of each library are in each state."""
    from oversmooth.models.coverage import STATES, counted, versions

    counts = {library: counted(library) for library in versions()}
    return [
        {"what": words, **{f"{library} {version}": counts[library][state] for library, version in versions().items()}}
        for state, words in STATES.items()
    ]
