"""Errors about changing a model."""

from dataclasses import dataclass

from oversmooth.errors.base import OversmoothError


@dataclass(eq=False)
class TooManyValueDirections(OversmoothError):
    n_kv: int
    d_head: int
    d_model: int

    @property
    def problem(self) -> str:
        return (
            f"{self.n_kv} value heads of size {self.d_head} make {self.n_kv * self.d_head} directions of values, more "
            f"than the width {self.d_model}: heads cannot own separate parts of one eigenbasis, so no exact form of "
            "H = V diag(lambda) V^-1 exists for this layer."
        )

    @property
    def next_step(self) -> str:
        return (
            "Leave it out with layers=..., or change its attention instead, for example osm.apply(model, 'attnscale')."
        )


@dataclass(eq=False)
class IllConditioned(OversmoothError):
    bound: float
    limit: float

    @property
    def problem(self) -> str:
        return (
            f"A general eigenbasis has become ill-conditioned: norm(V) norm(V^-1) is {self.bound:.3g}, above "
            f"{self.limit:g}, where the inverse loses its digits."
        )

    @property
    def next_step(self) -> str:
        return "Keep it bounded with max_condition=100, use basis='orthogonal', or lower the learning rate of V."


@dataclass(eq=False)
class CannotControl(OversmoothError):
    """An intervention that has no exact form for this model."""

    intervention: str
    where: str
    reason: str
    alternative: str

    @property
    def problem(self) -> str:
        return f"{self.intervention} cannot be applied to {self.where}: {self.reason}."

    @property
    def next_step(self) -> str:
        return self.alternative
