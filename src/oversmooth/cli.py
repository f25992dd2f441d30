"""The command line. Results go to stdout, everything else to stderr; an error is its message and exit code 2."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from oversmooth.errors import OversmoothError
from oversmooth.writing import require_writable

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


def _embedded_default() -> str:
    """The folder of the small pretrained model that comes from the package index."""
    from oversmooth.models.embedded import minilm_folder

    return str(minilm_folder())


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, only where a person watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns: tuple[Any, ...] = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    """Entry point: our own errors and Ctrl-C end in one message, never in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a file name beyond its encoding is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OversmoothError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away: not an error
        sys.exit(0)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
