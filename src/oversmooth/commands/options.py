"""Options that several commands have, and the default target."""

from typing import Annotated

import typer

from oversmooth.commands import completion

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder, .safetensors/.bin/.pt/.gguf file, URL, hub id or timm name. Default: the embedded MiniLM.",
        show_default=False,
        autocompletion=completion.targets,
    ),
]
Base = Annotated[
    str | None, typer.Option(help="The model that an adapter's folder was trained on, where its config names another.")
]
RunDtype = Annotated[
    str | None,
    typer.Option(
        help="What the model runs in: stored (default), float32, bfloat16 or float16.",
        autocompletion=completion.values("dtype"),
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
    str | None, typer.Option(help="Model type of a file without a config; see `oversmooth architectures`.")
]
DataOption = Annotated[
    str | None,
    typer.Option(
        help="Text file or folder, image folder, .parquet/.jsonl/.csv table, or NAME:SPLIT of a hub dataset. "
        "Default: built-in samples.",
        autocompletion=completion.targets,
    ),
]
WhatIfs = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        help="Also predict each layer with this change; repeatable: no_skip, no_biases, flip_norms, positive_norms, "
        "scale:F, interval:LOW,HIGH, layerscale:G, attnscale:W, featscale:T1,T2, centered, gfsa:W0,W1,WK, tempscale:T, "
        "differential:SHARE, gate:GAIN, layernorm_scaling:LAYER.",
        autocompletion=completion.values("what_if"),
    ),
]
LossTask = Annotated[
    str | None,
    typer.Option(
        help="`causal language`, `masked language`, `classification` or `similarity`. Default: what it has a head for.",
        autocompletion=completion.values("loss_task"),
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
    """The folder of the small pretrained model that comes from the package index."""
    from oversmooth.models.embedded import minilm_folder

    return str(minilm_folder())
