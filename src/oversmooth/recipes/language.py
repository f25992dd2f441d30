"""The recipe and the training job of masked language modelling."""

import json
import logging
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import nn

from oversmooth.environment.files import cache_folder, make_folder, write_text_whole
from oversmooth.errors import BadValue, UnreadableData
from oversmooth.models.live import register_own_models
from oversmooth.recipes.corpus import Corpus, CorpusSettings, prepare_corpus
from oversmooth.recipes.cramming import (
    ClockPlan,
    MaskedValidation,
    Plan,
    StepBatches,
    StepPlan,
    TrainingSequences,
    clock_callback,
    cramming_trainer,
    stacked,
    triangle,
)
from oversmooth.recipes.recipe import (
    Count,
    Depth,
    Intervals,
    Job,
    Recipe,
    RecipeSection,
    Share,
    Text,
    Width,
    require_possible,
)
from oversmooth.recipes.train import RecipeKind, RunRequest, process_count
from oversmooth.results import Progress

Positive = Annotated[float, Field(gt=0)]


class LanguageData(RecipeSection):
    """Where the text comes from when `--data` does not say it, and how it becomes sequences."""

    source: Text
    """`python-docs` (the documentation inside the running Python), a file, a folder, or an id on the hub."""
    vocab_size: Annotated[int, Field(ge=64, le=65536)] = 32768
    length: Annotated[int, Field(ge=8, le=65_536)] = 128
    trash_cutoff: Annotated[float, Field(ge=0)] = 0.25
    """Documents with more tokens per character are dropped; 0 keeps all."""
    order: Literal["sentence-length", "as-read"] = "sentence-length"
    english_keyboard: bool = True
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Share of documents that are never trained on and that every run is judged on."""
    tuning_sequences: Annotated[int, Field(ge=0)] = 0
    """So many training sequences, the last that were read, are left out of training and judged instead of those documents:
    for choices, such as that of a learning rate."""
    max_documents: Annotated[int, Field(ge=0)] = 0
    max_sequences: Annotated[int, Field(ge=0)] = 0
    tokenizer_documents: Annotated[int, Field(ge=0)] = 0
    """Limits; 0: all."""


class LanguageModel(RecipeSection):
    """A crammed BERT."""

    layers: Depth
    width: Width
    heads: Count
    feed_forward: Count
    """Rows of the gated layer, both halves together."""
    dropout: Share = 0.0
    initial_deviation: Positive = 0.02
    norm_epsilon: Positive = 1e-12

    @model_validator(mode="after")
    def _sizes_divide(self) -> "LanguageModel":
        if self.width % self.heads:
            raise BadValue("model.width", self.width, f"divisible by model.heads ({self.heads})")
        if self.feed_forward % 2:
            raise BadValue("model.feed_forward", self.feed_forward, "even, because its gate takes one half")
        require_possible(self.layers, self.width, self.feed_forward)
        return self


class LanguageTraining(RecipeSection):
    """The budget, and everything that follows it."""

    budget_hours: Annotated[float, Field(ge=0)] = 0.0
    """Of wall clock; the run is then not repeatable. 0: the budget is `steps`."""
    steps: Count
    """Optimizer steps; with `budget_hours`, a limit that should never be reached."""
    batch: Count
    """Sequences of one optimizer step once the ramp is over, over all devices."""
    ramp: Share = 0.0
    """Share of the budget over which the batch grows linearly; 0: it has its size from the start."""
    ramp_quantum: Count = 1
    """The batch grows by so many sequences at a time."""
    peak_at: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of the budget at which the rate is highest."""
    start_share: Share = 0.25
    """The rate at the start, as a share of the highest."""
    mask: Annotated[float, Field(gt=0, lt=1)] = 0.25
    shuffle: bool = False
    """Another order in every epoch; otherwise that of the corpus, which may be a curriculum."""

    @model_validator(mode="after")
    def _quantum_divides(self) -> "LanguageTraining":
        if self.ramp and self.batch % self.ramp_quantum:
            raise BadValue("training.batch", self.batch, f"divisible by training.ramp_quantum ({self.ramp_quantum})")
        return self


class LanguageWatch(RecipeSection):
    """How often things are written, in optimizer steps."""

    log_every: Count = 50
    monitor_every: Count = 500
    evaluate_every: Count = 500
    save_every: Count = 500
    validation_sequences: Count = 1024
    probe_sequences: Count = 16
    """Held-out sequences on which smoothing is measured."""

    @property
    def intervals(self) -> Intervals:
        every = {"log": self.log_every, "monitor": self.monitor_every}
        return Intervals(**every, evaluate=self.evaluate_every, save=self.save_every)


class LanguageRecipe(Recipe):
    """A run of masked language modelling."""

    kind: Literal["language"]
    data: LanguageData
    model: LanguageModel
    training: LanguageTraining
    watch: LanguageWatch = LanguageWatch()

    def model_arguments(self, vocabulary: int) -> dict[str, Any]:
        """Keyword arguments of `CrammedBertConfig`."""
        return {
            "vocab_size": vocabulary,
            "hidden_size": self.model.width,
            "num_hidden_layers": self.model.layers,
            "num_attention_heads": self.model.heads,
            "intermediate_size": self.model.feed_forward,
            "max_position_embeddings": self.data.length,
            "layer_norm_eps": self.model.norm_epsilon,
            "initializer_range": self.model.initial_deviation,
            "hidden_dropout_prob": self.model.dropout,
        }


# --- real text on every machine: the language reference that Python carries inside itself for `help()` ---

PYTHON_DOCS = "python-docs"
DOCUMENT_CHARACTERS = 2000


def python_docs(folder: Path) -> Path:
    """Writes the topics of this Python's `help()`, about half a million characters of prose, as a .jsonl file.

    Whole paragraphs, about 2000 characters to a document. The text differs between versions of Python; the hash of the
    corpus says which one it was.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        advice = "a Python without its own documentation; give a text with --data"
        raise UnreadableData(PYTHON_DOCS, "the module pydoc_data of the standard library", advice) from error
    lines = []
    for name in sorted(topics):
        held: list[str] = []
        for paragraph in topics[name].split("\n\n"):
            held.append(" ".join(paragraph.split()))
            if sum(map(len, held)) >= DOCUMENT_CHARACTERS:
                lines.append(json.dumps({"text": "\n".join(held)}))
                held = []
        lines += [json.dumps({"text": "\n".join(held)})] if held else []
    path = folder / "python-docs.jsonl"
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text_whole(path, text)
    return path


# --- A language recipe becomes a job ---

SECONDS_BETWEEN_LINES = 10.0
log = logging.getLogger(__name__)


def language_job(recipe: Recipe, data: str | None, request: RunRequest) -> Job:
    """Corpus, model, schedule and judgement of one run."""
    assert isinstance(recipe, LanguageRecipe)
    _require_processes(recipe)
    settings, corpus = recipe.training, load_corpus(recipe.data, data)
    vocabulary = int(corpus.facts["vocabulary"])
    plan, held_out = plan_of(recipe), recipe.data.tuning_sequences
    judged = judged_sequences(corpus, held_out)
    reading = TrainingSequences(
        corpus, seed=request.seed, shuffle=settings.shuffle, fraction=request.fraction, held_out=held_out
    )
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
        rhythm=recipe.watch.intervals,
        probe=[probe(judged if len(judged) else corpus.sequences("train"), recipe.watch.probe_sequences)],
        save=partial(save_model, corpus),
        decays=decays,
        # The loss of guessing by frequency alone, to be seen beside the loss of the model.
        final=lambda evaluate: {"unigram_entropy": float(corpus.facts["unigram_entropy"])},
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
    settings, processes = recipe.training, process_count()
    key = "ramp_quantum" if settings.ramp else "batch"
    if (smallest := getattr(settings, key)) % processes:
        raise BadValue(f"training.{key}", smallest, f"divisible by the number of processes ({processes})")


def load_corpus(data: LanguageData, given: str | None) -> Corpus:
    """The corpus of a recipe, or of `--data`; what was passed over is said once."""
    cache, source = cache_folder("corpora"), given or data.source
    if source == PYTHON_DOCS:
        make_folder(cache)
        source = str(python_docs(cache))
    said = data.model_dump(exclude={"source", "tuning_sequences"})
    for limit in ("trash_cutoff", "max_documents", "max_sequences", "tokenizer_documents"):
        said[limit] = said[limit] or None
    corpus = prepare_corpus(CorpusSettings(source=source, **said), cache, progress_lines)
    if skipped := corpus.facts["skipped"]:
        words = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        first = "\n  ".join(corpus.facts["named"][:10])
        log.warning("Skipped of the %d records of %s: %s.\n  %s", corpus.facts["records"], source, words, first)
    return corpus


def progress_lines(stage: str) -> Progress:
    """How far a stage has come, as a line on stderr every few seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            sys.stderr.write(f"{stage}: {done / total:.0%} of {total:,} bytes\n")

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


KIND = RecipeKind(recipe=LanguageRecipe, job=language_job)
