"""`oversmooth gate`: limits for continuous integration."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import DataOption, Json, reads_data, runs_model
from oversmooth.data.options import ReadingOptions
from oversmooth.environment.files import require_writable
from oversmooth.errors import BadValue, UnknownName
from oversmooth.output.console import one_bar

if TYPE_CHECKING:
    from oversmooth.results import GateResult

TABLES = ("rules", "against")


@runs_model
@reads_data
def gate(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A model, or the metrics.jsonl of a run. Default: the small model that comes along.",
            show_default=False,
            autocompletion=completion.targets,
        ),
    ] = None,
    data: DataOption = None,
    max_cosine: Annotated[float | None, typer.Option(help="Largest mean cosine that leaves any block.")] = None,
    max_between: Annotated[
        float | None, typer.Option(help="Largest similarity between different sequences that leaves any block.")
    ] = None,
    min_effective_rank_share: Annotated[
        float | None, typer.Option(help="Smallest share of the rank that leaves any block.")
    ] = None,
    max_loss_increase: Annotated[
        float | None, typer.Option(help="Of a run: how far the last loss may lie above the lowest.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="max_METRIC=NUMBER or min_METRIC=NUMBER for any metric; can be repeated."),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="TOML file with a table [rules], and [against] analysis, tolerance.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Saved analysis: no layer may have become smoother.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="By how much it may have; 0.02 without it.", show_default=False)
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML.")] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Annotations of GitHub; by itself where GITHUB_ACTIONS is set.")
    ] = False,
    json: Json = False,
    *,
    load: dict[str, Any],
    reading: ReadingOptions,
) -> None:
    """Hold a model to limits; exit code 1, with the layer and sub-block to blame, if it breaks one."""
    from oversmooth.measurement.gate import gate as gate_
    from oversmooth.output.exports import annotations, write_junit

    require_writable(junit)
    file = _rules_file(rules) if rules is not None else {}
    asked = {**file.get("rules", {}), **_given_rules(rule or ())}
    options = {
        "max_cosine": max_cosine,
        "max_between": max_between,
        "min_effective_rank_share": min_effective_rank_share,
        "max_loss_increase": max_loss_increase,
    }
    asked |= {name: value for name, value in options.items() if value is not None}
    compared = file.get("against", {})
    with one_bar("Measuring, layers of sequences") as progress:
        result = gate_(
            target or completion.embedded_default(),
            data,
            rules=asked,
            against=against or compared.get("analysis"),
            tolerance=tolerance if tolerance is not None else compared.get("tolerance", 0.02),
            progress=progress,
            **load,
            **reading,
        )
    if junit is not None:
        write_junit(result, junit)
    if github or os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotations(result):
            typer.echo(line, err=True)
    typer.echo(result.to_json(indent=2) if json else _text(result))
    if not result.passed:
        raise typer.Exit(1)


def _text(result: "GateResult") -> str:
    """A line per breach, and the answer."""
    lines = [f"{breach.rule}: {breach.words}" for breach in result.breaches]
    count = "1 breach" if len(lines) == 1 else f"{len(lines)} breaches"
    return "\n".join([*lines, "passed" if result.passed else f"failed: {count}"])


def _given_rules(words: Any) -> dict[str, float]:
    """`max_cosine=0.9` and the like."""
    found = {}
    for word in words:
        name, equals, number = word.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError as error:
            problem = word if equals else f"{word}, without a value"
            raise BadValue("--rule", problem, "NAME=NUMBER, such as max_cosine=0.95") from error
    return found


def _rules_file(path: Path) -> dict[str, Any]:
    """The tables of a rules file; an analysis in it is found beside the file."""
    from oversmooth.environment.files import read_text_file, toml_tables

    tables = toml_tables(read_text_file(path, "a TOML file"), str(path))
    for name, table in tables.items():
        if name not in TABLES:
            raise UnknownName("table of a rules file", name, TABLES)
        if not isinstance(table, dict):
            raise BadValue(f"{name} in {path}", table, "a table")
    against = dict(tables.get("against", {}))
    for key in against:
        if key not in ("analysis", "tolerance"):
            raise UnknownName("key of [against]", key, ("analysis", "tolerance"))
    if "tolerance" in against and (
        isinstance(against["tolerance"], bool) or not isinstance(against["tolerance"], int | float)
    ):
        raise BadValue("tolerance", against["tolerance"], "a number")
    if "analysis" in against:
        against["analysis"] = path.parent / str(against["analysis"])
    return {"rules": tables.get("rules", {}), "against": against}
