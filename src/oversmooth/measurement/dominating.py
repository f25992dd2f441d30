"""The token that outweighs all others: which one it is, in which channel it is large, and which block makes it so."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oversmooth.measurement.attribution import PART_OF
from oversmooth.measurement.evidence import Running
from oversmooth.measurement.metric import MetricValues
from oversmooth.measurement.moments import Moments
from oversmooth.models.hooks.places import Place
from oversmooth.results import DominatingToken


@dataclass
class _Seen:
    """One place of the stream."""

    ratio: Running = field(default_factory=Running)
    share: Running = field(default_factory=Running)
    positions: Counter[int] = field(default_factory=Counter)
    ids: Counter[int] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False, slots=True)
class _Largest:
    """The largest tokens of one batch at one place."""

    place: Place
    shares: Float[Tensor, " batch"]
    columns: Int[Tensor, " batch"]
    channels: Int[Tensor, " batch"]
    first: int
    """Position of the first column."""
    ids: Int[Tensor, "batch token"] | None

    def add_to(self, seen: _Seen, ratios: Float[np.ndarray, " batch"], defined: Bool[np.ndarray, " batch"]) -> None:
        shares = self.shares.cpu().double().numpy()
        defined = defined & np.isfinite(shares)
        positions = self.columns.cpu().numpy()[defined] + self.first
        seen.ratio.add(ratios[defined])
        seen.share.add(shares[defined])
        seen.positions.update(positions.tolist())
        seen.channels.update(self.channels.cpu().numpy()[defined].tolist())
        if self.ids is not None:
            seen.ids.update(self.ids.cpu().numpy()[defined.nonzero()[0], positions].tolist())


@dataclass
class LargestTokens:
    """The largest token of every sequence at every place of the stream."""

    _pending: list[_Largest] = field(default_factory=list)
    _seen: dict[Place, _Seen] = field(default_factory=dict)

    def begin(self) -> None:
        self._pending.clear()

    def see(self, place: Place, moments: Moments, first: int, ids: Int[Tensor, "batch token"] | None) -> None:
        """`first` is the position of the span's first column; `ids` are the tokens that entered the model, if any did."""
        channel = moments.largest_token.abs().max(1)
        shares = channel.values.square() / moments.largest_token.square().sum(1)
        self._pending.append(_Largest(place, shares, moments.largest, channel.indices, first, ids))

    def finish(self, label: str, places: Sequence[Place], ratios: MetricValues) -> None:
        """The batch is complete; `ratios` are `largest_norm` at the places of a stack."""
        values, defined = (
            part.unflatten(0, (len(places), -1)).cpu().numpy() for part in (ratios.values, ratios.defined)
        )
        of_place = dict(zip(places, zip(values.astype(np.float64), defined, strict=True), strict=True))
        for found in self._pending:
            if found.place.stack == label:
                found.add_to(self._seen.setdefault(found.place, _Seen()), *of_place[found.place])

    def results(self) -> tuple[DominatingToken, ...]:
        """For every stack the place where its largest token is largest."""
        labels = dict.fromkeys(place.stack for place, seen in self._seen.items() if seen.ratio.count)
        return tuple(
            _of_stack(
                [(place, seen) for place, seen in self._seen.items() if place.stack == label and seen.ratio.count]
            )
            for label in labels
        )


def _of_stack(chain: Sequence[tuple[Place, _Seen]]) -> DominatingToken:
    place, seen = max(chain, key=lambda item: item[1].ratio.mean)
    steps = [(after, b.ratio.mean - a.ratio.mean) for (_, a), (after, b) in pairwise(chain)]
    made_by = max(steps, key=lambda step: step[1], default=None)
    (position, count), (channel, _) = seen.positions.most_common(1)[0], seen.channels.most_common(1)[0]
    return DominatingToken(
        stack=place.stack,
        depth=place.depth,
        place=place.name,
        ratio=seen.ratio.mean,
        position=position,
        position_share=count / seen.ratio.count,
        token_id=seen.ids.most_common(1)[0][0] if seen.ids else None,
        channel=channel,
        channel_share=seen.share.mean,
        made_at_depth=made_by[0].depth if made_by else None,
        made_by=PART_OF[made_by[0].name] if made_by else None,
    )
