"""The command line. Results go to stdout, everything else to stderr; an error is its message and exit code 2."""

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands_finetune import finetune
from oversmooth.commands_reproduce import reproduce
from oversmooth.commands_train import train
from oversmooth.errors import BrokenFile, OutOfRange, OversmoothError
from oversmooth.progress_bars import one_bar as _progress
from oversmooth.progress_bars import stages as _stages
from oversmooth.writing import require_writable, write_whole

if TYPE_CHECKING:
    from oversmooth.results import Analysis

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Inspect, measure, predict and control oversmoothing in any Transformer.",
)

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder, .safetensors/.bin/.pt/.gguf file, URL, hub id or timm name. Without it: the embedded MiniLM.",
        show_default=False,
    ),
]
ModelType = Annotated[str | None, typer.Option(help="Family of a bare file; see `oversmooth architectures`.")]
DataOption = Annotated[
    str | None,
    typer.Option(
        help="Text file or folder, image folder, .parquet/.jsonl/.csv, or NAME:SPLIT of `datasets`. "
        "Without it: built-in samples."
    ),
]
MaxSamples = Annotated[int | None, typer.Option(help="Stop after this many sequences.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)]
MaxTokens = Annotated[int, typer.Option(help="Longer texts are cut at this many tokens.", min=2)]
Seed = Annotated[int, typer.Option(help="Seed of generated inputs.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; without it: where the model loads.")]
CsvFile = Annotated[Path | None, typer.Option(help="Also write the rows to this CSV file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, in the library's own schema.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Allow code from the model's repository to run.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from oversmooth import __version__

        typer.echo(f"oversmooth {__version__}")
        raise typer.Exit


@app.command()
def inspect(
    target: TargetArgument = None,
    full: Annotated[bool, typer.Option(help="Every eigenvalue of wide layers too, not only the extremes.")] = False,
    heads: Annotated[bool, typer.Option("--heads", help="One more table with a row per head.")] = False,
    json: Json = False,
    csv: CsvFile = None,
    model_type: ModelType = None,
    n_heads: Annotated[int | None, typer.Option(help="Number of heads, where no config says it.", min=1)] = None,
    n_kv: Annotated[int | None, typer.Option(help="Number of value heads, where no config says it.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the eigenvalues: auto, float64 or float32.")] = "auto",
) -> None:
    """Eigenvalues of the value map of every layer, from weights alone: which layers could smooth, which sharpen."""
    from oversmooth import tables
    from oversmooth.inspection import inspect as inspect_

    require_writable(csv)
    with _progress("Reading layers") as progress:
        result = inspect_(
            target or _embedded_default(),
            full=full,
            dtype=dtype,
            model_type=model_type,
            n_heads=n_heads,
            n_kv=n_kv,
            progress=progress,
        )
    if csv is not None:
        tables.write_csv(csv, result.head_rows() if heads else result.rows())
    if json:
        typer.echo(result.to_json(indent=2))
        return
    tables.show_inspection(result, heads=heads)


@app.command()
def verify(
    target: TargetArgument = None,
    json: Json = False,
    model_type: ModelType = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run the equal-token check: does the declared layout fit this very model? Exit code 1 if it does not."""
    from oversmooth import tables
    from oversmooth.models.verify import verify as verify_

    result = verify_(target or _embedded_default(), model_type=model_type, trust_remote_code=trust_remote_code)
    if json:
        typer.echo(result.to_json(indent=2))
    else:
        tables.show_verification(result)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def measure(
    target: TargetArgument = None,
    data: DataOption = None,
    metrics: Annotated[
        str | None, typer.Option(help="Names of metrics, separated by commas; `all` for every one that fits.")
    ] = None,
    at: Annotated[
        str, typer.Option(help="Places: stream, norms, branches, all, or names separated by commas.")
    ] = "stream",
    prefix_tokens: Annotated[str, typer.Option(help="CLS and register tokens: keep or drop.")] = "keep",
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = 128,
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
    csv: CsvFile = None,
    parquet: Annotated[Path | None, typer.Option(help="Also write the rows to this Parquet file.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run the model and measure how alike its tokens become over depth, and which sub-block does it."""
    from oversmooth import tables
    from oversmooth.measure import measure as measure_
    from oversmooth.metrics import DEFAULT_METRICS, METRICS

    require_writable(csv, parquet)
    names = tuple(metrics.split(",")) if metrics else DEFAULT_METRICS
    if metrics == "all":
        names = tuple(name for name, metric in METRICS.items() if not metric.images_only)
    with _progress("Measuring sequences") as progress:
        result = measure_(
            target or _embedded_default(),
            data,
            metrics=names,
            at=at if "," not in at else at.split(","),
            prefix_tokens=prefix_tokens,
            max_samples=max_samples,
            batch_size=batch_size,
            max_tokens=max_tokens,
            seed=seed,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if csv is not None:
        tables.write_csv(csv, result.rows())
    if parquet is not None:
        tables.write_parquet(parquet, result)
    if json:
        typer.echo(result.to_json(indent=2))
        return
    tables.show_measurement(result)


@app.command()
def predict(
    target: TargetArgument = None,
    data: DataOption = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Predict a changed layer too; can be repeated: no_skip, no_biases, flip_norms, positive_norms, "
            "scale:F, interval:LOW,HIGH, layerscale:G, attnscale:W, featscale:T1,T2, centered, gfsa:W0,W1,WK."
        ),
    ] = None,
    simulate: Annotated[
        int, typer.Option(help="Iterate every layer so many times at fixed attention, on the first sequence.", min=0)
    ] = 0,
    solve: Annotated[int, typer.Option(help="Sequences whose eigenvalue problems are solved.", min=1)] = 4,
    heads: Annotated[bool, typer.Option("--heads", help="One more table with a row per head.")] = False,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = 128,
    dtype: Annotated[str, typer.Option(help="Precision of the theory: float32 or float64.")] = "float32",
    seed: Seed = 0,
    device: Device = None,
    json: Json = False,
    csv: CsvFile = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Say what the theory predicts for every layer, beside what is measured there, and where the two part."""
    from oversmooth.predict import predict as predict_
    from oversmooth.tables import write_csv
    from oversmooth.tables_prediction import show_prediction

    require_writable(csv)
    with _progress("Predicting sequences") as progress:
        result = predict_(
            target or _embedded_default(),
            data,
            what_ifs=what_if or (),
            simulate=simulate,
            solve=solve,
            max_samples=max_samples,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=dtype,
            seed=seed,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if csv is not None:
        write_csv(csv, result.head_rows() if heads else result.rows())
    if json:
        typer.echo(result.to_json(indent=2))
        return
    show_prediction(result, heads=heads)


@app.command()
def report(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models, or analyses saved with --save. Without any: the embedded MiniLM.", show_default=False
        ),
    ] = None,
    data: DataOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path("report.html"),
    save: Annotated[Path | None, typer.Option(help="Also save the analysis as JSON, to be opened again.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write PDF, PNG and SVG figures into this folder.")] = None,
    run: Annotated[Path | None, typer.Option(help="Curves over training from the JSONL file of a monitor.")] = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = 128,
    seed: Seed = 0,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write one self-contained HTML page with the verdict, the curves, the spectra and the explanation."""
    from oversmooth.report import write_page
    from oversmooth.report.compare import compare_page
    from oversmooth.report.page import page_of
    from oversmooth.report.static import write_figures
    from oversmooth.report.training import read_run, training_page

    require_writable(output, save)
    if run is not None:
        page = training_page(run, read_run(run))
    else:
        options: dict[str, Any] = {
            "max_samples": max_samples,
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        options |= {"device": device, "trust_remote_code": trust_remote_code}
        analyses = [_analysis(target, data, options) for target in targets or [_embedded_default()]]
        page = page_of(analyses[0]) if len(analyses) == 1 else compare_page(analyses)
        if save is not None:
            text = analyses[0].to_json(indent=1)
            write_whole(save, lambda partial: partial.write_text(text, encoding="utf-8"))
        if figures is not None:
            for path in write_figures(analyses[0], figures):
                typer.echo(path, err=True)
    write_page(page, output)
    typer.echo(page.verdict)
    typer.echo(f"report: {output.absolute()}")


@app.command()
def compare(
    targets: Annotated[list[str], typer.Argument(help="Two or more models, or analyses saved with `report --save`.")],
    data: DataOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path("compare.html"),
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = 128,
    seed: Seed = 0,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare models on one page, aligned by relative depth: before and after, or checkpoints of one run."""
    from oversmooth.report import write_page
    from oversmooth.report.compare import compare_page

    if len(targets) < 2:
        raise OutOfRange("the number of targets", len(targets), "at least 2 (for one model: oversmooth report)")
    require_writable(output)
    options: dict[str, Any] = {
        "max_samples": max_samples,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    options |= {"device": device, "trust_remote_code": trust_remote_code}
    page = compare_page([_analysis(target, data, options) for target in targets])
    write_page(page, output)
    typer.echo(page.verdict)
    typer.echo(f"report: {output.absolute()}")


def _analysis(target: str, data: str | None, options: dict[str, Any]) -> "Analysis":
    """A saved analysis as it is, or a new one of a model."""
    import json
    import shlex

    from oversmooth.analyze import analyze
    from oversmooth.results import Analysis

    path = Path(target)
    if path.suffix == ".json" and path.is_file():
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BrokenFile(target, "an analysis saved with `oversmooth report --save`", "no JSON") from error
        return Analysis.from_dict(loaded, where=target)
    words = ["oversmooth", "report", target, *(["--data", data] if data else [])]
    words += ["--max-samples", str(options["max_samples"])] if options["max_samples"] else []
    words += ["--batch-size", str(options["batch_size"]), "--max-tokens", str(options["max_tokens"])]
    words += ["--seed", str(options["seed"])]
    with _stages() as stage:
        return analyze(target, data, command=shlex.join(words), stage=stage, **options)


@app.command()
def edit(
    target: Annotated[str, typer.Argument(help="Folder or file of a checkpoint on this machine.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")],
    sharpen: Annotated[bool, typer.Option("--sharpen", help="Eigenvalues of H into [-1, 0].")] = False,
    smooth: Annotated[bool, typer.Option("--smooth", help="Eigenvalues of H into [0, 1].")] = False,
    interval: Annotated[tuple[float, float] | None, typer.Option(help="Eigenvalues of H into [LOW, HIGH].")] = None,
    scale_h: Annotated[float | None, typer.Option(help="Multiply H by this number.")] = None,
    flip_norm_signs: Annotated[
        bool, typer.Option("--flip-norm-signs", help="Negate the attention's own norm.")
    ] = False,
    layers: Annotated[str | None, typer.Option(help="Layers to change, such as 6-11,14; all without it.")] = None,
    stack: Annotated[str | None, typer.Option(help="Only this stack: encoder, decoder, text, vision.")] = None,
    basis: Annotated[str, typer.Option(help="orthogonal, or general, which moves H less.")] = "orthogonal",
    json: Json = False,
    model_type: ModelType = None,
    n_heads: Annotated[int | None, typer.Option(help="Number of heads, where no config says it.", min=1)] = None,
    n_kv: Annotated[int | None, typer.Option(help="Number of value heads, where no config says it.", min=1)] = None,
) -> None:
    """Change the value maps of a checkpoint and write an ordinary one; prints how far each layer moved."""
    from oversmooth import tables
    from oversmooth.control.edit import edit as edit_

    asked = [*([(-1.0, 0.0)] if sharpen else []), *([(0.0, 1.0)] if smooth else []), *([interval] if interval else [])]
    if len(asked) > 1:
        raise OutOfRange("the interval", asked, "one of --sharpen, --smooth and --interval")
    with _progress("Writing layers") as progress:
        result = edit_(
            target,
            out,
            interval=asked[0] if asked else None,
            scale_h=scale_h,
            flip_norm_signs=flip_norm_signs,
            basis=basis,
            layers=layers,
            stack=stack,
            model_type=model_type,
            n_heads=n_heads,
            n_kv=n_kv,
            progress=progress,
        )
    if json:
        typer.echo(result.to_json(indent=2))
        return
    tables.show_control(result)


@app.command()
def architectures(json: Json = False) -> None:
    """List the declared families, and what is refused and why."""
    from oversmooth import tables
    from oversmooth.models.families import ARCHITECTURES, REFUSED

    if json:
        import json as json_module

        rows = [
            {"family": arch.name, "model_types": list(arch.model_types), "residual": arch.residual, "norm": arch.norm}
            for arch in ARCHITECTURES.values()
        ]
        typer.echo(json_module.dumps({"declared": rows, "refused": dict(REFUSED)}, indent=2))
        return
    tables.show_architectures(ARCHITECTURES.values(), REFUSED)


app.command()(train)
app.command()(finetune)
app.command()(reproduce)


def _embedded_default() -> str:
    """The folder of the small pretrained model that comes from the package index."""
    from oversmooth.models.embedded import minilm_folder

    return str(minilm_folder())


def main() -> None:
    """Entry point: our own errors end in one message, never in a traceback; typer sees to Ctrl-C and closed pipes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a file name beyond its encoding is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OversmoothError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
