"""The Trainer of transformers with a recipe's optimizer and schedule, and with checkpoints that are whole or absent."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import NotWritable, OversmoothError, TrainingStopped, first_line
from oversmooth.training.recipes.job import EpochSampler, Job

PARTIAL = ".partial"
WEIGHTS, AVERAGE = "model.safetensors", "average.safetensors"
CHECKPOINT = "checkpoint-"
NOT_REPEATABLE = ("_runtime", "_per_second", "total_flos")
"""Endings of logged names that differ from run to run; they have their place in the manifest."""


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending."""
    found = [entry.name.removeprefix(CHECKPOINT) for entry in folder.glob(f"{CHECKPOINT}*") if entry.is_dir()]
    return sorted(int(name) for name in found if name.isdigit())


def recipe_trainer(job: Job) -> type:
    """A Trainer for this job; a class made when it is asked for, because transformers is imported only then."""
    from transformers import Trainer

    base: Any = job.trainer_base() if job.trainer_base else Trainer

    class RecipeTrainer(base):
        optimizer: Any
        lr_scheduler: Any
        average: Any = None
        """timm's moving average of the weights, where the recipe has one."""
        writing_into: str | None = None
        loss_is_scaled_for_ga = False if job.loss else None  # ours is a mean over the micro-batch

        # --- optimisation ---

        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                settings = job.recipe.optimizer
                named = [item for item in (model or self.model).named_parameters() if item[1].requires_grad]
                decayed = [parameter for name, parameter in named if job.decays(name, parameter)]
                others = [parameter for name, parameter in named if not job.decays(name, parameter)]
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
                peak = job.recipe.optimizer.learning_rate
                self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                    optimizer or self.optimizer, lambda step: job.learning_rate(step, num_training_steps) / peak
                )
                self._created_lr_scheduler = True
            return self.lr_scheduler

        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **more: Any
        ) -> Any:
            if job.loss is None:
                return super().compute_loss(model, inputs, return_outputs=return_outputs, **more)
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = job.loss(outputs, labels)
            return (loss, {"loss": loss, "logits": outputs}) if return_outputs else loss

        def _run_epoch(self, *words: Any, **more: Any) -> None:
            """Transformers looks at the number of steps only after a step: a run that was killed after its last one would
            take one more."""
            if self.state.global_step >= self.state.max_steps:
                self.control.should_training_stop = True
                return
            super()._run_epoch(*words, **more)

        # --- data ---

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return job.sampler if job.sampler is not None else super()._get_train_sampler(train_dataset)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            """Its own collator, and the last batch too, which transformers would drop because training does."""
            self.data_collator, self.args.dataloader_drop_last = job.collate_evaluation, False
            try:
                return super().get_eval_dataloader(eval_dataset)
            finally:
                self.data_collator, self.args.dataloader_drop_last = job.collate, True

        # --- checkpoints ---

        def _get_output_dir(self, trial: Any) -> str:
            return self.writing_into or super()._get_output_dir(trial)

        def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
            """Writes into a folder of another name and renames it: a kill at any moment leaves whole checkpoints."""
            folder = Path(self.args.output_dir)
            with self._whole_or_absent(folder):
                super()._save_checkpoint(model, trial)

        @contextmanager
        def _whole_or_absent(self, folder: Path) -> Iterator[None]:
            partial, name = folder / PARTIAL, f"{CHECKPOINT}{self.state.global_step}"
            if self.args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            self.writing_into = str(partial)
            try:
                yield
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    _reach_the_disk(partial / name)
                    shutil.rmtree(folder / name, ignore_errors=True)
                    os.replace(partial / name, folder / name)
                    for old in checkpoints(folder)[: -job.rhythm.keep_checkpoints]:
                        shutil.rmtree(folder / f"{CHECKPOINT}{old}", ignore_errors=True)
            except _write_errors() as error:
                shutil.rmtree(partial, ignore_errors=True)
                raise NotWritable(str(folder / name), first_line(error), "Free some space.") from error
            finally:
                self.writing_into = None
            self.accelerator.wait_for_everyone()

        def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
            """Weights as they are trained, parametrized ones too, and their average; `run` writes ordinary ones."""
            from safetensors.torch import save_file, save_model

            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            if state_dict is not None:  # sharded weights that were gathered
                save_file(state_dict, folder / WEIGHTS, metadata={"format": "pt"})
            else:
                save_model(self.model, str(folder / WEIGHTS))
            if self.average is not None:
                save_model(self.average.module, str(folder / AVERAGE))

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
            from safetensors.torch import load_model

            if self.is_fsdp_enabled:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
                return
            folder = Path(resume_from_checkpoint)
            load_model(model or self.model, str(folder / WEIGHTS))
            if self.average is not None:
                load_model(self.average.module, str(folder / AVERAGE))

        @contextmanager
        def averaged(self) -> Iterator[None]:
            """The average in the place of the weights, for an evaluation."""
            kept = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(self.average.module.state_dict())
            try:
                yield
            finally:
                self.model.load_state_dict(kept)

    return RecipeTrainer


def _write_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return (OSError, RuntimeError, SafetensorError)  # torch.save raises RuntimeError on a full disk


def _reach_the_disk(folder: Path) -> None:
    """A rename may reach the disk before the bytes do; then a power cut would leave a checkpoint of zeros."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


# --- callbacks ------------------------------------------------------------------------------------------------------


def run_callback(job: Job, metrics: Path, trainer: Any, on_step: Callable[[int, int], None]) -> Any:
    """Sets the epoch of the sampler, updates the average, writes the log to the metrics file, stops at a broken loss."""
    from transformers import TrainerCallback

    class RunCallback(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kw: Any) -> None:
            if isinstance(job.sampler, EpochSampler):
                steps = max(1, len(train_dataloader) // args.gradient_accumulation_steps)
                job.sampler.epoch = state.global_step // steps

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kw: Any) -> None:
            if trainer.average is not None:
                trainer.average.update(trainer.accelerator.unwrap_model(model))
            on_step(state.global_step, state.max_steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
            is_ours = any(name.startswith("smoothing/") for name in logs)  # the monitor writes its own lines
            if not state.is_world_process_zero or is_ours or "train_runtime" in logs:
                return
            kept = {name: value for name, value in logs.items() if not name.endswith(NOT_REPEATABLE)}
            loss = kept.get("loss", 0.0)
            if not math.isfinite(loss):
                advice = "lower optimizer.learning_rate, or set optimizer.clip_norm"
                found = checkpoints(Path(args.output_dir))
                saved = found[-1] if found else None
                raise TrainingStopped(state.global_step, f"the loss is {loss}; {advice}", saved)
            with metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **kept}) + "\n")

    return RunCallback()


def cut_metrics(path: Path, step: int) -> None:
    """Removes what a killed run wrote after the checkpoint from which it continues; smoothing is measured there again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            point = json.loads(line)
        except ValueError:
            continue  # the line that was being written
        measured_again = point["step"] == step and any(name.startswith("smoothing/") for name in point)
        if point["step"] <= step and not measured_again:
            kept.append(line + "\n")
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


def words_of(error: BaseException) -> str | None:
    """The message of an error of ours, also where it was raised in a worker process; `None` for other errors."""
    if isinstance(error, OversmoothError):
        return str(error)
    marker = f"{OversmoothError.__module__}."
    if "DataLoader worker process" in str(error) and marker in str(error):
        return str(error).rpartition(marker)[2].partition(": ")[2].strip()
    return None
