"""Code that users hand over (metrics, callbacks, interventions) cannot change a run, and is named where it fails."""

import copy
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.control.interventions import RULES, Rule
from oversmooth.errors import DeviceUnavailable, NotSupported, OversmoothError, UserCodeFailed
from oversmooth.measurement.metrics import METRICS, Metric
from oversmooth.measurement.moments import Moments
from tests.contract.tiny_models import tiny_model

SEQUENCES = {"input_ids": torch.arange(1, 41).reshape(5, 8)}


def spread(h, keep):
    return h.std(dim=(1, 2))


def doubles(h, keep):
    h.mul_(2)
    return h.std(dim=(1, 2))


def zeroes_padding(h, keep):
    keep.zero_()
    return h.std(dim=(1, 2))


def through_numpy(h, keep):
    h.numpy()[:] = 5
    return torch.ones(len(h))


def raises(h, keep):
    raise ZeroDivisionError(f"this went wrong {1000 * 'again '}")


def of_nothing(h, keep):
    return None


def complex_numbers(h, keep):
    return torch.ones(len(h), dtype=torch.complex64)


def centres_sums(moments: Moments):
    moments.mean.zero_()
    moments.x.zero_()
    return moments.norms.sum(1)


@pytest.mark.parametrize("metric", [doubles, zeroes_padding])
def test_a_metric_that_writes_into_what_it_is_given_is_named(metric):
    model, inputs = tiny_model("bert")
    with pytest.raises(UserCodeFailed, match=f"The metric '{metric.__name__}' writes into the hidden states"):
        osm.measure(model, [inputs], metrics=["cosine", metric])


@pytest.mark.parametrize("of_sums", [True, False])
def test_a_metric_of_sums_that_writes_into_them_is_named(of_sums):
    model, inputs = tiny_model("bert")
    metric = Metric("mine", centres_sums, "a mistake", of_sums=of_sums)
    if of_sums:  # sums of all places together hold no tokens
        metric = Metric("mine", lambda moments: moments.norms.mul_(2).sum(1), "a mistake", of_sums=True)
    with pytest.raises(UserCodeFailed, match="The metric 'mine' writes into"):
        osm.measure(model, [inputs], metrics=[metric, "cosine"])


def test_what_a_metric_writes_where_nobody_can_see_it_changes_no_other_number():
    model, inputs = tiny_model("bert")
    plain = osm.measure(model, [inputs], metrics=["cosine", "effective_rank"])
    found = osm.measure(model, [inputs], metrics=[through_numpy, "cosine", "effective_rank"])
    for name in ("cosine", "effective_rank"):
        assert found.curve(name) == plain.curve(name)
    with torch.inference_mode():  # there tensors have no versions
        found = osm.measure(model, [inputs], metrics=[through_numpy, "cosine", "effective_rank"])
    assert found.curve("cosine") == plain.curve("cosine")


def test_a_sound_metric_of_the_user_sees_the_features_themselves():
    model, inputs = tiny_model("bert")
    found = osm.measure(model, [inputs], metrics=[spread]).curve("spread")
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    for point, h in zip(found, states, strict=True):
        assert point.mean == pytest.approx(spread(h, None).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (raises, "The metric 'raises' raises ZeroDivisionError: this went wrong again"),
        (of_nothing, "The metric 'of_nothing' returns a NoneType"),
        (complex_numbers, r"The metric 'complex_numbers' returns a tensor of torch\.complex64"),
    ],
)
@pytest.mark.parametrize("verb", ["measure", "gate", "monitor"])
def test_a_metric_that_fails_is_named_in_one_short_message(metric, words, verb, monkeypatch):
    model, inputs = tiny_model("bert")
    monkeypatch.setitem(METRICS, metric.__name__, Metric(metric.__name__, lambda m: metric(m.h, m.keep), "a plugin's"))
    acts = {
        "measure": lambda: osm.measure(model, [inputs], metrics=metric.__name__),
        "gate": lambda: osm.gate(model, [inputs], rules={f"max_{metric.__name__}": 0.5}),
        "monitor": lambda: osm.Monitor(model, [inputs], metrics=[metric.__name__]).step(),
    }
    with pytest.raises(UserCodeFailed, match=words) as caught:
        acts[verb]()
    assert len(str(caught.value)) < 700


def stumbles(done, total):
    raise KeyError("no such bar")


PROGRESS = {
    "inspect": lambda model, inputs: osm.inspect(model, progress=stumbles),
    "measure": lambda model, inputs: osm.measure(model, [inputs], progress=stumbles),
    "predict": lambda model, inputs: osm.predict(model, [inputs], progress=stumbles),
    "gate": lambda model, inputs: osm.gate(model, [inputs], rules={"max_cosine": 0.5}, progress=stumbles),
    "ablate": lambda model, inputs: osm.ablate(model, [inputs], progress=stumbles),
    "edit_curve": lambda model, inputs: osm.edit_curve(model, [inputs], scale_h=0.5, progress=stumbles),
    "task_loss": lambda model, inputs: osm.task_loss(model, [inputs], original=model, progress=stumbles),
    "analyze": lambda model, inputs: osm.analyze(model, [inputs], stage=lambda name: stumbles),
    "a stage": lambda model, inputs: osm.analyze(model, [inputs], stage=lambda name: stumbles(0, 0)),
    "a log": lambda model, inputs: osm.Monitor(model, [inputs], log=stumbles).step(),
}


@pytest.mark.parametrize("verb", PROGRESS)
def test_a_callback_that_raises_is_named(verb):
    model, _ = tiny_model("bert")
    with pytest.raises(UserCodeFailed, match=r"(callback|log function of the Monitor) raises KeyError"):
        PROGRESS[verb](model, SEQUENCES)


def broken_rule(*, step: bool) -> type[Rule]:
    class Broken(Rule):
        title = "Broken"

        def __init__(self, facts):
            super().__init__(facts)
            if not step:
                raise LookupError("no room")

        def mixed(self, o):
            raise RuntimeError("a step failed")

    return Broken


def test_an_intervention_that_raises_is_named_where_it_is_made_and_where_it_acts(monkeypatch):
    model, inputs = tiny_model("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setitem(RULES, "broken", broken_rule(step=False))
    with pytest.raises(UserCodeFailed, match="The intervention 'broken' raises LookupError: no room"):
        osm.apply(model, "broken")
    assert model.state_dict().keys() == before.keys()
    monkeypatch.setitem(RULES, "broken", broken_rule(step=True))
    osm.apply(model, "broken")
    with pytest.raises(UserCodeFailed, match="The intervention 'Broken' raises RuntimeError: a step failed"):
        osm.measure(model, [inputs])


# --- a live model stays as it is -------------------------------------------------------------------------------------


def state_of(model: nn.Module):
    """All that a run could change, bit for bit."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: [len(getattr(module, kind)) for kind in hooks] for name, module in model.named_modules()},
        "forward": {name: "forward" in vars(module) for name, module in model.named_modules()},
        "modules": [name for name, _ in model.named_modules()],
        "tensors": {
            name: (tensor.device, tensor.dtype, tensor.requires_grad, id(tensor), tensor.data_ptr(), tensor.grad)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        },
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }


VERBS = {
    "inspect": lambda model, inputs: osm.inspect(model),
    "verify": lambda model, inputs: osm.verify(model, inputs=inputs),
    "measure": lambda model, inputs: osm.measure(model, [inputs, inputs], metrics="all"),
    "predict": lambda model, inputs: osm.predict(model, [inputs, inputs], solve=1),
    "gate": lambda model, inputs: osm.gate(model, [inputs], rules={"max_cosine": 0.5}),
    "analyze": lambda model, inputs: osm.analyze(model, [inputs], solve=1),
    "ablate": lambda model, inputs: osm.ablate(model, [inputs]),
    "edit_curve": lambda model, inputs: osm.edit_curve(model, [inputs], scale_h=0.5, strengths=(0.5, 1.0)),
    "task_loss": lambda model, inputs: osm.task_loss(model, [inputs], original=model),
    "discover": lambda model, inputs: osm.discover(model, inputs),
    "monitor": lambda model, inputs: osm.Monitor(model, [inputs]).step(),
}
FAILURES = {
    "nothing": (None, 0.0),
    "an early error": (RuntimeError("out of luck"), 0.05),
    "a late error": (RuntimeError("out of luck"), 0.7),
    "a late Ctrl-C": (KeyboardInterrupt(), 0.7),
}
"""What fails, and after which share of the work."""


def counted(monkeypatch, fail_at: int = 0, error: BaseException | None = None) -> SimpleNamespace:
    """Counts calls of linear layers; fails at one of them."""
    calls = SimpleNamespace(number=0)

    def forward(self, x):
        calls.number += 1
        if calls.number == fail_at and error is not None:
            raise error
        return nn.functional.linear(x, self.weight, self.bias)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    return calls


def in_mixed_modes(name: str):
    model, _ = tiny_model(name)
    model = copy.deepcopy(model).train()
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 0
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    return model


@pytest.mark.parametrize(
    ("name", "verb", "failure"),
    [
        *(("bert", verb, failure) for verb in VERBS for failure in FAILURES),
        *(("llama", verb, "a late error") for verb in ("verify", "measure", "predict", "ablate", "edit_curve")),
    ],
)
def test_a_live_model_is_as_it_was_after_every_verb_and_after_failures_midway(name, verb, failure, monkeypatch):
    model = in_mixed_modes(name)
    before, values = state_of(model), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    error, share = FAILURES[failure]
    calls = counted(monkeypatch)
    if error is None:
        VERBS[verb](model, SEQUENCES)
    else:
        VERBS[verb](copy.deepcopy(model), SEQUENCES)
        fail_at = 1 + int(share * calls.number)
        calls = counted(monkeypatch, fail_at, error)
        with suppress(OversmoothError, KeyboardInterrupt, RuntimeError):
            VERBS[verb](model, SEQUENCES)
        assert calls.number >= fail_at or verb == "inspect", "the failure happened"
    assert state_of(model) == before
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, values[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("verb", ["measure", "predict", "gate", "ablate", "edit_curve", "task_loss", "analyze"])
def test_a_live_model_is_never_moved(verb):
    model = in_mixed_modes("bert")
    before, values = state_of(model), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    more = {"gate": {"rules": {"max_cosine": 0.5}}, "edit_curve": {"scale_h": 0.5}, "task_loss": {"original": model}}
    run = getattr(osm, verb)
    with pytest.raises(DeviceUnavailable, match="'meta' cannot be used: tensors there have no numbers"):
        run(model, [SEQUENCES], device="meta", **more.get(verb, {}))
    with pytest.raises(NotSupported, match=r"a model of your own is not moved.*\nMove it yourself"):
        run(model, [SEQUENCES], device="cuda", **more.get(verb, {}))
    assert state_of(model) == before
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, values[key], rtol=0, atol=0)
    run(model, [SEQUENCES], device="cpu", **more.get(verb, {}))


def test_a_loaded_model_is_not_put_where_tensors_have_no_numbers(tmp_path):
    model, inputs = tiny_model("bert")
    model.save_pretrained(tmp_path)
    with pytest.raises(DeviceUnavailable, match="tensors there have no numbers"):
        osm.measure(tmp_path, [inputs], device="meta")
