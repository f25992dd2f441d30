"""Errors about what was typed: a value, a name, a combination of options."""

from collections.abc import Sequence
from dataclasses import dataclass

from oversmooth.errors.base import OversmoothError, close_to


@dataclass(eq=False)
class BadValue(OversmoothError):
    """A value outside of what is allowed."""

    name: str
    value: object
    expected: str

    @property
    def problem(self) -> str:
        return f"{self.name} must be {self.expected}; got {self.value!r}."


@dataclass(eq=False)
class MissingValue(OversmoothError):
    """A value without which there is nothing to do."""

    name: str

    @property
    def problem(self) -> str:
        return f"{self.name} must be given."


@dataclass(eq=False)
class UnknownName(OversmoothError):
    """A word that is not in a list."""

    kind: str
    name: object
    known: Sequence[str]

    @property
    def problem(self) -> str:
        known = ", ".join(self.known) or "none"
        return f"Unknown {self.kind} {self.name!r}.{close_to(str(self.name), self.known)} Known: {known}."


@dataclass(eq=False)
class Conflict(OversmoothError):
    """Options of which only one can be given."""

    options: Sequence[str]

    @property
    def problem(self) -> str:
        return f"Give only one of {', '.join(self.options)}."


@dataclass(eq=False)
class NothingChosen(OversmoothError):
    """Options of which one has to be given."""

    options: Sequence[str]

    @property
    def problem(self) -> str:
        return f"Give one of {', '.join(self.options)}."


@dataclass(eq=False)
class GivenTwice(OversmoothError):
    """A list in which every entry must be different."""

    what: str
    value: object

    @property
    def problem(self) -> str:
        return f"{self.what} {self.value!r} is given more than once."


@dataclass(eq=False)
class NameTaken(OversmoothError):
    """A name of the user's own that already means something here."""

    what: str
    name: str

    @property
    def problem(self) -> str:
        return f"There is already a built-in {self.what} called {self.name!r}."

    @property
    def next_step(self) -> str:
        return "Choose another name."


@dataclass(eq=False)
class NotDivisible(OversmoothError):
    """Two sizes that do not go into each other."""

    name: str
    value: int
    divisor_name: str
    divisor: int

    @property
    def problem(self) -> str:
        return f"{self.name} ({self.value}) must be divisible by {self.divisor_name} ({self.divisor})."


@dataclass(eq=False)
class OddNumber(OversmoothError):
    """A size that is split in two."""

    name: str
    value: int
    reason: str

    @property
    def problem(self) -> str:
        return f"{self.name} ({self.value}) must be even: {self.reason}."


@dataclass(eq=False)
class NotSupported(OversmoothError):
    """Something that is understood but does not exist in this combination."""

    what: str
    where: str
    reason: str = ""
    advice: str = ""

    @property
    def problem(self) -> str:
        return f"{self.what} is not supported {self.where}" + (f": {self.reason}." if self.reason else ".")

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class DeviceUnavailable(OversmoothError):
    device: str
    reason: str

    @property
    def problem(self) -> str:
        return f"The device {self.device!r} cannot be used: {self.reason.rstrip('.')}."

    @property
    def next_step(self) -> str:
        return "Give a device that torch has on this machine, such as cpu, cuda, cuda:1 or mps."


@dataclass(eq=False)
class ClusterUnavailable(OversmoothError):
    cluster: str
    reason: str

    @property
    def problem(self) -> str:
        return f"{self.cluster} cannot be used: {self.reason.rstrip('.')}."

    @property
    def next_step(self) -> str:
        return "Check --address, try again on a less busy machine, or use --engine process, which needs no cluster."


@dataclass(eq=False)
class WrongShape(OversmoothError):
    what: str
    expected: str
    found: tuple[int, ...]

    @property
    def problem(self) -> str:
        return f"The shape of {self.what} must be {self.expected}; got {self.found}."


@dataclass(eq=False)
class TooFewTokens(OversmoothError):
    """Smoothing compares tokens, and there are not two."""

    sequence: int
    kept: int

    @property
    def problem(self) -> str:
        return (
            f"Sequence {self.sequence} keeps {self.kept} token(s); at least 2 are needed, because tokens are compared."
        )

    @property
    def next_step(self) -> str:
        return "Leave such sequences out, as `measurable(keep)` does."


@dataclass(eq=False)
class NotAGrid(OversmoothError):
    """Tokens that do not form a square image."""

    kept: int
    metric: str

    @property
    def problem(self) -> str:
        return f"{self.metric} needs a square number of tokens, a grid of patches; got {self.kept}."

    @property
    def next_step(self) -> str:
        return "Measure square images, with prefix tokens dropped."


@dataclass(eq=False)
class MissingDependency(OversmoothError):
    package: str
    extra: str
    needed_for: str

    @property
    def problem(self) -> str:
        return f"{self.needed_for} needs the package {self.package!r}, which is not installed."

    @property
    def next_step(self) -> str:
        return f"Install it with: pip install 'oversmooth[{self.extra}]'"
