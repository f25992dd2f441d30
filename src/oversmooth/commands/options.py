"""Options that verbs share, each declared once; values behind TAB; how a verb shows its result.

A panel is a heading of the help. A hidden option is rare: `--help-all` shows it. The lists repeat tables that live beside
code which needs torch; a test compares each with its table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.environment.files import require_writable
from oversmooth.errors import BadValue, UnknownName

if TYPE_CHECKING:
    from oversmooth.output.blocks import Page
    from oversmooth.results import Row
    from oversmooth.results.base import SavedResult


# --- what the shell offers behind TAB: values of options, and files where a target is expected ---

VALUES: dict[str, tuple[str, ...]] = {
    "basis": ("orthogonal", "general"),
    "claim": (
        *("all", "similarity", "eigenvalue", "skip", "norm-signs"),
        *("parametrization", "vision", "language", "baselines"),
    ),
    "device_map": ("auto", "balanced", "balanced_low_0", "sequential"),
    "dtype": ("stored", "float32", "bfloat16", "float16"),
    "engine": ("auto", "serial", "process", "ray"),
    "kind": ("architectures", "metrics", "interventions", "recipes", "what-ifs", "plugins"),
    "loss_task": ("causal-lm", "masked-lm", "classification", "similarity"),
    "metric": (
        *(
            "all",
            "steps",
            "attention",
            "cosine",
            "cosine_abs",
            "hfc_lfc",
            "log_hfc_lfc",
            "log_hfc_lfc_unit",
            "dirichlet",
            "residual",
            "effective_rank",
        ),
        *("effective_rank_share", "stable_rank", "token_norm", "token_norm_spread", "largest_norm", "massive"),
        *("matrix_entropy", "high_frequency", "between"),
        *("influence", "angular_distance", "contribution", "alignment", "ceiling", "influence_smoothing"),
        *("influence_shared", "influence_differing", "undone"),
        *("attention_entropy", "effective_tokens", "sink_rate", "attention_rank"),
    ),
    "part": ("attention", "feed-forward", "block"),
    "place": (
        *("all", "stream", "norms", "branches"),
        *(
            "embedding",
            "between",
            "other_sum",
            "attn_sum",
            "cross_sum",
            "ffn_sum",
            "final_norm",
            "attn_norm",
            "cross_norm",
        ),
        *("ffn_norm", "attn_branch", "cross_branch", "ffn_branch"),
    ),
    "precision": ("auto", "float32", "float64"),
    "prefix_tokens": ("keep", "drop"),
    "printed_format": ("table", "json", "md", "csv"),
    "prune_by": ("influence", "loss"),
    "scale": ("cpu", "full"),
    "short_format": ("table", "json"),
    "setting": ("superglue", "glue"),
    "spectrum": ("auto", "extremes", "full"),
    "task": ("superglue", "boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc", "axb", "axg"),
    "variant": (
        *("vanilla", "sharpen", "smooth", "sharpen-measured", "smooth-measured", "free", "sharpen-start"),
        *("smooth-start", "no-identity", "matched"),
        *("attnscale", "featscale", "neutreno", "contranorm", "gfsa", "centered", "layerscale", "residual_scaling"),
        *("value_residual", "layernorm_scaling", "tempscale", "exclusive", "gate"),
    ),
    "what_if": (
        *("no_skip", "flip_norms", "positive_norms", "no_biases", "scale:", "interval:", "layerscale:"),
        *("residual_scaling:", "attnscale:", "featscale:", "centered", "gfsa:"),
        *("layernorm_scaling:", "tempscale:", "differential:", "gate:"),
    ),
}


def values(kind: str) -> Callable[[str], list[str]]:
    """Completes one of the known values; after a comma, the next one of a list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in VALUES[kind] if value.startswith(last)]

    return complete


def targets(incomplete: str) -> list[str]:
    """Completes files and folders; a folder ends in a slash, so that one can go on inside."""
    path = Path(incomplete).expanduser()
    inside = path if incomplete.endswith("/") else path.parent
    start = "" if incomplete.endswith("/") else path.name
    written = incomplete[: len(incomplete) - len(start)] if start else incomplete
    try:
        found = sorted(entry for entry in inside.iterdir() if entry.name.startswith(start))
    except OSError:
        return []
    shown = [entry for entry in found if start.startswith(".") or not entry.name.startswith(".")]
    return [f"{written}{entry.name}{'/' if entry.is_dir() else ''}" for entry in shown]


def recipes(incomplete: str) -> list[str]:
    """Completes shipped recipes, and recipe files."""
    shipped = files("oversmooth") / "recipes"
    names = sorted(entry.name.removesuffix(".toml") for entry in shipped.iterdir() if entry.name.endswith(".toml"))
    return [name for name in names if name.startswith(incomplete)] + targets(incomplete)


# --- what to point at ---

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder, file (.safetensors .bin .pt .gguf), URL, hub id or timm name. Default: the example model.",
        show_default=False,
        autocompletion=targets,
    ),
]


def example_target() -> str:
    """The folder of the small trained model that is used where none is given."""
    from oversmooth.models.example_model import example_model

    return str(example_model())


# --- options of single verbs that more than one has ---

WhatIfs = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        help="Also predict each layer with this change; repeatable.\n"
        "no_skip no_biases flip_norms positive_norms centered scale:F interval:LOW,HIGH layerscale:G "
        "residual_scaling:G attnscale:W featscale:T1,T2 gfsa:W0,W1,WK tempscale:T differential:SHARE gate:GAIN "
        "layernorm_scaling:LAYER",
        autocompletion=values("what_if"),
    ),
]
Solve = Annotated[int, typer.Option(help="Sequences whose eigenvalues are solved; 0: no theory.", min=0)]
LossTask = Annotated[
    str | None,
    typer.Option(
        help="causal-lm, masked-lm, classification or similarity.",
        autocompletion=values("loss_task"),
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(help="Cut texts to each of these lengths: 16,32,64."),
]
HeadRows = Annotated[bool, typer.Option("--heads", help="Also one row per head.")]
LossIncrease = Annotated[float | None, typer.Option(help="Largest increase of the loss that is allowed.")]
LossIncreaseOrDefault = Annotated[float, typer.Option(help="Largest increase of the loss that is allowed.")]
WithLoss = Annotated[bool, typer.Option("--loss", help="Also run the model, and show its loss.")]
SpectrumKind = Annotated[
    str,
    typer.Option(
        "--spectrum",
        help="Of wide layers: auto, extremes (fast) or full.",
        autocompletion=values("spectrum"),
    ),
]
Precision = Annotated[
    str,
    typer.Option(help="Of our own computation: auto, float32 or float64.", autocompletion=values("precision")),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=2**64 - 1)]
Override = Annotated[list[str] | None, typer.Option("--set", help="Set section.key=value of the recipe; repeatable.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what a stopped run left in the folder.")]


# --- groups of options that go together: stated once ---

Options = Mapping[str, tuple[Any, object]]
"""Type and default of each option, in the order of `--help`."""


def with_options(
    command: Callable[..., None], receives: str, options: Options, gather: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """The command with these options; it receives what `gather` makes of their values as the keyword `receives`."""
    own = [parameter for parameter in signature(command).parameters.values() if parameter.name != receives]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in options.items()
    ]

    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in options}
        command(**given, **{receives: gather(values)})

    everything = sorted([*own, *added], key=lambda parameter: parameter.kind)  # stable: those of a wrapper come last
    return declared(run, command, everything)


def declared(
    run: Callable[..., None], command: Callable[..., None], parameters: Sequence[Parameter]
) -> Callable[..., None]:
    """`run` with the name of a command and other parameters, which is where typer looks for options."""
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


# --- Model: how it is opened and run, in every verb that takes one ---

_of_model = partial(typer.Option, rich_help_panel="Model")

Revision = Annotated[str | None, _of_model(help="Branch, tag or commit of a hub repository.")]
Base = Annotated[str | None, _of_model(help="Base model of an adapter, if its config names another.")]
RunDtype = Annotated[
    str | None,
    _of_model(help="stored (default), float32, bfloat16 or float16.", autocompletion=values("dtype")),
]
Device = Annotated[str | None, _of_model(help="cpu, cuda, mps, ... Default: where the model loads.")]
DeviceMap = Annotated[
    str | None,
    _of_model(help="Spread over devices: auto, balanced or sequential.", autocompletion=values("device_map")),
]
Offload = Annotated[
    bool | None,
    _of_model(
        "--offload/--no-offload",
        help="Keep weights on disk. Default: if memory is too small.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool, _of_model("--trust-remote-code", help="Allow code from the model's repository to run.")
]
ModelType = Annotated[
    str | None,
    _of_model(help="Model type of a file without a config; see `oversmooth list architectures`.", hidden=True),
]
Heads = Annotated[int | None, _of_model(help="Attention heads, if no config says it.", min=1, hidden=True)]
ValueHeads = Annotated[int | None, _of_model(help="Key/value heads, if no config says it.", min=1, hidden=True)]

SOURCE_OPTIONS: Options = {
    "base": (Base, None),
    "revision": (Revision, None),
    "model_type": (ModelType, None),
    "n_heads": (Heads, None),
    "n_kv": (ValueHeads, None),
}
LOAD_OPTIONS: Options = {
    "device": (Device, None),
    "dtype": (RunDtype, None),
    "device_map": (DeviceMap, None),
    "offload": (Offload, None),
    "trust_remote_code": (TrustRemoteCode, False),
    **SOURCE_OPTIONS,
}


def reads_weights(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `SourceKeywords`, which it receives together as `load`."""
    return with_options(command, "load", SOURCE_OPTIONS, dict)


def runs_model(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `LoadKeywords`, which it receives together as `load`."""
    return with_options(command, "load", LOAD_OPTIONS, dict)


# --- Data: what the model is run on, in every verb that runs one ---

_of_data = partial(typer.Option, rich_help_panel="Data")

DataOption = Annotated[
    str | None,
    _of_data(
        help="Text file, folder of texts or images, table (.parquet .jsonl .csv), or NAME:SPLIT of a hub dataset. "
        "Default: built-in samples.",
        autocompletion=targets,
    ),
]
MaxSamples = Annotated[
    int | None, _of_data("--max-samples", "--limit", help="Stop after this many sequences. Also: --limit.", min=1)
]
BatchSize = Annotated[int, _of_data(help="Sequences per forward pass.", min=1)]
MaxTokens = Annotated[int, _of_data(help="Cut texts into windows of this many tokens.", min=2)]
PerLine = Annotated[bool, _of_data("--per-line", help="Lines of a text file are texts, not its paragraphs.")]
Tokenizer = Annotated[str | None, _of_data(help="Folder or hub id of another tokenizer.")]
Ids = Annotated[
    str | None,
    _of_data(help="Token ids in place of text: one sequence per line, .jsonl or .npy.", hidden=True),
]
AllowUnknown = Annotated[
    bool,
    _of_data("--allow-unknown", help="Continue even if over 20% of the tokens are unknown.", hidden=True),
]
Mean = Annotated[
    str | None, _of_data(help="Mean of pixels in [0, 1]: one number, or one per channel with commas.", hidden=True)
]
Std = Annotated[str | None, _of_data(help="Standard deviation of pixels, likewise.", hidden=True)]
Size = Annotated[int | None, _of_data(help="Resize the shorter side of images to this.", min=1, hidden=True)]
Crop = Annotated[int | None, _of_data(help="Center-crop to this size. Default: --size.", min=1, hidden=True)]
DataSeed = Annotated[int, _of_data(help="Seed of everything random.", min=0, max=2**64 - 1, hidden=True)]

DATA_OPTIONS: Options = {
    "max_samples": (MaxSamples, None),
    "batch_size": (BatchSize, 8),
    "max_tokens": (MaxTokens, 128),
    "per_line": (PerLine, False),
    "tokenizer": (Tokenizer, None),
    "ids": (Ids, None),
    "allow_unknown": (AllowUnknown, False),
    "mean": (Mean, None),
    "std": (Std, None),
    "size": (Size, None),
    "crop": (Crop, None),
    "seed": (DataSeed, 0),
}


def reads_data(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `ReadingOptions`, which it receives together as `reading`."""
    return with_options(command, "reading", DATA_OPTIONS, _reading)


def _reading(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, **{name: _numbers(name, given[name]) for name in ("mean", "std")}}


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed, to repeat a command."""
    words = []
    for name, value in options.items():
        if value is False and name == "offload":
            words.append("--no-offload")
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return words


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise BadValue(f"--{name}", text, "numbers with commas between them, such as 0.485,0.456,0.406") from error


# --- Output: the answer on the terminal, and files whose suffix says what they hold ---

_of_output = partial(typer.Option, rich_help_panel="Output")

Files = Annotated[
    list[Path] | None,
    _of_output(
        "--output",
        "-o",
        help="Also write a .json .md .csv .parquet file; repeatable.",
        metavar="FILE",
    ),
]
Pages = Annotated[
    list[Path] | None,
    _of_output(
        "--output",
        "-o",
        help="Page to write (.html or .md), or the analysis (.json), which report, compare and gate read; repeatable. "
        "Default: report.html.",
        metavar="FILE",
    ),
]
PairPages = Annotated[
    list[Path] | None,
    _of_output(
        "--output", "-o", help="Page to write: .html or .md; repeatable. Default: compare.html.", metavar="FILE"
    ),
]
NewFolder = partial(_of_output, "--output", "-o", metavar="FOLDER")
Format = Annotated[
    str,
    _of_output(help="What is printed: table, json, md or csv.", autocompletion=values("printed_format")),
]
ShortFormat = Annotated[
    str, _of_output("--format", help="What is printed: table or json.", autocompletion=values("short_format"))
]
Tables = Annotated[Path | None, _of_output(help="Also write every table as CSV and Parquet here.", metavar="FOLDER")]

WRITTEN = (".json", ".md", ".csv", ".parquet", ".html")


@dataclass(frozen=True, slots=True)
class Showing:
    """What is printed, and the files that are written."""

    format: str = "table"
    files: tuple[Path, ...] = ()

    def require_page_free(self) -> None:
        """Refuses a page where a verb has none, before any work."""
        for path in self.files:
            if path.suffix == ".html":
                raise BadValue(
                    "--output", str(path), "a .json, .md, .csv or .parquet file here", "Pages: oversmooth report"
                )


def shows_rows(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options for what it shows, which it receives together as `showing`, checked before it runs."""
    return with_options(command, "showing", {"output": (Files, None), "format": (Format, "table")}, _showing)


def prints_rows(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command whose `--output` is something else."""
    return with_options(command, "showing", {"format": (Format, "table")}, _showing)


def _showing(given: dict[str, Any]) -> Showing:
    require_format(given["format"], VALUES["printed_format"])
    return Showing(given["format"], checked_files(given.get("output"), WRITTEN))


def require_format(asked: str, known: tuple[str, ...]) -> None:
    if asked == "parquet":
        raise BadValue("--format", asked, f"one of {', '.join(known)}", "Parquet goes into a file: -o FILE.parquet")
    if asked not in known:
        raise UnknownName("format", asked, known)


def checked_files(asked: "list[Path] | None", suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """The files of `--output`, refused before any work where one has another suffix or cannot be written.

    A device, such as /dev/stdout, has none: JSON goes there, or a page.
    """
    files = tuple(asked or ())
    for path in files:
        if path.suffix not in suffixes and not (path.suffix == "" and path.is_relative_to("/dev")):
            raise BadValue("--output", str(path), f"a file that ends in {', '.join(suffixes)}")
    require_writable(*files)
    if any(path.suffix == ".parquet" for path in files):
        from oversmooth.output.exports import require_parquet

        require_parquet("--output FILE.parquet")
    return files


def show(
    result: "SavedResult",
    table: Callable[[], None],
    showing: Showing,
    rows: "list[Row] | None" = None,
    page: "Callable[[], Page] | None" = None,
) -> None:
    """Writes and prints the result; `rows` are those of tables where they are not the result's own."""
    rows = result.rows() if rows is None else rows
    for path in showing.files:
        _write(path, result, table, rows, page)
    if showing.format == "json":
        typer.echo(result.to_json(indent=2))
    elif showing.format == "csv":
        from oversmooth.output.tables import csv_text

        typer.echo(csv_text(_sourced(result, rows)), nl=False)
    elif showing.format == "md":
        typer.echo(markdown_of(table), nl=False)
    else:
        table()


def _write(
    path: Path, result: Any, table: Callable[[], None], rows: "list[Row]", page: "Callable[[], Page] | None"
) -> None:
    """One file, in the format of its suffix."""
    from oversmooth.environment.files import write_text_whole

    if path.suffix in (".json", ""):
        result.save(path)
    elif path.suffix == ".md":
        write_text_whole(path, markdown_of(table))
    elif path.suffix == ".csv":
        from oversmooth.output.tables import csv_text

        write_text_whole(path, csv_text(_sourced(result, rows)))
    elif path.suffix == ".parquet":
        from oversmooth.output.exports import write_parquet

        write_parquet(path, _sourced(result, rows))
    elif page is not None:
        from oversmooth.output.render import write_page

        write_page(page(), path)


def markdown_of(table: Callable[[], None]) -> str:
    """What the table prints, as Markdown."""
    import io
    from contextlib import redirect_stdout

    from oversmooth.output.console import as_markdown

    with as_markdown(), redirect_stdout(io.StringIO()) as text:
        table()
    return text.getvalue()


def _sourced(result: Any, rows: "list[Row]") -> "list[Row]":
    """Every row with the model and what its numbers rest on."""
    from oversmooth.output.exports import sourced

    return sourced(rows, result.provenance, getattr(result, "data", None))
