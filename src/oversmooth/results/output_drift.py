"""How far the output of one model is from that of another on the same inputs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDrift:
    """A model and its edit, compared where both end: behind the last block and the final norm."""

    sequences: int
    tokens: int
    relative_distance: float
    """`norm(Y' - Y) / norm(Y)` over all tokens: 0 where nothing changed."""
    cosine: float
    """Mean cosine between a token's features in the two models: 1 where no direction changed."""
    similarity: float | None
    """Mean cosine between the mean tokens of two different sequences in the first model; `None` for one sequence."""
    other_similarity: float | None
    """The same in the other. Near 1, a model says the same about everything."""
