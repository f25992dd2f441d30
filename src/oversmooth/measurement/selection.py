"""Which numbers `measure` was asked for: metrics of states, of steps between them, and of attention, by one list of names."""

from collections.abc import Iterable
from dataclasses import dataclass

from oversmooth.errors import GivenTwice, UnknownName
from oversmooth.measurement.attention_health import ATTENTION_METRICS
from oversmooth.measurement.metric import METRICS, Metric
from oversmooth.measurement.metrics import Choice, all_metrics, lookup
from oversmooth.measurement.steps import STEP_METRICS, StepMetric

GROUPS = {"steps": tuple(STEP_METRICS), "attention": tuple(ATTENTION_METRICS)}
"""Names that stand for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was chosen, in the order in which it was asked for within each kind."""

    states: tuple[Metric, ...]
    steps: tuple[StepMetric, ...]
    attention: tuple[str, ...]

    @property
    def has_spans(self) -> bool:
        """Distances between any two depths come with either distance."""
        return any(metric.name in ("angular_distance", "influence") for metric in self.steps)

    def definitions(self) -> tuple[tuple[str, str], ...]:
        states = tuple((metric.name, metric.definition) for metric in self.states)
        steps = tuple((metric.name, metric.definition) for metric in self.steps)
        return states + steps + tuple((name, ATTENTION_METRICS[name]) for name in self.attention)


def known_metrics() -> tuple[str, ...]:
    return (*all_metrics(), *STEP_METRICS, *ATTENTION_METRICS)


def select(choices: Choice | Iterable[Choice]) -> Selection:
    """The metrics asked for by name, by the name of a group, or given as functions; `all` is every one without a grid."""
    if isinstance(choices, str) or callable(choices):
        choices = (choices,)
    named: list[Choice] = []
    for choice in choices:
        if choice == "all":
            named += [name for name in known_metrics() if name not in METRICS or not METRICS[name].images_only]
        elif isinstance(choice, str) and choice in GROUPS:
            named += GROUPS[choice]
        else:
            named.append(choice)
    if twice := [name for name in named if isinstance(name, str) and named.count(name) > 1]:
        raise GivenTwice("The metric", str(twice[0]))
    for name in named:
        if isinstance(name, str) and name not in known_metrics():
            raise UnknownName("metric", name, (*known_metrics(), *GROUPS, "all"))
    return Selection(
        states=lookup(name for name in named if name not in STEP_METRICS and name not in ATTENTION_METRICS),
        steps=tuple(STEP_METRICS[name] for name in named if isinstance(name, str) and name in STEP_METRICS),
        attention=tuple(name for name in named if isinstance(name, str) and name in ATTENTION_METRICS),
    )
