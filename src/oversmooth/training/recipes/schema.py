"""What a recipe is: sections that every kind shares, how one is found, read, overridden and refused.

A kind (`recipes/vision`, `recipes/language`) derives its own model from `Recipe` and adds sections. Keys are words; a
recipe that has a key too many, a value out of range or a word that is not allowed is refused with that key.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oversmooth.errors import BadRecipe, BadValue, BrokenFile, MissingValue, OversmoothError, UnknownName
from oversmooth.results.text_files import read_text_file

SHIPPED = Path(__file__).parent
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A table of a recipe: frozen, and without keys that nobody reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Optimizer(Section):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    betas: tuple[Share, Share] = (0.9, 0.999)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Largest norm of all gradients together; 0 does not clip."""


class Hardware(Section):
    """What does not change the result beyond rounding."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that prepare data, for each training process."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Examples that fit on one device at once; the rest of the batch is accumulated. 0: the whole share at once."""


class VariantOptions(Section):
    """How `--variant sharpen` and `smooth` are applied."""

    basis: Literal["orthogonal", "general"] = "orthogonal"
    positive_norms: bool = False


class Recipe(Section):
    """What recipes of every kind have."""

    kind: str
    budget: Text
    """What a run costs, in words."""
    expected: Text
    """The result to expect, and where that is known from."""
    optimizer: Optimizer
    hardware: Hardware = Hardware()
    variant: VariantOptions = VariantOptions()


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


# --- finding and reading --------------------------------------------------------------------------------------------


def shipped_recipes() -> dict[str, Path]:
    """Names of the recipes that come with the package, and their files."""
    return {path.stem: path for path in sorted(SHIPPED.rglob("*.toml"))}


def read_recipe(name: str) -> dict[str, Any]:
    """The tables of a shipped recipe, or of a file of the user's own."""
    path = Path(name)
    known = shipped_recipes()
    if path.suffix != ".toml" and name not in known:
        raise UnknownName("recipe", name, [*known, "or a file that ends in .toml"])
    path = known.get(name, path)
    try:
        return tomllib.loads(read_text_file(path, "a recipe in TOML"))
    except tomllib.TOMLDecodeError as error:
        raise BrokenFile(str(path), "a recipe in TOML", str(error), "Fix that line.") from error


def overridden(tables: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The tables with every `section.key=value` put in; values are written as in TOML, words without quotes."""
    changed: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise BadValue("--set", setting, "section.key=value, such as training.epochs=10")
        *sections, last = key.strip().split(".")
        table = changed
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise BadValue("--set", setting, f"section.key=value, and {section!r} is a key, not a section")
        table[last] = _value(text.strip())
    return changed


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parsed(model: type[AnyRecipe], tables: Mapping[str, Any], where: str) -> AnyRecipe:
    """The recipe, or the first thing that is wrong with it: the key, the value and what is allowed."""
    try:
        return model.model_validate(dict(tables))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UnknownName(f"key of the recipe {where}", key, _keys(model)) from error
        if first["type"] == "missing":
            raise BadRecipe(where, MissingValue(key)) from error
        expected = str(first["msg"]).removeprefix("Input should be ")
        raise BadRecipe(where, BadValue(key, first["input"], expected)) from error
    except OversmoothError as mistake:  # from our own validators: keys that do not fit each other
        raise BadRecipe(where, mistake) from mistake


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a recipe, with its sections."""
    found = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found += _keys(inner, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]  # type: ignore[arg-type]
    return found
