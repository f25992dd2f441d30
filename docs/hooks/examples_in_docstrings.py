"""Examples in our docstrings are bare `>>>` lines; a heading before them makes the reference print them as code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n(?:.+\n?)*)", re.MULTILINE)


class ExamplesInDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_as_section, obj.docstring.value)


def _as_section(found: re.Match[str]) -> str:
    return "Examples:\n" + "".join(f"    {line}\n" for line in found[0].splitlines())
