"""Losses, ablations and pruned checkpoints as tables for the terminal."""

from rich.markup import escape

from oversmooth.output.numbers import format_cell
from oversmooth.output.terminal.layout import new_table
from oversmooth.output.terminal.tables import open_console, show_data
from oversmooth.results.worth import Ablation, EditCurve, Loss, Pruning, TaskLoss

SHOWN = ("influence", "contribution", "ceiling", "influence_differing", "smoothing_change")


def loss_words(task: str, found: Loss) -> str:
    """One sentence: the loss and what goes with it."""
    if task == "similarity":
        return f"similarity: rank correlation with the original's {1 - found.loss:.4f}, loss {found.loss:.4f}"
    error = "" if found.standard_error is None else f" ±{found.standard_error:.2g}"
    more = "" if found.perplexity is None else f", perplexity {found.perplexity:.4g}"
    more += "" if found.accuracy is None else f", accuracy {found.accuracy:.1%}"
    return f"{task}: loss {found.loss:.4f}{error}{more}"


def show_loss(result: TaskLoss) -> None:
    console = open_console()
    console.print(escape(result.provenance.target), style="bold", soft_wrap=True)
    show_data(console, result.data, "")
    console.print(loss_words(result.task, result.found))


def show_ablation(result: Ablation) -> None:
    console = open_console()
    console.print(escape(result.provenance.target), style="bold", soft_wrap=True)
    show_data(console, result.data, "")
    console.print(f"whole model, {loss_words(result.task, result.whole)}")
    table = new_table()
    has_stacks = len({item.stack for item in result.removals}) > 1
    for name in (*(["stack"] if has_stacks else []), "layer", "removed", "loss grows by", *SHOWN):
        table.add_column(name, justify="left" if name == "removed" else "right", no_wrap=True)
    for item in result.removals:
        cheap = dict(item.cheap)
        grows = "-" if item.increase is None else f"{item.increase:+.4f}"
        cells = (format_cell(cheap.get(name)) for name in SHOWN)
        table.add_row(*([escape(item.stack)] if has_stacks else []), str(item.layer), item.part, grows, *cells)
    console.print(table)
    predictors = new_table()
    for name in ("removed", "cheap number", "rank correlation", "95% interval", "parts"):
        predictors.add_column(name, justify="left" if name in ("removed", "cheap number") else "right", no_wrap=True)
    for one in sorted(result.predictors, key=lambda one: (one.part, -abs(one.rank_correlation))):
        interval = "-" if one.interval is None else f"{one.interval[0]:+.2f} to {one.interval[1]:+.2f}"
        predictors.add_row(one.part, one.name, f"{one.rank_correlation:+.2f}", interval, str(one.parts))
    console.print(predictors)
    console.print(
        "Rank correlation of each cheap number with what removal costs; an interval that holds 0 says nothing.",
        style="dim",
    )


def show_pruning(result: Pruning) -> None:
    console = open_console()
    console.print(escape(result.provenance.target), style="bold", soft_wrap=True)
    removed = ", ".join(str(number) for number in result.removed)
    console.print(f"removed blocks {removed} of {result.blocks_before}, chosen by {result.by}")
    console.print(f"before, {loss_words(result.task, result.before)}")
    console.print(f"after, {loss_words(result.task, result.after)}")
    console.print(f"Written to {escape(result.out)}", soft_wrap=True)


def show_edit_curve(result: EditCurve) -> None:
    console = open_console()
    console.print(escape(result.provenance.target), style="bold", soft_wrap=True)
    show_data(console, result.data, "")
    console.print(f"{escape(result.change_words)}; {loss_words(result.task, result.points[0].loss)} as it is")
    show_edit_points(result)


def show_edit_points(result: EditCurve) -> None:
    """Loss and features over strength, and what they say."""
    console = open_console()
    table = new_table()
    for name in ("strength", "loss", "grows by", "mean cosine", "log(HFC/LFC) changes by", "H moved"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in result.points:
        numbers = (format_cell(point.cosine), format_cell(point.change), format_cell(point.moved))
        table.add_row(f"{point.strength:g}", f"{point.loss.loss:.4f}", f"{point.increase:+.4f}", *numbers)
    console.print(table)
    console.print(result.verdict)
