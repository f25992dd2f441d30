"""Options that verbs share, values behind TAB, and how a verb shows its result.

The lists repeat tables that live beside code which needs torch; a test compares each with its table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.environment.files import require_writable
from oversmooth.errors import BadValue, Conflict, UnknownName

if TYPE_CHECKING:
    from oversmooth.results import Row
    from oversmooth.results.base import SavedResult


# --- what the shell offers behind TAB: values of options, and files where a target is expected ---

VALUES: dict[str, tuple[str, ...]] = {
    "basis": ("orthogonal", "general"),
    "claim": (
        *("all", "similarity", "eigenvalue", "skip", "norm-signs"),
        *("parametrization", "vision", "language", "baselines"),
    ),
    "dtype": ("stored", "float32", "bfloat16", "float16"),
    "engine": ("auto", "serial", "process", "ray"),
    "kind": ("architectures", "metrics", "interventions", "recipes", "what-ifs", "plugins"),
    "loss_task": ("causal language", "masked language", "classification", "similarity"),
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
    "page_format": ("html", "md", "card"),
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
    "precision": ("float32", "float64"),
    "prefix_tokens": ("keep", "drop"),
    "printed_format": ("table", "md", "json"),
    "prune_by": ("influence", "loss"),
    "scale": ("cpu", "full"),
    "setting": ("superglue", "glue"),
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


# --- options that several commands have, and the default target ---

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder, .safetensors/.bin/.pt/.gguf file, URL, hub id or timm name. Default: the example model.",
        show_default=False,
        autocompletion=targets,
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
Base = Annotated[
    str | None, typer.Option(help="The model that an adapter's folder was trained on, where its config names another.")
]
RunDtype = Annotated[
    str | None,
    typer.Option(
        help="What the model runs in: stored (default), float32, bfloat16 or float16.",
        autocompletion=values("dtype"),
    ),
]
Offload = Annotated[
    bool | None,
    typer.Option(
        "--offload/--no-offload",
        help="Read weights block by block while the model runs; without it: where they do not fit into memory.",
        show_default=False,
    ),
]
ModelType = Annotated[
    str | None, typer.Option(help="Model type of a file without a config; see `oversmooth list architectures`.")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        help="Text file or folder, image folder, .parquet/.jsonl/.csv table, or NAME:SPLIT of a hub dataset. "
        "Default: built-in samples.",
        autocompletion=targets,
    ),
]
WhatIfs = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        help="Also predict each layer with this change; repeatable: no_skip, no_biases, flip_norms, positive_norms, "
        "scale:F, interval:LOW,HIGH, layerscale:G, attnscale:W, featscale:T1,T2, centered, gfsa:W0,W1,WK, tempscale:T, "
        "differential:SHARE, gate:GAIN, layernorm_scaling:LAYER.",
        autocompletion=values("what_if"),
    ),
]
LossTask = Annotated[
    str | None,
    typer.Option(
        help="`causal language`, `masked language`, `classification` or `similarity`. Default: what it has a head for.",
        autocompletion=values("loss_task"),
    ),
]
MaxSamples = Annotated[int | None, typer.Option(help="Stop after this many sequences.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)]
MaxTokens = Annotated[int, typer.Option(help="Cut longer texts into windows of this many tokens.", min=2)]
Seed = Annotated[int, typer.Option(help="Seed of generated inputs.", min=0, max=2**64 - 1)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps, ... Default: the device the model loads on.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Allow code from the model's repository to run.")]
Heads = Annotated[int | None, typer.Option(help="Number of attention heads, if no config gives it.", min=1)]
ValueHeads = Annotated[int | None, typer.Option(help="Number of key/value heads, if no config gives it.", min=1)]


def embedded_default() -> str:
    """The folder of the small trained model that is used where none is given."""
    from oversmooth.models.example_model import example_model

    return str(example_model())


# --- groups of options that go together in several commands: stated once ---

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

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    everything = sorted([*own, *added], key=lambda parameter: parameter.kind)  # stable: those of a wrapper come last
    run.__signature__ = Signature(everything)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
    return run


# --- how a model is opened and run: the options of every command that takes one ---

SOURCE_OPTIONS: Options = {
    "base": (Base, None),
    "revision": (Revision, None),
    "model_type": (ModelType, None),
    "n_heads": (Heads, None),
    "n_kv": (ValueHeads, None),
}
LOAD_OPTIONS: Options = {
    **SOURCE_OPTIONS,
    "device": (Device, None),
    "dtype": (RunDtype, None),
    "offload": (Offload, None),
    "trust_remote_code": (TrustRemoteCode, False),
}
"""Type and default of each, in the order of `--help`."""


def reads_weights(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `SourceKeywords`, which it receives together as `load`."""
    return with_options(command, "load", SOURCE_OPTIONS, dict)


def runs_model(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `LoadKeywords`, which it receives together as `load`."""
    return with_options(command, "load", LOAD_OPTIONS, dict)


# --- the options of every command that runs a model on data, stated once ---

PerLine = Annotated[
    bool, typer.Option("--per-line", help="Each line of a text file is a text; otherwise paragraphs are.")
]
Ids = Annotated[
    str | None,
    typer.Option(help="Token ids in place of text: a file with one sequence per line, .jsonl or .npy."),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or hub id of a tokenizer to use in place of the model's own.")
]
AllowUnknown = Annotated[
    bool, typer.Option("--allow-unknown", help="Go on where the tokenizer knows less than four fifths of the text.")
]
Mean = Annotated[str | None, typer.Option(help="Mean of pixels in [0, 1]: one number, or one per channel with commas.")]
Std = Annotated[str | None, typer.Option(help="Standard deviation of pixels, likewise.")]
Size = Annotated[int | None, typer.Option(help="Resize the shorter side of images to this.", min=1)]
Crop = Annotated[int | None, typer.Option(help="Then cut this square out of the middle; by default --size.", min=1)]

DATA_OPTIONS: dict[str, tuple[Any, object]] = {
    "max_samples": (MaxSamples, None),
    "batch_size": (BatchSize, 8),
    "max_tokens": (MaxTokens, 128),
    "per_line": (PerLine, False),
    "ids": (Ids, None),
    "tokenizer": (Tokenizer, None),
    "allow_unknown": (AllowUnknown, False),
    "mean": (Mean, None),
    "std": (Std, None),
    "size": (Size, None),
    "crop": (Crop, None),
    "seed": (Seed, 0),
}
"""Type and default of each, in the order of `--help`."""


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


# --- how a verb ends: rows into files where asked for, then a table, Markdown or JSON ---

Format = Annotated[
    str,
    typer.Option(help="What is printed: table, md (Markdown) or json.", autocompletion=values("printed_format")),
]
CsvFile = Annotated[
    Path | None, typer.Option(help="Also write the rows to this CSV file, with the model and what they rest on.")
]
ParquetFile = Annotated[Path | None, typer.Option(help="Also write the same rows to this Parquet file.")]
OUTPUT_OPTIONS: Options = {
    "format": (Format, "table"),
    "json": (Json, False),
    "csv": (CsvFile, None),
    "parquet": (ParquetFile, None),
}


@dataclass(frozen=True, slots=True)
class Showing:
    """What is printed, and the files that the rows go into."""

    format: str = "table"
    csv: Path | None = None
    parquet: Path | None = None


def shows_rows(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options for what it shows, which it receives together as `showing`, checked before it runs."""
    return with_options(command, "showing", OUTPUT_OPTIONS, _showing)


def _showing(given: dict[str, Any]) -> Showing:
    known = VALUES["printed_format"]
    if given["format"] not in known:
        raise UnknownName("format", given["format"], known)
    if given["json"] and given["format"] == "md":
        raise Conflict(["--json", "--format md"])
    require_writable(given["csv"], given["parquet"])
    if given["parquet"] is not None:
        from oversmooth.output.exports import require_parquet

        require_parquet("--parquet")
    return Showing("json" if given["json"] else given["format"], given["csv"], given["parquet"])


def show(result: "SavedResult", table: Callable[[], None], showing: Showing, rows: "list[Row] | None" = None) -> None:
    """Writes and prints the result; `rows` are those of the files where they are not the result's own."""
    if showing.csv is not None or showing.parquet is not None:
        _write(result, result.rows() if rows is None else rows, showing)
    if showing.format == "json":
        typer.echo(result.to_json(indent=2))
    elif showing.format == "md":
        from oversmooth.output.console import as_markdown

        with as_markdown():
            table()
    else:
        table()


def _write(result: Any, rows: "list[Row]", showing: Showing) -> None:
    """Every row with the model and what its numbers rest on."""
    from oversmooth.output.exports import sourced, write_parquet
    from oversmooth.output.tables import write_csv

    whole = sourced(rows, result.provenance, getattr(result, "data", None))
    if showing.csv is not None:
        write_csv(showing.csv, whole)
    if showing.parquet is not None:
        write_parquet(showing.parquet, whole)
