"""The Trainer of transformers with a recipe's optimizer, schedule, loss and data, and what happens around its steps."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oversmooth.errors import TrainingStopped
from oversmooth.training.recipes.checkpoints import checkpoints
from oversmooth.training.recipes.job import EpochSampler, Job
from oversmooth.training.recipes.log_state import LogState
from oversmooth.training.recipes.trainer_internals import TrainerInternals
from oversmooth.training.recipes.worker_errors import ReportingCollate, ReportingDataset, without_errors

# The base class is a Trainer, known only when a trainer is made: `super()` is not typed.
# mypy: disable-error-code="misc"

NOT_REPEATABLE = ("_runtime", "_per_second", "total_flos")
"""Endings of logged names that differ from run to run; they have their place in the manifest."""


def recipe_trainer(job: Job) -> type:
    """A Trainer for this job; a class made when it is asked for, because transformers is imported only then."""
    from transformers import Trainer

    base: Any = job.trainer_base() if job.trainer_base else Trainer
    ours = {"job": job, "loss_is_scaled_for_ga": False if job.loss else None}  # ours is a mean over the micro-batch
    return type("RecipeTrainer", (RecipeSteps, TrainerInternals, base), ours)


class RecipeSteps:
    """Public methods of the Trainer, as a job wants them."""

    job: Job
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    data_collator: Any
    eval_dataset: Any
    average: Any
    remember_our_scheduler: Callable[[], None]

    # --- optimisation ---

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            settings = self.job.recipe.optimizer
            named = [item for item in (model or self.model).named_parameters() if item[1].requires_grad]
            decayed = [parameter for name, parameter in named if self.job.decays(name, parameter)]
            others = [parameter for name, parameter in named if not self.job.decays(name, parameter)]
            groups = [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(
                groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            job, peak = self.job, self.job.recipe.optimizer.learning_rate
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: job.learning_rate(step, num_training_steps) / peak
            )
            self.remember_our_scheduler()
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

    # --- data ---

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
        return super().get_batch_samples(map(without_errors, epoch_iterator), *words, **more)

    def prediction_step(self, model: nn.Module, inputs: Mapping[str, Any], *words: Any, **more: Any) -> Any:
        return super().prediction_step(model, without_errors(inputs), *words, **more)


# --- callbacks ------------------------------------------------------------------------------------------------------


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
