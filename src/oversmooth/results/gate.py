"""Whether a model keeps within limits."""

from dataclasses import dataclass
from typing import ClassVar

from oversmooth.results.base import Row, SavedResult, fields_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A rule that does not hold, and where."""

    rule: str
    stack: str
    depth: int
    """k + 1 for what leaves block k; 0 where the rule is about the whole run."""
    value: float | None
    """What was found; `None` where there is nothing to be judged."""
    bound: float
    sub_block: str = ""
    """Which part of that block smooths most; empty where that is not known."""
    sub_block_change: float | None = None
    """By how much it changes `log(HFC/LFC)` of tokens at unit length; below 0 it smooths."""

    @property
    def words(self) -> str:
        """One sentence: what was found where, and what was allowed."""
        where = "the run" if self.depth == 0 else f"layer {self.depth - 1}"
        where = f"{self.stack} {where}" if self.stack else where
        side, _, metric = self.rule.partition("_")
        if side == "against":
            allowed, metric = (
                f"{'at most' if metric == 'cosine' else 'at least'} {self.bound:.4g}",
                f"{metric}, compared",
            )
        else:
            allowed = f"{'at most' if side == 'max' else 'at least'} {self.bound:.4g}"
        found = "has no value" if self.value is None else f"is {self.value:.4g}"
        why = ""
        if self.sub_block:
            change = (
                f" ({self.sub_block_change:+.3f} in log HFC/LFC at unit length)"
                if self.sub_block_change is not None
                else ""
            )
            why = f"; its {self.sub_block} smooths most{change}"
        return f"{where}: {metric} {found}, allowed is {allowed}{why}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GateResult(SavedResult):
    """Rules, and where they do not hold."""

    kind: ClassVar[str] = "gate"
    target: str
    rules: tuple[tuple[str, float], ...]
    """Name and number of every rule that was judged."""
    against: str | None
    """The saved analysis that was compared with."""
    breaches: tuple[Breach, ...]

    @property
    def passed(self) -> bool:
        return not self.breaches

    def rows(self) -> list[Row]:
        """One flat row per breach."""
        return [fields_of(breach) for breach in self.breaches]

    def __repr__(self) -> str:
        word = "passed" if self.passed else f"{len(self.breaches)} breaches"
        return f"<GateResult of {self.target}: {len(self.rules)} rules, {word}>"

    def _title(self) -> str:
        return f"Gate of {self.target}"
