"""Who changes a number of the stream: differences between neighbouring places, which add up from embedding to output.

One chain is `log(HFC/LFC)` of the tokens as they are, the other that of tokens at length one, which no single token decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oversmooth.measurement.evidence import Running, direction, interval
from oversmooth.measurement.metric import MetricValues
from oversmooth.models.hooks.places import NORMS, Place
from oversmooth.results import Attribution, KindChange, Part

PART_OF = {
    "attn_sum": "attention",
    "cross_sum": "cross-attention",
    "ffn_sum": "feed-forward",
    "other_sum": "other",
    **dict.fromkeys(NORMS, "norm"),
    "final_norm": "final norm",
}


@dataclass
class Chain:
    """One number at every place of the stream: its changes, per place, per kind of sub-block and in all."""

    quantity: str
    _stream: dict[str, tuple[list[Place], MetricValues]] = field(default_factory=dict)
    """Of each stack the places of the stream, and the number of every sequence at the first place, at the second..."""
    _parts: dict[str, dict[Place, Running]] = field(default_factory=dict)
    _kinds: dict[str, dict[str, Running]] = field(default_factory=dict)
    _totals: dict[str, Running] = field(default_factory=dict)

    def begin(self) -> None:
        self._stream.clear()

    def add(self, label: str, places: list[Place], found: MetricValues) -> None:
        """The number of every sequence of a batch, at one place of a stack behind the other."""
        self._stream[label] = (places, found)

    def finish(self) -> None:
        """Takes over the changes of a batch that is complete; a sequence counts if it has a value at every place."""
        for label, (places, found) in self._stream.items():
            if len(places) < 2:
                continue
            values, defined = (part.unflatten(0, (len(places), -1)).T for part in (found.values, found.defined))
            complete = values[defined.all(1)].cpu().double().numpy()
            changes = np.diff(complete, axis=1)
            parts = self._parts.setdefault(label, {})
            for place, change in zip(places[1:], changes.T, strict=True):
                parts.setdefault(place, Running()).add(change)
            kinds = [PART_OF[place.name] for place in places[1:]]
            for kind in dict.fromkeys(kinds):
                together = changes[:, [other == kind for other in kinds]].sum(1)
                self._kinds.setdefault(label, {}).setdefault(kind, Running()).add(together)
            self._totals.setdefault(label, Running()).add(complete[:, -1] - complete[:, 0])

    def attributions(self) -> tuple[Attribution, ...]:
        return tuple(
            self._attribution(label, parts) for label, parts in self._parts.items() if self._totals[label].count
        )

    def _attribution(self, label: str, sums: Mapping[Place, Running]) -> Attribution:
        parts = tuple(
            Part(stack=label, depth=place.depth, part=PART_OF[place.name], place=place.name, **_facts(change))
            for place, change in sums.items()
        )
        total = _facts(self._totals[label])

        def share(*wanted: str) -> float:
            return sum((item.change for item in parts if item.part in wanted), 0.0)

        return Attribution(
            stack=label,
            total=total.pop("change"),
            **total,
            sequences=self._totals[label].count,
            attention=share("attention"),
            cross_attention=share("cross-attention"),
            feed_forward=share("feed-forward"),
            norms=share("norm", "final norm"),
            other=share("other"),
            parts=parts,
            quantity=self.quantity,
            kinds=tuple(KindChange(part=kind, **_facts(change)) for kind, change in self._kinds[label].items()),
        )


def _facts(change: Running) -> dict[str, Any]:
    """A change over sequences with what it says."""
    found = interval(change.mean, change.standard_error, change.count)
    return {
        "change": change.mean,
        "standard_error": change.standard_error,
        "interval": found,
        "direction": direction(change.mean, found),
    }
