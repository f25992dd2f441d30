"""Modules of at most 300 lines and bodies of at most 40, so that a reader holds each in mind; exceptions have reasons."""

import ast
from collections.abc import Iterator

import pytest

from tests.unit.test_layers import SOURCES

MODULE_LINES, BODY_LINES = 300, 40
LONGER_MODULES = {
    "measurement.metrics": "a table: one function per metric",
    "models.families": "a table: one row per family",
    "models.crammed_bert": "one model as a file of its own, as transformers' models are, to be read top to bottom",
    "training.recipes.vision.corruptions": "a table: one function per published corruption",
}
"""Module to the reason why it is longer."""
LONGER_BODIES: dict[str, str] = {}
"""Module and function to the reason why it is longer."""


def bodies(module: str, text: str) -> Iterator[tuple[str, int]]:
    """Every function and the lines of its statements; signature and docstring do not count."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body:
                yield f"{module}.{node.name}", body[-1].end_lineno - body[0].lineno + 1


def test_modules_are_short_or_have_a_reason():
    longer = {module: text.count("\n") for module, text in SOURCES.items() if text.count("\n") > MODULE_LINES}
    assert longer.keys() - LONGER_MODULES.keys() == set(), longer


def test_bodies_of_functions_are_short_or_have_a_reason():
    found = [item for module, text in SOURCES.items() for item in bodies(module, text)]
    longer = {name: lines for name, lines in found if lines > BODY_LINES}
    assert longer.keys() - LONGER_BODIES.keys() == set(), longer


def test_every_exception_is_still_needed():
    assert [module for module in LONGER_MODULES if SOURCES[module].count("\n") <= MODULE_LINES] == []
    lengths = dict(item for module, text in SOURCES.items() for item in bodies(module, text))
    assert [name for name in LONGER_BODIES if lengths.get(name, 0) <= BODY_LINES] == []


@pytest.mark.parametrize("lines", [BODY_LINES, BODY_LINES + 1])
def test_the_measure_of_bodies_can_fail(lines):
    text = 'def long():\n    """Not counted."""\n' + "    call()\n" * lines
    assert dict(bodies("m", text)) == {"m.long": lines}
