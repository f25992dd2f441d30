"""Documents into sequences of equal length, appended to a file; and the order in which training reads them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from oversmooth.training.recipes.language.wordpiece import SEP, SPECIAL_TOKENS

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 2**19
"""Texts that are tokenized together; a longer one goes in pieces of this size, cut at a space."""
CHUNK = 2**22
"""Tokens of a file that are looked at together."""
SEP_ID = SPECIAL_TOKENS.index(SEP)
Tokens = NDArray[numpy.uint16]


def batches_of_texts(tokenizer: Any, texts: Iterator[str]) -> Iterator[list[tuple[Tokens, int]]]:
    """Tokens and number of characters of each document, batch by batch, so that memory does not grow with the corpus.

    Never reads ahead: when a batch is given out, every text that was read is in it or in one before.
    """
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield _tokenized(tokenizer, batch)
            batch, size = [], 0
    if batch:
        yield _tokenized(tokenizer, batch)


def _tokenized(tokenizer: Any, batch: list[str]) -> list[tuple[Tokens, int]]:
    short = [text for text in batch if len(text) <= BATCH_CHARACTERS]
    encodings = iter(tokenizer.encode_batch_fast(short, add_special_tokens=False))
    found = []
    for text in batch:
        if len(text) <= BATCH_CHARACTERS:
            tokens = _ids(next(encodings))
        else:
            parts = (tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0] for piece in pieces(text))
            tokens = numpy.concatenate([_ids(part) for part in parts])
        found.append((tokens, len(text)))
    return found


def _ids(encoding: Any) -> Tokens:
    return numpy.asarray(encoding.ids, numpy.uint16)


def pieces(text: str) -> Iterator[str]:
    """A long text in parts, cut at spaces: tokenizers keep some eighty bytes per character of what they work on."""
    start = 0
    while start < len(text):
        end = start + BATCH_CHARACTERS
        space = text.rfind(" ", start + 1, end) if end < len(text) else -1
        end = space if space > start else end
        yield text[start:end]
        start = end


class Packer:
    """Joins documents by [SEP] and writes whole sequences; what is left over waits for the next document."""

    def __init__(self, file: BinaryIO, length: int, sequences: int, left: list[int]):
        self._file = file
        self._length = length
        self.sequences = sequences
        self._left: Tokens = numpy.asarray(left, numpy.uint16)

    @classmethod
    @contextmanager
    def open(cls, path: Path, length: int, state: Mapping[str, Any]) -> Iterator["Packer"]:
        """Continues at a state: whatever was written after it is cut off."""
        sequences = int(state.get("sequences", 0))
        with path.open("r+b" if sequences else "wb") as file:
            file.truncate(sequences * length * 2)
            file.seek(0, os.SEEK_END)
            yield cls(file, length, sequences, list(state.get("left", ())))

    def add(self, tokens: Tokens) -> None:
        joined = numpy.concatenate([self._left, tokens, numpy.asarray([SEP_ID], numpy.uint16)])
        whole = len(joined) // self._length
        self._file.write(joined[: whole * self._length].tobytes())
        self._left = joined[whole * self._length :]
        self.sequences += whole

    def cut(self, sequences: int) -> None:
        self._file.flush()
        self._file.truncate(sequences * self._length * 2)
        self.sequences, self._left = sequences, self._left[:0]

    def state(self) -> dict[str, Any]:
        """Where to continue; everything up to here is on the disk before this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"sequences": self.sequences, "left": self._left.tolist()}


def chunks(path: Path, size: int = CHUNK) -> Iterator[Tokens]:
    """The tokens of a file, so many at a time; read and not mapped, since mapped pages stay in memory."""
    with path.open("rb") as file:
        while len(tokens := numpy.fromfile(file, numpy.uint16, size)):
            yield tokens


def sentence_length_order(path: Path, sequences: int, length: int, stop: int | None, out: Path) -> None:
    """Writes the numbers of the sequences by falling number of full stops, equal ones in reading order.

    A counting sort in two passes over the file, since a sequence has at most `length` full stops.
    """
    step = max(1, CHUNK // length)
    counts = numpy.zeros(sequences, numpy.uint16)
    for number, tokens in enumerate(chunks(path, step * length)):
        part = tokens.reshape(-1, length)
        counts[number * step : number * step + len(part)] = (part == (-1 if stop is None else stop)).sum(1)
    sizes = numpy.bincount(counts, minlength=length + 1)
    begins = numpy.cumsum(sizes[::-1])[::-1] - sizes  # most full stops first
    partial = out.with_suffix(".partial")
    order = numpy.memmap(partial, numpy.uint32, "w+", shape=(sequences,))
    for start in range(0, sequences, step):
        part = counts[start : start + step]
        for value in numpy.unique(part):
            found = numpy.flatnonzero(part == value)
            order[begins[value] : begins[value] + len(found)] = found + start
            begins[value] += len(found)
    order.flush()
    del order
    os.replace(partial, out)
