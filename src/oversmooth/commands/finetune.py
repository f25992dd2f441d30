"""`oversmooth finetune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oversmooth.commands import completion
from oversmooth.errors import BadValue
from oversmooth.output.terminal.progress_bars import stages

if TYPE_CHECKING:
    from oversmooth.training.recipes.language.superglue.finetune import FinetuneResult


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
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds; one run per seed.")] = "0",
    data: Annotated[
        str | None,
        typer.Option(help="Folder with the official jsonl folders, or a hub id. Default: aps/super_glue."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and results.json.")] = Path("finetune"),
    setting: Annotated[
        str,
        typer.Option(
            help="superglue (10 epochs, rate 1e-5) or glue (5 epochs, rate 4e-5).",
            autocompletion=completion.values("setting"),
        ),
    ] = "superglue",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: training.epochs=3; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue unfinished runs; finished ones are kept.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Fine-tune an encoder on SuperGLUE: official metrics and prediction files, smoothing before and after."""
    import shlex
    import sys

    from oversmooth.training.recipes.language.superglue.finetune import finetune as finetune_
    from oversmooth.training.recipes.runner import is_first_process, process_group_ends

    try:
        numbers = [int(word) for word in seeds.split(",")]
    except ValueError as error:
        raise BadValue("--seeds", seeds, "a comma-separated list of whole numbers, such as 0,1,2") from error
    with process_group_ends(), stages() as stage:
        found = finetune_(
            checkpoint,
            out,
            tasks=tasks,
            seeds=numbers,
            data=data,
            setting=setting,
            overrides=tuple(set_ or ()),
            resume=resume,
            command=shlex.join(["oversmooth", *sys.argv[1:]]),
            stage=stage,
        )
    if not is_first_process():
        return
    if json:
        typer.echo(found.model_dump_json(indent=2))
        return
    _show(found)
    typer.echo(f"results: {(out / 'results.json').absolute()}")


def _show(found: "FinetuneResult") -> None:
    """One row per task: metrics, score with its spread, and smoothing before and after."""
    from rich.markup import escape

    from oversmooth.output.terminal.tables import new_table, open_console
    from oversmooth.training.recipes.language.superglue.tasks import TASKS

    def number(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    console, table = open_console(), new_table()
    console.print(escape(f"{found.checkpoint}, seeds {', '.join(map(str, found.seeds))}"), style="bold", soft_wrap=True)
    for name in ("task", "metrics", "score", "spread", "cosine", "HFC/LFC", "smoothing layers"):
        table.add_column(name, justify="left" if name in ("task", "metrics") else "right", no_wrap=True)
    for row in found.tasks:
        means = {name: sum(values) / len(values) for name, values in row.metrics.items()}
        words = ", ".join(f"{name} {100 * value:.1f}" for name, value in means.items())
        spread = "-" if row.spread is None else f"{100 * row.spread:.1f}"
        changes = ["", "", ""]
        if row.before is not None and row.after:
            after = row.after[0]
            changes = [f"{number(row.before.cosine)} → {number(after.cosine)}"]
            changes += [f"{number(row.before.hfc_lfc)} → {number(after.hfc_lfc)}"]
            changes += [f"{row.before.smoothing_layers} → {after.smoothing_layers} of {after.layers}"]
        table.add_row(TASKS[row.task].folder, words, f"{100 * row.mean:.1f}", spread, *changes)
    console.print(table)
    if found.overall is None:
        typer.echo("Overall score needs all eight tasks.")
        return
    mean = sum(found.overall) / len(found.overall)
    typer.echo(f"Overall score: {100 * mean:.1f} (seeds: {', '.join(f'{100 * v:.1f}' for v in found.overall)})")
