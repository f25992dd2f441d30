"""The notebook in `examples/` is one that Colab opens, and all of its cells run from top to bottom."""

import json

import pytest

from oversmooth.models.example_model import example_model
from tests.command_line import ROOT, fresh_python

NOTEBOOK = json.loads((ROOT / "examples" / "oversmooth.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def tagged(tag: str) -> list[dict]:
    return [cell for cell in CODE if tag in cell["metadata"].get("tags", ())]


@pytest.mark.slow
def test_every_cell_runs_and_the_report_is_written(tmp_path):
    """With the embedded model in place of the one from the hub, and what installs the package left out."""
    (parameters,) = tagged("parameters")
    cells = [
        f"MODEL = {str(example_model())!r}" if cell is parameters else "".join(cell["source"])
        for cell in CODE
        if cell not in tagged("install")
    ]
    done = fresh_python("\n\n".join(cells), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "layer 5: measured" in done.stdout
    assert "depth 6: cosine" in done.stdout
    assert done.stdout.splitlines()[-1] == "passed"
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_notebook_is_clean_and_says_what_it_needs():
    assert NOTEBOOK["nbformat"] == 4
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    (install,) = tagged("install")
    assert "".join(install["source"]) == '%pip install -q "oversmooth[hf,report]"'
    assert not any(line.startswith(("%", "!")) for cell in CODE if cell is not install for line in cell["source"])
