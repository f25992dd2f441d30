"""What people hold in Python, as data: one batch, a loader, texts, pictures, a data set.

one batch                    a tokenizer's output, a dict of tensors, a tensor or array
many batches                 a DataLoader or any iterable of these, or of `(inputs, labels)`
texts                        a list of strings, a column of a table
pictures                     PIL images or uint8 arrays (height, width, channel)
token ids                    a list of lists of whole numbers
data sets                    `datasets.Dataset`, a data frame, a map-style data set of torch
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oversmooth.data.raw import RawData, of_rows, require_usable
from oversmooth.data.tokens import padded
from oversmooth.errors import UnreadableData, WrongBatch

Data = Any
"""Whatever `held` understands; nothing, for built-in samples."""


@dataclass(frozen=True, eq=False, slots=True)
class InMemory:
    """Texts, pictures or rows of a table that were given as objects."""

    rows: Iterable[Any]
    kind: str
    """text, image or table."""
    description: str

    def read(self, kind: str) -> RawData:
        """The texts or pictures; raises `UnreadableData` where these are of another kind."""
        if self.kind == "table":
            return of_rows(self.description, f"rows with {kind}", self.rows, kind)
        if kind != self.kind:
            raise UnreadableData(self.description, f"{kind}, which this model takes", self.kind)
        if kind == "text":
            texts = [_text(row, number).strip() for number, row in enumerate(self.rows)]
            return RawData(iter([text for text in texts if text]), sum(map(len, texts)), texts.count(""))
        return RawData(_pictures(self.rows))


def held(data: Any, batch_size: int = 8) -> str | InMemory | Iterable[Any] | None:
    """Whatever was given, as a path, `InMemory`, or an iterable of batches; what is one of these already stays as it is."""
    if data is None or isinstance(data, str | InMemory):
        return data
    if isinstance(data, Path):
        return str(data)
    if isinstance(data, Tensor | Mapping):
        return [data]
    if _is_picture(data):
        return InMemory([data], "image", "1 picture")
    if _is_array(data) and data.dtype.kind in "fiub":
        return [torch.as_tensor(data)]
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return _of_data_set(data, batch_size)
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return InMemory(data.to_dict("records"), "table", f"a table of {len(data)} rows")
    if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
        data = _of_torch(data, batch_size)
    if not isinstance(data, Iterable):
        expected = "texts, pictures, tensors, a loader, a data set or a path"
        raise WrongBatch(expected, f"an object of type {type(data).__name__}", "See docs/data.md.")
    return _of_items(data, batch_size)


def reusable(data: Any) -> str | InMemory | list[Any] | None:
    """The same, to be run several times."""
    found = held(data)
    return found if found is None or isinstance(found, str | InMemory) else list(found)


def _of_items(data: Iterable[Any], batch_size: int) -> Iterable[Any] | InMemory:
    """Told by the first item; an iterator is not used up by looking."""
    items = iter(data)
    first = next(items, None)
    whole: Iterable[Any] = chain([first], items) if items is data else data
    if isinstance(first, str):
        texts = list(whole)
        return InMemory(texts, "text", f"{len(texts)} text{'s' * (len(texts) != 1)}")
    if _is_picture(first) or (isinstance(first, tuple | list) and first and _is_picture(first[0])):
        pictures = [item[0] if isinstance(item, tuple | list) and item else item for item in whole]
        return InMemory(pictures, "image", f"{len(pictures)} picture{'s' * (len(pictures) != 1)}")
    if isinstance(first, list | tuple) and first and all(isinstance(token, int) for token in first):
        rows = list(whole)
        return [padded(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
    return data if first is None else _Batches(whole)


@dataclass(frozen=True, eq=False, slots=True)
class _Batches:
    """Batches without their labels, each time they are asked for."""

    given: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return map(_inputs_of, self.given)


def _inputs_of(batch: Any) -> Any:
    """The inputs of `(inputs, labels)`; labels are one whole number or word per sequence."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch
    inputs, labels = batch
    if isinstance(inputs, Mapping):
        return inputs
    is_one_each = isinstance(labels, Tensor) and labels.ndim <= 1
    return inputs if isinstance(inputs, Tensor) and (is_one_each or not isinstance(labels, Tensor)) else batch


def _of_data_set(data: Any, batch_size: int) -> Iterable[Any] | InMemory:
    """A data set of the `datasets` library: what a tokenizer made, or its column of texts or pictures."""
    columns = list(data.column_names or ())
    if "input_ids" not in columns and "pixel_values" not in columns:
        return InMemory(data, "table", f"a data set with the columns {', '.join(columns)}")
    return _OfColumns(data, batch_size)


@dataclass(frozen=True, eq=False, slots=True)
class _OfColumns:
    """Rows that were made into numbers already, several at a time."""

    data: Any
    batch_size: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = iter(self.data)
        while chosen := list(islice(rows, self.batch_size)):
            if "input_ids" in chosen[0]:
                yield padded([list(row["input_ids"]) for row in chosen])
            else:
                yield {"pixel_values": torch.stack([torch.as_tensor(row["pixel_values"]) for row in chosen])}


def _of_torch(data: Any, batch_size: int) -> Iterable[Any]:
    """A map-style data set: its pictures one by one, or its tensors in batches."""
    first = data[0] if len(data) else None
    item = first[0] if isinstance(first, tuple | list) and first else first
    if isinstance(item, str) or _is_picture(item):
        return (data[number] for number in range(len(data)))
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def _is_picture(value: Any) -> bool:
    """A PIL image, or an array of bytes with a height, a width and channels."""
    if _is_array(value):
        return value.dtype.name == "uint8" and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4)))
    return hasattr(value, "convert") and hasattr(value, "size")


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and hasattr(value, "dtype") and not isinstance(value, Tensor)


def _text(row: Any, number: int) -> str:
    if not isinstance(row, str):
        raise WrongBatch(
            "strings only in a list of texts", f"an object of type {type(row).__name__} at {number}", "Leave it out."
        )
    return row


def _pictures(rows: Iterable[Any]) -> Iterator[Any]:
    from PIL import Image

    for number, row in enumerate(rows):
        if not _is_picture(row):
            raise WrongBatch("pictures only", f"an object of type {type(row).__name__} at {number}", "Leave it out.")
        picture = Image.fromarray(row.squeeze()) if _is_array(row) else row
        require_usable(picture, f"picture {number}")
        yield picture.convert("RGB")
