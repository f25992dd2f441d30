"""Kinds of recipes by name: each is a package with a module `kind` that reads its recipes and makes jobs from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from oversmooth.errors import BadValue, UnknownName
from oversmooth.results import Progress, no_progress
from oversmooth.training.recipes.job import Job
from oversmooth.training.recipes.runner import Asked, Run, require_place, run
from oversmooth.training.recipes.schema import Recipe, overridden, parsed, read_recipe

KINDS = ("vision", "language")


@dataclass(frozen=True, slots=True)
class Kind:
    """What the module `kind` of a kind declares."""

    recipe: type[Recipe]
    job: Callable[[Recipe, str | None, Asked], Job]
    """Makes the job from a recipe, `--data` and what was asked for."""


def kind_of(name: str) -> Kind:
    module = f"oversmooth.training.recipes.{name}.kind"
    if name not in KINDS or find_spec(f"oversmooth.training.recipes.{name}") is None:
        raise UnknownName("kind of recipe", name, KINDS)
    found = import_module(module).KIND
    assert isinstance(found, Kind)
    return found


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe or a file, with overrides, checked by its kind."""
    tables = overridden(read_recipe(name), overrides)
    return parsed(kind_of(str(tables.get("kind"))).recipe, tables, name)


def train(asked: Asked, data: str | None = None, progress: Progress = no_progress) -> Run:
    """Everything that `oversmooth train` does."""
    if not 0 < asked.fraction <= 1:
        raise BadValue("fraction", asked.fraction, "above 0 and at most 1")
    recipe = load_recipe(asked.name, asked.overrides)
    require_place(asked)
    job = kind_of(recipe.kind).job(recipe, data, asked)
    return run(job, asked, progress)
