"""`oversmooth list`: what the library and its plugins know, by kind, with a search word."""

from collections.abc import Callable
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import VALUES, Format, markdown_of, require_format
from oversmooth.errors import UnknownName

Rows = list[dict[str, object]]


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="architectures, metrics, interventions, recipes, what-ifs or plugins. Default: how many of each.",
            show_default=False,
            autocompletion=completion.values("kind"),
        ),
    ] = None,
    search: Annotated[str | None, typer.Argument(help="Show only rows that contain this word.")] = None,
    format: Format = "table",
) -> None:
    """List supported architectures, metrics, interventions, recipes, what-ifs and installed plugins."""
    require_format(format, VALUES["printed_format"])
    if kind is not None and kind not in KINDS:
        raise UnknownName("kind", kind, tuple(KINDS))
    if kind is None:
        rows: Rows = [{"list": name, "entries": len(rows_of())} for name, rows_of in KINDS.items()]
    else:
        rows = KINDS[kind]()
    if search is not None:
        rows = [row for row in rows if any(search.lower() in str(value).lower() for value in row.values())]
    _print(rows, format, f"No {kind} found." if search is None else f"No {kind} with {search!r}.")


def _print(rows: Rows, format: str, nothing: str) -> None:
    """The rows in one of the formats; in words where there are none for a table."""
    from oversmooth.output.tables import csv_text, show_list

    if format == "json":
        import json

        typer.echo(json.dumps(rows, indent=2))
    elif format == "csv":
        typer.echo(csv_text(rows), nl=False)
    elif not rows:
        typer.echo(nothing)
    elif format == "md":
        typer.echo(markdown_of(lambda: show_list(rows)), nl=False)
    else:
        show_list(rows)


def architectures() -> Rows:
    """Every model type: declared, found by running it, refused with the reason, or without attention."""
    from oversmooth.models.families import REFUSED, coverage
    from oversmooth.models.identify import architectures as declared_families

    families: dict[str, list[str]] = {}  # an encoder and a decoder of one model type are two families
    for arch in declared_families().values():
        for name in arch.model_types:
            families.setdefault(name, []).append(f"{arch.name} ({arch.residual}-norm)")
    declared: Rows = [
        {"library": "transformers", "model": name, "state": "declared", "why": ", ".join(found)}
        for name, found in families.items()
    ]
    known = set(families)
    covered: Rows = [
        {"library": row.library, "model": row.name, "state": row.state, "why": row.reason or ""}
        for row in coverage()
        if row.name not in known
    ]
    known |= {str(row["model"]) for row in covered}
    refused: Rows = [
        {"library": "transformers", "model": name, "state": "refused", "why": reason}
        for name, reason in REFUSED.items()
        if name not in known
    ]
    return declared + covered + refused


def metrics() -> Rows:
    from oversmooth.measurement.observer import select

    return [
        {"metric": name, "definition": formula} for name, formula in select(("all", "high_frequency")).definitions()
    ]


def interventions() -> Rows:
    from oversmooth.control.interventions import all_rules

    return [{"intervention": name, "what it does": _first_line(rule)} for name, rule in all_rules().items()]


def recipes() -> Rows:
    from importlib.resources import files

    shipped = sorted(
        entry.name for entry in (files("oversmooth") / "recipes").iterdir() if entry.name.endswith(".toml")
    )
    rows: Rows = []
    for name in shipped:
        first = (files("oversmooth") / "recipes" / name).read_text(encoding="utf-8").partition("\n")[0]
        rows.append({"recipe": name.removesuffix(".toml"), "budget": first.removeprefix("# Budget: ")})
    return rows


def what_ifs() -> Rows:
    from oversmooth.prediction.what_if import WHAT_IFS

    return [{"what-if": f"{name}:{form}" if form else name} for name, (form, *_) in WHAT_IFS.items()]


def plugins() -> Rows:
    """What other packages add; broken ones with the reason."""
    import warnings

    from oversmooth.control.interventions import all_rules
    from oversmooth.environment.plugins import KINDS as PLUGIN_KINDS
    from oversmooth.environment.plugins import PluginWarning
    from oversmooth.environment.plugins import plugins as plugins_
    from oversmooth.measurement.metrics import all_metrics
    from oversmooth.models.identify import architectures as declared_families
    from oversmooth.output.page import all_sections

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the table says it
        for load in (declared_families, all_metrics, all_rules, all_sections):
            load()
    return [
        {"adds to": kind, "name": plugin.name, "package": plugin.package, "state": plugin.problem or "used"}
        for kind in PLUGIN_KINDS
        for plugin in plugins_(kind)
    ]


def _first_line(described: object) -> str:
    return (described.__doc__ or "").partition("\n")[0]


KINDS: dict[str, Callable[[], Rows]] = {
    "architectures": architectures,
    "metrics": metrics,
    "interventions": interventions,
    "recipes": recipes,
    "what-ifs": what_ifs,
    "plugins": plugins,
}
