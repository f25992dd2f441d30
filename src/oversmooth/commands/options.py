"""Options that several commands have, and the default target."""

from pathlib import Path
from typing import Annotated

import typer

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
Heads = Annotated[int | None, typer.Option(help="Number of heads, where no config says it.", min=1)]
ValueHeads = Annotated[int | None, typer.Option(help="Number of value heads, where no config says it.", min=1)]


def embedded_default() -> str:
    """The folder of the small pretrained model that comes from the package index."""
    from oversmooth.models.embedded import minilm_folder

    return str(minilm_folder())
