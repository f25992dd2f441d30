"""`load_data`: from whatever people hold (paths, tables, tensors, nothing) to batches and facts about them.

raw.py, samples/            texts, pictures, sounds
tokens.py, preprocessing.py as numbers, through the model's own tokenizer or processor
this module                 rows into batches, and what was done to them
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.data.held import InMemory
from oversmooth.data.options import DataOptions, Mask, ReadingOptions
from oversmooth.data.preprocessing import RATE, Geometry, find_extractor, find_preprocessing
from oversmooth.data.raw import RawData, read_raw, require_there
from oversmooth.data.samples import DIGITS_SHAPE, sample_digits, sample_images, sample_sounds, sample_texts
from oversmooth.data.tokens import (
    REFUSED_SHARE,
    WITHOUT_TOKENIZER,
    NotationTokenizer,
    TextRows,
    find_tokenizer,
    given_tokenizer,
    padded,
    random_ids,
    read_ids,
    tokenizer_name,
)
from oversmooth.errors import Conflict, NotSupported, UnreadableData, WrongBatch
from oversmooth.models.inputs import IMAGE, image_shape, input_kinds, longest_text, vocabulary_size
from oversmooth.models.open import LoadKeywords, OpenedModel, Target, open_model
from oversmooth.models.source import Source
from oversmooth.results import DataFacts

# --- what a model is fed when nothing is given: texts and molecules of this package, generated pictures ---

SAMPLE_COUNT = 16
"""Generated pictures, sounds or sequences of ids."""
SOUND_SECONDS = 2


def built_in(texts: Sequence[str]) -> RawData:
    return RawData(iter(texts), sum(map(len, texts)))


def built_in_pictures(geometry: Geometry, seed: int) -> Iterator[Any]:
    """Generated pictures in RGB of the size that the model takes, or a little larger where its margins are cut off."""
    from PIL import Image

    scale = (geometry.shorter or 0) / min(geometry.height, geometry.width)
    height, width = (max(side, round(side * scale)) for side in (geometry.height, geometry.width))
    pixels = (sample_images(SAMPLE_COUNT, height, width, 3, seed) * 255).round().byte()
    return (Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels)


def built_in_digits() -> RawData:
    """Handwritten digits for models of 8 x 8 grey pixels, whose generated pictures would be mere noise."""
    from PIL import Image

    pictures = sample_digits()
    each = len(pictures) // 10
    found = RawData(iter(()))

    def read() -> Iterator[Any]:
        for number, pixels in enumerate(pictures):
            found.labels.append(str(number // each))
            yield Image.fromarray(pixels).convert("RGB")

    found.items = read()
    return found


# --- keywords of every function that runs a model on data ---


class RunKeywords(LoadKeywords, ReadingOptions, total=False):
    """How the model is opened and run (`LoadOptions`), and how data are read (`DataOptions`)."""


def opened(target: Target, options: RunKeywords, data: object = None) -> tuple[OpenedModel, DataOptions]:
    """The opened target, and how data are read; what cannot be is said before anything is read."""
    load: Any = {name: value for name, value in options.items() if name in LoadKeywords.__annotations__}
    reading: Any = {name: value for name, value in options.items() if name not in load}
    how = DataOptions(**reading)
    if data is not None and how.ids is not None:
        raise Conflict(("--data", "--ids") if isinstance(data, str) else ("batches", "ids"))
    if isinstance(data, str):
        require_there(data)
    return open_model(target, **load), how


# --- from `--data`, or from nothing, to batches that a model takes ---


Once = Callable[[str, Callable[[], Any]], Any]
"""Keeps what a function makes under a name, as `OpenedModel.once` does."""


@dataclass
class InputRows:
    """One kind of input: rows in order, how several become tensors, and how they were made."""

    rows: Iterable[Any]
    collate: Callable[[Sequence[Any]], dict[str, Any]]
    statement: str = ""
    warnings: tuple[str, ...] = ()
    texts: TextRows | None = None
    given: RawData | None = None


@dataclass
class LoadedData:
    """Batches, and what is known about them once they were used."""

    batches: Iterable[Batch]
    description: str
    origin: str
    """given, built-in, random ids, or batches of the caller's own."""
    parts: tuple[InputRows, ...] = field(default=())
    labels: list[Any] = field(default_factory=list)
    """The class of every sequence that was given out so far, as it is written; `None` where there is none."""
    mask: Mask | None = None
    """Which tokens count, where the caller says so."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What became known while they were used."""

    def facts(self, *, sha256: str, sequences: int, tokens: int, skipped: int) -> DataFacts:
        """What the model was run on; raises `UnknownTokens` where most of it was unknown to the tokenizer."""
        text = next((part.texts.facts() for part in self.parts if part.texts is not None), None)
        warnings = [warning for part in self.parts for warning in part.warnings]
        warnings += [warning for part in self.parts if part.texts is not None for warning in part.texts.warnings()]
        given = [part.given for part in self.parts if part.given is not None]
        empty = sum(raw.empty for raw in given)
        cut = tuple(raw.note for raw in given if raw.note)
        return DataFacts(
            description=self.description,
            sha256=sha256,
            sequences=sequences,
            tokens=tokens,
            skipped=skipped,
            origin=self.origin,
            preprocessing="; ".join(part.statement for part in self.parts if part.statement),
            text=text,
            warnings=(*warnings, *self.warnings),
            notes=(*((f"{empty} rows without content were left out.",) if empty else ()), *cut, *self.notes),
        )


def given_batches(batches: Iterable[Batch], how: DataOptions) -> LoadedData:
    """What the caller made, as it is."""
    if how.tokenizer is not None:
        raise Conflict(("batches", "tokenizer"))
    return LoadedData(batches, "batches given by the caller", "batches", mask=how.mask)


def load_data(
    data: str | InMemory | None,
    model: nn.Module,
    source: Source,
    config: Mapping[str, Any],
    reading: DataOptions,
    *,
    once: Once = lambda name, make: make(),
) -> LoadedData:
    """Batches of the right kind for the model, from `--data`, from a file of ids, or built in.

    `once` keeps the tokenizer for the next call; without it, it is loaded each time.
    """
    kinds = input_kinds(model, config)
    if data is not None and len(kinds) > 1:
        raise UnreadableData(
            _name_of(data), "a model with one kind of input", f"one that takes {' and '.join(kinds)} together"
        )
    reader = _Reader(data, model, source, config, reading, once)
    parts = tuple(reader.of_kind(kind) for kind in kinds)
    rows = islice(zip(*(part.rows for part in parts), strict=False), reading.max_samples)
    found = LoadedData(iter(()), *reader.described(kinds), parts, mask=reading.mask)

    def noting() -> Iterator[tuple[Any, ...]]:
        """The rows, with the class of what each was made from; windows of one text have the class of that text."""
        for row in rows:
            known = [part.given.labels for part in parts if part.given is not None and part.given.labels]
            found.labels.append(known[0][-1] if known else None)
            yield row

    found.batches = _batched(noting(), parts, reading.batch_size)
    return found


def _batched(rows: Iterable[tuple[Any, ...]], parts: Sequence[InputRows], size: int) -> Iterator[dict[str, Any]]:
    iterator = iter(rows)
    while chosen := list(islice(iterator, size)):
        batch: dict[str, Any] = {}
        for part, column in zip(parts, zip(*chosen, strict=True), strict=True):
            batch |= part.collate(column)
        yield batch


@dataclass
class _Reader:
    """Everything that decides how one kind of input is made."""

    data: str | InMemory | None
    model: nn.Module
    source: Source
    config: Mapping[str, Any]
    reading: DataOptions
    once: Once
    drawn: int | None = None
    """Size of the vocabulary that ids were drawn from, where there is no tokenizer."""

    def of_kind(self, kind: str) -> InputRows:
        if self.reading.ids is not None and kind != "text":
            raise NotSupported("--ids", f"for a model that takes {kind}")
        return {"text": self._texts, "image": self._images, "audio": self._sounds}[kind]()

    def described(self, kinds: Sequence[str]) -> tuple[str, str]:
        """Description and origin of the data."""
        if self.reading.ids is not None:
            return f"token ids of {self.reading.ids}", "given"
        if self.data is not None:
            return _name_of(self.data), "given"
        if self.drawn is not None:
            return f"token ids drawn at random from the model's own {self.drawn:,}", "random ids"
        return f"built-in samples ({' and '.join(kinds)})", "built-in"

    def _texts(self) -> InputRows:
        length = longest_text(self.config, self.reading.max_tokens)
        if self.reading.ids is not None:
            return InputRows(read_ids(self.reading.ids, length), padded)
        if self.reading.tokenizer is not None:
            trusted = self.source.trust_remote_code
            tokenizer = given_tokenizer(self.reading.tokenizer, trust_remote_code=trusted)
            self._require_fit(tokenizer)
            whose = f"the tokenizer of {tokenizer_name(self.reading.tokenizer)}"
        else:
            tokenizer, reason = self.once("tokenizer", lambda: find_tokenizer(self.source))
            whose = "the model's own tokenizer"
        if tokenizer is None:
            return self._random_ids(length, f"There is no tokenizer beside the model (found {reason})", reason)
        if isinstance(tokenizer, NotationTokenizer):
            given = self.reading.tokenizer
            how = f"{tokenizer.notation.name}, in the words of {tokenizer_name(given) if given else 'the model'}'s vocab.txt"
            return self._tokenized(tokenizer, length, tokenizer.notation.samples, how)
        if self.data is None and not self.reading.allow_unknown and (words := _unknown_built_in(tokenizer, length)):
            why = f"The model's tokenizer does not know the built-in texts (for example {', '.join(map(repr, words))})"
            return self._random_ids(length, why, "")
        return self._tokenized(tokenizer, length, sample_texts, whose)

    def _read(self, kind: str) -> RawData:
        if isinstance(self.data, InMemory):
            return self.data.read(kind)
        assert self.data is not None, "asked for where data were given"
        return read_raw(self.data, kind, per_line=self.reading.per_line and kind == "text")

    def _require_fit(self, tokenizer: Any) -> None:
        """Refuses another model's tokenizer that makes ids which this model does not have."""
        known = vocabulary_size(self.model, self.config)
        ids = tokenizer.words.values() if isinstance(tokenizer, NotationTokenizer) else tokenizer.get_vocab().values()
        if known and max(ids) >= known:
            advice = "Give the tokenizer that the model was trained with."
            raise WrongBatch(f"a tokenizer with ids below {known:,}", f"one with ids up to {max(ids):,}", advice)

    def _tokenized(self, tokenizer: Any, length: int, samples: Callable[[], Sequence[str]], how: str) -> InputRows:
        texts = built_in(samples()) if self.data is None else self._read("text")
        rows = TextRows(texts, tokenizer, length, self.reading.allow_unknown)
        return InputRows(rows, rows.collate, f"{how}, windows of at most {length} tokens", texts=rows, given=texts)

    def _random_ids(self, length: int, why: str, reason: str) -> InputRows:
        vocabulary = vocabulary_size(self.model, self.config)
        if self.data is not None or not vocabulary:
            raise WrongBatch(f"a tokenizer beside {self.source.target}", reason, WITHOUT_TOKENIZER)
        self.drawn = vocabulary
        rows = random_ids(vocabulary, self.config, count=SAMPLE_COUNT, length=length, seed=self.reading.seed)
        warning = (
            f"{why}: token ids were drawn at random from the model's own vocabulary. The numbers say nothing about text that "
            "the model was trained on; give it with --data and --tokenizer, or with --ids."
        )
        return InputRows(rows, padded, f"random ids, {length} in each sequence", (warning,))

    def _images(self) -> InputRows:
        steps = find_preprocessing(self.model, self.source, self.config, self.reading, is_generated=self.data is None)
        shape = image_shape(self.model, self.config)
        given = None
        if self.data is not None:
            given = self._read("image")
        elif shape == DIGITS_SHAPE:
            given = built_in_digits()
        pictures = built_in_pictures(steps.geometry, self.reading.seed) if given is None else given.items
        _, height, width = shape
        takes = inspect.signature(self.model.forward).parameters
        is_other = (steps.geometry.height, steps.geometry.width) != (height, width)
        statement, extra = steps.statement, {}
        if is_other and "interpolate_pos_encoding" in takes:
            extra = {"interpolate_pos_encoding": True}
            statement += f"; position encodings interpolated from {height} x {width} pixels"

        def collate(images: Sequence[Any]) -> dict[str, Any]:
            return {IMAGE: steps.apply(images), **extra}

        return InputRows(pictures, collate, statement, steps.warnings, given=given)

    def _sounds(self) -> InputRows:
        if self.data is not None:
            raise NotSupported("--data", "for audio models", "they are measured on generated sounds")
        extract, statement = find_extractor(self.model, self.source, self.config)
        sounds = sample_sounds(SAMPLE_COUNT, RATE * SOUND_SECONDS, self.reading.seed)
        return InputRows(sounds, extract, statement)


def _name_of(data: str | InMemory) -> str:
    return data.description if isinstance(data, InMemory) else data


def _unknown_built_in(tokenizer: Any, length: int) -> list[str]:
    """Words of the built-in texts that a tokenizer does not know, where it does not know too much of them."""
    rows = TextRows(built_in(sample_texts()), tokenizer, length, allow_unknown=True)
    for _ in rows:
        pass
    return rows.unknown_words if rows.unknown_share > REFUSED_SHARE else []
