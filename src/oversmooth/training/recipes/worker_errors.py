"""Errors of ours that arise in the processes that load data, brought to the training process with their fields.

torch raises a worker's error again as its own text only. So an example that cannot be read becomes its error, a batch
with such an example becomes `{FAILED: error}`, and the training process raises it there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from oversmooth.errors import OversmoothError

FAILED = "failed"
Collate = Callable[[list[Any]], dict[str, Any]]


class ReportingDataset(Dataset[Any]):
    """The same examples; one that cannot be read is its error."""

    def __init__(self, examples: Any):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.examples[index]
        except OversmoothError as error:
            return error


@dataclass(frozen=True)
class ReportingCollate:
    """The same batches; one with an example that could not be read holds the error alone."""

    collate: Collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        for example in examples:
            if isinstance(example, OversmoothError):
                return {FAILED: example}
        return self.collate(examples)


def without_errors(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, or the error that it holds, raised."""
    if FAILED in batch:
        raise batch[FAILED]
    return batch
