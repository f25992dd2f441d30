"""`train`: from a recipe and a seed to a run folder.

OUT/manifest.json       recipe, overrides, seed, splits, versions, hardware, commit, cost, results
OUT/metrics.jsonl       loss, rate, evaluations and smoothing over steps (`oversmooth report`)
OUT/running.json        who trains here, while it lasts
OUT/checkpoints/        to resume from; each is whole or absent
OUT/model/              ordinary weights (with an average of weights: OUT/model-average/ too)
OUT/analysis.json       the final Analysis (`oversmooth report OUT/analysis.json`), unless the request does without
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from oversmooth.analysis import analyze
from oversmooth.control.readback import Reference, of_live, require_read_back
from oversmooth.environment.files import LOCK, folder_whole, held, make_folder, require_free, write_text_whole
from oversmooth.environment.versions import without_kernel_hint
from oversmooth.errors import (
    BadValue,
    CannotControl,
    CannotResume,
    NotWritable,
    OversmoothError,
    TrainingStopped,
    UnknownName,
)
from oversmooth.recipes.recipe import Job, Numbers, Recipe, overridden, parsed, read_recipe
from oversmooth.recipes.run_folder import (
    ANALYSIS,
    CHECKPOINT,
    MANIFEST,
    METRICS,
    LogState,
    Manifest,
    checkpoints,
    cut_metrics,
    first_difference,
    new_session,
    read_log_state,
    read_manifest,
)
from oversmooth.recipes.trainer import NOT_REPEATABLE, ReportingCollate, ReportingDataset, recipe_trainer, run_callback
from oversmooth.recipes.variants import leaves_ordinary_weights, ordinary, put_on, require_variant
from oversmooth.results import Analysis, Progress, no_progress

WHAT_IFS = ("no_skip", "positive_norms")
"""What the analysis of a trained model shows beside every layer: the two changes that the paper's claims are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What the user asked for, beside the recipe."""

    name: str
    """Of the recipe."""
    out: Path
    variant: str = "vanilla"
    seed: int = 0
    fraction: float = 1.0
    overrides: Sequence[str] = ()
    resume: bool = False
    analyzes: bool = True
    """Whether the trained model is analysed at the end: of use to nobody where only a score is wanted."""
    command: str = ""
    say: Callable[[str], None] = lambda line: None
    """Hears what is inferred from the data before training begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run; in other processes than the first only `results` are complete."""

    manifest: Manifest
    results: Numbers
    analysis: Analysis | None


def process_count() -> int:
    """How many processes train together; before torch.distributed is set up."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the process that writes; before torch.distributed is set up."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def process_group_ends() -> Iterator[None]:
    """Ends torch.distributed with the command: threads of its own abort the process if the interpreter ends first.

    Not after an error: other processes may be in the middle of an exchange, and the end would wait for them.
    """
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def place_held(request: RunRequest) -> Iterator[None]:
    """Holds the folder of a run while it lasts; refuses one that holds another run or is in use, before data are loaded."""
    require_variant(request.variant)
    if not is_first_process():
        yield
        return
    _require_place(request.out, request.resume)
    with held(request.out):
        _require_place(request.out, request.resume)  # another run may have come and gone meanwhile
        yield


def _require_place(folder: Path, resume: bool) -> None:
    """Refuses a folder that holds something else than the run to be resumed."""
    names = [entry.name for entry in folder.iterdir() if entry.name != LOCK] if folder.is_dir() else []
    # A run that was killed while it wrote its first file can be continued too.
    has_begun = MANIFEST in names or (bool(names) and all(name.endswith(".partial") for name in names))
    if (resume and has_begun) or (folder.is_dir() and not names):
        return
    if MANIFEST in names:
        advice = "Continue that run with --resume, or give a new folder."
        raise NotWritable(str(folder), "it holds a run already", advice)
    require_free(folder)


def train_job(job: Job, request: RunRequest, progress: Progress = no_progress) -> FinishedRun:
    """Trains, evaluates, bakes, analyses and writes; resumes from the last whole checkpoint where that is asked for."""
    arguments = _training_arguments(job, request)
    torch.manual_seed(request.seed)
    model = job.build()
    options = job.recipe.variant
    put_on(model, request.variant, seed=request.seed, basis=options.basis, positive_norms=options.positive_norms)
    with arguments.main_process_first(local=False, desc="preparing the folder"):
        manifest, last = _manifest(job, request)
    if manifest.finished:
        return FinishedRun(manifest=manifest, results=manifest.results, analysis=None)
    metrics = request.out / METRICS
    resumed_log = None
    if last is not None:
        checkpoint = request.out / "checkpoints" / f"{CHECKPOINT}{last}"
        resumed_log = read_log_state(checkpoint)
        if job.state is not None:
            job.state.load(checkpoint)
    if arguments.process_index == 0:
        manifest.sessions.append(new_session(last or 0, arguments.world_size))
        manifest.write(request.out)
        cut_metrics(metrics, resumed_log.metrics_bytes if resumed_log else 0)
        if job.preview is not None and last is None:
            job.preview(request.out)
    trainer = _trainer(job, model, arguments, metrics, progress, resumed_log)
    torch.manual_seed(request.seed + 1_000_003 * arguments.process_index)  # other drop-path draws in every process
    began = time.perf_counter()
    _train(trainer, last)
    seconds = time.perf_counter() - began
    results = _evaluated(job, trainer)
    if arguments.process_index == 0:
        analysis = _written(job, request, trainer, manifest)
        _finish(manifest, job, trainer, seconds, results)
        manifest.write(request.out)
    trainer.accelerator.wait_for_everyone()
    return FinishedRun(manifest=manifest, results=results, analysis=analysis if arguments.process_index == 0 else None)


def _training_arguments(job: Job, request: RunRequest) -> Any:
    with without_kernel_hint():
        from transformers import TrainingArguments

    hardware, rhythm, has_gpu = job.recipe.hardware, job.rhythm, torch.cuda.is_available()
    micro, parts = parts_of_a_batch(job.batch, process_count(), hardware.micro_batch)
    ours: dict[str, Any] = {
        "output_dir": str(request.out / "checkpoints"),
        "max_steps": job.steps,
        "per_device_train_batch_size": micro,
        "per_device_eval_batch_size": micro,
        "gradient_accumulation_steps": parts,
        **job.recipe.optimizer.arguments,
        "logging_steps": rhythm.log,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no" if job.evaluate is None else "steps",
        "eval_steps": rhythm.evaluate,
        "save_strategy": "steps",
        "save_steps": rhythm.save,
        "seed": request.seed,
        "bf16": hardware.precision == "bfloat16",
        "fp16": hardware.precision == "float16",
        "use_cpu": not has_gpu,
        "dataloader_drop_last": True,
        "dataloader_num_workers": hardware.workers,
        "dataloader_persistent_workers": hardware.workers > 0,
        "dataloader_pin_memory": has_gpu,
        "label_names": ["labels"],
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**{**ours, **job.trainer_arguments})
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one process uses one GPU; torch's DataParallel would multiply the batch
    return arguments


def parts_of_a_batch(batch: int, processes: int, micro_batch: int) -> tuple[int, int]:
    """Examples at once in every process, and how often they are accumulated."""
    share, rest = divmod(batch, processes)
    if rest:
        raise BadValue("training.batch", batch, f"divisible by the number of processes ({processes})")
    micro = min(micro_batch or share, share)
    if share % micro:
        raise BadValue("The batch of one process", share, f"divisible by hardware.micro_batch ({micro_batch})")
    return micro, share // micro


def _manifest(job: Job, request: RunRequest) -> tuple[Manifest, int | None]:
    """The manifest of this run and the step to continue from, if there is one."""
    new = Manifest(
        name=request.name,
        recipe=job.recipe.model_dump(mode="json"),
        overrides=list(request.overrides),
        variant=request.variant,
        seed=request.seed,
        fraction=request.fraction,
        command=request.command,
        data=dict(job.facts),
        steps=job.steps,
    )
    old = read_manifest(request.out) if request.resume else None
    if old is None:
        make_folder(request.out)
        return new, None
    if difference := first_difference(old.identity, new.identity):
        key, was, now = difference
        advice = "Give the same recipe, settings and data, or train in a new folder."
        raise CannotResume(str(request.out), f"{key} was {was!r} and is now {now!r}", advice)
    found = checkpoints(request.out / "checkpoints")
    return old, found[-1] if found else None


def _trainer(
    job: Job, model: nn.Module, arguments: Any, metrics: Path, progress: Progress, resumed_log: LogState | None
) -> Any:
    from transformers import PrinterCallback

    from oversmooth.training.callback import SmoothingCallback

    trainer = recipe_trainer(job)(
        model=model,
        args=arguments,
        data_collator=ReportingCollate(job.collate),
        train_dataset=ReportingDataset(job.train),
        eval_dataset=job.evaluate,
        compute_metrics=job.metrics,
        callbacks=list(job.callbacks),
    )
    if trainer.is_fsdp_enabled and any(parametrize.is_parametrized(module) for module in model.modules()):
        reason = "FSDP cuts each weight into shards, and an eigenbasis is factorised as a whole"
        raise CannotControl("FSDP", "a sharpened or smoothed model", reason, "Use torchrun without FSDP (DDP).")
    if job.ema_decay is not None:
        from timm.utils import ModelEmaV3

        trainer.average = ModelEmaV3(trainer.model, decay=job.ema_decay, exclude_buffers=True)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(SmoothingCallback(job.rhythm.monitor, job.probe, file=metrics))
    trainer.add_callback(run_callback(job, metrics, trainer, progress, resumed_log))
    return trainer


def _train(trainer: Any, last: int | None) -> None:
    folder = Path(trainer.args.output_dir)
    try:
        trainer.train(resume_from_checkpoint=None if last is None else str(folder / f"{CHECKPOINT}{last}"))
    except TrainingStopped:
        raise
    except OversmoothError as error:
        saved = next(reversed(checkpoints(folder)), None)
        raise TrainingStopped(trainer.state.global_step, str(error), saved) from error


def _evaluated(job: Job, trainer: Any) -> Numbers:
    """Numbers about the trained model, on every process."""

    def evaluate(data: Any, prefix: str) -> Numbers:
        found = trainer.evaluate(data, metric_key_prefix=prefix)
        left_out = (*NOT_REPEATABLE, "epoch")
        return {name: value for name, value in found.items() if not name.endswith(left_out)}

    trainer.callback_handler.callbacks = []  # these numbers are not part of the curves
    results: Numbers = {}
    if job.evaluate is not None:
        results |= evaluate(job.evaluate, "eval")
        if trainer.average is not None:
            with trainer.averaged():
                results |= evaluate(job.evaluate, "eval_average")
    if job.final is not None:
        results |= job.final(evaluate)
    return results


def _written(job: Job, request: RunRequest, trainer: Any, manifest: Manifest) -> Analysis | None:
    """Ordinary weights, their average and the analysis that was asked for; what a killed run left half done is made again.

    The manifest is told how each model was read back.
    """
    # Without the wrapper of accelerate, which runs the model in half precision: what is handed over runs without it.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    found = {"model": ordinary(model, request.variant)}
    if trainer.average is not None:
        found["model-average"] = ordinary(trainer.average.module, request.variant)
    for name, each in found.items():
        shutil.rmtree(request.out / name, ignore_errors=True)
        with folder_whole(request.out / name) as partial:
            job.save(each, partial)
            if leaves_ordinary_weights(request.variant):
                reference = of_live(each.get_submodule(job.saved_part))
            else:
                reason = f"the plain library does not know {request.variant}, which no ordinary weights can express"
                reference = Reference(not_checked=reason)
            manifest.read_back[name] = require_read_back(partial, reference, "train", str(request.out / name)).words
    if not request.analyzes:
        return None
    analysis = analyze(found["model"], job.probe, what_ifs=WHAT_IFS, command=request.command)
    write_text_whole(request.out / ANALYSIS, analysis.to_json(indent=1))
    return analysis


def _finish(manifest: Manifest, job: Job, trainer: Any, seconds: float, results: Numbers) -> None:
    session = manifest.sessions[-1]
    session.to_step, session.seconds = trainer.state.global_step, round(seconds, 3)
    ended = [each for each in manifest.sessions if each.seconds is not None and each.to_step is not None]
    steps = sum((each.to_step or 0) - each.from_step for each in ended)
    wall = sum(each.seconds or 0.0 for each in ended)
    manifest.cost = {"seconds": wall, "steps_timed": float(steps)}
    if steps:
        manifest.cost |= {"seconds_per_step": wall / steps, "examples_per_second": steps * job.batch / wall}
    manifest.results = results
    manifest.finished = True


KINDS = ("vision", "language")


@dataclass(frozen=True, slots=True)
class RecipeKind:
    """What the module of a kind of recipe declares as `KIND`."""

    recipe: type[Recipe]
    job: Callable[[Recipe, str | None, RunRequest], Job]
    """Makes the job from a recipe, `--data` and what was asked for."""


def kind_of(name: str) -> RecipeKind:
    module = f"oversmooth.recipes.{name}"
    if name not in KINDS or find_spec(module) is None:
        raise UnknownName("kind of recipe", name, KINDS)
    found = import_module(module).KIND
    assert isinstance(found, RecipeKind)
    return found


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe or a file, with overrides, checked by its kind."""
    tables = overridden(read_recipe(name), overrides)
    return parsed(kind_of(str(tables.get("kind"))).recipe, tables, name)


def train(request: RunRequest, data: str | None = None, progress: Progress = no_progress) -> FinishedRun:
    """Everything that `oversmooth train` does."""
    if not 0 < request.fraction <= 1:
        raise BadValue("fraction", request.fraction, "above 0 and at most 1")
    recipe = load_recipe(request.name, request.overrides)
    with place_held(request):
        job = kind_of(recipe.kind).job(recipe, data, request)
        return train_job(job, request, progress)
