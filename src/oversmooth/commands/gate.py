"""`oversmooth gate`: limits for continuous integration."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.options import (
    VALUES,
    DataOption,
    LossIncrease,
    ShortFormat,
    checked_files,
    reads_data,
    require_format,
    runs_model,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.errors import BadValue
from oversmooth.output.console import one_bar

if TYPE_CHECKING:
    from oversmooth.results import GateResult

Verdicts = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        help="Also write FILE.json, or FILE.xml (JUnit); repeatable.",
        metavar="FILE",
        rich_help_panel="Output",
    ),
]


@runs_model
@reads_data
def gate(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A model, or the .jsonl log of a run. Default: the example model.",
            show_default=False,
            autocompletion=completion.targets,
        ),
    ] = None,
    data: DataOption = None,
    max_cosine: Annotated[float | None, typer.Option(help="Largest mean cosine of tokens, behind every block.")] = None,
    max_loss_increase: LossIncrease = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="max_METRIC=NUMBER or min_METRIC=NUMBER, such as min_effective_rank_share=0.05; repeatable."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Saved result of the model before: no layer may be smoother now.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="By how much it may be smoother than --against.")] = 0.02,
    output: Verdicts = None,
    format: ShortFormat = "table",
    *,
    load: dict[str, Any],
    reading: ReadingOptions,
) -> None:
    """Check a model against limits; exit 1 and name the layer if one is exceeded."""
    from oversmooth.measurement.gate import gate as gate_
    from oversmooth.output.exports import annotations, write_junit

    require_format(format, VALUES["short_format"])
    files = checked_files(output, (".json", ".xml"))
    asked: dict[str, float] = _given_rules(rule or ())
    options = {
        "max_cosine": max_cosine,
        "max_loss_increase": max_loss_increase,
    }
    asked |= {name: value for name, value in options.items() if value is not None}
    with one_bar("Measuring, layers of sequences") as progress:
        result = gate_(
            target or completion.example_target(),
            data,
            rules=asked,
            against=against,
            tolerance=tolerance,
            progress=progress,
            **load,
            **reading,
        )
    for path in files:
        if path.suffix == ".xml":
            write_junit(result, path)
        else:
            result.save(path)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotations(result):
            typer.echo(line, err=True)
    typer.echo(result.to_json(indent=2) if format == "json" else _text(result))
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
