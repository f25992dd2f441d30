"""A language recipe becomes a job."""

import logging
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import nn

from oversmooth.errors import BadValue, NotDivisible
from oversmooth.models.live import register_own_models
from oversmooth.output.whole_files import make_folder
from oversmooth.training.recipes.job import Evaluate, Job, Numbers, Rhythm
from oversmooth.training.recipes.language.budget import ClockPlan, Plan, StepPlan, triangle
from oversmooth.training.recipes.language.corpus import Corpus, CorpusSettings, prepare_corpus
from oversmooth.training.recipes.language.cramming_trainer import clock_callback, cramming_trainer
from oversmooth.training.recipes.language.documents import Progress
from oversmooth.training.recipes.language.embedded_text import PYTHON_DOCS, python_docs
from oversmooth.training.recipes.language.sequences import MaskedValidation, Reading, StepBatches, stacked
from oversmooth.training.recipes.language.settings import Data, LanguageRecipe, Watch
from oversmooth.training.recipes.runner import RunRequest
from oversmooth.training.recipes.schema import Recipe
from oversmooth.training.recipes.train import RecipeKind

CACHE = "OVERSMOOTH_CACHE"
"""Environment variable: the folder in which corpora are kept."""
SECONDS_BETWEEN_LINES = 10.0
log = logging.getLogger(__name__)


def language_job(recipe: Recipe, data: str | None, request: RunRequest) -> Job:
    """Corpus, model, schedule and judgement of one run."""
    assert isinstance(recipe, LanguageRecipe)
    settings = recipe.training
    _require_processes(recipe)
    corpus = load_corpus(recipe.data, data)
    vocabulary = int(corpus.facts["vocabulary"])
    plan = plan_of(recipe)
    held_out = recipe.data.tuning_sequences
    judged = judged_sequences(corpus, held_out)
    reading = Reading(corpus, seed=request.seed, shuffle=settings.shuffle, fraction=request.fraction, held_out=held_out)
    batches = StepBatches(
        reading, plan, steps=settings.steps, mask=settings.mask, vocabulary=vocabulary, seed=request.seed
    )
    watched = MaskedValidation(judged[: recipe.watch.validation_sequences], mask=settings.mask, vocabulary=vocabulary)
    return Job(
        recipe=recipe,
        build=partial(build_model, recipe, vocabulary),
        train=batches,
        evaluate=watched if len(watched) else None,
        collate=stacked,
        collate_evaluation=stacked,
        steps=settings.steps,
        batch=settings.batch,
        learning_rate=partial(learning_rate, recipe, plan),
        rhythm=_rhythm(recipe.watch),
        probe=[probe(judged if len(judged) else corpus.sequences("train"), recipe.watch.probe_sequences)],
        save=partial(save_model, corpus),
        decays=decays,
        final=partial(_against_frequencies, float(corpus.facts["unigram_entropy"])),
        callbacks=[clock_callback(plan)] if isinstance(plan, ClockPlan) else [],
        state=plan if isinstance(plan, ClockPlan) else None,
        trainer_base=partial(cramming_trainer, batches, plan, recipe.hardware.micro_batch),
        trainer_arguments={
            "gradient_accumulation_steps": 1,  # the loader gives whole batches; the trainer takes them apart
            "prediction_loss_only": True,
            "per_device_eval_batch_size": recipe.hardware.micro_batch or 32,
        },
        facts={"source": data or recipe.data.source}
        | {name: corpus.facts[name] for name in ("hash", "vocabulary", "sequences", "unigram_entropy", "skipped")},
    )


def _require_processes(recipe: LanguageRecipe) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = recipe.training
    smallest = settings.ramp_quantum if settings.ramp else settings.batch
    if smallest % processes:
        key = "training.ramp_quantum" if settings.ramp else "training.batch"
        raise NotDivisible(key, smallest, "the number of processes", processes)


# --- data -----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where corpora are kept: `$OVERSMOOTH_CACHE`, or the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get(CACHE, home / "oversmooth")).expanduser() / "corpora"


def load_corpus(data: Data, given: str | None) -> Corpus:
    """The corpus of a recipe, or of `--data`; what was passed over is said once."""
    cache, source = cache_folder(), given or data.source
    if source == PYTHON_DOCS:
        make_folder(cache)
        source = str(python_docs(cache))
    settings = CorpusSettings(
        source=source,
        vocab_size=data.vocab_size,
        length=data.length,
        trash_cutoff=data.trash_cutoff or None,
        order=data.order,
        english_keyboard=data.english_keyboard,
        validation_fraction=data.validation_fraction,
        max_documents=data.max_documents or None,
        max_sequences=data.max_sequences or None,
        tokenizer_documents=data.tokenizer_documents or None,
    )
    corpus = prepare_corpus(settings, cache, told_on_stderr())
    if skipped := corpus.facts["skipped"]:
        words = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        first = "\n  ".join(corpus.facts["named"][:10])
        log.warning("Of %d records of %s passed over: %s.\n  %s", corpus.facts["records"], source, words, first)
    return corpus


def told_on_stderr() -> Any:
    """A report of progress as a line every few seconds."""
    last = [time.monotonic()]

    def report(stage: str, progress: Progress) -> None:
        if time.monotonic() - last[0] >= SECONDS_BETWEEN_LINES:
            last[0] = time.monotonic()
            part = f"{progress.done / progress.total:.0%} of {progress.total:,} bytes" if progress.total else "..."
            sys.stderr.write(f"{stage}: {part}\n")

    return report


def judged_sequences(corpus: Corpus, tuning: int) -> NDArray[numpy.uint16]:
    """(sequence, token) that a run is judged on: held-out documents, or so many of the last training sequences."""
    train = corpus.sequences("train")
    if tuning >= len(train):
        raise BadValue("data.tuning_sequences", tuning, f"below {len(train)}, the training sequences that there are")
    return train[len(train) - tuning :] if tuning else corpus.sequences("validation")


def probe(sequences: NDArray[numpy.uint16], count: int) -> dict[str, torch.Tensor]:
    """The first of these sequences (sequence, token), as they are."""
    return {"input_ids": torch.from_numpy(sequences[:count].astype("int64"))}


# --- model and schedule ---------------------------------------------------------------------------------------------


def build_model(recipe: LanguageRecipe, vocabulary: int) -> nn.Module:
    """A fresh model; seed torch before."""
    register_own_models()
    from oversmooth.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM

    return CrammedBertForMaskedLM(CrammedBertConfig(**recipe.model_arguments(vocabulary)))


def save_model(corpus: Corpus, model: nn.Module, folder: Path) -> None:
    """Writes what AutoModelForMaskedLM and AutoTokenizer load."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)  # type: ignore[operator]
    shutil.copytree(corpus.tokenizer, folder, dirs_exist_ok=True)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Matrices and embeddings; not norms and scales, nor the tangent of a basis, which decay would turn back."""
    return parameter.ndim > 1 and not name.endswith(".tangent")


def plan_of(recipe: LanguageRecipe) -> Plan:
    settings = recipe.training
    growth: dict[str, Any] = {"batch": settings.batch, "ramp": settings.ramp, "quantum": settings.ramp_quantum}
    if settings.budget_hours:
        return ClockPlan(settings.budget_hours, **growth)
    return StepPlan(settings.steps, **growth)


def learning_rate(recipe: LanguageRecipe, plan: Plan, step: int, steps: int) -> float:
    settings = recipe.training
    return triangle(
        plan.share(step),
        peak=recipe.optimizer.learning_rate,
        start_share=settings.start_share,
        peak_at=settings.peak_at,
    )


def _rhythm(watch: Watch) -> Rhythm:
    return Rhythm(
        log=watch.log_every, monitor=watch.monitor_every, evaluate=watch.evaluate_every, save=watch.save_every
    )


def _against_frequencies(entropy: float, evaluate: Evaluate) -> Numbers:
    """The loss of guessing by frequency alone, to be seen beside the loss of the model."""
    return {"unigram_entropy": entropy}


KIND = RecipeKind(recipe=LanguageRecipe, job=language_job)
