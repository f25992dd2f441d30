"""The table of `oversmooth finetune`."""

from rich.markup import escape

from oversmooth.output.terminal.layout import new_table
from oversmooth.output.terminal.tables import open_console
from oversmooth.results import EndOfDepth, FinetuneResult

COLUMNS = ("task", "metrics", "score", "spread", "cosine", "HFC/LFC", "smoothing layers")


def show_finetuning(found: FinetuneResult, names: dict[str, str]) -> None:
    """One row per task under its official name: metrics, score with its spread, and smoothing before and after."""
    console, table = open_console(), new_table()
    console.print(escape(f"{found.checkpoint}, seeds {', '.join(map(str, found.seeds))}"), style="bold", soft_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("task", "metrics") else "right", no_wrap=True)
    for row in found.tasks:
        means = {name: sum(values) / len(values) for name, values in row.metrics.items()}
        words = ", ".join(f"{name} {100 * value:.1f}" for name, value in means.items())
        spread = "-" if row.spread is None else f"{100 * row.spread:.1f}"
        changes = _changes(row.before, row.after[0]) if row.before is not None and row.after else ("", "", "")
        table.add_row(names[row.task], words, f"{100 * row.mean:.1f}", spread, *changes)
    console.print(table)
    if found.overall is None:
        console.print("Overall score needs all eight tasks.")
        return
    mean = sum(found.overall) / len(found.overall)
    console.print(f"Overall score: {100 * mean:.1f} (seeds: {', '.join(f'{100 * v:.1f}' for v in found.overall)})")


def _changes(before: EndOfDepth, after: EndOfDepth) -> tuple[str, str, str]:
    return (
        f"{_number(before.cosine)} → {_number(after.cosine)}",
        f"{_number(before.hfc_lfc)} → {_number(after.hfc_lfc)}",
        f"{before.smoothing_layers} → {after.smoothing_layers} of {after.layers}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
