"""`oversmooth report`: a model, several, a run, a survey or a saved analysis as a page, Markdown or a model card."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands.options import (
    DataOption,
    Pages,
    Solve,
    Tables,
    WhatIfs,
    checked_files,
    example_target,
    reads_data,
    runs_model,
    words_of,
)
from oversmooth.data.options import ReadingOptions
from oversmooth.environment.files import make_folder, require_writable, write_text_whole
from oversmooth.errors import BadValue, BrokenFile, OversmoothError, WrongBatch, first_line
from oversmooth.output.console import stages

if TYPE_CHECKING:
    from oversmooth.models.source import Source
    from oversmooth.output.blocks import Page
    from oversmooth.results import Analysis, TaskLoss
    from oversmooth.results.measurement import OutputDrift
    from oversmooth.results.runs import TrainedRun


# --- what `report` and `compare` share: analyses of targets, the page that shows them, and where it goes ---

SAVED = "an analysis saved with `oversmooth report -o FILE.json`"


def destinations(
    output: "list[Path] | None", default: str | None, suffixes: tuple[str, ...], tables: Path | None
) -> tuple[Path, ...]:
    """Where pages go; refused before any work where something has another suffix or cannot be written."""
    files = checked_files(output or ([Path(default)] if default else None), suffixes)
    if tables is not None:
        from oversmooth.output.exports import require_parquet

        require_parquet("--tables")
        make_folder(tables)
    return files


Readings = Mapping[str, ReadingOptions]
"""How data are read for each target."""


def readings_of(targets: list[str], load: dict[str, Any], data: str | None, reading: ReadingOptions) -> Readings:
    """How data are read for each target: models of text without a tokenizer take that of another, which is said.

    Done before any work: a target that has none, where no other fits, is refused by name if there are data to be read.
    Without the package that runs models nothing is looked for: a page of the weights needs no tokenizer.
    """
    from oversmooth.data.raw import require_there
    from oversmooth.data.tokens import WITHOUT_TOKENIZER, find_tokenizer, given_tokenizer, has_transformers

    if data is not None:
        require_there(data)
    readings = dict.fromkeys(targets, reading)
    trusted = load["trust_remote_code"]
    tokenizer, is_alone = reading.get("tokenizer"), len(targets) == 1 and data is None
    if reading.get("ids") is not None or is_alone or not has_transformers():
        return readings
    if tokenizer is not None:
        given_tokenizer(tokenizer, trust_remote_code=trusted)
        return readings
    sources = {target: source for target in targets if (source := _opened_text_model(target, load))}
    lacking: dict[str, str] = {}
    for target, source in sources.items():
        found, reason = find_tokenizer(source)
        if found is None:
            lacking[target] = reason
    for target, reason in lacking.items():
        size = _vocabulary(sources[target])
        fits = [name for name in sources if name not in lacking and _vocabulary(sources[name]) == size]
        if fits:
            readings[target] = {**reading, "tokenizer": str(sources[fits[0]].place)}
            typer.echo(f"{target} has no tokenizer of its own: that of {fits[0]} is used.", err=True)
        elif data is not None:
            raise WrongBatch(f"a tokenizer beside {target}", reason, WITHOUT_TOKENIZER)
    return readings


def _opened_text_model(target: str, load: dict[str, Any]) -> "Source | None":
    """The model behind a target, where it reads text and can be run; a saved analysis is none."""
    from oversmooth.models.inputs import reads_text
    from oversmooth.models.open import open_source

    if Path(target).suffix == ".json":
        return None
    source = open_source(target, **load)
    can_run = source.place is not None and source.gguf_file is None and not source.place.startswith("timm:")
    return source if can_run and reads_text(source.config) else None


def _vocabulary(source: "Source") -> object:
    text = source.config.get("text_config") or source.config
    return text.get("vocab_size")


def losses_of(targets: list[str], load: dict[str, Any], data: str | None, readings: Readings) -> list["TaskLoss | str"]:
    """The loss of every target, or why it has none; similarities are compared with those of the first."""
    from oversmooth.errors import OversmoothError
    from oversmooth.models.open import open_source
    from oversmooth.worth.task_loss import task_loss

    found: list[TaskLoss | str] = []
    for target in targets:
        try:
            first = open_source(targets[0], **load)
            found.append(task_loss(target, data, original=first, **load, **_shared(readings, targets[0], target)))
        except OversmoothError as error:
            found.append(error.problem)
    return found


def _shared(readings: Readings, first: str, other: str) -> ReadingOptions:
    """How data are read where two targets are run on the same: with the tokenizer of one, where the other has none."""
    tokenizer = readings[first].get("tokenizer") or readings[other].get("tokenizer")
    return {**readings[other], "tokenizer": tokenizer} if tokenizer else readings[other]


def logs_of(targets: list[str]) -> list["TrainedRun"]:
    """The runs, where every target is the folder or log of one; some of each kind cannot stand on one page."""
    from oversmooth.recipes.run_folder import is_log, read_log

    paths = [Path(target).expanduser() for target in targets]
    are_logs = [is_log(path) for path in paths]
    if any(are_logs) and not all(are_logs):
        odd = targets[are_logs.index(False)]
        raise BadValue("The targets", odd, "all folders of runs, or all models (of a run: its folder model)")
    return [read_log(path) for path in paths] if all(are_logs) else []


def other_page(targets: list[str]) -> "Page | None":
    """The page of a run's folder or log, where the one target is that; models have pages of their own."""
    from oversmooth.recipes.run_folder import is_log, read_log
    from oversmooth.results.runs import read_run

    path = Path(targets[0]).expanduser()
    if len(targets) == 1 and path.suffix == ".jsonl":
        from oversmooth.output.run_pages import training_page

        return training_page(path, read_run(path))
    if len(targets) == 1 and is_log(path):
        from oversmooth.output.run_pages import watched_page

        return watched_page([read_log(path)])
    return None


def steps_in(targets: list[str]) -> list[list[str]]:
    """Every target, and those that are a series of checkpoints step by step."""
    from oversmooth.models.revisions import steps_of

    return [[step.target for step in steps_of(target)] or [target] for target in targets]


def analysed(
    targets: list[str],
    load: dict[str, Any],
    data: str | None,
    readings: Readings,
    options: dict[str, Any],
    losses: Sequence["TaskLoss | str"] = (),
) -> tuple[list["Analysis"], "Page"]:
    """The analyses of all targets, and the page that shows them: one model, several, or the steps of one series."""
    from oversmooth.models.revisions import integrity, steps_of
    from oversmooth.output.compare_page import compare_page
    from oversmooth.output.page import page_of
    from oversmooth.output.run_pages import series_page

    steps = steps_of(targets[0]) if len(targets) == 1 else []
    if steps:
        plain = {**options, "what_ifs": ()}
        analyses = [_analysis(step.target, load, data, readings[step.target], plain) for step in steps]
        numbers = [step.number for step in steps]
        flags = integrity(numbers, [analysis.inspection for analysis in analyses])
        return analyses, series_page(targets[0], numbers, analyses, [flag.sentence for flag in flags])
    each = [target for found in steps_in(targets) for target in found]
    analyses = [_analysis(target, load, data, readings[target], options) for target in each]
    if len(analyses) == 1:
        return analyses, page_of(analyses[0])
    return analyses, compare_page(analyses, losses, _drifts(each, analyses, load, data, readings))


def _drifts(
    targets: list[str],
    analyses: list["Analysis"],
    load: dict[str, Any],
    data: str | None,
    readings: Readings,
) -> list["OutputDrift | None"]:
    """How far every other model's output is from that of the first, where both took the same data and are of one form."""
    from oversmooth.analysis import output_drift

    def form(analysis: "Analysis") -> object:
        sizes = [(stack.family, stack.d_model, stack.blocks) for stack in analysis.inspection.stacks]
        return sizes, analysis.measurement and analysis.measurement.data.sha256

    def drift(target: str) -> "OutputDrift":
        return output_drift(targets[0], target, data, **load, **_shared(readings, targets[0], target))

    is_live = [Path(target).suffix != ".json" for target in targets]
    return [
        drift(target) if is_live[0] and live and analysis.measurement and form(analysis) == form(analyses[0]) else None
        for target, live, analysis in zip(targets[1:], is_live[1:], analyses[1:], strict=True)
    ]


def put_tables(analyses: Sequence["Analysis"], folder: Path | None, models: Sequence[str] = ()) -> None:
    """Writes every table of the analyses where asked for, and says which."""
    if folder is not None:
        from oversmooth.output.exports import write_tables

        for path in write_tables(analyses, folder, models):
            typer.echo(path, err=True)


def put_page(page: "Page", files: Sequence[Path]) -> None:
    """Writes the page into every file that can hold one, and says where they are, and last what is on it."""
    from oversmooth.output.render import markdown_of, write_page

    for path in files:
        if path.suffix == ".md":
            write_text_whole(path, markdown_of(page))
        elif path.suffix != ".json":
            write_page(page, path)
    for path in files:
        typer.echo(f"{'analysis' if path.suffix == '.json' else 'report'}: {path.absolute()}")
    typer.echo(page.verdict)


def saved_analysis(path: Path) -> "Analysis":
    """What `oversmooth report -o FILE.json` wrote."""
    from oversmooth.environment.files import json_object
    from oversmooth.models.stores.store import LARGEST_JSON, LocalFolder, read_small
    from oversmooth.output.page import page_of
    from oversmooth.output.render import render
    from oversmooth.results import Analysis

    if not path.is_file():
        raise BrokenFile(str(path), SAVED, "no such file", "Check the path.")
    content = read_small(LocalFolder(path.parent), path.name, LARGEST_JSON)
    found = Analysis.from_dict(json_object(content, str(path), SAVED), where=str(path))
    try:
        render(page_of(found))
    except OversmoothError:
        raise
    except Exception as error:  # numbers that each are possible, and contradict each other: no list of such is complete
        what = f"numbers that do not fit together ({first_line(error)})"
        raise BrokenFile(str(path), SAVED, what, "Make it again: oversmooth report MODEL -o FILE.json") from error
    return found


def _analysis(
    target: str, load: dict[str, Any], data: str | None, reading: ReadingOptions, options: dict[str, Any]
) -> "Analysis":
    """A saved analysis as it is, or a new one of a model."""
    import shlex

    from oversmooth.analysis import analyze
    from oversmooth.models.open import local_path

    path = local_path(target)
    if path is not None and path.suffix == ".json" and path.is_file():
        return saved_analysis(path)
    words = ["oversmooth", "report", target, *words_of(load), *(["--data", data] if data else [])]
    words += words_of(reading)
    words += ["--solve", str(options["solve"])] if options.get("solve", 2) != 2 else []
    words += [word for name in options.get("what_ifs") or () for word in ("--what-if", name)]
    with stages() as stage:
        return analyze(target, data, command=shlex.join(words), stage=stage, **load, **options, **reading)


# --- `oversmooth report` and `compare`: one page ---


@runs_model
@reads_data
def report(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models, a saved analysis (.json), the folder or log of a run, or the folder of a survey. "
            "Default: the example model.",
            show_default=False,
        ),
    ] = None,
    data: DataOption = None,
    solve: Solve = 2,
    what_if: WhatIfs = None,
    output: Pages = None,
    card: Annotated[
        Path | None,
        typer.Option(help="Write a section of a model card (Markdown).", metavar="FILE", rich_help_panel="Output"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model on its card.", rich_help_panel="Output", hidden=True)
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Also write every chart as SVG and PNG here.", metavar="FOLDER", rich_help_panel="Output"),
    ] = None,
    tables: Tables = None,
    *,
    load: dict[str, Any],
    reading: ReadingOptions,
) -> None:
    """Write one self-contained page about a model, a run or a survey: the answer, the curves and the explanation."""
    from oversmooth.surveys.table import ABOUT

    chosen = targets or [example_target()]
    if len(chosen) == 1 and (Path(chosen[0]).expanduser() / ABOUT).is_file():
        _survey_page(Path(chosen[0]).expanduser(), destinations(output, "atlas.html", (".html",), None))
        return
    files = destinations(output, None if card else "report.html", (".html", ".md", ".json"), tables)
    require_writable(card)
    saved = [path for path in files if path.suffix == ".json"]
    _require_one(chosen, {"--output FILE.json": saved[0] if saved else None, "--figures": figures, "--card": card})
    page = other_page(chosen)
    if page is not None:
        if saved or card is not None:
            raise BadValue("--output", str(saved[0] if saved else card), "a .html or .md file for a run")
        put_page(page, files)
        return
    readings = _readings(chosen, load, data, reading)
    analyses, page = analysed(chosen, load, data, readings, {"solve": solve, "what_ifs": what_if})
    for path in saved:
        analyses[0].save(path)
    if figures is not None:
        from oversmooth.output.figures import write_figures

        for path in write_figures(analyses[0], figures):
            typer.echo(path, err=True)
    put_tables(analyses, tables)
    if files:
        put_page(page, files)
    if card is not None:
        _write_card(analyses[0], name, card)


def _survey_page(folder: Path, files: Sequence[Path]) -> None:
    """The picture of a survey: every model of it on one page, with filters."""
    from oversmooth.output.atlas import atlas_of, atlas_words, render_atlas

    models, versions = atlas_of(folder)
    page = render_atlas(models, folder=str(folder), versions=versions)
    for path in files:
        write_text_whole(path, page)
        typer.echo(f"report: {path.absolute()}")
    typer.echo(atlas_words(models))


def _write_card(analysis: "Analysis", name: str | None, path: Path) -> None:
    """The hub's evaluation results as YAML, and the same for readers."""
    from oversmooth.output.render import card

    write_text_whole(path, card(analysis, name or Path(analysis.inspection.provenance.target).name))
    typer.echo(f"card: {path.absolute()}")


def _readings(targets: list[str], load: dict[str, Any], data: str | None, reading: ReadingOptions) -> Readings:
    each = [target for found in steps_in(targets) for target in found]
    return readings_of(each, load, data, reading)


def _require_one(targets: list[str], given: dict[str, Path | None]) -> None:
    """Refuses options that write one analysis where there are several."""
    from oversmooth.models.revisions import steps_of

    for name, path in given.items():
        if path is not None and (len(targets) > 1 or any(steps_of(target) for target in targets)):
            raise BadValue(name, "several models", "given with one model at a time")
