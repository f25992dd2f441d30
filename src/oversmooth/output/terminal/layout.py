"""How tables look."""

from rich.box import SIMPLE_HEAD
from rich.table import Table


def new_table() -> Table:
    """Light rules and tight columns: the widest table of a layer fits an 80-column terminal."""
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
