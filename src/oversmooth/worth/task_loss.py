"""`task_loss`: how well a model does what it was trained for, on given data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from oversmooth.data.batches import Batch, prepare, run_checked
from oversmooth.data.labels import class_number
from oversmooth.data.reading import Reading, ReadingOptions
from oversmooth.errors import NoData, WrongBatch
from oversmooth.measurement.passes import LiveModel, Seen, open_live
from oversmooth.models.inputs import TEXT
from oversmooth.models.live import quiet_eval
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Target
from oversmooth.models.task_heads import with_head
from oversmooth.results import Progress, no_progress
from oversmooth.results.worth import TaskLoss
from oversmooth.worth.judging import CrossEntropy, Judge, Similarities

MASKED_SHARE = 0.15


def task_loss(
    target: Target,
    data: Iterable[Batch] | str | None = None,
    *,
    task: str | None = None,
    original: Target | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = no_progress,
    **reading: Unpack[ReadingOptions],
) -> TaskLoss:
    """The loss of a model: `causal language`, `masked language` (seeded masks), `classification`, or `similarity`.

    Without `task` it is the one that the checkpoint has a head for. Models without a head are embedding models: their loss
    is 1 minus the rank correlation of pairwise similarities with those of `original`, which they then need. Classes come
    from folders, from the column `label` of a table, or from `labels` in batches. Data and other keywords are those of
    `measure`.
    """
    how = Reading(**reading)
    given = data if data is None or isinstance(data, str) else list(data)
    judge, seen, live, task = _judged(target, given, task, how, device, trust_remote_code, progress)
    reference = None
    if task == "similarity":
        if original is None:
            advice = "Give the model to compare with: original=..., --original TARGET; or a checkpoint with a head."
            raise WrongBatch("a model with a head, or an original to compare with", "an embedding model alone", advice)
        reference, *_ = _judged(original, given, task, how, device, trust_remote_code, progress)
    found = judge.result(reference)
    dtype = f"model {live.runs_in()}"
    return TaskLoss(
        provenance=provenance_of(live.source, live.stacks, live.hashed(), compute_dtype=dtype, seed=how.seed),
        data=seen.facts(live.data),
        task=task,
        found=found,
        counted=judge.counted,
    )


def _judged(
    target: Target, given: Any, task: str | None, how: Reading, device: str | None, trust: bool, progress: Progress
) -> tuple[Judge, Seen, LiveModel, str]:
    live, task = open_judged(target, given, task, "loss", how, device=device, trust_remote_code=trust)
    judge, seen = new_judge(task, live), Seen()
    with quiet_eval(live.model):
        for asked in questions(live, task, how, seen):
            judge.add(run_checked(live.model, live.config, asked.inputs), asked.inputs, asked.answers)
            progress(seen.sequences, how.max_samples or 0)
    return judge, seen, live, task


def open_judged(
    target: Target,
    batches: Any,
    task: str | None,
    verb: str,
    how: Reading,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[LiveModel, str]:
    """The model with the head of its task, and its data."""
    source, task = with_head(open_source(target), task, verb, trust_remote_code=trust_remote_code)
    live = open_live(source, batches, verb, reading=how, device=device, trust_remote_code=trust_remote_code)
    return live, task


def new_judge(task: str, live: LiveModel) -> Judge:
    if task == "similarity":
        return Similarities(takes_first=any(stack.prefix_tokens for stack in live.stacks))
    return CrossEntropy(is_language=task != "classification", shift=int(task == "causal language"))


@dataclass(frozen=True, slots=True)
class Question:
    """What enters the model, and what it should answer."""

    inputs: dict[str, Any]
    answers: Tensor | None


def questions(live: LiveModel, task: str, how: Reading, seen: Seen) -> Iterable[Question]:
    """Every batch with its answers; counts in `seen` what was given out."""
    generator = torch.Generator().manual_seed(how.seed)
    for batch in live.data.batches:
        remaining = None if how.max_samples is None else how.max_samples - seen.sequences
        if remaining == 0:
            break
        inputs = prepare(live.model, live.config, batch, remaining)
        rows = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
        answers = _answers(live, task, batch, inputs, rows)
        if task == "masked language":
            inputs, answers = _masked(live, inputs, generator)
        _count(seen, inputs, rows)
        yield Question(inputs, answers)
    if not seen.sequences:
        raise NoData(live.data.description, seen.skipped)


def _count(seen: Seen, inputs: Mapping[str, Any], rows: int) -> None:
    """What went through the model; into how many tokens it cuts pictures is seen only where it is measured."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs[TEXT]) if TEXT in inputs else None)
    seen.add(inputs, torch.ones(rows, 2, dtype=torch.bool) if mask is None else mask.bool())
    if mask is None:
        seen.tokens = 0


def _answers(live: LiveModel, task: str, batch: Batch, inputs: Mapping[str, Any], rows: int) -> Tensor | None:
    if task == "causal language":
        if TEXT not in inputs:
            raise WrongBatch("token ids, to predict the next one", f"the inputs {', '.join(inputs)}", "Give texts.")
        return _known_only(inputs[TEXT].clone(), inputs)
    if task != "classification":
        return None
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is not None:
        return torch.as_tensor(labels)[:rows]
    noted = live.data.labels[-rows:]  # those of this batch came last
    if not noted or None in noted:
        advice = "Give a folder per class, a table with a column `label`, or batches with a tensor `labels`."
        raise WrongBatch("labels, for the loss of a classifier", "data without any", advice)
    return torch.tensor([class_number(label, live.config) for label in noted])


def _known_only(ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Nothing is asked about padding."""
    mask = inputs.get("attention_mask")
    return ids if mask is None else ids.masked_fill(~mask.bool(), -100)


def _masked(live: LiveModel, inputs: dict[str, Any], generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    """15% of the ordinary tokens replaced by the mask token, drawn from the seed; at least one of each sequence."""
    tokenizer = next((part.texts.tokenizer for part in live.data.parts if part.texts is not None), None)
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
