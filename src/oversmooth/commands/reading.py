"""The options of every command that runs a model on data, stated once."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from oversmooth.commands.option_groups import with_options
from oversmooth.commands.options import BatchSize, MaxSamples, MaxTokens, Seed
from oversmooth.data.reading import ReadingOptions
from oversmooth.errors import BadValue

PerLine = Annotated[
    bool, typer.Option("--per-line", help="Each line of a text file is a text; otherwise paragraphs are.")
]
Ids = Annotated[
    str | None,
    typer.Option(help="Token ids in place of text: a file with one sequence per line, .jsonl or .npy."),
]
AllowUnknown = Annotated[
    bool, typer.Option("--allow-unknown", help="Go on where the tokenizer knows less than four fifths of the text.")
]
Mean = Annotated[str | None, typer.Option(help="Mean of pixels in [0, 1]: one number, or one per channel with commas.")]
Std = Annotated[str | None, typer.Option(help="Standard deviation of pixels, likewise.")]
Size = Annotated[int | None, typer.Option(help="Resize the shorter side of images to this.", min=1)]
Crop = Annotated[int | None, typer.Option(help="Then cut this square out of the middle; by default --size.", min=1)]

OPTIONS: dict[str, tuple[Any, object]] = {
    "max_samples": (MaxSamples, None),
    "batch_size": (BatchSize, 8),
    "max_tokens": (MaxTokens, 128),
    "per_line": (PerLine, False),
    "ids": (Ids, None),
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
    return with_options(command, "reading", OPTIONS, _reading)


def _reading(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, **{name: _numbers(name, given[name]) for name in ("mean", "std")}}


def words_of(reading: ReadingOptions) -> list[str]:
    """The same options as they are typed, to repeat a command."""
    words = []
    for name, value in reading.items():
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
