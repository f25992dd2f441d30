"""`oversmooth report` and `compare`: one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands import completion
from oversmooth.commands.options import (
    DataOption,
    Device,
    TrustRemoteCode,
    embedded_default,
)
from oversmooth.commands.reading import reads_data, words_of
from oversmooth.data.reading import ReadingOptions
from oversmooth.errors import BadValue, BrokenFile, UnknownName
from oversmooth.output.terminal.progress_bars import stages
from oversmooth.output.whole_files import require_writable, write_whole

if TYPE_CHECKING:
    from oversmooth.output.report.blocks import Page
    from oversmooth.results import Analysis

SAVED = "an analysis saved with `oversmooth report --save`"


@reads_data
def report(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Models, or analyses saved with --save. Default: the embedded MiniLM.", show_default=False),
    ] = None,
    data: DataOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: report.html or report.md.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="html, or md for pull requests.", autocompletion=completion.values("format"))
    ] = "html",
    save: Annotated[
        Path | None, typer.Option(help="Also save the analysis as JSON; `report` and `compare` can open it again.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write PDF, PNG and SVG figures into this folder.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Show training curves from the JSONL file of a monitor instead.")
    ] = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    reading: ReadingOptions,
) -> None:
    """Write one self-contained page with the verdict, the curves, the spectra and the explanation."""
    from oversmooth.output.report.compare import compare_page
    from oversmooth.output.report.page import page_of
    from oversmooth.output.report.static import write_figures
    from oversmooth.output.report.training import read_run, training_page

    if format not in completion.VALUES["format"]:
        raise UnknownName("format", format, completion.VALUES["format"])
    output = output or Path(f"report.{format}")
    require_writable(output, save)
    if run is not None:
        page = training_page(run, read_run(run))
    else:
        options = {"device": device, "trust_remote_code": trust_remote_code}
        analyses = [_analysis(target, data, reading, options) for target in targets or [embedded_default()]]
        page = page_of(analyses[0]) if len(analyses) == 1 else compare_page(analyses)
        if save is not None:
            text = analyses[0].to_json(indent=1)
            write_whole(save, lambda partial: partial.write_text(text, encoding="utf-8"))
        if figures is not None:
            for path in write_figures(analyses[0], figures):
                typer.echo(path, err=True)
    _put(page, output, format)


@reads_data
def compare(
    targets: Annotated[list[str], typer.Argument(help="Two or more models, or analyses saved with `report --save`.")],
    data: DataOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("compare.html"),
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    *,
    reading: ReadingOptions,
) -> None:
    """Compare models on one page, aligned by relative depth: before and after, or checkpoints of one run."""
    from oversmooth.output.report.compare import compare_page

    if len(targets) < 2:
        raise BadValue("The number of targets", len(targets), "at least 2 (for one model: oversmooth report)")
    require_writable(output)
    options = {"device": device, "trust_remote_code": trust_remote_code}
    _put(compare_page([_analysis(target, data, reading, options) for target in targets]), output)


def _put(page: "Page", output: Path, format: str = "html") -> None:
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


def saved_analysis(path: Path) -> "Analysis":
    """What `oversmooth report --save` wrote."""
    from oversmooth.models.stores.files import LARGEST_JSON, LocalFolder, read_small
    from oversmooth.results import Analysis
    from oversmooth.results.json_text import json_object

    if not path.is_file():
        raise BrokenFile(str(path), SAVED, "no such file", "Check the path.")
    content = read_small(LocalFolder(path.parent), path.name, LARGEST_JSON)
    return Analysis.from_dict(json_object(content, str(path), SAVED), where=str(path))


def _analysis(target: str, data: str | None, reading: ReadingOptions, options: dict[str, Any]) -> "Analysis":
    """A saved analysis as it is, or a new one of a model."""
    import shlex

    from oversmooth.analysis import analyze
    from oversmooth.models.opening import local_path

    path = local_path(target)
    if path is not None and path.suffix == ".json" and path.is_file():
        return saved_analysis(path)
    words = ["oversmooth", "report", target, *(["--data", data] if data else []), *words_of(reading)]
    with stages() as stage:
        return analyze(target, data, command=shlex.join(words), stage=stage, **options, **reading)
