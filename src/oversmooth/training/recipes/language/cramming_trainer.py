"""What cramming needs beyond the Trainer: a batch that grows over the run, and a budget of wall clock."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from oversmooth.environment.kernel_hint import without_kernel_hint
from oversmooth.training.recipes.language.budget import ClockPlan, Plan
from oversmooth.training.recipes.language.sequences import StepBatches


def cramming_trainer(batches: StepBatches, plan: Plan, micro_batch: int) -> type:
    """A Trainer for which one batch of the loader is one optimizer step, worked through in parts of `micro_batch`."""
    from transformers import Trainer

    class CrammingTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            batches.process, batches.processes = self.args.process_index, self.args.world_size
            return DataLoader(
                batches,
                batch_size=1,
                collate_fn=_only,
                num_workers=0 if isinstance(plan, ClockPlan) else self.args.dataloader_num_workers,
                pin_memory=self.args.dataloader_pin_memory,
            )

        def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
            """Losses are sums over the tokens of the whole batch, so parts of unequal size weigh what they hold."""
            rows = len(inputs["input_ids"])
            starts = range(0, rows, micro_batch or rows)
            total = torch.zeros((), device=self.args.device)
            for start in starts:
                part = {name: tensor[start : start + (micro_batch or rows)] for name, tensor in inputs.items()}
                is_last = start == starts[-1]
                with nullcontext() if is_last else self.accelerator.no_sync(model):
                    total += super().training_step(model, part, num_items_in_batch)
            return total

    return CrammingTrainer


def _only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return items[0]


def clock_callback(plan: ClockPlan) -> Any:
    """Looks at the clock after every step, tells the other processes, and ends the run when the budget is spent."""
    with without_kernel_hint():
        from transformers import TrainerCallback

    class ClockCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            plan.begin()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            """After the weights have moved and before the next rate is looked up."""
            spent = torch.tensor(plan.measured(), dtype=torch.float64, device=args.device)
            if args.world_size > 1:
                torch.distributed.broadcast(spent, 0)
            plan.tick(spent.item())

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            control.should_training_stop |= plan.is_over

    return ClockCallback()
