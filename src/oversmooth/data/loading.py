"""From `--data`, or from nothing, to batches that a model takes, with the facts that a reader of the result needs.

given.py, built_in.py   texts, pictures, sounds
tokens.py, preprocessing.py, sounds.py   as numbers, through the model's own tokenizer or processor
this module             rows into batches, and what was done to them
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.data.built_in import (
    SAMPLE_COUNT,
    built_in_molecules,
    built_in_pictures,
    built_in_sounds,
    built_in_texts,
)
from oversmooth.data.given import Given, find_given
from oversmooth.data.notations import find_notation_tokenizer
from oversmooth.data.preprocessing import find_preprocessing
from oversmooth.data.reading import Reading
from oversmooth.data.sounds import find_extractor
from oversmooth.data.tokens import TextRows, find_tokenizer, padded, random_ids, read_ids
from oversmooth.errors import NotSupported, UnreadableData, WrongBatch
from oversmooth.models.inputs import IMAGE, image_shape, input_kinds, longest_text, vocabulary_size
from oversmooth.models.source import Source
from oversmooth.results import DataFacts


@dataclass
class Rows:
    """One kind of input: rows in order, how several become tensors, and how they were made."""

    rows: Iterable[Any]
    collate: Callable[[Sequence[Any]], dict[str, Any]]
    statement: str = ""
    warnings: tuple[str, ...] = ()
    texts: TextRows | None = None
    given: Given | None = None


@dataclass
class Data:
    """Batches, and what is known about them once they were used."""

    batches: Iterable[Batch]
    description: str
    origin: str
    """given, built-in, random ids, or batches of the caller's own."""
    parts: tuple[Rows, ...] = field(default=())
    labels: list[Any] = field(default_factory=list)
    """The class of every sequence that was given out so far, as it is written; `None` where there is none."""

    def facts(self, *, sha256: str, sequences: int, tokens: int, skipped: int) -> DataFacts:
        """What the model was run on; raises `UnknownTokens` where most of it was unknown to the tokenizer."""
        text = next((part.texts.facts() for part in self.parts if part.texts is not None), None)
        warnings = [warning for part in self.parts for warning in part.warnings]
        warnings += [warning for part in self.parts if part.texts is not None for warning in part.texts.warnings()]
        empty = sum(part.given.empty for part in self.parts if part.given is not None)
        return DataFacts(
            description=self.description,
            sha256=sha256,
            sequences=sequences,
            tokens=tokens,
            skipped=skipped,
            origin=self.origin,
            preprocessing="; ".join(part.statement for part in self.parts if part.statement),
            text=text,
            warnings=tuple(warnings),
            notes=(f"{empty} rows without content were left out.",) if empty else (),
        )


def given_batches(batches: Iterable[Batch]) -> Data:
    """What the caller made, as it is."""
    return Data(batches, "batches given by the caller", "batches")


def load_data(
    data: str | None,
    model: nn.Module,
    source: Source,
    config: Mapping[str, Any],
    reading: Reading,
    *,
    trust_remote_code: bool = False,
) -> Data:
    """Batches of the right kind for the model, from `--data`, from a file of ids, or built in."""
    kinds = input_kinds(model, config)
    if data is not None and len(kinds) > 1:
        raise UnreadableData(data, "a model with one kind of input", f"one that takes {' and '.join(kinds)} together")
    reader = _Reader(data, model, source, config, reading, trust_remote_code)
    parts = tuple(reader.of_kind(kind) for kind in kinds)
    rows = islice(zip(*(part.rows for part in parts), strict=False), reading.max_samples)
    found = Data(iter(()), *reader.described(kinds), parts)
    found.batches = _batched(_noting(rows, found), parts, reading.batch_size)
    return found


def _noting(rows: Iterable[tuple[Any, ...]], data: Data) -> Iterator[tuple[Any, ...]]:
    """The rows, with the class of what each was made from; windows of one text have the class of that text."""
    for row in rows:
        known = [part.given.labels for part in data.parts if part.given is not None and part.given.labels]
        data.labels.append(known[0][-1] if known else None)
        yield row


def _batched(rows: Iterable[tuple[Any, ...]], parts: Sequence[Rows], size: int) -> Iterator[dict[str, Any]]:
    iterator = iter(rows)
    while chosen := list(islice(iterator, size)):
        batch: dict[str, Any] = {}
        for part, column in zip(parts, zip(*chosen, strict=True), strict=True):
            batch |= part.collate(column)
        yield batch


@dataclass
class _Reader:
    """Everything that decides how one kind of input is made."""

    data: str | None
    model: nn.Module
    source: Source
    config: Mapping[str, Any]
    reading: Reading
    trust_remote_code: bool
    drawn: int | None = None
    """Size of the vocabulary that ids were drawn from, where there is no tokenizer."""

    def of_kind(self, kind: str) -> Rows:
        if self.reading.ids is not None and kind != "text":
            raise NotSupported("--ids", f"for a model that takes {kind}")
        return {"text": self._texts, "image": self._images, "audio": self._sounds}[kind]()

    def described(self, kinds: Sequence[str]) -> tuple[str, str]:
        """Description and origin of the data."""
        if self.reading.ids is not None:
            return f"token ids of {self.reading.ids}", "given"
        if self.data is not None:
            return self.data, "given"
        if self.drawn is not None:
            return f"token ids drawn at random from the model's own {self.drawn:,}", "random ids"
        return f"built-in samples ({' and '.join(kinds)})", "built-in"

    def _texts(self) -> Rows:
        length = longest_text(self.config, self.reading.max_tokens)
        if self.reading.ids is not None:
            return Rows(read_ids(self.reading.ids, length), padded)
        tokenizer, reason = find_tokenizer(self.source, trust_remote_code=self.trust_remote_code)
        if tokenizer is not None:
            return self._tokenized(tokenizer, length, built_in_texts, "the model's own tokenizer")
        tokenizer = find_notation_tokenizer(self.source)
        if tokenizer is not None:
            how = f"{tokenizer.notation.name}, in the words of the model's vocab.txt"
            return self._tokenized(tokenizer, length, lambda: built_in_molecules(tokenizer.notation), how)
        return self._random_ids(length, reason)

    def _tokenized(self, tokenizer: Any, length: int, built_in: Callable[[], Given], how: str) -> Rows:
        texts = built_in() if self.data is None else find_given(self.data, "text", per_line=self.reading.per_line)
        rows = TextRows(texts, tokenizer, length, self.reading.allow_unknown)
        return Rows(rows, rows.collate, f"{how}, windows of at most {length} tokens", texts=rows, given=texts)

    def _random_ids(self, length: int, reason: str) -> Rows:
        vocabulary = vocabulary_size(self.model, self.config)
        if self.data is not None or not vocabulary:
            advice = "Give token ids (--ids FILE) or batches of your own: osm.measure(model, batches)."
            raise WrongBatch("a tokenizer beside the model", reason, advice)
        self.drawn = vocabulary
        rows = random_ids(vocabulary, self.config, count=SAMPLE_COUNT, length=length, seed=self.reading.seed)
        warning = (
            f"There is no tokenizer beside the model (found {reason}): token ids were drawn at random from the model's own "
            "vocabulary. The numbers say nothing about text that the model was trained on; give it with --ids."
        )
        return Rows(rows, padded, f"random ids, {length} in each sequence", (warning,))

    def _images(self) -> Rows:
        steps = find_preprocessing(self.model, self.source, self.config, self.reading, is_generated=self.data is None)
        given = None
        if self.data is None:
            pictures = built_in_pictures(steps.geometry, self.reading.seed)
        else:
            given = find_given(self.data, "image", per_line=False)
            pictures = given.items
        _, height, width = image_shape(self.model, self.config)
        takes = inspect.signature(self.model.forward).parameters
        is_other = (steps.geometry.height, steps.geometry.width) != (height, width)
        extra = {"interpolate_pos_encoding": True} if is_other and "interpolate_pos_encoding" in takes else {}
        statement = steps.statement
        if extra:
            statement += f"; position encodings interpolated from {height} x {width} pixels"
        return Rows(
            pictures, lambda images: {IMAGE: steps.apply(images), **extra}, statement, steps.warnings, given=given
        )

    def _sounds(self) -> Rows:
        if self.data is not None:
            raise NotSupported("--data", "for audio models", "they are measured on generated sounds")
        extract, statement = find_extractor(self.model, self.source, self.config)
        return Rows(built_in_sounds(self.reading.seed), extract, statement)
