"""`train`: from a recipe's name to a finished run. Each kind of recipe is a package whose module `job` makes the jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from oversmooth.errors import BadValue, UnknownName
from oversmooth.results import Progress, no_progress
from oversmooth.training.recipes.job import Job
from oversmooth.training.recipes.runner import Run, RunRequest, place_held, train_job
from oversmooth.training.recipes.schema import Recipe, overridden, parsed, read_recipe

KINDS = ("vision", "language")


@dataclass(frozen=True, slots=True)
class RecipeKind:
    """What the module `job` of a kind of recipe declares."""

    recipe: type[Recipe]
    job: Callable[[Recipe, str | None, RunRequest], Job]
    """Makes the job from a recipe, `--data` and what was asked for."""


def kind_of(name: str) -> RecipeKind:
    module = f"oversmooth.training.recipes.{name}.job"
    if name not in KINDS or find_spec(f"oversmooth.training.recipes.{name}") is None:
        raise UnknownName("kind of recipe", name, KINDS)
    found = import_module(module).KIND
    assert isinstance(found, RecipeKind)
    return found


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe or a file, with overrides, checked by its kind."""
    tables = overridden(read_recipe(name), overrides)
    return parsed(kind_of(str(tables.get("kind"))).recipe, tables, name)


def train(request: RunRequest, data: str | None = None, progress: Progress = no_progress) -> Run:
    """Everything that `oversmooth train` does."""
    if not 0 < request.fraction <= 1:
        raise BadValue("fraction", request.fraction, "above 0 and at most 1")
    recipe = load_recipe(request.name, request.overrides)
    with place_held(request):
        job = kind_of(recipe.kind).job(recipe, data, request)
        return train_job(job, request, progress)
