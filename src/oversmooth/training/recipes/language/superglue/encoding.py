"""Examples as tensors: tokens of every row, and which of them belong to the words that a task points at."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from oversmooth.training.recipes.language.superglue.tasks import Example, Row

NO_LABEL = 0
"""Stands where a test set has none; what is computed from it is thrown away."""


def token_ranges(row: Row, offsets: Sequence[tuple[int, int]], texts: Sequence[int | None]) -> list[list[int]]:
    """For each span the tokens that overlap it; none where it was cut off."""
    found = []
    for which, start, end in row.spans:
        inside = [
            i
            for i, ((a, b), text) in enumerate(zip(offsets, texts, strict=True))
            if text == which and a < end and b > start
        ]
        found.append(inside)
    return found


class EncodedExamples(Dataset[dict[str, Any]]):
    """Tokenized when asked for: ReCoRD has millions of rows."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any, max_tokens: int):
        self.examples, self.tokenizer, self.max_tokens = examples, tokenizer, max_tokens

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        label = NO_LABEL if example.label is None else example.label
        return {"rows": [self._row(row) for row in example.rows], "label": label}

    def _row(self, row: Row) -> dict[str, Any]:
        encoded = self.tokenizer(
            row.first,
            row.second,
            truncation="longest_first" if row.second is not None else True,
            max_length=self.max_tokens,
            return_offsets_mapping=True,
        )
        spans = token_ranges(row, encoded["offset_mapping"], encoded.sequence_ids())
        kept = {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}
        return {**kept, "spans": spans}


class Collate:
    """Rows padded to the longest: (example, token), or (example, choice, token) where a task has choices."""

    def __init__(self, pad_token_id: int):
        self.pad = pad_token_id

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [row for item in items for row in item["rows"]]
        length = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad),
            "attention_mask": torch.zeros(len(rows), length),
        }
        if "token_type_ids" in rows[0]:
            batch["token_type_ids"] = torch.zeros(len(rows), length, dtype=torch.long)
        if rows[0]["spans"]:
            batch["span_mask"] = torch.zeros(len(rows), len(rows[0]["spans"]), length)
        for number, row in enumerate(rows):
            size = len(row["input_ids"])
            for name in ("input_ids", "token_type_ids"):
                if name in row:
                    batch[name][number, :size] = torch.tensor(row[name])
            batch["attention_mask"][number, :size] = 1
            for span, tokens in enumerate(row["spans"]):
                batch["span_mask"][number, span, tokens] = 1
        batch["attention_mask"] = batch["attention_mask"].long()
        choices = len(items[0]["rows"])
        if choices > 1:
            batch = {name: tensor.unflatten(0, (len(items), choices)) for name, tensor in batch.items()}
        return {**batch, "labels": torch.tensor([item["label"] for item in items])}
