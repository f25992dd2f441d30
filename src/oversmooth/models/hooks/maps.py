"""The attention that a layer showed while the model ran, one sequence at a time, with the gains of what its tokens write."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oversmooth.errors import NoAttentionMaps
from oversmooth.models.hooks.gains import TokenGains

ROW_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far the sum of a row may be from one; half precision rounds each entry, so there it is 1e-2."""


@dataclass(frozen=True, eq=False, slots=True)
class Written:
    """What multiplied the mixed heads of one layer, for one batch."""

    before: Float[Tensor, "batch token inner"]
    after: Float[Tensor, "batch token inner"] | None = None
    """Behind a norm on the mixed heads."""
    subtracted: Tensor | None = None
    """Of differential attention: the factor of the attention that is subtracted."""

    def of(self, sequence: int, heads: int) -> TokenGains:
        before, after = (
            None if part is None else part[sequence].unflatten(-1, (heads, -1)) for part in (self.before, self.after)
        )
        assert before is not None
        return TokenGains(before, after)


@dataclass(frozen=True, eq=False, slots=True)
class AttentionMaps:
    """The attention of one layer for one batch, computed for one sequence at a time."""

    layer: str
    """Which layer it is, in words."""
    of_sequence: Callable[[int], Float[Tensor, "head token key"]]
    written: Written | None = None
    """The gains of the tokens that are written, where the family has any."""
    has_sink: bool = False
    """Whether the family has a learned sink beside the tokens, which takes a part of every row."""

    def seen(
        self, sequence: int, keep: Bool[Tensor, " token"], dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "head kept kept"], TokenGains | None]:
        """Attention between the kept tokens, every head's rows with one sum, and the gains of what each token writes.

        What a sink leaves of a row is such a gain. Heads of differential attention have the sum `1 - lambda`.
        """
        if self.written is None:
            return self.of(sequence, keep, dtype), None
        if self.written.subtracted is not None:
            both = self.of(sequence, keep, dtype)
            attention, sums = _difference(self.layer, both, self.written.subtracted), None
        else:
            kept, tolerance = self._kept(sequence, keep, dtype)
            sums = kept.sum(-1)
            if not bool(((sums > 0) & (sums <= 1 + tolerance)).all()):
                raise NoAttentionMaps(self.layer, "rows that sum to nothing or to more than one", "Check the mask.")
            attention = kept / sums[..., None]
        gains = self.written.of(sequence, len(attention)).of(keep, dtype)
        return attention, gains if sums is None else gains.times(sums)

    @property
    def sequences(self) -> int:
        """In the batch, where gains were followed."""
        assert self.written is not None
        return len(self.written.before)

    def all_gains(self, sequence: int) -> TokenGains:
        """The gains of every token of a sequence, with what the rows of its attention sum to."""
        assert self.written is not None
        found = self.of_sequence(sequence).double()
        if self.written.subtracted is not None:
            found = _difference(self.layer, found, self.written.subtracted)
        keep = torch.ones(found.shape[1], dtype=torch.bool)
        return self.written.of(sequence, len(found)).of(keep, torch.float64).times(found.sum(-1))

    def of(
        self, sequence: int, keep: Bool[Tensor, " token"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "head kept kept"]:
        """Probabilities between the kept tokens of one sequence; raises `NoAttentionMaps` unless rows sum to one."""
        kept, tolerance = self._kept(sequence, keep, dtype)
        sums = kept.sum(-1, keepdim=True)
        worst = (sums - 1).abs().max().item()
        if not worst <= tolerance:  # also where it is NaN
            reason = f"rows that do not sum to one over the tokens that count (off by {worst:.2g})"
            raise NoAttentionMaps(
                self.layer, reason, "Sinks, dropout and padding that is not masked break the theory: it needs row sums."
            )
        return kept / sums

    def with_sink(
        self, sequence: int, keep: Bool[Tensor, " token"]
    ) -> tuple[Float[Tensor, "head kept kept"], Float[Tensor, "head kept"] | None]:
        """Probabilities between the kept tokens, and what each row leaves to a learned sink, if the family has one."""
        if not self.has_sink:
            return self.of(sequence, keep), None
        kept, tolerance = self._kept(sequence, keep, torch.float32)
        dropped = self.of_sequence(sequence)[:, keep][:, :, ~keep].float().sum(-1)
        sums = kept.sum(-1)
        if not bool(((sums >= 0) & (sums <= 1 + tolerance) & (dropped <= tolerance)).all()):  # also where it is NaN
            reason = "rows that sum to more than one, or that look at tokens that do not count"
            raise NoAttentionMaps(self.layer, reason, "Check the mask; keep prefix tokens.")
        beside = 1 - sums
        return kept, beside.masked_fill(beside <= tolerance, 0)  # some layers have no sink: rounding is none

    def _kept(
        self, sequence: int, keep: Bool[Tensor, " token"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "head kept kept"], float]:
        """Attention between the kept tokens, and how far its rows may be from their sum by rounding."""
        found = self.of_sequence(sequence)
        if found.shape[1:] != (len(keep), len(keep)):
            shape = f"attention of {found.shape[1]} queries to {found.shape[2]} keys for {len(keep)} tokens"
            advice = (
                "Give whole sequences, without a cache. Windowed attention is inspected and measured, not predicted."
            )
            raise NoAttentionMaps(self.layer, f"{shape} (windows, a sink or a cache)", advice)
        kept = (found if bool(keep.all()) else found[:, keep][:, :, keep]).to(dtype)
        return kept, ROW_TOLERANCE.get(found.dtype, 1e-2)


def _difference(
    layer: str, attention: Float[Tensor, "both token token"], factor: Tensor
) -> Float[Tensor, "head token token"]:
    """`A_1 - lambda A_2` of differential attention, whose second maps are the second half of the heads."""
    number = factor.flatten()[0]
    if not torch.allclose(factor, number.expand(factor.shape), rtol=1e-4):
        raise NoAttentionMaps(layer, "a difference of attentions whose factor is not one number", "Measure it instead.")
    first, second = attention.chunk(2)
    return first - number.to(attention) * second
