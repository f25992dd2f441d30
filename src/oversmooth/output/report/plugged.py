"""Sections of a report that plugins add: a function of the analysis, whose section stands before the methods."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from oversmooth.environment import plugins
from oversmooth.errors import first_line
from oversmooth.output.report.blocks import Block, Section
from oversmooth.results import Analysis

SectionMaker = Callable[[Analysis], Section | None]
"""Returns `None` where it has nothing to say about an analysis."""
SECTIONS: dict[str, SectionMaker] = {}
"""Name to function; only plugins add to it."""


def all_sections() -> dict[str, SectionMaker]:
    return plugins.fill(SECTIONS, "reports", _accepted)


def plugged_sections(analysis: Analysis) -> list[Section]:
    """What every plugin says about this analysis; one that fails is named in a warning and left out."""
    found = []
    for name, make in list(all_sections().items()):
        try:
            section = _checked(name, make(analysis))
        except Exception as error:  # whatever a stranger's function does: the report is written without it
            plugins.skip("reports", name, f"it raises {type(error).__name__}: {first_line(error)}")
            continue
        if section is not None:
            found.append(replace(section, id=f"plugin-{name}"))  # no section of ours has such an id
    return found


def _checked(name: str, section: object) -> Section | None:
    if section is not None and not isinstance(section, Section):
        raise plugins.expected(name, section, "a function that returns a Section or None")
    if section is not None and (other := [block for block in section.blocks if not isinstance(block, get_args(Block))]):
        raise plugins.expected(
            name, other[0], "a function whose Section holds blocks of oversmooth.output.report.blocks"
        )
    return section


def _accepted(name: str, value: object) -> SectionMaker:
    if not callable(value):
        raise plugins.expected(name, value, "a function from an Analysis to a Section")
    return value
