"""The command line. Results go to stdout, everything else to stderr; an error is its message and exit code 2."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from oversmooth.errors import OversmoothError

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
    csv: Annotated[Path | None, typer.Option(help="Also write the rows to this CSV file.")] = None,
    model_type: ModelType = None,
    n_heads: Annotated[int | None, typer.Option(help="Number of heads, where no config says it.", min=1)] = None,
    n_kv: Annotated[int | None, typer.Option(help="Number of value heads, where no config says it.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the eigenvalues: auto, float64 or float32.")] = "auto",
) -> None:
    """Eigenvalues of the value map of every layer, from weights alone: which layers could smooth, which sharpen."""
    from oversmooth import tables
    from oversmooth.inspection import inspect as inspect_

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
