"""Real digits, trained by loops that people use: what they log, what stops them, and two processes at once."""

import json
import sys
import warnings

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.training.monitor import CollapseWarning
from tests.command_line import ROOT, _process


def digits(count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 8 x 8 images of handwritten digits as sequences of 8 tokens, and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images[:count] / 16, dtype=torch.float32), torch.tensor(found.target[:count])


class RowsClassifier(nn.Module):
    """An encoder over the rows of an image."""

    def __init__(self, layers: int = 4):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, rows, labels=None):
        logits = self.head(self.encoder(self.embed(rows)).mean(1))
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


def probe(model: RowsClassifier) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.embed(digits(8)[0])]


def trained_by_the_trainer(tmp_path, callback, steps: int, rate: float, model: RowsClassifier, **more):
    from transformers import Trainer, TrainingArguments

    rows, labels = digits()
    data = [{"rows": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=rate,
        lr_scheduler_type="constant",
        logging_steps=2,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    return trainer


def test_the_trainer_logs_the_curves_beside_the_loss(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    watch = osm.SmoothingCallback(every=4, batches=[digits(8)[0]])
    trained_by_the_trainer(tmp_path, watch, 8, 0.01, RowsClassifier(), report_to="tensorboard")
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}  # one run
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8]
    for name in ("smoothing/cosine/depth_4", "smoothing/hfc_lfc/depth_1", "smoothing/rho_dc/layer_3"):
        points = events.Scalars(name)
        assert [event.step for event in points] == [0, 4, 8]
        assert len({event.value for event in points}) == 3  # it moves while the model learns


def test_a_collapsed_run_is_stopped_by_the_callback_at_the_step_of_its_patience(tmp_path):
    torch.manual_seed(0)
    model = RowsClassifier()
    osm.smooth(model.encoder)
    rules = {"max_cosine": 0.9}
    watch = osm.SmoothingCallback(
        every=2, batches=[digits(8)[0]], rules=rules, patience=3, on_collapse="stop", file=tmp_path / "run.jsonl"
    )
    with pytest.warns(CollapseWarning, match="max_cosine is broken"):
        trainer = trained_by_the_trainer(tmp_path, watch, 60, 0.1, model, report_to="none")
    points = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    broken = [max(point[f"smoothing/cosine/depth_{k}"] for k in range(1, 5)) > 0.9 for point in points]
    third = next(i for i in range(len(broken)) if all(broken[max(0, i - 2) : i + 1]) and i >= 2)
    assert trainer.state.global_step == points[third]["step"] < 60
    assert osm.gate(tmp_path / "run.jsonl", rules=rules).passed is False


def test_lightning_logs_the_curves_beside_the_loss_and_stops_at_a_collapse(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.data import DataLoader, TensorDataset

    from oversmooth.lightning import SmoothingCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = RowsClassifier()

        def training_step(self, batch, batch_idx):
            loss = self.model(*batch)["loss"]
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fitted(module, watch, logger):
        trainer = lightning.Trainer(
            max_steps=12,
            logger=logger,
            callbacks=[watch],
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*num_workers.*|.*isinstance.*|.*litlogger.*|.*deprecated.*")
            trainer.fit(module, DataLoader(TensorDataset(*digits()), batch_size=32))
        return trainer

    torch.manual_seed(0)
    module, logger = Module(), TensorBoardLogger(tmp_path)
    fitted(module, SmoothingCallback(every=4, batches=[digits(8)[0]], model="model"), logger)
    events = EventAccumulator(logger.log_dir).Reload()
    assert "train/loss" in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("smoothing/cosine/depth_4")] == [0, 4, 8, 12]
    osm.smooth(module.model.encoder)
    rules = {"max_cosine": -1.0}  # broken by every model: the count is what is tested here
    watch = SmoothingCallback(
        every=2, batches=[digits(8)[0]], model=lambda m: m.model, rules=rules, patience=3, on_collapse="stop"
    )
    with pytest.warns(CollapseWarning, match="Collapse at step 4"):
        trainer = fitted(module, watch, False)
    assert trainer.global_step == 4


TWO_PROCESSES = """
import sys, warnings
import torch
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.end_to_end.test_training_loops import RowsClassifier, digits, trained_by_the_trainer
import oversmooth as osm
warnings.simplefilter("ignore")
out = Path(sys.argv[1])
torch.manual_seed(0)
model = RowsClassifier(2)
watch = osm.SmoothingCallback(every=2, batches=[digits(8)[0]], rules={{"max_cosine": -1.0}}, patience=2,
                              on_collapse="stop", file=out / "run.jsonl")
trainer = trained_by_the_trainer(out, watch, 20, 0.01, model, report_to="none", ddp_backend="gloo")
(out / f"rank{{trainer.args.process_index}}").write_text(str(trainer.state.global_step))
torch.distributed.destroy_process_group()
"""


def test_two_processes_train_with_the_callback_and_stop_together(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES.format(root=str(ROOT)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = _process([*launcher, script, tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert steps == [0, 2]


SHARDED = """
import copy, json, sys, warnings
import torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
sys.path.insert(0, {root!r})
from tests.end_to_end.test_training_loops import RowsClassifier, digits
import oversmooth as osm
warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
rows, labels = digits(32)


def trained(model):
    monitor = osm.Monitor(model, [rows[:4]], every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [monitor.step()]
    for _ in range(2):
        model(rows, labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(monitor.step())
    return found


def with_fully_shard(model):
    for layer in model.encoder.layers:
        fully_shard(layer)
    return fully_shard(model)


def with_wrappers(model):
    for index, layer in enumerate(model.encoder.layers):
        model.encoder.layers[index] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


torch.manual_seed(0)
plain = RowsClassifier(2)
models = {{"plain": plain, "ddp": nn.parallel.DistributedDataParallel(copy.deepcopy(plain))}}
models |= {{"fsdp": with_wrappers(copy.deepcopy(plain)), "fsdp2": with_fully_shard(copy.deepcopy(plain))}}
found = {{name: trained(model) for name, model in models.items()}}
Path(sys.argv[1], f"{{rank}}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_models_in_shards_and_copies_give_the_numbers_of_the_plain_model_in_the_first_process_only(tmp_path):
    """The same data in both processes, so that all four train alike: DDP, FSDP and `fully_shard` beside no wrapper."""
    script = tmp_path / "train.py"
    script.write_text(SHARDED.format(root=str(ROOT)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = _process([*launcher, script, tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for name in ("ddp", "fsdp", "fsdp2"):
        for step, numbers in enumerate(first["plain"]):
            assert first[name][step] == pytest.approx(numbers, rel=1e-4, abs=1e-5), (name, step)
        assert second[name] == [None] * 3
    assert first["plain"][0]["smoothing/cosine/depth_2"] != first["plain"][2]["smoothing/cosine/depth_2"]
