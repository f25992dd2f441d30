"""Kept tokens of a batch, and the sums over them that metrics share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oversmooth.errors import BadValue

T = TypeVar("T")
CLEARLY = 0.2
"""Share of HFC^2 in sum |x_i|^2 from which their difference keeps all but one digit."""


def measurable(keep: Bool[Tensor, "batch token"]) -> Bool[Tensor, " batch"]:
    """Which sequences keep at least two tokens, so that there is something to compare."""
    return keep.sum(-1) >= 2


@dataclass(frozen=True, eq=False)
class TokenMask:
    """Which tokens of a batch count, checked once for all places where its hidden states are seen."""

    keep: Bool[Tensor, "batch token"]
    span: slice
    """The columns that any sequence keeps; the others are cut off."""
    n: Int[Tensor, " batch"]
    """Number of kept tokens."""
    dropped: Int[Tensor, " row"] | None
    """Rows of the flattened span that hold dropped tokens; `None` without any."""

    @classmethod
    def of(cls, keep: Bool[Tensor, "batch token"]) -> "TokenMask":
        n = keep.sum(-1)
        if (n < 2).any():
            first = int((n < 2).nonzero()[0])
            expected = "at least 2, because tokens are compared"
            advice = "Leave such sequences out, as `measurable(keep)` does."
            raise BadValue(f"The number of tokens that sequence {first} keeps", int(n[first]), expected, advice)
        columns = keep.any(0).nonzero()
        span = slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(None)
        dropped = ~keep[:, span]
        return cls(keep, span, n, dropped.flatten().nonzero()[:, 0] if dropped.any() else None)


@dataclass(frozen=True, eq=False)
class Moments:
    """Kept tokens of a batch and the sums over them that metrics share; each is computed once, when first asked for."""

    h: Float[Tensor, "batch token d_model"]
    keep: Bool[Tensor, "batch token"]
    x: Float[Tensor, "batch span d_model"]
    """Kept tokens in float32 or float64, zeros at dropped positions; columns that no sequence keeps are cut off."""
    mask: Float[Tensor, "batch span"]
    """1 where `x` holds a kept token, otherwise 0."""
    n: Int[Tensor, " batch"]
    """Number of kept tokens."""

    @classmethod
    def of(cls, h: Float[Tensor, "batch token d_model"], keep: Bool[Tensor, "batch token"] | TokenMask) -> "Moments":
        """Take the kept tokens; no copy when `h` is float32 and all sequences keep the same span."""
        kept = keep if isinstance(keep, TokenMask) else TokenMask.of(keep)
        if kept.keep.shape != h.shape[:2]:
            expected = f"(batch, token) of h, here {tuple(h.shape[:2])}"
            raise BadValue("The shape of keep", tuple(kept.keep.shape), expected)
        x = h[:, kept.span].to(torch.float64 if h.dtype == torch.float64 else torch.float32)
        if kept.dropped is not None:
            x = x.clone(memory_format=torch.contiguous_format)
            # Overwritten, not multiplied (0 * NaN is NaN), and by row number: four times faster than `x[dropped] = 0`.
            x.flatten(0, 1).index_fill_(0, kept.dropped, 0)
        return cls(h, kept.keep, x, kept.keep[:, kept.span].to(x.dtype), kept.n)

    def every(self, step: int, before: int) -> "Moments":
        """Every `step`-th sequence of a run, of which `before` came in earlier batches."""
        if len(self.x) == 1 and before % step == 0:
            return self
        rows = slice(-before % step, None, step)
        found = Moments(self.h[rows], self.keep[rows], self.x[rows], self.mask[rows], self.n[rows])
        found.__dict__.update({"norms": self.norms[rows], "sums": tuple(part[rows] for part in self.sums)})
        return found

    def on(self, device: torch.device) -> "Moments":
        """The same tokens on another device, as where the next block of a model is."""
        if self.x.device == device:
            return self
        return Moments(*(part.to(device) for part in (self.h, self.keep, self.x, self.mask, self.n)))

    @property
    def dtype(self) -> torch.dtype:
        """What sums are taken in."""
        return self.norms.dtype

    @cached_property
    def norms(self) -> Float[Tensor, "batch span"]:
        """Euclidean norm of each token."""
        return torch.linalg.vector_norm(self.x, dim=-1)

    @cached_property
    def is_finite(self) -> Bool[Tensor, " batch"]:
        """Whether all token norms of a sequence are finite numbers."""
        return self.norms.sum(1).isfinite()

    @cached_property
    def inverse_norms(self) -> Float[Tensor, "batch span"]:
        """1/|x_i|, and 0 for a zero token."""
        return torch.where(self.norms == 0, 0.0, 1 / self.norms)

    @cached_property
    def nonzero(self) -> Int[Tensor, " batch"]:
        """Number of tokens that are not zero."""
        return (self.norms > 0).sum(1)

    @cached_property
    def sums(self) -> tuple[Float[Tensor, "batch d_model"], ...]:
        """Sums of the tokens, of those at length one and of all but the largest, and the largest: one walk through `x`."""
        is_largest = torch.zeros_like(self.mask).scatter_(1, self.largest[:, None], 1)
        weights = torch.stack((self.mask, self.inverse_norms, self.mask - is_largest, is_largest), 1)
        return weighted_sums(self.x, weights).unbind(1)

    @cached_property
    def mean(self) -> Float[Tensor, "batch d_model"]:
        """Mean m of the kept tokens."""
        return self.sums[0] / self.n[:, None]

    @cached_property
    def mean_squared(self) -> Float[Tensor, " batch"]:
        """|m|^2."""
        return self.mean.square().sum(-1)

    @cached_property
    def centred(self) -> Float[Tensor, "batch span d_model"]:
        """HC(X): each kept token minus the mean; zeros at dropped positions."""
        return torch.addcmul(self.x, self.mask[..., None], self.mean[:, None], value=-1)

    @cached_property
    def hfc_squared(self) -> Float[Tensor, " batch"]:
        """HFC^2, accurate however equal the tokens are.

        sum |x_i|^2 - n |m|^2 needs no temporary, and loses no more than a digit where tokens differ clearly. It is all
        rounding error once they are nearly equal; there tokens are centred first. Even sum |x_i - m|^2 has a floor: if
        rounding moved m by e, it is larger by n |e|^2. But e is minus the mean of the centred tokens, which are small
        and nearly exact, so the floor is computed and taken off.
        """
        total = self.norms.square().sum(1)
        difference = total - self.n * self.mean_squared
        if bool((difference >= CLEARLY * total).all()):
            return difference
        floor = self.centred.sum(1).square().sum(-1) / self.n
        return (torch.linalg.vector_norm(self.centred, dim=-1).square().sum(1) - floor).clamp(min=0)

    @cached_property
    def lfc_squared(self) -> Float[Tensor, " batch"]:
        """LFC^2 = n |m|^2, and NaN where it is only the rounding error of a mean that is zero (LFC <= 4 eps HFC)."""
        lfc_squared = self.n * self.mean_squared
        is_rounding = lfc_squared <= (4 * torch.finfo(self.dtype).eps) ** 2 * self.hfc_squared
        return lfc_squared.masked_fill(is_rounding, torch.nan)

    @cached_property
    def unit(self) -> Float[Tensor, "batch span d_model"]:
        """Tokens of length one, u_i = x_i / |x_i|; zeros at dropped positions and for zero tokens."""
        return self.x * self.inverse_norms[..., None]

    @cached_property
    def unit_sum(self) -> Float[Tensor, "batch d_model"]:
        """Sum of the tokens of length one."""
        return self.sums[1]

    @cached_property
    def unit_sum_squared(self) -> Float[Tensor, " batch"]:
        """|sum of u_i|^2."""
        return self.unit_sum.square().sum(-1)

    @cached_property
    def unit_hfc_squared(self) -> Float[Tensor, " batch"]:
        """HFC^2 of the tokens of length one; accurate however parallel they are, as `hfc_squared` is."""
        difference = self.nonzero - self.unit_lfc_squared
        if bool((difference >= CLEARLY * self.nonzero).all()):
            return difference
        centred = torch.addcmul(self.unit, self.mask[..., None], (self.unit_sum / self.n[:, None])[:, None], value=-1)
        floor = centred.sum(1).square().sum(-1) / self.n
        return (torch.linalg.vector_norm(centred, dim=-1).square().sum(1) - floor).clamp(min=0)

    @cached_property
    def unit_lfc_squared(self) -> Float[Tensor, " batch"]:
        """LFC^2 of the tokens of length one."""
        return self.unit_sum_squared / self.n

    @cached_property
    def largest(self) -> Int[Tensor, " batch"]:
        """Which column of the span holds the token of the largest norm."""
        return self.norms.argmax(1)

    @cached_property
    def largest_token(self) -> Float[Tensor, "batch d_model"]:
        """The token of the largest norm; NaN where a sequence is not finite."""
        return self.sums[3]

    @property
    def without_largest(self) -> "Moments":
        """The same sequences without their largest token, which alone may carry HFC, LFC and all that scales with them.

        Not kept here: it refers to the whole, and a cycle would hold the tokens until the garbage collector comes by.
        """
        return WithoutLargest.of_whole(self)

    @cached_property
    def gram(self) -> Float[Tensor, "batch small small"]:
        """The smaller of X X^T and X^T X, in float64."""
        x = in_float64(self.x)
        return x @ x.mT if x.shape[1] <= x.shape[2] else x.mT @ x

    @cached_property
    def singular_values(self) -> Float[Tensor, "batch rank"]:
        """Singular values of X, and zeros, from the eigenvalues of the smaller of X X^T and X^T X in float64.

        Squaring loses half of the 16 digits: singular values below about 1e-8 of the largest are noise. Hidden states
        in float32 have no more digits than that.
        """
        # One NaN would make eigvalsh refuse the whole batch; `is_finite` marks that sequence as having no value.
        finite = self.is_finite.to(self.gram.device)[:, None, None]
        return (
            torch.linalg.eigvalsh(self.gram.masked_fill(~finite, 0)).clamp(min=0).sqrt().to(self.x.device, self.x.dtype)
        )


class WithoutLargest(Moments):
    """Sequences without their largest token; their sums come from the whole, and tokens are copied only if asked for."""

    whole: Moments

    @classmethod
    def of_whole(cls, whole: Moments) -> "WithoutLargest":
        column, n = whole.largest[:, None], whole.n - 1
        others: dict[str, object] = {"whole": whole, "h": whole.h, "keep": whole.keep, "n": n}
        others |= {"mask": whole.mask.scatter(1, column, 0), "norms": whole.norms.scatter(1, column, 0)}
        if bool(whole.is_finite.all()):  # else a sum over all tokens holds 0 times infinity
            others["mean"] = whole.sums[2] / n[:, None]
        return made_of(cls, others)

    @cached_property
    def x(self) -> Float[Tensor, "batch span d_model"]:
        """Zeros in place of the largest token."""
        column = self.whole.largest[:, None, None].expand(-1, -1, self.whole.x.shape[2])
        return self.whole.x.scatter(1, column, 0)

    @cached_property
    def gram(self) -> Float[Tensor, "batch small small"]:
        """That of the whole without a row and a column, where it is of tokens."""
        if self.whole.x.shape[1] > self.whole.x.shape[2]:
            x = in_float64(self.x)
            return x.mT @ x
        kept = self.mask.to(self.whole.gram.device).bool()
        return self.whole.gram.masked_fill(~(kept[:, :, None] & kept[:, None]), 0)


def made_of(kind: type[T], facts: dict[str, object]) -> T:
    """An object of which only these attributes are known; what follows from them is computed when asked for."""
    found = object.__new__(kind)
    found.__dict__.update(facts)
    return found


def behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    """What several places gave, on the device of the first: the blocks of a large model are on more than one."""
    return torch.cat([part.to(parts[0].device) for part in parts])


def weighted_sums(
    x: Float[Tensor, "batch span d_model"], weights: Float[Tensor, "batch sum span"]
) -> Float[Tensor, "batch sum d_model"]:
    """`sum_i w_i x_i` for several weights: a matrix product on the CPU, which needs no temporary, unless the user lets
    those be rounded."""
    if x.device.type != "cpu" or torch.get_float32_matmul_precision() != "highest":
        return torch.stack([(x * part[..., None]).sum(1) for part in weights.unbind(1)], 1)
    with torch.autocast("cpu", enabled=False):
        return weights @ x


def in_float64(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In double precision, on the CPU where the device (MPS) has none."""
    return x.cpu().double() if x.device.type == "mps" else x.double()
