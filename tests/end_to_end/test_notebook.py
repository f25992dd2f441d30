"""The notebooks in `examples/`: they run from top to bottom, and what is stored in them is what they print."""

import pytest

from tests.command_line import ROOT
from tests.notebooks import NAMES, executed, has_tag, printed, read

IN_EVERY_RUN = ("vision_transformer",)
"""Runs in `make test`; the others in `make test-slow`."""
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_notebook_runs_and_prints_what_is_stored(name, tmp_path):
    assert printed(executed(name, tmp_path)) == printed(read(name))


def test_there_are_four_and_the_readme_links_to_each():
    assert set(NAMES) == {"language_model", "pruning", "vision_transformer", "watch_training"}
    assert all(f"examples/{name}.ipynb" in README for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_run_in_order_and_holds_no_path_of_the_machine_that_ran_it(name):
    counts = [cell.execution_count for cell in code(name) if not has_tag(cell, "install")]
    assert counts == list(range(1, len(counts) + 1))
    shown = [str(cell.outputs) for cell in code(name)]
    assert any(shown)
    assert not any("/work/" in text or "/home/" in text or "Traceback" in text for text in shown)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_install_cell_needs_a_notebook(name):
    cells = code(name)
    (install,) = [cell for cell in cells if has_tag(cell, "install")]
    assert install.source.startswith('%pip install -q "oversmooth[')
    lines = [line for cell in cells if cell is not install for line in cell.source.splitlines()]
    assert not any(line.startswith(("%", "!")) for line in lines)
