"""Chemical reactions as token ids, for models that read reaction SMILES and ship only a list of words beside their weights.

Such a model has a `vocab.txt` of atoms, bonds and `>>`, and its tokenizer lives in a package of its own; transformers makes
of the folder a tokenizer of nothing but special tokens. SMILES splits in one way only: bracket atoms whole, `Cl` and `Br` as
one letter, everything else character by character.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from oversmooth.models.source import Source

TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
MARKS = {">>", "(", "=", "[C@H]", "Cl", "Br"}
"""Words that no vocabulary of text has together."""


@dataclass(frozen=True)
class ReactionTokenizer:
    """What is needed of a tokenizer to cut reactions into windows: `[CLS] reaction [SEP]`."""

    words: dict[str, int]
    is_fast: ClassVar[bool] = False
    eos_token_id: ClassVar[None] = None
    model_input_names: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "attention_mask")

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = False) -> dict[str, list[int]]:
        ids = [self.words.get(token, self.unk_token_id) for token in TOKEN.findall(text)]
        return {"input_ids": self.build_inputs_with_special_tokens(ids) if add_special_tokens else ids}

    def build_inputs_with_special_tokens(self, ids: list[int]) -> list[int]:
        return [self.words["[CLS]"], *ids, self.words["[SEP]"]]

    def num_special_tokens_to_add(self) -> int:
        return 2

    @property
    def unk_token_id(self) -> int:
        return self.words["[UNK]"]

    @property
    def pad_token_id(self) -> int:
        return self.words["[PAD]"]

    @property
    def all_special_ids(self) -> list[int]:
        return [self.words[name] for name in SPECIAL]


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def find_reaction_tokenizer(source: Source) -> Any | None:
    """A tokenizer of reaction SMILES where the list of words beside the model is one of atoms and bonds."""
    vocabulary = Path(str(source.place or "")) / "vocab.txt"
    if not source.place or not vocabulary.is_file():
        return None
    try:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None  # a tokenizer that cannot be read is none; the caller says that there is none
    if not MARKS.union(SPECIAL).issubset(words):
        return None
    return ReactionTokenizer({word: number for number, word in enumerate(words)})
