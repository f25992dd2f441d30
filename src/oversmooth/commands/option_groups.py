"""Groups of options that go together in several commands: stated once, and given to a command as one value."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any

Options = Mapping[str, tuple[Any, object]]
"""Type and default of each option, in the order of `--help`."""


def with_options(
    command: Callable[..., None], receives: str, options: Options, gather: Callable[[dict[str, Any]], Any]
) -> Callable[..., None]:
    """The command with these options; it receives what `gather` makes of their values as the keyword `receives`."""
    own = [parameter for parameter in signature(command).parameters.values() if parameter.name != receives]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in options.items()
    ]

    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in options}
        command(**given, **{receives: gather(values)})

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    everything = sorted([*own, *added], key=lambda parameter: parameter.kind)  # stable: those of a wrapper come last
    run.__signature__ = Signature(everything)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
    return run
