"""Plugins: what other installed packages add to our tables, by entry points of the groups `oversmooth.metrics` and so on.

They are loaded when a table is first looked into, never by `import oversmooth`. One that cannot be loaded, or that is not
what its group asks for, is named in a warning and skipped: a mistake in one package never keeps the others from working.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from oversmooth.errors import BadValue, OversmoothError, first_line

T = TypeVar("T")
KINDS = ("architectures", "metrics", "interventions", "reports")


class PluginWarning(UserWarning):
    """A plugin is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point, and what became of it."""

    kind: str
    """Which of our tables it adds to."""
    name: str
    package: str
    """Name and version of the package that it comes from."""
    problem: str = ""
    """Why it is skipped; empty where it is used."""

    @property
    def words(self) -> str:
        return f"The plugin {self.name!r} (oversmooth.{self.kind}) of {self.package} is skipped: {self.problem}"


_loaded: dict[str, list[Plugin]] = {}


def fill(table: dict[str, T], kind: str, accept: Callable[[str, object], T]) -> dict[str, T]:
    """Enters what plugins add into a table, the first time it is asked for; returns the table.

    `accept` turns what an entry point names into an entry, or raises an error that says what it should be.
    """
    assert kind in KINDS, "a group that the guide names"
    if kind not in _loaded:
        _loaded[kind] = []  # now, because a plugin may look into the table while it is imported
        for entry in _entries(kind):
            _loaded[kind].append(_entered(table, kind, entry, accept))
    return table


def plugins(kind: str) -> tuple[Plugin, ...]:
    """What became of the plugins of one table, which has been filled before."""
    return tuple(_loaded.get(kind, ()))


def skip(kind: str, name: str, problem: str) -> None:
    """Notes that a plugin failed when it was used, and warns of it."""
    found = _loaded.setdefault(kind, [])
    package = next((plugin.package for plugin in found if plugin.name == name), "an unknown package")
    found[:] = [plugin for plugin in found if plugin.name != name]
    found.append(Plugin(kind=kind, name=name, package=package, problem=problem))
    _warn(found[-1])


def _entries(kind: str) -> list[EntryPoint]:
    """In an order that does not depend on the file system."""
    return sorted(_all_entries().select(group=f"oversmooth.{kind}"), key=lambda entry: (entry.name, entry.value))


@cache
def _all_entries():  # type: ignore[no-untyped-def]  # importlib's own type has another name in every version
    return entry_points()


def _entered(table: dict[str, T], kind: str, entry: EntryPoint, accept: Callable[[str, object], T]) -> Plugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
    problem = ""
    if entry.name in table:
        problem = f"There is already a built-in {kind.removesuffix('s')} called {entry.name!r}."
    else:
        try:
            table[entry.name] = accept(entry.name, entry.load())
        except OversmoothError as error:
            problem = error.problem
        except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
            problem = f"{entry.value} raises {type(error).__name__}: {first_line(error)}"
    plugin = Plugin(kind=kind, name=entry.name, package=package, problem=problem)
    if problem:
        _warn(plugin)
    return plugin


def _warn(plugin: Plugin) -> None:
    warnings.warn(f"{plugin.words}\nUpdate or remove that package.", PluginWarning, stacklevel=4)


def expected(name: str, value: object, what: str) -> BadValue:
    """The error of an entry point that names something else than its group asks for."""
    return BadValue(f"What {name!r} names", value, what)
