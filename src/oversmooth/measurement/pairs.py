"""Pairs of tokens at block outputs (how their cosines are spread, how many directions they fill), and pairs of sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from oversmooth.measurement.moments import Moments, in_float64
from oversmooth.measurement.statistics import Running
from oversmooth.models.hooks.places import Place
from oversmooth.results import PairSpread

# --- how the cosines of all pairs of tokens are spread: a collapse is a distribution that closes ---

TOKENS = 512
"""Tokens of a sequence that are compared at most; of longer ones this many are drawn."""
FINE = 2000
"""Bins from -1 to 1 in which pairs are counted, so that quantiles are right to a thousandth."""
BINS = 40
"""Bins of the histogram that is kept."""
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
ALIKE = 0.9
"""Cosine from which on two tokens count as nearly the same."""
RANK_EVERY = 8
"""The rank needs eigenvalues, so it is taken of every so many-th sequence."""


@dataclass
class _Spread:
    """Sums over sequences at one place."""

    counts: Float[np.ndarray, " fine"] = field(default_factory=lambda: np.zeros(FINE))
    """Shares of the pairs of each sequence, added up."""
    sequences: int = 0
    tokens: int = 0
    rank: Running = field(default_factory=Running)
    largest_rank: Running = field(default_factory=Running)

    def add(self, found: "_OfSequence") -> None:
        self.counts += found.shares
        self.sequences += 1
        self.tokens = max(self.tokens, found.tokens)
        if found.rank is not None:
            self.rank.add(np.array([found.rank]))
            self.largest_rank.add(np.array([found.largest_rank]))


@dataclass(frozen=True, eq=False, slots=True)
class _OfSequence:
    """The pairs of one sequence at one place."""

    place: Place
    shares: Float[np.ndarray, " fine"]
    tokens: int
    largest_rank: float
    rank: float | None


@dataclass
class PairGatherer:
    """Looks at what leaves each block of one stack."""

    seed: int
    _last: tuple[Place, Moments, int] | None = None
    """The stream where it stands, and how many sequences came before; only what leaves a block is looked at."""
    _pending: list[_OfSequence] = field(default_factory=list)
    _spreads: dict[Place, _Spread] = field(default_factory=dict)

    def begin(self) -> None:
        self._pending.clear()
        self._last = None

    def see(self, place: Place, moments: Moments, before: int) -> None:
        """The stream as it stands; of each depth the last call counts, and the final norm has one of its own."""
        if place.name == "between":
            return
        if self._last is not None and (self._last[0].depth != place.depth or place.name == "final_norm"):
            self._leave()
        self._last = (place, moments, before)

    def finish(self) -> None:
        """Takes over what a batch gave, now that it is complete."""
        self._leave()
        for found in self._pending:
            self._spreads.setdefault(found.place, _Spread()).add(found)

    def _leave(self) -> None:
        if self._last is None:
            return
        (place, moments, before), self._last = self._last, None
        usable = (moments.is_finite & (moments.nonzero >= 2)).tolist()
        with torch.autocast(moments.x.device.type, enabled=False):
            for row in (row for row, is_usable in enumerate(usable) if is_usable):
                self._pending.append(self._of_sequence(place, moments, row, before + row))

    def _of_sequence(self, place: Place, moments: Moments, row: int, number: int) -> _OfSequence:
        kept = moments.mask[row].nonzero()[:, 0]
        if len(kept) > TOKENS:
            kept = kept[_drawn(len(kept), self.seed + number).to(kept.device)]
        u = moments.x[row, kept] * moments.inverse_norms[row, kept, None]
        rank = effective_rank(u) if number % RANK_EVERY == 0 else None
        return _OfSequence(place, _shares(u), len(u), float(min(len(u) - 1, u.shape[1])), rank)

    def results(self) -> tuple[PairSpread, ...]:
        return tuple(_result(place, spread) for place, spread in self._spreads.items())


@cache
def _drawn(count: int, seed: int) -> Int[Tensor, " few"]:
    """The same tokens at every depth."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:TOKENS].sort().values


def _shares(u: Float[Tensor, "token d_model"]) -> Float[np.ndarray, " fine"]:
    """The share of pairs of distinct tokens in each bin."""
    cosines = (u @ u.mT).clamp(-1, 1).fill_diagonal_(2)  # beyond the last bin, so that no token is its own pair
    counts = torch.histc(cosines, FINE, -1, 1).cpu().double().numpy()
    return counts / counts.sum()


def effective_rank(u: Float[Tensor, "token d_model"]) -> float:
    """exp of the entropy of the singular values of the tokens minus their mean; 1 where these are all the same."""
    centred = in_float64(u - u.mean(0))
    gram = centred @ centred.mT if len(centred) <= centred.shape[1] else centred.mT @ centred
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return float(torch.special.entr(s / s.sum()).sum().exp()) if float(s.sum()) > 0 else 1.0


def _result(place: Place, spread: _Spread) -> PairSpread:
    shares = spread.counts / spread.sequences
    below = np.concatenate([[0.0], np.cumsum(shares)])
    edges = np.linspace(-1, 1, FINE + 1)
    low, first, middle, third, high = (float(np.interp(share, below, edges)) for share in SHARES)
    alike = shares[round((ALIKE + 1) / 2 * FINE) :]
    return PairSpread(
        stack=place.stack,
        depth=place.depth,
        is_final_norm=place.name == "final_norm",
        quantiles=(low, first, middle, third, high),
        histogram=tuple(shares.reshape(BINS, -1).sum(1).tolist()),
        share_above=float(alike.sum()),
        rank=spread.rank.mean if spread.rank.count else None,
        largest_rank=spread.largest_rank.mean if spread.largest_rank.count else None,
        sequences=spread.sequences,
        tokens=spread.tokens,
    )


# --- pairs of sequences: whether different texts are told apart ---

BETWEEN = "between"
BETWEEN_METRICS = {
    BETWEEN: "mean over pairs of different sequences of the cosine between their mean tokens, of the first 256 sequences"
}
SEQUENCES = 256
"""Sequences whose mean tokens are held at most."""


@dataclass
class BetweenGatherer:
    """The mean token of every sequence at the places that are asked for."""

    _pending: list[tuple[Place, Float[Tensor, "sequence d_model"]]] = field(default_factory=list)
    _means: dict[Place, list[Float[Tensor, "sequence d_model"]]] = field(default_factory=dict)

    def begin(self) -> None:
        self._pending.clear()

    def see(self, place: Place, moments: Moments) -> None:
        means = moments.mean[moments.is_finite & (moments.mean_squared > 0)]
        self._pending.append((place, F.normalize(in_float64(means), dim=1).cpu()))

    def finish(self) -> None:
        for place, means in self._pending:
            held = self._means.setdefault(place, [])
            held.append(means[: SEQUENCES - sum(map(len, held))])

    @property
    def places(self) -> Sequence[Place]:
        return list(self._means)

    def values(self, place: Place) -> tuple[float, ...]:
        """The mean cosine of every sequence's mean token with those of all others; empty for fewer than two."""
        units = torch.cat(self._means[place])
        if len(units) < 2:
            return ()
        return tuple(((units @ units.sum(0) - 1) / (len(units) - 1)).tolist())

    def results(self) -> dict[Place, Running]:
        """The similarity at every place; its error is that of leaving out one sequence after another (jackknife)."""
        return {place: between_sequences(means) for place, means in self._means.items()}


def between_sequences(means: Sequence[Float[Tensor, "_ d_model"]]) -> Running:
    """Mean cosine between different sequences, from their mean tokens at length one; empty for fewer than two."""
    units = torch.cat(list(means))
    count = len(units)
    if count < 2:
        return Running()
    squared = float(units.sum(0).square().sum())
    found = Running(count, (squared - count) / (count * (count - 1)), 0.0)
    if count > 2:
        without = squared - 2 * (units @ units.sum(0)) + 1
        left = (without - (count - 1)) / ((count - 1) * (count - 2))
        # The jackknife's error, put the way `Running` keeps it: squares / (count - 1) / count is the error squared.
        variance = (count - 1) / count * float((left - left.mean()).square().sum())
        found.squares = variance * (count - 1) * count
    return found
