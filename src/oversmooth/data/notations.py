"""Molecules as token ids, for models that read a notation of chemistry and ship only a list of words beside their weights.

Such a model has a `vocab.txt` of atoms and bonds, or of amino acids, and its tokenizer lives in a package of its own;
transformers makes of the folder a tokenizer of nothing but special tokens. Both notations split in one way only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from oversmooth.data.samples import sample_antibodies, sample_reactions
from oversmooth.models.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How molecules are written down for a kind of model."""

    name: str
    token: re.Pattern[str]
    """One word of the notation."""
    marks: frozenset[str]
    """Words that no other vocabulary has together."""
    begin: tuple[str, ...]
    end: tuple[str, ...]
    samples: Callable[[], tuple[str, ...]]


REACTIONS = Notation(
    name="reaction SMILES",
    token=re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|."),  # bracket atoms whole, Cl and Br as one letter
    marks=frozenset({">>", "(", "=", "[C@H]", "Cl", "Br"}),
    begin=("[CLS]",),
    end=("[SEP]",),
    samples=sample_reactions,
)
ANTIBODIES = Notation(
    name="antibodies in letters of amino acids behind chain and species",
    token=re.compile(r"\[[A-Z]+\]|."),
    marks=frozenset({"[HEAVY]", "[LIGHT]", "[HUMAN]", "[MOUSE]", *"ACDEFGHIKLMNPQRSTVWY"}),
    begin=(),
    end=("[SEP]",),
    samples=sample_antibodies,
)
NOTATIONS = (REACTIONS, ANTIBODIES)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@dataclass(frozen=True)
class NotationTokenizer:
    """What is needed of a tokenizer to cut molecules into windows."""

    notation: Notation
    words: dict[str, int]
    is_fast: ClassVar[bool] = False
    eos_token_id: ClassVar[None] = None
    model_input_names: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "attention_mask")

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = False) -> dict[str, list[int]]:
        ids = [self.words.get(token, self.unk_token_id) for token in self.notation.token.findall(text)]
        return {"input_ids": self.build_inputs_with_special_tokens(ids) if add_special_tokens else ids}

    def build_inputs_with_special_tokens(self, ids: list[int]) -> list[int]:
        begin, end = ([self.words[word] for word in words] for words in (self.notation.begin, self.notation.end))
        return [*begin, *ids, *end]

    def num_special_tokens_to_add(self) -> int:
        return len(self.notation.begin) + len(self.notation.end)

    @property
    def unk_token_id(self) -> int:
        return self.words["[UNK]"]

    @property
    def pad_token_id(self) -> int:
        return self.words["[PAD]"]

    @property
    def all_special_ids(self) -> list[int]:
        return [self.words[name] for name in SPECIAL]


def find_notation_tokenizer(source: Source) -> Any | None:
    """A tokenizer of a notation whose words are those of the list beside the model."""
    vocabulary = Path(str(source.place or "")) / "vocab.txt"
    if not source.place or not vocabulary.is_file():
        return None
    try:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None  # a tokenizer that cannot be read is none; the caller says that there is none
    for notation in NOTATIONS:
        if notation.marks.union(SPECIAL).issubset(words):
            return NotationTokenizer(notation, {word: number for number, word in enumerate(words)})
    return None
