"""What `report` and `compare` share: analyses of targets, the page that shows them, and where it goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from oversmooth.commands import completion
from oversmooth.commands.reading import words_of
from oversmooth.data.reading import ReadingOptions
from oversmooth.errors import BadValue, BrokenFile, UnknownName
from oversmooth.output.terminal.progress_bars import stages
from oversmooth.output.whole_files import make_folder, require_writable, write_whole

if TYPE_CHECKING:
    from oversmooth.output.report.blocks import Page
    from oversmooth.output.report.runs import TrainedRun
    from oversmooth.results import Analysis, TaskLoss
    from oversmooth.results.output_drift import OutputDrift

SAVED = "an analysis saved with `oversmooth report --save`"


def destination(output: Path | None, name: str, format: str, tables: Path | None) -> Path:
    """Where the page goes; refused before any work where the format is unknown or something cannot be written."""
    if format not in completion.VALUES["page_format"]:
        raise UnknownName("format", format, completion.VALUES["page_format"])
    output = output or Path(f"{name}.{format}")
    require_writable(output)
    if tables is not None:
        from oversmooth.output.exports import require_parquet

        require_parquet("--tables")
        make_folder(tables)
    return output


def losses_of(
    targets: list[str], how: dict[str, Any], data: str | None, reading: ReadingOptions, options: dict[str, Any]
) -> list["TaskLoss | str"]:
    """The loss of every target, or why it has none; similarities are compared with those of the first."""
    from oversmooth.errors import OversmoothError
    from oversmooth.models.opening import open_source
    from oversmooth.worth.task_loss import task_loss

    found: list[TaskLoss | str] = []
    for target in targets:
        try:
            first, own = (open_source(each, **how) for each in (targets[0], target))
            found.append(task_loss(own, data, original=first, **options, **reading))
        except OversmoothError as error:
            found.append(error.problem)
    return found


def run_folders(targets: list[str]) -> list["TrainedRun"]:
    """The runs, where every target is the folder of one; some of each kind cannot stand on one page."""
    from oversmooth.training.recipes.run_folders import is_run_folder, read_run_folder

    folders = [Path(target).expanduser() for target in targets]
    are_runs = [is_run_folder(folder) for folder in folders]
    if any(are_runs) and not all(are_runs):
        odd = targets[are_runs.index(False)]
        raise BadValue("The targets", odd, "all folders of runs, or all models (of a run: its folder model)")
    return [read_run_folder(folder) for folder in folders] if all(are_runs) else []


def run_page(path: Path) -> "Page":
    """Curves over training: of the folder of a run, or of what a monitor wrote."""
    from oversmooth.output.report.run_pages import watched_page
    from oversmooth.output.report.training import read_run, training_page
    from oversmooth.training.recipes.run_folders import read_run_folder

    if path.is_dir():  # one that is not of a run is refused with what was expected
        return watched_page([read_run_folder(path)])
    return training_page(path, read_run(path))


def analysed(
    targets: list[str],
    how: dict[str, Any],
    data: str | None,
    reading: ReadingOptions,
    options: dict[str, Any],
    losses: Sequence["TaskLoss | str"] = (),
) -> tuple[list["Analysis"], "Page"]:
    """The analyses of all targets, and the page that shows them: one model, several, or the steps of one series."""
    from oversmooth.models.revisions import integrity, steps_of
    from oversmooth.output.report.compare import compare_page
    from oversmooth.output.report.page import page_of
    from oversmooth.output.report.series import series_page

    steps = [steps_of(target) for target in targets]
    if len(targets) == 1 and steps[0]:
        numbers = [step.number for step in steps[0]]
        analyses = [_analysis(step.target, how, data, reading, {**options, "what_ifs": ()}) for step in steps[0]]
        flags = integrity(numbers, [analysis.inspection for analysis in analyses])
        return analyses, series_page(targets[0], numbers, analyses, [flag.sentence for flag in flags])
    each = [[step.target for step in found] or [target] for target, found in zip(targets, steps, strict=True)]
    analyses = [_analysis(target, how, data, reading, options) for found in each for target in found]
    if len(analyses) == 1:
        return analyses, page_of(analyses[0])
    drifts = _drifts([target for found in each for target in found], analyses, how, data, reading, options)
    return analyses, compare_page(analyses, losses, drifts)


def _drifts(
    targets: list[str],
    analyses: list["Analysis"],
    how: dict[str, Any],
    data: str | None,
    reading: ReadingOptions,
    options: dict[str, Any],
) -> list["OutputDrift | None"]:
    """How far every other model's output is from that of the first, where both took the same data and are of one form."""
    from oversmooth.measurement.output_drift import output_drift
    from oversmooth.models.opening import open_source

    def form(analysis: "Analysis") -> object:
        sizes = [(stack.family, stack.d_model, stack.blocks) for stack in analysis.inspection.stacks]
        return sizes, analysis.measurement and analysis.measurement.data.sha256

    def opened(target: str) -> Any:
        return open_source(target, **how)

    is_live = [Path(target).suffix != ".json" for target in targets]
    run_options: dict[str, Any] = {name: options.get(name) for name in ("device", "trust_remote_code")}
    return [
        output_drift(opened(targets[0]), opened(target), data, **run_options, **reading)
        if is_live[0] and live and analysis.measurement and form(analysis) == form(analyses[0])
        else None
        for target, live, analysis in zip(targets[1:], is_live[1:], analyses[1:], strict=True)
    ]


def put_tables(analyses: Sequence["Analysis"], folder: Path | None, models: Sequence[str] = ()) -> None:
    """Writes every table of the analyses where asked for, and says which."""
    if folder is not None:
        from oversmooth.output.exports import write_tables

        for path in write_tables(analyses, folder, models):
            typer.echo(path, err=True)


def put_page(page: "Page", output: Path, format: str) -> None:
    """Writes the page and says what is on it."""
    if format == "md":
        from oversmooth.output.report.markdown import markdown_of

        text = markdown_of(page)
        write_whole(output, lambda partial: partial.write_text(text, encoding="utf-8"))
    else:
        from oversmooth.output.report import write_page

        write_page(page, output)
    typer.echo(page.verdict)
    typer.echo(f"report: {output.absolute()}")


def _words(how: dict[str, Any]) -> list[str]:
    """How the target was opened, as options on the command line."""
    words = [word for name in ("base", "dtype") if how[name] for word in (f"--{name}", str(how[name]))]
    return words + ([] if how["offload"] is None else ["--offload" if how["offload"] else "--no-offload"])


def saved_analysis(path: Path) -> "Analysis":
    """What `oversmooth report --save` wrote."""
    from oversmooth.models.stores.files import LARGEST_JSON, LocalFolder, read_small
    from oversmooth.results import Analysis
    from oversmooth.results.json_text import json_object

    if not path.is_file():
        raise BrokenFile(str(path), SAVED, "no such file", "Check the path.")
    content = read_small(LocalFolder(path.parent), path.name, LARGEST_JSON)
    return Analysis.from_dict(json_object(content, str(path), SAVED), where=str(path))


def _analysis(
    target: str, how: dict[str, Any], data: str | None, reading: ReadingOptions, options: dict[str, Any]
) -> "Analysis":
    """A saved analysis as it is, or a new one of a model."""
    import shlex

    from oversmooth.analysis import analyze
    from oversmooth.models.opening import local_path

    path = local_path(target)
    if path is not None and path.suffix == ".json" and path.is_file():
        return saved_analysis(path)
    words = ["oversmooth", "report", target, *_words(how), *(["--data", data] if data else [])]
    words += words_of(reading)
    words += ["--solve", str(options["solve"])] if options.get("solve", 2) != 2 else []
    words += [word for name in options.get("what_ifs") or () for word in ("--what-if", name)]
    with stages() as stage:
        return analyze(target, data, command=shlex.join(words), stage=stage, **how, **options, **reading)
