"""Errors about data, and about running a model on them."""

from dataclasses import dataclass

from oversmooth.errors.base import OversmoothError


@dataclass(eq=False)
class NoData(OversmoothError):
    description: str
    skipped: int

    @property
    def problem(self) -> str:
        why = "it is empty"
        if self.skipped:
            why = f"{self.skipped} sequences were skipped because fewer than two tokens remained"
        return f"There is nothing to measure in {self.description}: {why}."

    @property
    def next_step(self) -> str:
        return "Smoothing compares tokens of one sequence: give texts of at least two tokens, or images."


@dataclass(eq=False)
class UnreadableData(OversmoothError):
    data: str
    expected: str
    found: str

    @property
    def problem(self) -> str:
        return f"The data {self.data!r} cannot be used: expected {self.expected}, found {self.found}."


@dataclass(eq=False)
class WrongBatch(OversmoothError):
    """Model and data do not fit each other."""

    expected: str
    found: str
    advice: str

    @property
    def problem(self) -> str:
        return f"The data do not fit the model: expected {self.expected}, found {self.found}."

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class NoAttentionMaps(OversmoothError):
    """Attention that cannot be seen, or whose rows do not sum to one."""

    layer: str
    found: str
    advice: str

    @property
    def problem(self) -> str:
        return (
            f"The theory needs the attention probabilities of {self.layer}, each row summing to one; "
            f"found {self.found}."
        )

    @property
    def next_step(self) -> str:
        return self.advice
