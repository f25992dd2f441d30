"""The streaming run itself: averages, errors, interruption, modes, choices."""

import math

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.errors import NoData, UnknownName, UserCodeFailed, WrongBatch
from oversmooth.measurement.measure import measure
from oversmooth.measurement.statistics import Running
from oversmooth.output.charts import Fan, Line
from oversmooth.results import Measurement
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def batches(count=3, rows=2, tokens=7, width=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, tokens, width, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("cuts", [(10,), (3, 7), (1, 1, 8), (5, 5)])
def test_running_mean_and_error_do_not_depend_on_how_numbers_are_batched(cuts):
    numbers = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e6
    running = Running()
    for part in numbers.split(list(cuts)):
        running.add(part)
    assert running.count == 10
    torch.testing.assert_close(running.mean, numbers.mean().item())
    torch.testing.assert_close(running.standard_error, (numbers.std() / math.sqrt(10)).item())


def test_one_number_has_no_standard_error():
    running = Running()
    running.add(torch.tensor([2.0]))
    assert running.mean == 2.0
    assert running.standard_error is None


def test_values_are_means_over_sequences_of_an_independent_computation(encoder):
    data = batches()
    result = measure(encoder, data, metrics="cosine")
    states, cosines = [], []
    handles = [layer.register_forward_hook(lambda m, a, out: states.append(out)) for layer in encoder.layers]
    with torch.no_grad():
        encoder.eval()
        for batch in data:
            states.clear()
            encoder(batch)
            for h in states[-1]:
                unit = h / h.norm(dim=1, keepdim=True)
                gram = unit @ unit.T
                n = len(h)
                cosines.append((gram.sum() - n) / (n * (n - 1)))
    for handle in handles:
        handle.remove()
    expected = torch.stack(cosines).double()
    last = result.curve("cosine")[-1]
    torch.testing.assert_close(last.mean, expected.mean().item(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last.standard_error, (expected.std() / math.sqrt(6)).item(), rtol=1e-4, atol=1e-6)
    assert last.sequences == 6


def test_a_result_does_not_depend_on_the_batch_size(encoder):
    data = torch.cat(batches())
    one, three = measure(encoder, [data]), measure(encoder, data.split(2))
    for a, b in zip(one.values, three.values, strict=True):
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-5, atol=1e-5)


def test_mode_and_hooks_are_as_before(encoder):
    encoder.train()
    encoder.layers[1].eval()
    measure(encoder, batches())
    assert encoder.training
    assert not encoder.layers[1].training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())
    encoder.eval()


def test_interruption_returns_what_was_measured_marked_partial(encoder):
    def interrupted():
        yield from batches(2)
        raise KeyboardInterrupt

    result = measure(encoder, interrupted())
    assert result.is_partial
    assert result.data.sequences == 4
    assert not any(m._forward_hooks for m in encoder.modules())


def test_interruption_inside_the_model_counts_only_whole_batches(encoder):
    calls = []

    def stop(module, args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = encoder.layers[1].register_forward_pre_hook(stop)
    result = measure(encoder, batches(3), metrics="cosine")
    handle.remove()
    assert result.is_partial
    assert result.data.sequences == 2
    assert {value.sequences for value in result.values} == {2}


def test_hooks_are_removed_when_the_model_fails(encoder):
    with pytest.raises(WrongBatch, match="the model says"):
        measure(encoder, [torch.randn(2, 7, 5)])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())


def test_nan_is_reported_with_depth_and_place_and_never_enters_a_mean():
    model, inputs = tiny_model("gpt2")
    with torch.no_grad():
        model.h[1].attn.c_proj.weight[0, 0] = math.nan
    result = measure(model, [inputs])
    (problem,) = result.problems
    assert "depth 2, attn_sum" in problem
    assert "1 of 1 sequences" in problem
    after = [value for value in result.values if value.depth == 3]
    assert all(value.mean is None and value.missing for value in after)
    before = [value for value in result.values if value.depth == 1]
    assert all(value.mean is not None for value in before)
    result.to_json()


def test_half_precision_models_are_measured_in_float32():
    model, inputs = tiny_model("bert")
    result = measure(model.bfloat16(), [inputs], metrics="cosine")
    reference = measure(model.float(), [inputs], metrics="cosine")
    for a, b in zip(result.values, reference.values, strict=True):
        torch.testing.assert_close(a.mean, b.mean, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(("choice", "word", "tokens"), [("keep", "kept", 17), ("drop", "dropped", 16)])
def test_prefix_tokens_are_kept_or_dropped_and_the_result_says_which(choice, word, tokens):
    model, inputs = tiny_model("vit")
    result = measure(model, [inputs], prefix_tokens=choice)
    assert result.prefix_tokens == word
    assert result.data.tokens == tokens


def test_registers_are_prefix_tokens_too():
    model, inputs = tiny_model("dinov2-registers")
    assert measure(model, [inputs], prefix_tokens="drop").data.tokens == 16


def test_models_without_prefix_tokens_say_none(encoder):
    assert measure(encoder, batches(), prefix_tokens="drop").prefix_tokens == "none"


def test_short_sequences_are_skipped_and_counted():
    model, inputs = tiny_model("bert")
    ids = inputs["input_ids"].repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[1, 1:] = 0
    result = measure(model, [{"input_ids": ids, "attention_mask": mask}])
    assert (result.data.sequences, result.data.skipped) == (2, 1)
    with pytest.raises(NoData, match="1 sequences were skipped"):
        measure(model, [{"input_ids": ids[1:2], "attention_mask": mask[1:2]}])


def test_no_data_is_an_error(encoder):
    with pytest.raises(NoData, match="it is empty"):
        measure(encoder, [])


def test_max_samples_counts_sequences_not_batches(encoder):
    assert measure(encoder, batches(), max_samples=3).data.sequences == 3


def test_a_users_own_metric_goes_beside_the_named_ones(encoder):
    def largest(h, keep):
        return h.abs().amax((1, 2))

    result = measure(encoder, batches(), metrics=["cosine", largest])
    assert {value.metric for value in result.values} == {"cosine", "largest"}
    assert dict(result.definitions)["largest"] == "largest(h, keep), defined by the user"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"metrics": "cosin"}, UnknownName, "cosine"),
        ({"at": "atn_sum"}, UnknownName, "attn_sum"),
        ({"prefix_tokens": "maybe"}, UnknownName, "Known: keep, drop"),
    ],
)
def test_unknown_choices_suggest_the_nearest(encoder, options, error, text):
    with pytest.raises(error, match=text):
        measure(encoder, batches(), **options)


def test_places_can_be_chosen(encoder):
    result = measure(encoder, batches(), at=["attn_branch", "ffn_branch"])
    assert {value.place for value in result.values} == {"attn_branch", "ffn_branch"}
    assert not any(value.on_stream for value in result.values)
    assert len(result.attributions) == 1


def test_groups_of_places_can_stand_beside_places(encoder):
    both = measure(encoder, batches(), at=["norms", "ffn_branch"])
    alone = [measure(encoder, batches(), at=at) for at in ("norms", "ffn_branch")]
    assert {value.place for value in both.values} == {value.place for one in alone for value in one.values}


def test_the_result_round_trips_and_tabulates(encoder):
    result = measure(encoder, batches(), at="all")
    assert Measurement.from_dict(result.to_dict()) == result
    frame = result.to_pandas()
    assert {"depth", "place", "metric", "mean", "standard_error"} <= set(frame.columns)
    assert len(frame) == len(result.values)
    assert "cosine" in repr(result)


def test_the_same_data_have_the_same_hash_and_other_data_another(encoder):
    first, again = measure(encoder, batches()), measure(encoder, batches())
    assert first == again
    assert measure(encoder, batches(2)).data.sha256 != first.data.sha256


def test_a_plot_shows_the_curve_with_its_band(encoder):
    (panel,) = measure(encoder, batches()).plot("hfc_lfc").figure.panels
    (line,) = [mark for mark in panel.marks if isinstance(mark, Line)]
    (band,) = [mark for mark in panel.marks if isinstance(mark, Fan)]
    assert list(line.x) == list(band.x) == [0, 1, 2, 3]
    assert all(low < value < high for low, value, high in zip(band.low, line.y, band.high, strict=True))


def test_measure_and_inspect_identify_the_weights_by_the_same_hash(encoder):
    assert measure(encoder, batches()).provenance.weights_sha256 == osm.inspect(encoder).provenance.weights_sha256


@pytest.mark.parametrize("error", [RuntimeError, ValueError, IndexError, TypeError, KeyError])
def test_a_bug_in_a_users_metric_is_named_and_keeps_its_cause(encoder, error):
    def broken(h, keep):
        raise error("my own bug")

    with pytest.raises(UserCodeFailed, match="my own bug") as caught:
        measure(encoder, batches(), metrics=["cosine", broken])
    assert isinstance(caught.value.__cause__, error)
    assert "'broken'" in str(caught.value)
    assert not any(module._forward_hooks for module in encoder.modules())
