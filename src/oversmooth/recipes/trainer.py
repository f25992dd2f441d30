"""The Trainer of transformers with a recipe's steps.

Three private methods are overridden, each with its reason in one line; everything else goes through methods that
transformers offers for it. It may change private parts in any release, so `pyproject.toml` bounds its version from above,
and a test compares the sources of what is overridden with those that this module was written against.

torch raises a worker's error again as its own text only. So an example that cannot be read becomes its error, a batch
with such an example becomes `{FAILED: error}`, and the training process raises it there.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from oversmooth.control.eigenbasis import accumulate
from oversmooth.errors import OversmoothError, TrainingStopped
from oversmooth.recipes.recipe import EpochSampler, Job
from oversmooth.recipes.run_folder import (
    AVERAGE,
    CHECKPOINT,
    METRICS,
    WEIGHTS,
    LogState,
    checkpoints,
    size_of,
    whole_or_absent,
)

# --- errors of ours that arise in the processes that load data ---

FAILED = "failed"
Collate = Callable[[list[Any]], dict[str, Any]]


class ReportingDataset(Dataset[Any]):
    """The same examples; one that cannot be read is its error."""

    def __init__(self, examples: Any):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.examples[index]
        except OversmoothError as error:
            return error


@dataclass(frozen=True)
class ReportingCollate:
    """The same batches; one with an example that could not be read holds the error alone."""

    collate: Collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        for example in examples:
            if isinstance(example, OversmoothError):
                return {FAILED: example}
        return self.collate(examples)


def without_errors(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch, or the error that it holds, raised."""
    if FAILED in batch:
        raise batch[FAILED]
    return batch


# --- the Trainer ---

# The base class is a Trainer, known only when a trainer is made: `super()` is not typed.
# mypy: disable-error-code="misc"

NOT_REPEATABLE = ("_runtime", "_per_second", "total_flos")
"""Endings of logged names that differ from run to run; they have their place in the manifest."""


def recipe_trainer(job: Job) -> type:
    """A Trainer for this job; a class made when it is asked for, because transformers is imported only then."""
    from transformers import Trainer

    base: Any = job.trainer_base() if job.trainer_base else Trainer
    ours = {"job": job, "loss_is_scaled_for_ga": False if job.loss else None}  # ours is a mean over the micro-batch
    return type("RecipeTrainer", (RecipeSteps, base), ours)


class RecipeSteps:
    """Put in front of a Trainer: what a job wants otherwise."""

    job: Job
    args: Any
    state: Any
    control: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    data_collator: Any
    eval_dataset: Any
    accelerator: Any
    is_fsdp_enabled: bool
    average: Any = None
    """timm's moving average of the weights, where the recipe has one."""
    loss_sum: Tensor | float = 0.0
    """Of the steps since the last line that held a loss; a resumed run continues it, which the Trainer's own cannot."""
    logged_at = 0
    """The step of that line."""
    step_in_parts: ExitStack | None = None
    """Open between the first and the last micro-batch of an optimizer step."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, parameter in model.named_parameters() if self.job.decays(name, parameter)]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            job, peak = self.job, self.job.recipe.optimizer.learning_rate
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: job.learning_rate(step, num_training_steps) / peak
            )
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **more: Any) -> Any:
        if self.job.loss is None:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **more)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.job.loss(outputs, labels)
        return (loss, {"loss": loss, "logits": outputs}) if return_outputs else loss

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The average in the place of the weights, for an evaluation."""
        kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.average.module.state_dict())
        try:
            yield
        finally:
            self.model.load_state_dict(kept)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Its own collator, the last batch too, which transformers would drop because training does, and these very data:
        with persistent workers transformers would give the loader of the first evaluation again, whatever is asked for."""
        examples = ReportingDataset(self.eval_dataset if eval_dataset is None else eval_dataset)
        collate, persistent = self.data_collator, self.args.dataloader_persistent_workers
        self.data_collator = ReportingCollate(self.job.collate_evaluation)
        self.args.dataloader_drop_last = self.args.dataloader_persistent_workers = False
        try:
            return super().get_eval_dataloader(examples)
        finally:
            self.data_collator = collate
            self.args.dataloader_drop_last, self.args.dataloader_persistent_workers = True, persistent

    def get_batch_samples(self, epoch_iterator: Iterator[Mapping[str, Any]], *words: Any, **more: Any) -> Any:
        """The Trainer counts steps only after a step: without this, a run killed after its last one would take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(map(without_errors, epoch_iterator), *words, **more)

    def training_step(self, model: nn.Module, *words: Any, **more: Any) -> Tensor:
        """Every eigenbasis is evaluated once per optimizer step, however many micro-batches that has."""
        if self.step_in_parts is None and self.accelerator.num_processes == 1:  # DDP wants gradients within each pass
            self.step_in_parts = ExitStack()
            self.step_in_parts.enter_context(accumulate(model))
        loss: Tensor = super().training_step(model, *words, **more)
        if self.step_in_parts is not None and self.accelerator.sync_gradients:
            self.step_in_parts.close()
            self.step_in_parts = None
        self.loss_sum = loss.detach() + self.loss_sum
        return loss

    def log(self, logs: dict[str, float], *words: Any, **more: Any) -> None:
        """With the mean loss since the last line, before a kill too."""
        if "loss" in logs:
            logs["loss"] = self.mean_loss_sum() / (self.state.global_step - self.logged_at)
            self.loss_sum, self.logged_at = 0.0, self.state.global_step
        super().log(logs, *words, **more)

    def mean_loss_sum(self) -> float:
        """Over all processes, every one of which takes part."""
        own = torch.as_tensor(self.loss_sum, dtype=torch.float32, device=self.args.device)
        return float(self.accelerator.gather(own).mean().item())

    def prediction_step(self, model: nn.Module, inputs: Mapping[str, Any], *words: Any, **more: Any) -> Any:
        return super().prediction_step(model, without_errors(inputs), *words, **more)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights as they are trained, parametrized ones too, and their average; `run` writes ordinary ones."""
        from safetensors.torch import save_file, save_model

        gathered: dict[str, Tensor] | None = None
        if self.is_fsdp_enabled:
            if "FULL_STATE_DICT" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
                return  # shards are saved with the optimizer
            gathered = self.accelerator.get_state_dict(self.model)  # every process takes part
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if gathered is not None:
            save_file(gathered, folder / WEIGHTS, metadata={"format": "pt"})
        else:
            save_model(self.model, str(folder / WEIGHTS))
        if self.average is not None:
            save_model(self.average.module, str(folder / AVERAGE))

    def save_beside(self, checkpoint: Path, metrics: Path) -> None:
        """What a resumed run needs beside what transformers saves."""
        loss = self.mean_loss_sum()
        if self.args.should_save:
            LogState(metrics_bytes=size_of(metrics), loss=loss, logged_at=self.logged_at).write(checkpoint)
            if self.job.state is not None:
                self.job.state.save(checkpoint)

    def continue_log(self, state: LogState) -> None:
        self.loss_sum, self.logged_at = state.loss, state.logged_at

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """A Trainer takes no sampler, and `get_train_dataloader` would have to repeat what it does about workers."""
        return self.job.sampler if self.job.sampler is not None else super()._get_train_sampler(train_dataset)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A Trainer writes into the final folder, so that a kill leaves half a checkpoint; this one renames it."""
        folder = Path(self.args.output_dir)
        with whole_or_absent(
            folder,
            self.state.global_step,
            writes=self.args.should_save,
            keep=self.job.rhythm.keep_checkpoints,
            wait_for_everyone=self.accelerator.wait_for_everyone,
        ) as partial:
            self.args.output_dir = str(partial)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = str(folder)
            self.save_beside(partial / f"{CHECKPOINT}{self.state.global_step}", folder.parent / METRICS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """A Trainer lets missing weights pass, and knows no average."""
        from safetensors.torch import load_model

        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        folder = Path(resume_from_checkpoint)
        load_model(model or self.model, str(folder / WEIGHTS))
        if self.average is not None:
            load_model(self.average.module, str(folder / AVERAGE))


def run_callback(
    job: Job, metrics: Path, trainer: Any, on_step: Callable[[int, int], None], resumed: LogState | None
) -> Any:
    """Sets the epoch of the sampler, updates the average, writes the log to the metrics file, stops at a broken loss."""
    from transformers import TrainerCallback

    class RunCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if resumed is not None:
                trainer.continue_log(resumed)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kw: Any) -> None:
            if isinstance(job.sampler, EpochSampler):
                steps = max(1, len(train_dataloader) // args.gradient_accumulation_steps)
                job.sampler.epoch = state.global_step // steps

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kw: Any) -> None:
            if trainer.average is not None:
                trainer.average.update(trainer.accelerator.unwrap_model(model))
            on_step(state.global_step, state.max_steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
            if not state.is_world_process_zero or "train_runtime" in logs:
                return
            kept = {name: value for name, value in logs.items() if not name.endswith(NOT_REPEATABLE)}
            require_finite(kept.get("loss", 0.0), state.global_step, Path(args.output_dir))
            with metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **kept}) + "\n")

    return RunCallback()


def require_finite(loss: float, step: int, folder: Path) -> None:
    """Ends a run whose loss is no number any more."""
    if not math.isfinite(loss):
        reason = f"the loss is {loss}; lower optimizer.learning_rate, or set optimizer.clip_norm"
        raise TrainingStopped(step, reason, next(reversed(checkpoints(folder)), None))
