"""Checkpoints of constrained models: what `osm.bake` would have left is read, and where it is missing they are refused."""

import re
from collections.abc import Collection

from oversmooth.errors import ForgottenBake

_EIGENBASIS = re.compile(r"(?P<owner>.*)\bparametrizations\.(?P<tensor>\w+)\.0\.eigenbasis\.")
"""Names under which a constrained model keeps what its value and output weights are made of."""


def holds_an_eigenbasis(names: Collection[str]) -> bool:
    return any(_EIGENBASIS.match(name) for name in names)


def require_ordinary_weights(names: Collection[str], target: str) -> None:
    """Refuses an eigenbasis that was saved without the ordinary weight that follows from it."""
    for name in names:
        match = _EIGENBASIS.match(name)
        if match and match["owner"] + match["tensor"] not in names:
            raise ForgottenBake(target, name)
