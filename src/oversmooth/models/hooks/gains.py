"""Gains of the token that is written: what a running model multiplies its mixed heads by before it projects them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class TokenGains:
    """Gates, what sinks leave of a row, and constant factors, for one sequence; `channel` is the head size or 1."""

    before: Float[Tensor, "token head channel"]
    """What multiplies the mixed heads themselves."""
    after: Float[Tensor, "token head channel"] | None = None
    """What multiplies them behind a norm on the mixed heads, where there is one."""

    def times(self, row_sums: Float[Tensor, "head token"]) -> "TokenGains":
        """With what the rows of attention sum to, which belongs to the token that is written too."""
        return TokenGains(self.before * row_sums.T[..., None].to(self.before), self.after)

    def of(self, keep: Tensor, dtype: torch.dtype) -> "TokenGains":
        """Those of the tokens that count."""
        after = None if self.after is None else self.after[keep].to(dtype)
        return TokenGains(self.before[keep].to(dtype), after)
