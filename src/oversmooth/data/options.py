"""What a user may choose about how raw data become batches; everything else comes from the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Union

from oversmooth.errors import BadValue, Conflict

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_SEED = 2**64 - 1
"""Beyond it torch's generators take no seed."""
LARGEST_COUNT = 2**31 - 1

Mask = Union["Tensor", Sequence["Tensor"], Callable[[Any], "Tensor"]]
"""Which tokens count, (batch, token): of the one batch, of each in turn, or as a function of a batch."""


class ReadingOptions(TypedDict, total=False):
    """Keywords of `measure`, `predict` and `analyze` about data; `Reading` says what each means."""

    batch_size: int
    max_tokens: int
    max_samples: int | None
    seed: int
    per_line: bool
    ids: str | None
    tokenizer: Any
    allow_unknown: bool
    mean: Sequence[float] | float | None
    std: Sequence[float] | float | None
    size: int | None
    crop: int | None
    mask: Mask | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """How data are read. Without any choice: texts in windows, images as the model's own processor makes them."""

    batch_size: int = 8
    """Sequences per forward pass."""
    max_tokens: int = 128
    """Longer texts are cut into windows of at most so many tokens."""
    max_samples: int | None = None
    """Stop after so many sequences."""
    seed: int = 0
    """Of everything that is generated: pictures, sounds, token ids."""
    per_line: bool = False
    """Whether each line of a text file is a text of its own; otherwise paragraphs are."""
    ids: str | None = None
    """A file of token ids, in place of text: one sequence per line, `.jsonl`, or `.npy`."""
    tokenizer: Any = None
    """A tokenizer of transformers, or a folder or hub id that holds one, used in place of the model's own."""
    allow_unknown: bool = False
    """Whether to go on where the tokenizer does not know more than a fifth of the text."""
    mean: Sequence[float] | float | None = None
    """Of pixels in [0, 1], per channel, in place of the model's own."""
    std: Sequence[float] | float | None = None
    """Likewise their standard deviation."""
    size: int | None = None
    """The shorter side of an image is resized to so many pixels, in place of what the model's own processor does."""
    crop: int | None = None
    """Side of the square that is cut out of the middle afterwards; by default `size`."""
    mask: Mask | None = None
    """True for tokens that count, where no input of the model says which are padding."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("max_tokens", 2), ("max_samples", 1), ("size", 1), ("crop", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadValue(name, value, f"at least {least}")
            if value is not None and value > LARGEST_COUNT:
                raise BadValue(name, value, f"at most {LARGEST_COUNT}")
        if self.ids is not None and self.tokenizer is not None:
            raise Conflict(("ids", "tokenizer"))
        if not 0 <= self.seed <= LARGEST_SEED:
            raise BadValue("seed", self.seed, "between 0 and 2^64 - 1")
        if self.std is not None and not all(value > 0 for value in _numbers(self.std)):
            raise BadValue("std", self.std, "greater than 0 for every channel")
        if self.size and self.crop and self.crop > self.size:
            raise BadValue("crop", self.crop, f"at most size, which is {self.size}")

    def statistics(self, channels: int) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Mean and standard deviation as given, one number per channel; `None` where nothing was given."""
        return _per_channel("mean", self.mean, channels), _per_channel("std", self.std, channels)


def _numbers(value: Sequence[float] | float) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)


def _per_channel(name: str, value: Sequence[float] | float | None, channels: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    numbers = _numbers(value)
    if len(numbers) not in (1, channels):
        raise BadValue(name, value, f"one number, or one for each of {channels} channels")
    return numbers * channels if len(numbers) == 1 else numbers
