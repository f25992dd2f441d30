"""Watching a training run: numbers, files, loggers, and a model that does not notice."""

import json

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.errors import BadValue, BrokenFile
from oversmooth.output.blocks import Pair
from oversmooth.output.run_pages import training_page
from oversmooth.results.runs import read_run
from tests.contract.tiny_models import tiny_model


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def batches():
    return [torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))]


def test_the_monitor_measures_first_and_then_every_k_steps(encoder):
    logged = []
    monitor = osm.Monitor(encoder, batches(), every=3, log=lambda numbers, step: logged.append(step))
    assert [monitor.step() is not None for _ in range(7)] == [True, False, False, True, False, False, True]
    assert logged == [0, 3, 6]
    assert monitor.seconds > 0


def test_numbers_are_those_of_measure_and_inspect(encoder):
    numbers = osm.Monitor(encoder, batches()).step()
    curve = osm.measure(encoder, batches()).curve("cosine")
    assert numbers["smoothing/cosine/depth_2"] == curve[2].mean
    for layer in osm.inspect(encoder).layers:
        torch.testing.assert_close(
            numbers[f"smoothing/rho_dc/layer_{layer.layer}"], layer.plain.rho_dc, rtol=1e-4, atol=0
        )
        torch.testing.assert_close(
            numbers[f"smoothing/min_real/layer_{layer.layer}"], layer.plain.min_real, rtol=1e-3, atol=1e-4
        )


def test_training_is_the_same_with_and_without_the_monitor():
    def train(watched):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = osm.Monitor(model, batches(), every=1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 16)).square().mean().backward()
            if watched:
                monitor.step()  # between backward and step: gradients must survive
            optimizer.step()
        assert model.training
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


def test_the_file_has_one_line_per_measurement_and_becomes_a_page(encoder, tmp_path):
    file = tmp_path / "run.jsonl"
    monitor = osm.Monitor(encoder, batches(), every=2, file=file)
    for _ in range(5):
        monitor.step()
    points = read_run(file)
    assert [point["step"] for point in points] == [0, 2, 4]
    page = training_page(file, points)
    blocks = page.sections[0].blocks
    ids = [chart.id for block in blocks for chart in (block.charts if isinstance(block, Pair) else (block,))]
    assert ids == [f"training-{name}" for name in ("cosine", "hfc-lfc", "rho-dc", "min-real", "max-real")]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text('{"step": 0, "smoothing/cosine/depth_0": 0.1}\n{"step": 10, "smoo')
    assert [point["step"] for point in read_run(file)] == [0]
    file.write_text('{"step": 0\n{"step": 10}\n')
    with pytest.raises(BrokenFile, match="line 1"):
        read_run(file)


def test_every_must_be_positive(encoder):
    with pytest.raises(BadValue, match="at least 1"):
        osm.Monitor(encoder, batches(), every=0)


def test_the_trainer_logs_to_tensorboard_and_its_history(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import Trainer, TrainerCallback, TrainingArguments

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    model, inputs = tiny_model("bert")

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert, self.head = model, nn.Linear(32, 2)

        def forward(self, input_ids, labels=None):
            logits = self.head(self.bert(input_ids).last_hidden_state[:, 0])
            return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"input_ids": inputs["input_ids"][0], "labels": torch.tensor(k % 2)} for k in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callback = osm.SmoothingCallback(every=2, batches=[inputs["input_ids"]], file=tmp_path / "run.jsonl")
    trainer = Trainer(Classifier(), arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    history = [entry["step"] for entry in trainer.state.log_history if "smoothing/cosine/depth_0" in entry]
    assert history == [0, 2, 4]
    assert [json.loads(line)["step"] for line in (tmp_path / "run.jsonl").read_text().splitlines()] == [0, 2, 4]
    (events,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}  # one run, beside the loss
    seen = EventAccumulator(str(events)).Reload().Tags()["scalars"]
    assert {"smoothing/cosine/depth_3", "train/train_loss"} <= set(seen)
    assert isinstance(callback, TrainerCallback)
