"""Whether a survey kept to what a hub asked for, judged request by request from what the hub saw and what a witness says.

Several workers cannot hold back everything: a request that was permitted before a 429 was told to all of them may be on its
way. That, and nothing else, is excused, and only by its witness (`tests/witness`); a request without one is never.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.witness import sitecustomize as witness

NUMBERED = 1e-6
"""Seconds that the n-th refusal asks for beyond the others, n times: the pause that a worker tells names its refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """What the header of a witness says."""

    run: str
    permit: str | None
    asked: float
    """When the permit was asked for."""

    @classmethod
    def of(cls, header: str | None) -> "Sender | None":
        if header is None:
            return None
        run, permit, *asked = header.split()
        return cls(run=run, permit=permit if asked else None, asked=float(asked[0]) if asked else 0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    sender: Sender | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A 429."""

    number: int
    at: float
    """Before it was sent."""
    seconds: float
    """`Retry-After`."""
    run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    early: tuple[tuple[Arrival, Refusal], ...]
    """Requests within the time of a refusal that nothing excuses, with that refusal."""
    without_permit: int
    """Requests with no permit, with one that was used before, or without a witness."""
    unheard: Mapping[str, int]
    """Refusals that nobody told to the others, by run."""
    excused: int
    """Requests within the time of a refusal that had been permitted before it was told."""
    latest: float
    """Seconds between a refusal and the last request that was excused."""


def judged(
    arrivals: Iterable[Arrival],
    refusals: Collection[Refusal],
    told: Mapping[int, float] | None = None,
    killed: Collection[str] = (),
) -> Judgement:
    """`told`: when the pause of a refusal had been told, by its number. A refusal that a killed run took with it before it
    was told excuses that run, and no other."""
    told = told or {}
    early: list[tuple[Arrival, Refusal]] = []
    lags: list[float] = []
    seen: set[str | None] = set()
    without = 0
    for arrival in arrivals:
        sender = arrival.sender
        permit = sender.permit if sender else None
        without += permit is None or permit in seen
        seen.add(permit)
        current = [one for one in refusals if one.at < arrival.at < one.at + one.seconds]
        unexcused = [one for one in current if not _is_excused(sender, one, told, killed)]
        if unexcused:
            early.append((arrival, unexcused[0]))
        elif current:
            lags.append(max(arrival.at - one.at for one in current))
    unheard = [str(one.run) for one in refusals if one.number not in told]
    return Judgement(
        early=tuple(early),
        without_permit=without,
        unheard={run: unheard.count(run) for run in unheard},
        excused=len(lags),
        latest=max(lags, default=0.0),
    )


def _is_excused(sender: Sender | None, refusal: Refusal, told: Mapping[int, float], killed: Collection[str]) -> bool:
    if sender is None:
        return False
    if refusal.number in told:
        return sender.asked < told[refusal.number]
    return sender.run == refusal.run and sender.run in killed


# --- the witness ----------------------------------------------------------------------------------------------------


def witnessed(
    environment: Mapping[str, str], log: Path, run: str, *, sabotage: str = "", deadly: str = ""
) -> dict[str, str]:
    """The environment of a process whose requests have a witness; `sabotage` and `deadly` make it misbehave."""
    paths = os.pathsep.join([str(Path(witness.__file__).parent), environment["PYTHONPATH"]])
    said = {witness.LOG: str(log), witness.RUN: run, witness.SABOTAGE: sabotage, witness.DEADLY: deadly}
    return {**environment, "PYTHONPATH": paths, **said}


def pauses_in(log: Path, seconds: float) -> dict[int, float]:
    """When each refusal had been told, by its number, from the log of the witness; `seconds` is what each asks for."""
    return dict(_pauses(log.read_text().splitlines() if log.exists() else [], seconds))


def _pauses(lines: Iterable[str], seconds: float) -> Iterator[tuple[int, float]]:
    for line in lines:
        _, asked, at = line.split()
        yield round((float(asked) - seconds) / NUMBERED), float(at)
