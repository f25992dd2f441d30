"""How far a survey is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyCounts:
    """What became of the targets of a list, so far or in the end."""

    models: int
    """Targets of the list."""
    earlier: int = 0
    """Of them, those that the table had before."""
    read: int = 0
    copied: int = 0
    """Targets with the files of another one, whose rows they share."""
    refused: int = 0
    failed: int = 0
    requests: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.earlier + self.read + self.copied + self.refused + self.failed

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; `None` before the first model."""
        fresh = self.done - self.earlier
        return (self.models - self.done) * self.seconds / fresh if fresh else None
