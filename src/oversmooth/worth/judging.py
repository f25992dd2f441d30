"""From outputs of a model to its loss, batch by batch: cross-entropies, or how similarities between inputs are kept."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.errors import WrongBatch
from oversmooth.measurement.evidence import Running
from oversmooth.results.worth import Loss


@runtime_checkable
class Judge(Protocol):
    """Adds up what one model gave."""

    counted: int

    def add(self, output: Any, inputs: Mapping[str, Any], answers: Tensor | None) -> None:
        """The output of one batch; `answers` are its labels, -100 where nothing is asked."""

    def result(self, original: "Judge | None") -> Loss:
        """The loss over all batches; of similarities beside those of the original."""


def logits_of(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise WrongBatch(
            "a model that returns logits", f"a {type(output).__name__} without them", "Load it with its head."
        )
    return found


@dataclass
class CrossEntropy:
    """Mean over everything that is asked, in nats."""

    is_language: bool
    shift: int
    """1 where each token predicts the next one."""
    counted: int = 0
    correct: int = 0
    total: float = 0.0
    by_sequence: Running = field(default_factory=Running)

    def add(self, output: Any, inputs: Mapping[str, Any], answers: Tensor | None) -> None:
        assert answers is not None, "cross-entropies have answers"
        logits = logits_of(output).float()
        if self.shift:
            logits, answers = logits[:, :-1], answers[:, 1:]
        answers = answers.to(logits.device)
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), answers.flatten(), reduction="none", ignore_index=-100
        ).reshape(answers.shape)
        asked = answers != -100
        rows = (len(answers), -1)
        counts = asked.reshape(rows).sum(1)
        sums = losses.double().reshape(rows).sum(1)
        self.total += sums.sum().item()
        self.counted += int(counts.sum())
        self.correct += int(((logits.argmax(-1) == answers) & asked).sum())
        self.by_sequence.add((sums / counts.clamp(min=1))[counts > 0].cpu())

    def result(self, original: Judge | None) -> Loss:
        loss = self.total / max(self.counted, 1)
        return Loss(
            loss=loss,
            standard_error=self.by_sequence.standard_error,
            perplexity=math.exp(min(loss, 700.0)) if self.is_language else None,
            accuracy=self.correct / self.counted if self.counted else None,
        )


@dataclass
class Similarities:
    """Embeddings of whole inputs; what counts is whether their pairwise cosines keep their order."""

    takes_first: bool
    """Whether the first token stands for the input (CLS of image models); otherwise the mean of its tokens does."""
    counted: int = 0
    _embeddings: list[Float[Tensor, "batch d_model"]] = field(default_factory=list)

    def add(self, output: Any, inputs: Mapping[str, Any], answers: Tensor | None) -> None:
        h = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
        if h is None:
            h = output[0]
        if h.ndim == 3:
            mask = inputs.get("attention_mask")
            weights = torch.ones(h.shape[:2], device=h.device) if mask is None else mask.to(h.device).float()
            h = h[:, 0] if self.takes_first else (h * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        self._embeddings.append(torch.nn.functional.normalize(h.float(), dim=-1).cpu())

    def pairs(self) -> Float[Tensor, " pair"]:
        u = torch.cat(self._embeddings)
        first, second = torch.triu_indices(len(u), len(u), 1)
        return (u @ u.T)[first, second].double()

    def result(self, original: Judge | None) -> Loss:
        assert isinstance(original, Similarities), "similarities are compared with those of the original"
        own, theirs = self.pairs(), original.pairs()
        self.counted = len(own)
        if self.counted < 3:
            raise WrongBatch("at least 3 inputs, to compare similarities", f"{self.counted} pairs", "Give more data.")
        return Loss(loss=1 - rank_correlation_of(own, theirs), standard_error=None)


def rank_correlation_of(a: Float[Tensor, " pair"], b: Float[Tensor, " pair"]) -> float:
    """Spearman's rank correlation; 0 where either does not vary."""
    from scipy.stats import rankdata

    x, y = (torch.tensor(rankdata(numbers.numpy())) for numbers in (a, b))
    x, y = x - x.mean(), y - y.mean()
    sizes = x.norm() * y.norm()
    return max(-1.0, min(1.0, float(x @ y / sizes))) if sizes > 0 else 0.0
