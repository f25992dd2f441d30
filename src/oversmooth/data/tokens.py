"""Texts as token ids: through the model's own tokenizer, in windows; and ids without any text.

A tokenizer that is missing is never replaced by an empty one, which would turn every word into the unknown token: without a
tokenizer ids are given by the user, or drawn from the model's vocabulary, and the result says so.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oversmooth.data.given import Given
from oversmooth.errors import UnknownTokens, UnreadableData, first_line
from oversmooth.models.source import Source
from oversmooth.results import Missing, TextFacts

REFUSED_SHARE, WARNED_SHARE = 0.20, 0.05
"""Of unknown tokens: beyond the first a curve means nothing, beyond the second it should be read with care."""
ENOUGH_TOKENS = 4096
"""After so many the share is known well enough to stop early."""
VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""Files that hold a tokenizer's words, under the names that most have."""
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def find_tokenizer(source: Source, *, trust_remote_code: bool) -> tuple[Any | None, str]:
    """The tokenizer beside the model, or `None` and what was found instead."""
    from transformers import AutoTokenizer

    place = source.place or getattr(getattr(source.module, "config", None), "_name_or_path", None)
    if not place:
        return None, "a model that was not loaded from a folder"
    try:
        found = AutoTokenizer.from_pretrained(
            place,
            trust_remote_code=trust_remote_code,
            **{**source.origin(), "local_files_only": Path(str(place)).is_dir()},
        )
        words = found.get_vocab().keys() - set(found.all_special_tokens)
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and tokenizers' own
        return None, first_line(error)
    if not words:
        has_files = any((Path(str(place)) / name).is_file() for name in VOCABULARIES)
        return None, "a tokenizer of nothing but special tokens" if has_files else "none of its files"
    return found, ""


@dataclass
class TextRows:
    """Windows of token ids from texts, counting what was read and what was not known."""

    texts: Given
    tokenizer: Any
    length: int
    """Tokens of a window, special ones included."""
    allow_unknown: bool
    only_beginnings: bool = False
    """Whether a longer text is cut off, instead of going on in further windows."""
    read: int = 0
    characters_read: int = 0
    characters_used: int = 0
    tokens: int = 0
    unknown: int = 0
    is_exhausted: bool = False

    def __iter__(self) -> Iterator[list[int]]:
        special = set(self.tokenizer.all_special_ids)
        unknown_id = self._unknown_id()
        for text in self.texts.items:
            self.read += 1
            self.characters_read += len(text)
            windows = list(self._windows(text))
            before, done, in_all = self.characters_used, 0, sum(map(len, windows)) or 1
            for ids in windows:
                done += len(ids)
                self.characters_used = before + round(len(text) * done / in_all)
                self.unknown += ids.count(unknown_id)
                self.tokens += sum(token not in special or token == unknown_id for token in ids)
                if self.tokens >= ENOUGH_TOKENS:
                    self.require_known()
                yield ids
        self.is_exhausted = True

    def _unknown_id(self) -> int:
        """-1 where nothing is ever unknown: byte-level tokenizers name their unknown token after another one."""
        tokenizer = self.tokenizer
        others = {getattr(tokenizer, name, None) for name in SPECIAL_IDS}
        found = tokenizer.unk_token_id
        return -1 if found is None or found in others else int(found)

    def _windows(self, text: str) -> Iterator[list[int]]:
        """The text in pieces of nearly equal length, each with the special tokens that the model expects."""
        whole = self.tokenizer(text, verbose=False)["input_ids"]
        if len(whole) <= self.length:
            yield list(whole)
            return
        if self.only_beginnings:
            yield list(self.tokenizer(text, truncation=True, max_length=self.length)["input_ids"])
            return
        special = self.tokenizer.num_special_tokens_to_add()
        step = even_step(len(whole) - special, max(self.length - special, 1))
        if self.tokenizer.is_fast:
            cut = {"truncation": True, "max_length": step + special, "return_overflowing_tokens": True}
            yield from map(list, self.tokenizer(text, **cut)["input_ids"])
            return
        bare = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(bare), step):
            yield list(self.tokenizer.build_inputs_with_special_tokens(bare[start : start + step]))

    @property
    def unknown_share(self) -> float:
        return self.unknown / self.tokens if self.tokens else 0.0

    def require_known(self) -> None:
        """Refuses text that is foreign to the tokenizer."""
        if self.unknown_share > REFUSED_SHARE and not self.allow_unknown:
            raise UnknownTokens(self.unknown, self.tokens, REFUSED_SHARE)

    def facts(self) -> TextFacts:
        """What was read of the texts; raises `UnknownTokens` where the tokenizer does not know too much of it."""
        self.require_known()
        total = self.characters_read if self.is_exhausted else self.texts.characters
        reason = "the data were not read to their end"
        return TextFacts(
            texts=self.read,
            characters=total,
            characters_used=self.characters_used,
            tokens=self.tokens,
            unknown_tokens=self.unknown,
            unknown_share=self.unknown_share,
            missing=() if total is not None else (Missing(field="characters", reason=reason),),
        )

    def warnings(self) -> tuple[str, ...]:
        if self.unknown_share <= WARNED_SHARE:
            return ()
        return (
            f"{self.unknown_share:.0%} of the tokens are unknown to the model's tokenizer: it was not made for such text.",
        )

    def collate(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        tokenizer = self.tokenizer
        padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        batch = padded(rows, int(padding))
        if "token_type_ids" in tokenizer.model_input_names:
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        return batch


def even_step(tokens: int, longest: int) -> int:
    """Length of windows that cover so many tokens with as few as possible, none much shorter than another."""
    return math.ceil(tokens / max(math.ceil(tokens / longest), 1))


def padded(rows: Sequence[Sequence[int]], padding: int = 0) -> dict[str, Tensor]:
    """Ids of equal length, with a mask over what was added behind them."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


# --- ids without text -----------------------------------------------------------------------------------------------


def random_ids(vocabulary: int, config: Mapping[str, Any], *, count: int, length: int, seed: int) -> list[list[int]]:
    """Ids drawn with equal probability from the model's vocabulary, without its special ones."""
    text = config.get("text_config") or config
    special = {text.get(name) for name in SPECIAL_IDS}
    allowed = torch.tensor([token for token in range(vocabulary) if token not in special] or [0])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(allowed), (count, length), generator=generator)
    return [list(map(int, row)) for row in allowed[drawn]]


def read_ids(file: str, longest: int) -> Iterator[list[int]]:
    """Sequences of token ids from a file, in windows of at most `longest`."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise UnreadableData(file, "a file of token ids", "no file of that name")
    for ids in _rows_of_ids(path):
        if not ids:
            continue
        step = even_step(len(ids), longest)
        yield from (list(ids[start : start + step]) for start in range(0, len(ids), step))


def _rows_of_ids(path: Path) -> Iterable[list[int]]:
    if path.suffix.lower() == ".npy":
        return _array_of_ids(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableData(str(path), "token ids as text, .jsonl or .npy", str(error)) from error
    parse = _json_ids if path.suffix.lower() in (".jsonl", ".json") else _plain_ids
    return (parse(line, f"{path}, line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _array_of_ids(path: Path) -> Iterable[list[int]]:
    import numpy

    try:
        found = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UnreadableData(str(path), "an .npy array of integers", first_line(error)) from error
    if found.ndim not in (1, 2) or found.dtype.kind not in "iu":
        raise UnreadableData(str(path), "a 1-D or 2-D array of integers", f"{found.ndim}-D, {found.dtype}")
    return ([int(token) for token in row] for row in (found if found.ndim == 2 else found[None]))


def _plain_ids(line: str, where: str) -> list[int]:
    try:
        return [int(word) for word in line.replace(",", " ").split()]
    except ValueError as error:
        raise UnreadableData(where, "whole numbers with spaces or commas between them", str(error)) from error


def _json_ids(line: str, where: str) -> list[int]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnreadableData(where, "a JSON list of token ids", str(error)) from error
    ids = found.get("input_ids") if isinstance(found, dict) else found
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UnreadableData(where, 'a JSON list of token ids, or {"input_ids": [...]}', type(found).__name__)
    return ids
