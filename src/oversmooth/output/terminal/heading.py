"""What stands above every table: the model, and which share of its blocks is meant."""

from rich.console import Console
from rich.markup import escape

from oversmooth.results import Provenance


def show_heading(console: Console, provenance: Provenance) -> None:
    """The target, and of hybrids how many blocks have softmax attention."""
    console.print(escape(provenance.target), style="bold", soft_wrap=True)
    for share in provenance.hybrids:
        console.print(escape(f"{share} have softmax attention and are analysed; the others are measured as 'other'"))
