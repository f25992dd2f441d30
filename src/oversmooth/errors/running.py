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
class UnknownTokens(OversmoothError):
    """Text that the model's tokenizer was not made for: what the model sees is mostly its unknown token."""

    unknown: int
    tokens: int
    allowed: float

    @property
    def problem(self) -> str:
        share = self.unknown / self.tokens
        return (
            f"The model's tokenizer does not know {self.unknown} of {self.tokens} tokens ({share:.0%}; at most "
            f"{self.allowed:.0%} are allowed): what happens to them says nothing about real inputs."
        )

    @property
    def next_step(self) -> str:
        return (
            "Give data of the kind that the model was trained on: --data, token ids (--ids FILE), or batches of your own; "
            "--allow-unknown goes on regardless."
        )


@dataclass(eq=False)
class UnknownPreprocessing(OversmoothError):
    """Photographs for a model of which nothing says how it was given photographs in training."""

    model: str

    @property
    def problem(self) -> str:
        return (
            f"Nothing says which mean and standard deviation of pixels {self.model} was trained with, and with wrong ones "
            "it would answer something else."
        )

    @property
    def next_step(self) -> str:
        return "Say them: --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 (those of ImageNet), or 0.5 and 0.5."


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
