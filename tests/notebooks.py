"""`python -m tests.notebooks`: runs the notebooks of `examples/` and stores what they print. The tests run them too."""

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.command_line import ROOT

FOLDER = ROOT / "examples"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
SECONDS = 600


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def has_tag(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def executed(name: str, folder: Path) -> Any:
    """The notebook after a run in a folder of its own; the cell that installs the package stays as it is."""
    whole = read(name)
    to_run = nbformat.v4.new_notebook(
        cells=[cell for cell in whole.cells if not has_tag(cell, "install")], metadata=whole.metadata
    )
    NotebookClient(to_run, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in whole.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
            cell.metadata.pop("execution", None)
    return whole


def printed(notebook: Any) -> list[str]:
    """What every code cell shows as text, without the numbers: their last digits depend on the processor."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.outputs]
            texts.append(re.sub(r"[−+-]?\d[\d.,]*", "#", "".join(shown)))
    return texts


def main() -> None:
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(name, Path(folder)), FOLDER / f"{name}.ipynb")
        print(name, flush=True)


if __name__ == "__main__":
    main()
