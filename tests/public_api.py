"""The public names with their signatures, as text; `make public-api` writes them to the file that the test compares."""

import dataclasses
import inspect
import typing
from pathlib import Path

import oversmooth

FILE = Path(__file__).parent / "unit" / "public_api.txt"


def signature(name: str) -> str:
    """A name with its parameters and their defaults; of a result, its fields."""
    value = getattr(oversmooth, name)
    if dataclasses.is_dataclass(value):
        return f"{name}: " + ", ".join(field.name for field in dataclasses.fields(value))
    if isinstance(value, type) and issubclass(value, Exception):
        return f"{name}: an exception"
    return f"{name}({', '.join(_parameters(list(inspect.signature(value).parameters.values())))})"


def _parameters(parameters: list[inspect.Parameter]) -> list[str]:
    found = []
    star_is_due = True
    for parameter in with_unpacked_keywords(parameters):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and star_is_due:
            found.append("*")
            star_is_due = False
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is inspect.Parameter.empty else f"={_shown(parameter.default)}"
        found.append(f"{stars}{parameter.name}{default}")
    return found


def with_unpacked_keywords(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """`**options: Unpack[...]` as the keywords that it stands for."""
    found = []
    for parameter in parameters:
        (stands_for,) = typing.get_args(parameter.annotation)[:1] or (None,)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and typing.is_typeddict(stands_for):
            names = stands_for.__annotations__
            found += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=...) for name in names]
        else:
            found.append(parameter)
    return found


def _shown(default: object) -> str:
    return "..." if default is ... else getattr(default, "__name__", None) or repr(default)


def public_api() -> str:
    return "".join(f"{signature(name)}\n" for name in sorted(oversmooth.__all__))


if __name__ == "__main__":
    FILE.write_text(public_api())
