"""`task_loss`: the loss of a model on the task that it was trained for."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.data.batches import Batch, prepare, run_checked
from oversmooth.data.held import Data, reusable
from oversmooth.data.load import LoadedData, RunKeywords, opened
from oversmooth.data.options import DataOptions
from oversmooth.data.raw import class_number
from oversmooth.errors import NoData, WrongBatch
from oversmooth.measurement.passes import Processed, open_live
from oversmooth.measurement.statistics import Running, rank_correlation
from oversmooth.models.inputs import TEXT
from oversmooth.models.live import head_for, quiet_eval
from oversmooth.models.open import LiveModel, LoadOptions, OpenedModel, Target, open_model
from oversmooth.results import Progress, guarded, no_progress
from oversmooth.results.changes import Loss, TaskLoss

# --- from outputs of a model to its loss, batch by batch: cross-entropies ---


@runtime_checkable
class LossMeter(Protocol):
    """Adds up what one model gave."""

    counted: int

    def add(self, output: Any, inputs: Mapping[str, Any], answers: Tensor | None) -> None:
        """The output of one batch; `answers` are its labels, -100 where nothing is asked."""

    def result(self, original: "LossMeter | None") -> Loss:
        """The loss over all batches; of similarities beside those of the original."""


def logits_of(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        found_instead = f"a {type(output).__name__} without them"
        raise WrongBatch("a model that returns logits", found_instead, "Load it with its head.")
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
        flat = logits.flatten(0, -2), answers.flatten()
        losses = torch.nn.functional.cross_entropy(*flat, reduction="none", ignore_index=-100)
        asked = answers != -100
        rows = (len(answers), -1)
        counts = asked.reshape(rows).sum(1)
        sums = losses.double().reshape(rows).sum(1)
        self.total += sums.sum().item()
        self.counted += int(counts.sum())
        self.correct += int(((logits.argmax(-1) == answers) & asked).sum())
        self.by_sequence.add((sums / counts.clamp(min=1))[counts > 0].cpu())

    def result(self, original: LossMeter | None) -> Loss:
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

    def result(self, original: LossMeter | None) -> Loss:
        assert isinstance(original, Similarities), "similarities are compared with those of the original"
        own, theirs = self.pairs(), original.pairs()
        self.counted = len(own)
        if self.counted < 3:
            raise WrongBatch("at least 3 inputs, to compare similarities", f"{self.counted} pairs", "Give more data.")
        return Loss(loss=1 - (rank_correlation(own.tolist(), theirs.tolist()) or 0.0), standard_error=None)


# --- `task_loss`: how well a model does what it was trained for, on given data ---

MASKED_SHARE = 0.15


def task_loss(
    target: Target,
    data: Data = None,
    *,
    task: str | None = None,
    original: Target | None = None,
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> TaskLoss:
    """The loss of a model: `causal-lm`, `masked-lm` (seeded masks), `classification`, or `similarity`.

    Without `task` it is the one that the checkpoint has a head for. Models without a head are embedding models: their loss
    is 1 minus the rank correlation of pairwise similarities with those of `original`, which they then need. Classes come
    from folders, from the column `label` of a table, or from `labels` in batches. Data and other keywords are those of
    `measure`.
    """
    given = reusable(data)
    model, how = opened(target, options, given)
    with model.alone:
        judge, seen, live, loaded, task = _judged(model, given, task, how, progress)
    reference = None
    if task == "similarity":
        if original is None:
            advice = "Give the model to compare with: original=..., --original TARGET; or a checkpoint with a head."
            raise WrongBatch("a model with a head, or an original to compare with", "an embedding model alone", advice)
        first = _opened_alike(original, model.load)
        with first.alone:
            reference, *_ = _judged(first, given, task, how, progress)
    found = judge.result(reference)  # first: it counts
    provenance = live.provenance(seed=how.seed)
    return TaskLoss(provenance=provenance, data=seen.facts(loaded), task=task, found=found, counted=judge.counted)


def _opened_alike(target: Target, load: LoadOptions) -> OpenedModel:
    """Another target, run as the first one is."""
    if isinstance(target, OpenedModel):
        return open_model(target)
    trusted = load.trust_remote_code
    return open_model(target, device=load.device, dtype=load.dtype, offload=load.offload, trust_remote_code=trusted)


def _judged(
    model: OpenedModel, given: Any, task: str | None, how: DataOptions, progress: Progress
) -> tuple[LossMeter, Processed, LiveModel, LoadedData, str]:
    live, loaded, task = open_judged(model, given, task, "loss", how)
    judge, seen = new_judge(task, live), Processed()
    with quiet_eval(live.model):
        for asked in questions(live, loaded, task, how, seen):
            answer(live, judge, asked)
            guarded(progress)(seen.sequences, how.max_samples or 0)
    return judge, seen, live, loaded, task


def open_judged(
    model: OpenedModel, batches: Any, task: str | None, verb: str, how: DataOptions
) -> tuple[LiveModel, LoadedData, str]:
    """The model with the head of its task, its data, and the task."""
    task = head_for(model.source, task)
    return *open_live(model, batches, verb, how, task), task


def new_judge(task: str, live: LiveModel) -> LossMeter:
    if task == "similarity":
        return Similarities(takes_first=any(stack.prefix_tokens for stack in live.stacks))
    return CrossEntropy(is_language=task != "classification", shift=int(task == "causal-lm"))


@dataclass(frozen=True, slots=True)
class Question:
    """What enters the model, and what it should answer."""

    inputs: dict[str, Any]
    answers: Tensor | None


def answer(live: LiveModel, judge: LossMeter, asked: Question) -> None:
    """Runs the model on a question and tells the judge what it gave."""
    judge.add(run_checked(live.model, live.config, asked.inputs), asked.inputs, asked.answers)


def questions(live: LiveModel, data: LoadedData, task: str, how: DataOptions, seen: Processed) -> Iterable[Question]:
    """Every batch with its answers; counts in `seen` what was given out."""
    generator = torch.Generator().manual_seed(how.seed)
    for batch in data.batches:
        remaining = None if how.max_samples is None else how.max_samples - seen.sequences
        if remaining == 0:
            break
        inputs = prepare(live.model, live.config, batch, remaining)
        rows = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
        answers = _answers(live, data, task, batch, inputs, rows)
        if task == "masked-lm":
            inputs, answers = _masked(data, inputs, generator)
        # Into how many tokens the model cuts pictures is seen only where it is measured.
        mask = inputs.get("attention_mask", torch.ones_like(inputs[TEXT]) if TEXT in inputs else None)
        seen.add(inputs, torch.ones(rows, 2, dtype=torch.bool) if mask is None else mask.bool())
        if mask is None:
            seen.tokens = 0
        yield Question(inputs, answers)
    if not seen.sequences:
        raise NoData(data.description, seen.skipped)


def _answers(
    live: LiveModel, data: LoadedData, task: str, batch: Batch, inputs: Mapping[str, Any], rows: int
) -> Tensor | None:
    if task == "causal-lm":
        if TEXT not in inputs:
            raise WrongBatch("token ids, to predict the next one", f"the inputs {', '.join(inputs)}", "Give texts.")
        return _known_only(inputs[TEXT].clone(), inputs)
    if task != "classification":
        return None
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is not None:
        return torch.as_tensor(labels)[:rows]
    noted = data.labels[-rows:]  # those of this batch came last
    if not noted or None in noted:
        advice = "Give a folder per class, a table with a column `label`, or batches with a tensor `labels`."
        raise WrongBatch("labels, for the loss of a classifier", "data without any", advice)
    return torch.tensor([class_number(label, live.config) for label in noted])


def _known_only(ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Nothing is asked about padding."""
    mask = inputs.get("attention_mask")
    return ids if mask is None else ids.masked_fill(~mask.bool(), -100)


def _masked(data: LoadedData, inputs: dict[str, Any], generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    """15% of the ordinary tokens replaced by the mask token, drawn from the seed; at least one of each sequence."""
    tokenizer = next((part.texts.tokenizer for part in data.parts if part.texts is not None), None)
    mask_id = getattr(tokenizer, "mask_token_id", None)
    if tokenizer is None or mask_id is None:
        advice = "Use a model with its tokenizer, and texts."
        raise WrongBatch("a tokenizer with a mask token", "none beside the model", advice)
    ids = inputs[TEXT]
    special = torch.tensor(sorted(tokenizer.all_special_ids), device=ids.device)
    ordinary = ~torch.isin(ids, special) & (_known_only(ids, inputs) != -100)
    draws = torch.rand(ids.shape, generator=generator).to(ids.device).masked_fill(~ordinary, 2.0)
    chosen = (draws < MASKED_SHARE) | ((draws == draws.amin(1, keepdim=True)) & ordinary)
    return {**inputs, TEXT: ids.masked_fill(chosen, mask_id)}, ids.masked_fill(~chosen, -100)
