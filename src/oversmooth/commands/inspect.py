"""`oversmooth inspect`."""

from typing import Any

from oversmooth.commands.options import (
    HeadRows,
    Precision,
    Showing,
    SpectrumKind,
    TargetArgument,
    example_target,
    reads_weights,
    show,
    shows_rows,
)
from oversmooth.output.console import one_bar


@reads_weights
@shows_rows
def inspect(
    target: TargetArgument = None,
    spectrum: SpectrumKind = "auto",
    heads: HeadRows = False,
    precision: Precision = "auto",
    *,
    load: dict[str, Any],
    showing: Showing,
) -> None:
    """Eigenvalues of the value map of every layer, from weights alone: which layers could smooth, which sharpen."""
    from oversmooth.output import tables
    from oversmooth.spectra.inspect import inspect as inspect_

    showing.require_page_free()
    with one_bar("Reading layers") as progress:
        result = inspect_(
            target or example_target(),
            spectrum=spectrum,
            heads=heads or None,
            precision=precision,
            progress=progress,
            **load,
        )
    rows = result.head_rows() if heads else None
    show(result, lambda: tables.show_inspection(result, heads=heads), showing, rows)
