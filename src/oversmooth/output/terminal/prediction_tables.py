"""A prediction as tables for the terminal: the theorem, the ladder beside the measurement, and the verdict in words."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oversmooth.output.numbers import format_cell, signed
from oversmooth.output.terminal.heading import show_heading
from oversmooth.output.terminal.layout import new_table
from oversmooth.output.terminal.tables import open_console, show_data
from oversmooth.results import Row
from oversmooth.results.layer_prediction import Asymptotic, LayerPrediction
from oversmooth.results.prediction import Prediction

LEAK_WORDS = (
    "leak: how much of what all tokens share is turned into differences, because a gate, a sink or a norm on heads lets "
    "every token write with a gain of its own; it works against smoothing."
)
COLOURS = {
    "no clear change": "dim",
    "smoothing": "blue",
    "sharpening": "dark_orange",
    "undecided": "bold red",
    "mixed": "magenta",
}


def show_prediction(result: Prediction, *, heads: bool = False) -> None:
    """Prints everything the prediction holds; details of every layer's verdict are in the JSON."""
    console = open_console()
    show_heading(console, result.provenance)
    partial = " (interrupted: partial)" if result.is_partial else ""
    show_data(console, result.data, f"; eigenvalue problems solved for {result.solved}{partial}")
    stacks = list(dict.fromkeys(layer.stack for layer in result.layers))
    for stack in stacks:
        layers = [layer for layer in result.layers if layer.stack == stack]
        console.print(_ladder_table(result, stack, layers))
        console.print(_theorem_table(stack, layers))
    _details(console, result, heads=heads)
    console.print("Verdict", style="bold")
    for statement in result.verdict:
        console.print(escape(f"  {_capitalised(statement.text)} [{statement.basis}]"))
    for layer in result.layers:
        for text in _remarks(layer):
            where = f"{layer.stack} " if layer.stack else ""
            console.print(escape(f"  {where}layer {layer.layer}, depth {layer.depth}: {text}"))
    for problem in result.problems:
        console.print(f"[bold red]{escape(problem)}[/]")


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _remarks(layer: LayerPrediction) -> list[str]:
    """Where theory and measurement disagree, where nothing could be decided, and what is guaranteed."""
    return [f"{item.text} [{item.basis}]" for item in layer.verdict if item.is_remark]


def _theorem_table(stack: str, layers: Sequence[LayerPrediction]) -> Table:
    """Infinite repetition: without and with the norms."""
    table = new_table()
    table.title, table.title_justify = f"{stack + ': ' if stack else ''}iterated at fixed attention", "left"
    for name in ("layer", "view", "rho_dc", "rho_ac", "exponent", "half-life", "rank", "residual", "if repeated"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in layers:
        for found in (layer.plain, layer.folded):
            if found is not None:
                table.add_row(*_theorem_cells(layer, found))
    return table


def _theorem_cells(layer: LayerPrediction, found: Asymptotic) -> list[str]:
    error = "" if found.standard_error is None else f" ±{found.standard_error:.1g}"
    bounds = f"{found.rho_ac:.3f}"
    if found.regime == "undecided":
        bounds = f"{found.rho_ac_low:.3g}..{found.rho_ac_high:.3g}"
    name = f"{layer.layer}" if layer.depth == layer.layer + 1 else f"{layer.layer} at {layer.depth}"
    return [
        name,
        found.view,
        f"{found.rho_dc:.3f}",
        bounds,
        "-" if found.exponent is None else f"{signed(found.exponent, 3)}{error}",
        "-" if found.half_life is None else f"{found.half_life:.3g}",
        "-" if found.limit_rank is None else f"{found.limit_rank:.2f}",
        f"{found.residual:.0e}" if found.residual else "exact",
        _coloured(found.regime),
    ]


def _ladder_table(result: Prediction, stack: str, layers: Sequence[LayerPrediction]) -> Table:
    """The rungs beside what was measured, and the leak where tokens write with gains of their own."""
    table = new_table()
    title = "change of log(HFC/LFC) across attention: measured, and from the theorem (rung 0) to it; below 0 smooths"
    table.title, table.title_justify = f"{stack + ': ' if stack else ''}{title}", "left"
    longest = max((layer.rungs for layer in layers), key=len)
    names = [f"{rung.rung} {rung.name}" for rung in longest]
    leaks = any(layer.leak for layer in layers)
    if leaks:
        table.caption, table.caption_justify = LEAK_WORDS, "left"
    for name in ("layer", "one pass", "measured", *names, "carried by", "token scale", *(["leak"] if leaks else [])):
        table.add_column(name, justify="right")
    for layer in layers:
        error = "" if layer.measured_standard_error is None else f" ±{layer.measured_standard_error:.1g}"
        scale = "-" if layer.scale is None else f"{layer.scale:.3g}"
        spread = "" if layer.scale_spread is None else f" ±{layer.scale_spread:.0%}"
        table.add_row(
            str(layer.layer) if layer.depth == layer.layer + 1 else f"{layer.layer} at {layer.depth}",
            _coloured(layer.direction or "not measured"),
            "-" if layer.measured is None else f"{signed(layer.measured, 3)}{error}",
            *("-" if rung.mean is None else signed(rung.mean, 3) for rung in layer.rungs),
            *[""] * (len(longest) - len(layer.rungs)),
            layer.carries or "-",
            scale + spread,
            *(["-" if layer.leak is None else f"{layer.leak:.0%}"] if leaks else []),
        )
    rows = [item for item in result.agreements if item.stack == stack]
    table.add_section()
    for label, shown in (("sign right", "sign_agreement"), ("rank corr.", "rank_correlation")):
        values = [getattr(item, shown) for item in rows]
        cells = ["-" if value is None else f"{value:.0%}" if "sign" in label else f"{value:+.2f}" for value in values]
        table.add_row(label, "", "", *cells, style="dim")
    return table


def _coloured(word: str) -> str:
    colour = COLOURS.get(word)
    return f"[{colour}]{word}[/]" if colour else word


def _details(console: Console, result: Prediction, *, heads: bool) -> None:
    """Heads, what-ifs and simulations, where they were asked for."""
    if heads:
        console.print(_rows_table("one head at a time", result.head_rows(), skip=("missing",)))
    if any(layer.what_ifs for layer in result.layers):
        console.print(_rows_table("what if", result.what_if_rows()))
    if any(layer.simulation for layer in result.layers):
        console.print(_rows_table("repeated at fixed attention, on the first sequence", result.simulation_rows()))


def _rows_table(title: str, rows: Sequence[Row], skip: Sequence[str] = ()) -> Table:
    table = new_table()
    table.title, table.title_justify = title, "left"
    every = dict.fromkeys(name for row in rows for name in row if name not in skip)
    names = [name for name in every if any(row.get(name) not in (None, "") for row in rows)]
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(escape(_cell(row.get(name))) for name in names))
    return table


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        real, imaginary = value
        return f"{real:.3g}" if abs(imaginary) < 5e-4 else f"{real:.3g}±{imaginary:.2g}i"
    return format_cell(value)
