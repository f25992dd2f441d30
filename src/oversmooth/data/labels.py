"""Classes of texts and pictures: from the name of a folder or a column of a table to the number that a classifier gives."""

from collections.abc import Mapping
from typing import Any

from oversmooth.errors import WrongBatch

COLUMNS = ("label", "labels", "class")
"""Columns of a table that hold classes, in the order in which they are looked for."""


def label_in(row: Mapping[str, Any]) -> Any:
    """The class of a row of a table; `None` where it has none."""
    return next((row[name] for name in COLUMNS if row.get(name) is not None), None)


def class_number(label: Any, config: Mapping[str, Any]) -> int:
    """The number of a class in the output of the model: by its name in the config, or a number as it is."""
    names = {str(name): int(number) for name, number in dict(config.get("label2id") or {}).items()}
    if str(label) in names:
        return names[str(label)]
    count = len(names) or config.get("num_classes") or config.get("num_labels")
    is_number = (isinstance(label, int) and not isinstance(label, bool)) or (isinstance(label, str) and label.isdigit())
    if is_number and (count is None or int(label) < int(count)):
        return int(label)
    known = ", ".join(list(names)[:5]) + (", ..." if len(names) > 5 else "") if names else f"numbers below {count}"
    raise WrongBatch(
        f"classes that the model knows ({known})",
        f"the class {label!r}",
        "Name folders, or the column `label` of a table, as the model's config does (label2id), or by number.",
    )
