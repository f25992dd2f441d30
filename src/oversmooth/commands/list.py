"""`oversmooth architectures` and `plugins`."""

from typing import Annotated

import typer

from oversmooth.commands.options import Json

# --- `oversmooth inspect`, `discover`, `verify` and `architectures`: what the weights say ---


def architectures(
    all_: Annotated[bool, typer.Option("--all", help="Every model type of transformers and timm family.")] = False,
    json: Json = False,
) -> None:
    """List the declared families, what else is covered, and what is refused and why."""
    from oversmooth.models.families import REFUSED, coverage
    from oversmooth.models.identify import architectures as declared
    from oversmooth.output import tables

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
    from oversmooth.models.families import coverage

    return [
        {"library": row.library, "model": row.name, "state": row.state, "error": row.error, "why": row.reason}
        for row in coverage()
    ]


def coverage_counts() -> list[dict[str, object]]:
    """How many model types of each library are in each state."""
    from oversmooth.models.families import STATES, counted, versions

    counts = {library: counted(library) for library in versions()}
    return [
        {"what": words, **{f"{library} {version}": counts[library][state] for library, version in versions().items()}}
        for state, words in STATES.items()
    ]


# --- `oversmooth plugins`: what other packages add ---


def plugins(json: Json = False) -> None:
    """List what installed packages add: families, metrics, interventions, report sections; broken ones with the reason."""
    import warnings

    from oversmooth.control.interventions import all_rules
    from oversmooth.environment.plugins import KINDS, PluginWarning
    from oversmooth.environment.plugins import plugins as plugins_
    from oversmooth.measurement.metrics import all_metrics
    from oversmooth.models.identify import architectures
    from oversmooth.output.page import all_sections
    from oversmooth.output.tables import show_plugins

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the table says it
        for load in (architectures, all_metrics, all_rules, all_sections):
            load()
    rows = [
        {"adds to": kind, "name": plugin.name, "package": plugin.package, "state": plugin.problem or "used"}
        for kind in KINDS
        for plugin in plugins_(kind)
    ]
    if json:
        import json as json_module

        typer.echo(json_module.dumps(rows, indent=2))
    elif rows:
        show_plugins(rows)
    else:
        typer.echo("No plugins are installed. How to write one: docs/guides/write-a-plugin.md")
