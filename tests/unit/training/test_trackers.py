"""Numbers reach each tracker's own active run under their names and steps."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.errors import MissingDependency, UnknownName
from oversmooth.training.callback import TRACKERS, tensorboard, tracker


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_names_numbers_and_the_step(name, monkeypatch):
    seen = []

    def log(numbers, step=None):
        seen.append((dict(numbers), step))

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(log=log, log_metrics=log))
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    monitor = osm.Monitor(model, [torch.randn(2, 5, 16)], every=5, log=tracker(name))
    for _ in range(6):
        monitor.step()
    steps = [step if step is not None else numbers["train/global_step"] for numbers, step in seen]
    assert steps == [0, 5]
    assert all("smoothing/cosine/depth_2" in numbers for numbers, _ in seen)


def test_tensorboard_takes_a_folder(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = tensorboard(tmp_path)
    log({"smoothing/cosine/depth_1": 0.25}, 3)
    (event,) = EventAccumulator(str(tmp_path)).Reload().Scalars("smoothing/cosine/depth_1")
    assert (event.step, event.value) == (3, 0.25)


def test_unknown_and_missing_trackers_are_named(monkeypatch):
    with pytest.raises(UnknownName, match=r"Unknown tracker 'wandbb'\. Close: wandb"):
        tracker("wandbb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match="logging to wandb needs the package 'wandb'"):
        tracker("wandb")
