"""A run that collapses is told of, or stopped, at the step at which a rule has been broken for long enough."""

import math
import warnings

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.errors import BadValue, UnknownName
from oversmooth.training.monitor import CollapseWarning


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def batches():
    return [torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))]


@torch.no_grad()
def make_tokens_alike(model: nn.Module) -> None:
    """The last norm adds the same large vector to every token."""
    model.layers[-1].norm2.bias.copy_(torch.linspace(50, 90, 16))


def test_a_rule_that_is_broken_often_enough_in_a_row_stops_the_run_once():
    model = encoder()
    monitor = osm.Monitor(model, batches(), every=2, rules={"max_cosine": 0.9}, patience=2, on_collapse="stop")

    def loop() -> int:
        for step in range(20):
            if step == 3:
                make_tokens_alike(model)  # seen at steps 4 and 6
            monitor.step()
            if monitor.should_stop:
                return step
        return -1

    with pytest.warns(
        CollapseWarning, match=r"Collapse at step 6: max_cosine is broken, after layer 1: mean cosine is 0\.9"
    ):
        stopped_at = loop()
    assert stopped_at == 6
    assert [breach.rule for breach in monitor.broken] == ["max_cosine"]


def test_a_rule_that_holds_in_between_starts_the_count_again():
    model = encoder()
    bias = model.layers[-1].norm2.bias
    monitor = osm.Monitor(model, batches(), every=1, rules={"max_cosine": 0.9}, patience=2, on_collapse="stop")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            torch.nn.init.zeros_(bias) if step % 2 else make_tokens_alike(model)
            monitor.step()
    assert not monitor.has_collapsed


def test_a_warning_lets_the_run_go_on_and_is_given_once():
    model = encoder()
    make_tokens_alike(model)
    monitor = osm.Monitor(model, batches(), every=1, rules={"max_cosine": 0.9})
    with pytest.warns(CollapseWarning, match="training continues") as told:
        _ = [monitor.step() for _ in range(3)]
    assert len(told) == 1
    assert not monitor.should_stop


def test_rules_bring_their_metrics_along():
    monitor = osm.Monitor(encoder(), batches(), metrics="cosine", rules={"min_effective_rank_share": 0.0})
    assert "smoothing/effective_rank_share/depth_2" in monitor.step()


@pytest.mark.parametrize(
    ("losses", "stops"), [((2.0, 1.0, 1.2), False), ((2.0, 1.0, 1.6), True), ((1.0, math.nan), True)]
)
def test_a_loss_that_rises_is_a_collapse_where_that_is_a_rule(losses, stops):
    rules = {"max_loss_increase": 0.5}
    monitor = osm.Monitor(encoder(), batches(), every=1, spectra=False, rules=rules, on_collapse="stop")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        for loss in losses:
            monitor.step(loss)
    assert monitor.should_stop == stops


def test_mistakes_are_told_when_the_monitor_is_made():
    with pytest.raises(UnknownName, match="Unknown rule 'max_cosin'"):
        osm.Monitor(encoder(), batches(), rules={"max_cosin": 1})
    with pytest.raises(UnknownName, match="Unknown rule"):
        osm.SmoothingCallback(batches=batches(), rules={"cosine": 1})
    with pytest.raises(BadValue, match="patience"):
        osm.Monitor(encoder(), batches(), patience=0)
    with pytest.raises(UnknownName, match="on_collapse"):
        osm.Monitor(encoder(), batches(), on_collapse="explode")
