"""`oversmooth finetune`."""

from pathlib import Path
from typing import Annotated

import typer

from oversmooth.commands import options as completion
from oversmooth.commands.help import command_line
from oversmooth.commands.options import VALUES, NewFolder, Override, Resume, ShortFormat, require_format
from oversmooth.errors import BadValue
from oversmooth.output.console import stages


def finetune(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Folder or hub id of a text encoder with its tokenizer.",
            show_default=False,
            autocompletion=completion.targets,
        ),
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="`superglue`, or a comma-separated list: boolq,cb,copa,multirc,record,rte,wic,wsc,axb,axg.",
            autocompletion=completion.values("task"),
        ),
    ] = "superglue",
    seeds: Annotated[str, typer.Option(help="One run for each of these seeds, comma-separated.")] = "0",
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder with the official jsonl folders, or a hub id. Default: aps/super_glue.", rich_help_panel="Data"
        ),
    ] = None,
    output: Annotated[Path, NewFolder(help="Folder for the runs and results.json.")] = Path("finetune"),
    setting: Annotated[
        str,
        typer.Option(
            help="superglue (10 epochs, rate 1e-5) or glue (5 epochs, rate 4e-5).",
            autocompletion=completion.values("setting"),
        ),
    ] = "superglue",
    set_: Override = None,
    resume: Resume = False,
    format: ShortFormat = "table",
) -> None:
    """Fine-tune an encoder on SuperGLUE: official metrics and prediction files, smoothing before and after."""
    from oversmooth.output.tables import show_finetuning
    from oversmooth.recipes.superglue import finetune as finetune_
    from oversmooth.recipes.superglue_tasks import TASKS
    from oversmooth.recipes.train import is_first_process, process_group_ends

    require_format(format, VALUES["short_format"])
    try:
        numbers = [int(word) for word in seeds.split(",")]
    except ValueError as error:
        raise BadValue("--seeds", seeds, "a comma-separated list of whole numbers, such as 0,1,2") from error
    with process_group_ends(), stages() as stage:
        found = finetune_(
            checkpoint,
            output,
            tasks=tasks,
            seeds=numbers,
            data=data,
            setting=setting,
            overrides=tuple(set_ or ()),
            resume=resume,
            command=command_line(),
            stage=stage,
        )
    if not is_first_process():
        return
    if format == "json":
        typer.echo(found.to_json(indent=2))
        return
    show_finetuning(found, {name: task.folder for name, task in TASKS.items()})
    typer.echo(f"results: {(output / 'results.json').absolute()}")
