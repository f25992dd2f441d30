"""Tokenizers, windows of long texts, padding, token ids from files, and notations of molecules.

Such a model has a `vocab.txt` of atoms and bonds, or of amino acids, and its tokenizer lives in a package of its own;
transformers makes of the folder a tokenizer of nothing but special tokens, or one that writes all letters small. Each
notation splits in one way only; white space between the letters of a protein is left out.

A tokenizer that is missing is never replaced by an empty one, which would turn every word into the unknown token: without a
tokenizer ids are given by the user, or drawn from the model's vocabulary, and the result says so.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from oversmooth.data.raw import RawData
from oversmooth.data.samples import sample_antibodies, sample_reactions
from oversmooth.errors import BadValue, UnknownTokens, UnreadableData, first_line
from oversmooth.models.source import Source
from oversmooth.results import Missing, TextFacts

# --- molecules as token ids, for models that read a notation of chemistry and ship only a list of words ---


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
    has_letters_only: bool = False
    """Whether every word beside the special ones is a single sign, none of them a small letter."""

    def fits(self, words: Sequence[str]) -> bool:
        """Whether a list of words is one of this notation."""
        if not self.marks.union(SPECIAL).issubset(words):
            return False
        signs = [word for word in words if word and not word.startswith("[")]
        return not self.has_letters_only or all(len(word) == 1 and not word.islower() for word in signs)


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
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
    token=re.compile(r"\[[A-Z]+\]|\S"),
    marks=frozenset({"[HEAVY]", "[LIGHT]", "[HUMAN]", "[MOUSE]", *"ACDEFGHIKLMNPQRSTVWY"}),
    begin=(),
    end=("[SEP]",),
    samples=sample_antibodies,
)
PROTEINS = Notation(
    name="proteins in letters of amino acids",
    token=re.compile(r"\[[A-Z]+\]|\S"),
    marks=frozenset("ACDEFGHIKLMNPQRSTVWY"),
    begin=("[CLS]",),
    end=("[SEP]",),
    samples=lambda: tuple(chain.rpartition("]")[2] for chain in sample_antibodies()),
    has_letters_only=True,
)
NOTATIONS = (REACTIONS, ANTIBODIES, PROTEINS)


@dataclass(frozen=True)
class NotationTokenizer:
    """What is needed of a tokenizer to cut molecules into windows."""

    notation: Notation
    words: dict[str, int]
    is_fast: ClassVar[bool] = False
    eos_token_id: ClassVar[None] = None
    model_input_names: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "attention_mask")

    def pieces(self, text: str) -> list[str]:
        """The words of a text as they are written."""
        return self.notation.token.findall(text)

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = False) -> dict[str, list[int]]:
        ids = [self.words.get(token, self.unk_token_id) for token in self.pieces(text)]
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


def find_notation_tokenizer(place: str | None) -> "NotationTokenizer | None":
    """A tokenizer of a notation whose words are those of the list in a folder."""
    words = words_beside(place)
    found = (NotationTokenizer(each, {w: i for i, w in enumerate(words)}) for each in NOTATIONS if each.fits(words))
    return next(found, None)


def words_beside(place: str | None) -> list[str]:
    """The lines of `vocab.txt` in a folder; none where it cannot be read, of which the caller says that there is none."""
    try:
        return (Path(str(place)) / "vocab.txt").read_text(encoding="utf-8").splitlines() if place else []
    except (OSError, UnicodeDecodeError, ValueError):
        return []


# --- texts as token ids: through the model's own tokenizer, in windows; and ids without any text ---

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
SETTINGS = ("tokenizer.json", "tokenizer_config.json")
"""Files that say how a tokenizer splits, beside its words."""
WITHOUT_TOKENIZER = (
    "Give its tokenizer (--tokenizer FOLDER), token ids (--ids FILE), or batches of your own: "
    "osm.measure(model, batches)."
)
"""What to do about text for a model that has no tokenizer."""
SHOWN_UNKNOWN, SHOWN_LETTERS, LOOKED_AT = 5, 20, 200
"""Unknown words that a message shows, letters of each, and words of a text that are looked at for them."""
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def has_transformers() -> bool:
    """Whether the library that reads tokenizers is installed and can be imported."""
    try:
        import transformers  # noqa: F401 - looked for as those do who use it
    except ImportError:
        return False
    return True


def find_tokenizer(source: Source) -> tuple[Any | None, str]:
    """The tokenizer beside the model, or `None` and what was found instead."""
    place = source.place or getattr(getattr(source.module, "config", None), "_name_or_path", None)
    if not place:
        return None, "a model that was not loaded from a folder"
    return tokenizer_at(str(place), source.origin(), trust_remote_code=source.trust_remote_code)


def tokenizer_at(place: str, origin: Mapping[str, Any], *, trust_remote_code: bool) -> tuple[Any | None, str]:
    """The tokenizer in a folder or on the hub; that of a notation of chemistry where only a list of words is there."""
    notation = find_notation_tokenizer(place)
    has_own = any((Path(place) / name).is_file() for name in SETTINGS)
    if notation is not None and not has_own:
        return notation, ""  # of such a list transformers makes a tokenizer of English
    found, reason = _tokenizer_of_transformers(place, origin, has_own, trust_remote_code)
    return (notation, "") if found is None and notation is not None else (found, reason)


def tokenizer_name(given: Any) -> str:
    """Where a tokenizer that was given comes from, in words."""
    return given if isinstance(given, str) else str(getattr(given, "name_or_path", "") or type(given).__name__)


def given_tokenizer(place: Any, *, trust_remote_code: bool) -> Any:
    """The tokenizer that the user names or gives; refused where there is none."""
    if not isinstance(place, str | Path):
        if not callable(place) or not hasattr(place, "get_vocab"):
            raise BadValue("tokenizer", place, "a tokenizer of transformers, or a folder or hub id that holds one")
        return place
    found, reason = tokenizer_at(str(Path(place).expanduser()), {}, trust_remote_code=trust_remote_code)
    if found is None:
        raise BadValue("tokenizer", place, f"a folder or hub id that holds a tokenizer (found {reason})")
    return found


def _tokenizer_of_transformers(
    place: str, origin: Mapping[str, Any], has_own: bool, trust_remote_code: bool
) -> tuple[Any | None, str]:
    from transformers import AutoTokenizer

    is_cased = not has_own and any(word != word.lower() for word in words_beside(place) if not word.startswith("["))
    options = {**origin, "local_files_only": Path(place).is_dir(), **({"do_lower_case": False} if is_cased else {})}
    try:
        found = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
        words = found.get_vocab().keys() - set(found.all_special_tokens)
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and tokenizers' own
        return None, first_line(error)
    if not words:
        has_files = any((Path(place) / name).is_file() for name in VOCABULARIES)
        return None, "a tokenizer of nothing but special tokens" if has_files else "none of its files"
    return found, ""


@dataclass
class TextRows:
    """Windows of token ids from texts, counting what was read and what was not known."""

    texts: RawData
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
    unknown_words: list[str] = field(default_factory=list)
    """A few of them as they are written."""
    is_exhausted: bool = False

    def __iter__(self) -> Iterator[list[int]]:
        special = set(self.tokenizer.all_special_ids)
        unknown_id = self._unknown_id()
        for text in self.texts.items:
            self.read += 1
            self.characters_read += len(text)
            windows = list(self._windows(text))
            if len(self.unknown_words) < SHOWN_UNKNOWN and any(unknown_id in ids for ids in windows):
                self._note_unknown(text, unknown_id)
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

    def _note_unknown(self, text: str, unknown_id: int) -> None:
        """Keeps words of the text that the tokenizer does not know."""
        pieces = getattr(self.tokenizer, "pieces", str.split)(text)
        for word in dict.fromkeys(pieces[:LOOKED_AT]):
            short = word if len(word) <= SHOWN_LETTERS else f"{word[:SHOWN_LETTERS]}..."
            if len(self.unknown_words) == SHOWN_UNKNOWN:
                return
            is_unknown = unknown_id in self.tokenizer(word, add_special_tokens=False)["input_ids"]
            if is_unknown and short not in self.unknown_words:
                self.unknown_words.append(short)

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
            raise UnknownTokens(self.unknown, self.tokens, REFUSED_SHARE, tuple(self.unknown_words))

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
        unknown = f"{self.unknown_share:.0%} of the tokens are unknown to the model's tokenizer"
        return (f"{unknown}: it was not made for such text.",) if self.unknown_share > WARNED_SHARE else ()

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
