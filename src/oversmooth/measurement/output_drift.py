"""`output_drift`: the same inputs through a model and its edit, and what differs where both end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import Batch, keep_mask
from oversmooth.data.reading import Reading, ReadingOptions
from oversmooth.errors import WrongBatch
from oversmooth.measurement.moments import measurable
from oversmooth.measurement.passes import Seen, open_live, pass_through
from oversmooth.models.hooks.places import Place, on_stream
from oversmooth.models.source import Stack, Target
from oversmooth.results import no_progress
from oversmooth.results.output_drift import OutputDrift

SEQUENCES = 32
"""Sequences that are compared at most: the features of all of them are held."""

States = Sequence[Float[Tensor, "_ d_model"]]


@dataclass
class LastStates:
    """Keeps the features of the first stack at the last place that the stream passes."""

    model: nn.Module
    stack: Stack
    seen: Seen = field(default_factory=Seen)
    found: list[Float[Tensor, "_ d_model"]] = field(default_factory=list)
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _last: Float[Tensor, "batch token d_model"] | None = None

    def wants(self, name: str, stack: Stack) -> bool:
        return stack.label == self.stack.label and on_stream(name, stack.arch.residual)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        self._inputs, self._last = inputs, None

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        self._last = h

    def finish(self) -> Bool[Tensor, "batch token"]:
        assert self._last is not None, "a stack has at least one place"
        keep = keep_mask(self.model, self._inputs, self.stack, self._last, 0)
        for sequence in measurable(keep).nonzero()[:, 0].tolist():
            self.found.append(self._last[sequence, keep[sequence]].float().cpu())
        return keep


def output_drift(
    target: Target,
    other: Target,
    data: Iterable[Batch] | str | None = None,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    **reading: Unpack[ReadingOptions],
) -> OutputDrift:
    """How far the output of `other` is from that of `target`, and how alike different sequences are in each.

    Both have to take the same inputs and to be of the same width, as a model and its edit are.
    """
    given = data if data is None or isinstance(data, str) else list(data)
    how = Reading(**reading)
    limit = min(how.max_samples or SEQUENCES, SEQUENCES)
    options: dict[str, Any] = {"reading": how, "device": device, "trust_remote_code": trust_remote_code}
    first, second = (_last_states(each, given, limit, options) for each in (target, other))
    if [state.shape for state in first] != [state.shape for state in second]:
        raise WrongBatch("two models that make features of one shape from the same inputs", "others", "Give an edit.")
    return compared(first, second)


def _last_states(target: Target, data: Any, limit: int, options: Mapping[str, Any]) -> States:
    live = open_live(target, data, "compare", **options)
    observer = LastStates(live.model, live.stacks[0])
    pass_through(live, observer, limit, no_progress)
    return observer.found


def compared(first: States, second: States) -> OutputDrift:
    """The same from the features of both."""
    y, changed = torch.cat(list(first)).double(), torch.cat(list(second)).double()
    return OutputDrift(
        sequences=len(first),
        tokens=len(y),
        relative_distance=((changed - y).norm() / y.norm()).item(),
        cosine=F.cosine_similarity(y, changed, dim=1).mean().item(),
        similarity=between_sequences(first),
        other_similarity=between_sequences(second),
    )


def between_sequences(states: States) -> float | None:
    """Mean cosine between the mean tokens of different sequences; `None` where there is only one."""
    if len(states) < 2:
        return None
    means = F.normalize(torch.stack([state.double().mean(0) for state in states]), dim=1)
    count = len(means)
    return ((means.sum(0).square().sum().item() - count) / (count * (count - 1))) if count > 1 else None
