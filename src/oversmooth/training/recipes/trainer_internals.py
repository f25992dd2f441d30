"""Every private part of transformers' Trainer that is overridden or set, and nothing else.

transformers may change them in any release, so `pyproject.toml` bounds its version from above, and a test asks the
installed one whether they are still there. What has a public name is overridden in `trainer.py`.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from oversmooth.training.recipes.checkpoints import AVERAGE, CHECKPOINT, WEIGHTS, whole_or_absent
from oversmooth.training.recipes.job import Job
from oversmooth.training.recipes.log_state import METRICS, LogState, size_of

# The base class is a Trainer, known only when a trainer is made: `super()` is not typed.
# mypy: disable-error-code="misc"


class TrainerInternals:
    """To be put in front of a Trainer; `job` says what it trains."""

    job: Job
    args: Any
    state: Any
    control: Any
    model: Any
    accelerator: Any
    is_fsdp_enabled: bool
    average: Any = None
    """timm's moving average of the weights, where the recipe has one."""
    writing_into: str | None = None
    _tr_loss: Tensor
    _globalstep_last_logged: int

    def _run_epoch(self, *words: Any, **more: Any) -> None:
        """Transformers looks at the number of steps only after a step: a run that was killed after its last one would
        take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*words, **more)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.job.sampler if self.job.sampler is not None else super()._get_train_sampler(train_dataset)

    def _get_output_dir(self, trial: Any) -> str:
        return self.writing_into or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes into a folder of another name and renames it."""
        with whole_or_absent(
            Path(self.args.output_dir),
            self.state.global_step,
            writes=self.args.should_save,
            keep=self.job.rhythm.keep_checkpoints,
            wait_for_everyone=self.accelerator.wait_for_everyone,
        ) as partial:
            self.writing_into = str(partial)
            try:
                super()._save_checkpoint(model, trial)
                self.save_log_state(partial / f"{CHECKPOINT}{self.state.global_step}")
            finally:
                self.writing_into = None

    def save_log_state(self, checkpoint: Path) -> None:
        loss = self.accelerator.gather(self._tr_loss).mean().item()  # every process takes part
        if self.args.should_save:
            size = size_of(Path(self.args.output_dir).parent / METRICS)
            LogState(metrics_bytes=size, loss=loss, logged_at=self._globalstep_last_logged).write(checkpoint)

    def continue_log(self, state: LogState) -> None:
        """Call it after the Trainer has set its sums to zero."""
        self._tr_loss += state.loss
        self._globalstep_last_logged = state.logged_at

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

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.job.state is not None and self.args.should_save:
            self.job.state.save(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.job.state is not None and checkpoint is not None:
            self.job.state.load(Path(checkpoint))

    def remember_our_scheduler(self) -> None:
        """The Trainer forgets a scheduler that it made when it starts again, and keeps one that a user gave."""
        self._created_lr_scheduler = True


def use_one_device(arguments: Any) -> None:
    """One process uses one GPU; torch's DataParallel would multiply the batch."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
