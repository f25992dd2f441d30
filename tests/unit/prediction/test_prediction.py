"""`predict` on tiny models: what it says, what it leaves out, and that it never decides what it does not know."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from oversmooth import predict
from oversmooth.control.projection import EigenvalueForm, kept_weights
from oversmooth.errors import BadValue, NoData, UnknownName
from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.prediction import ladder as sample
from oversmooth.prediction import radii
from oversmooth.prediction.asymptotics import asymptotics_each
from oversmooth.prediction.ladder import RUNGS, sample_layer
from oversmooth.prediction.operator import AttentionLayer
from oversmooth.prediction.summary import Guarantee, _regime, guarantee
from oversmooth.prediction.verdicts import (
    _guarantee_statement,
    agreements,
    carrying_step_of,
    layer_verdict,
    repeated_words,
    repetition_words,
    stack_verdict,
)
from oversmooth.results import Prediction
from tests.contract.tiny_models import AttentionStack, tiny_model
from tests.unit.prediction.random_layers import generator, normal, random_attention


@pytest.fixture(scope="module")
def found():
    model, inputs = tiny_model("gpt2")
    batch = {"input_ids": torch.cat([inputs["input_ids"], inputs["input_ids"].flip(1)])}
    changes = ["no_skip", "flip_norms", "positive_norms", "no_biases", "scale:2", "gfsa:0,1,0.5", "featscale:0.5,0.2"]
    return predict(model, [batch], what_ifs=changes, simulate=20)


def test_a_row_per_layer_head_change_and_step(found):
    assert [row["depth"] for row in found.rows()] == [1, 2, 3]
    assert {f"rung_{rung}" for rung in range(6)} <= found.rows()[0].keys()
    assert len(found.head_rows()) == 3 * 4
    assert [row["what_if"] for row in found.what_if_rows()[:2]] == ["as it is", "no_skip"]
    assert len(found.what_if_rows()) == 3 * 8
    assert [row["step"] for row in found.simulation_rows()[:6]] == [0, 1, 2, 5, 10, 20]
    assert Prediction.from_dict(found.to_dict()) == found
    assert "3 layers: one pass" in repr(found)
    assert "; if repeated" in repr(found)
    assert "<table>" in found._repr_html_()


def test_causal_layers_are_solved_from_their_diagonals(found):
    for layer in found.layers:
        assert layer.is_causal
        assert layer.plain.route == layer.folded.route == "diagonals"
        assert layer.folded.residual == 0.0


def test_pre_norm_layers_are_computed_at_their_measured_scale(found):
    layer = found.layers[0]
    assert layer.acting == "folded"
    assert layer.scale > 0
    assert layer.scale_spread > 0
    assert layer.rungs[0].mean == layer.folded.exponent
    bases = [statement.basis for statement in layer.verdict]
    assert "computed at measured attention and scale" in bases
    assert bases[-1] == "observed"


def test_changes_move_the_rungs_that_they_concern(found):
    for layer in found.layers:
        by_name = {change.name: change for change in layer.what_ifs}
        no_biases = by_name["no_biases"].rungs
        assert [rung.mean for rung in no_biases[:4]] == [rung.mean for rung in layer.rungs[:4]]
        assert no_biases[4].mean == pytest.approx(no_biases[3].mean, abs=1e-4)
        assert by_name["scale:2"].rungs[1].mean != layer.rungs[1].mean
        assert by_name["featscale:0.5,0.2"].rho_dc != by_name["no_biases"].rho_dc
        assert by_name["flip_norms"].rho_dc != layer.folded.rho_dc


def test_a_layer_whose_heads_decouple_is_proved_to_sharpen():
    torch.manual_seed(0)
    model = AttentionStack().eval()
    with torch.no_grad():
        for mixer in model.mixers.values():
            weights = AttentionWeights(
                w_v=mixer.in_proj_weight[64:].view(4, 8, 32), w_o=mixer.out_proj.weight.view(32, 4, 8)
            )
            replaced = kept_weights(weights, EigenvalueForm(low=-1.0, high=-0.1))
            mixer.in_proj_weight[64:] = replaced.w_v.flatten(0, 1)
            mixer.out_proj.weight.copy_(replaced.w_o.flatten(1))
    found = predict(model, [torch.randn(1, 9, 32)])
    for layer in found.layers:
        assert layer.regime == "sharpening"
        (proved,) = [statement for statement in layer.verdict if statement.kind == "proved"]
        assert proved.is_remark
        assert "sharpening, for any attention" in proved.text
        assert {head.certificate for head in layer.heads} == {"sharpening"}
        assert all(head.certified_rate > 1 for head in layer.heads)
        assert layer.folded is None
        assert "folded" in {item.field for item in layer.missing}


def test_what_is_not_known_is_undecided_with_its_bounds(monkeypatch):
    monkeypatch.setattr(radii, "DENSE_AC", 0)
    monkeypatch.setattr(sample, "asymptotics_each", partial(asymptotics_each, max_applications=3))
    model, inputs = tiny_model("bert")
    found = predict(model, [inputs])
    for layer in found.layers:
        assert layer.regime == "undecided"
        assert layer.plain.undecided == 1
        text = next(statement.text for statement in layer.verdict if statement.kind == "computed")
        assert "undecided" in text
        assert f"{layer.plain.rho_ac_low:.4g} and {layer.plain.rho_ac_high:.4g}" in text
    assert "3 would be undecided" in found.verdict[1].text


def test_layers_that_would_smooth_are_counted_with_their_norms(found):
    """Not `6 of 6 would smooth`, and far below `4 of 6 would sharpen with the norm behind them`: the layer has that norm."""
    first = found.layers[0]
    sharpens = dataclasses.replace(first.plain, view="folded", regime="sharpening")
    layers = [dataclasses.replace(first, acting="plain", regime="smoothing", folded=sharpens)] * 2
    layers.append(dataclasses.replace(first, acting="plain", regime="smoothing", folded=None))
    layers = [dataclasses.replace(each, plain=dataclasses.replace(each.plain, regime="smoothing")) for each in layers]
    assert repeated_words(layers) == (
        "iterated at fixed attention with their norms, of 3 layers 2 would sharpen, 1 would smooth; "
        "without the norm after the sum, 3 would smooth."
    )
    assert "without" not in repeated_words(layers[2:])


# --- words ----------------------------------------------------------------------------------------------------------


def with_rungs(layer, values, measured):
    rungs = tuple(dataclasses.replace(rung, mean=value) for rung, value in zip(layer.rungs, values, strict=True))
    direction = "smoothing" if measured < 0 else "sharpening"
    return dataclasses.replace(layer, rungs=rungs, measured=measured, direction=direction)


def test_a_disagreement_is_said_and_the_rung_is_named(found):
    layer = with_rungs(found.layers[0], (-0.5, -0.1, 0.2, 0.3, 0.3, 0.3), 0.3)
    layer = dataclasses.replace(layer, explained_from=2, carries="repetition")
    text = layer_verdict(layer, None, 1e-3)[-1].text
    for piece in ("disagree", "would smooth", "rung 2 (features)", "'repetition'"):
        assert piece in text
    between = dataclasses.replace(with_rungs(layer, (0.5, -0.1, 0.2, 0.3, 0.3, 0.3), 0.3), explained_from=2)
    assert "rungs between do not" in layer_verdict(between, None, 1e-3)[-1].text
    agreeing = dataclasses.replace(layer, explained_from=0)
    assert "agree in sign on every rung" in layer_verdict(agreeing, None, 1e-3)[-1].text
    unexplained = dataclasses.replace(layer, explained_from=None)
    assert "no rung explains it" in layer_verdict(unexplained, None, 1e-3)[-1].text


def test_a_layer_that_is_not_reproduced_gets_no_verdict(found):
    layer = dataclasses.replace(found.layers[0], identity_error=0.5)
    (only,) = layer_verdict(layer, None, 1e-3)
    assert "no verdict" in only.text


def test_mixed_inputs_and_differing_views_are_said(found):
    layer = found.layers[0]
    mixed = dataclasses.replace(layer.folded, regime="mixed", smoothing=3, sharpening=2)
    said = layer_verdict(dataclasses.replace(layer, folded=mixed), None, 1e-3)[1]
    assert "depends on the input: 3 smoothing, 2 sharpening" in said.text
    assert said.is_remark
    plain = dataclasses.replace(layer.plain, regime="smoothing")
    folded = dataclasses.replace(layer.folded, regime="sharpening")
    texts = [
        s.text for s in layer_verdict(dataclasses.replace(layer, acting="plain", plain=plain, folded=folded), None, 1.0)
    ]
    assert any("folded in, it would sharpen" in text for text in texts)


def test_agreement_over_layers_names_the_first_rung_that_explains(found):
    rungs = ((-1.0, -0.1, 0.1, 0.1, 0.1, 0.1), (0.5, 0.3, 0.2, 0.2, 0.2, 0.2), (0.1, 0.6, 0.3, 0.3, 0.3, 0.3))
    layers = [with_rungs(layer, values, values[-1]) for layer, values in zip(found.layers, rungs, strict=True)]
    items = agreements("", layers)
    assert [item.name for item in items] == list(RUNGS[:6])
    assert items[0].sign_agreement == pytest.approx(2 / 3)
    assert items[1].rank_correlation == pytest.approx(1.0)
    assert items[5].mean_error == 0.0
    words = stack_verdict("text", layers, items, None)[-1].text
    for piece in ("text: ", "67%", "rung 2 (features)", "right order from rung 1 (typical)", "'repetition'"):
        assert piece in words
    assert carrying_step_of(layers) == "repetition"
    assert carrying_step_of([]) is None


def test_two_sequences_that_differ_leave_a_layer_undecided_and_four_can_mix(found):
    assert _regime(Counter(smoothing=1, sharpening=1)) == "undecided"
    assert _regime(Counter(smoothing=3, sharpening=1)) == "undecided"
    assert _regime(Counter(smoothing=2, sharpening=2)) == "mixed"
    assert _regime(Counter(smoothing=5)) == "smoothing"
    assert _regime(Counter(smoothing=5, undecided=1)) == "undecided"
    assert _regime(Counter()) == "undecided"
    few = dataclasses.replace(
        found.layers[0].folded, regime="undecided", smoothing=1, sharpening=1, undecided=0, sequences=2
    )
    for piece in ("undecided", "1 smoothing, 1 sharpening", "2 solved sequences, too few"):
        assert piece in repetition_words(few)


@pytest.mark.parametrize(
    ("measured", "interval", "count", "direction", "pieces"),
    [
        (-0.2, (-0.3, -0.1), 9, "smoothing", ("One pass smooths: ", "-0.200", "-0.300 to -0.100", "9 sequences")),
        (0.1, (-0.1, 0.3), 9, "no clear change", ("makes no clear change", "+0.100", "-0.100 to +0.300")),
        (0.1, None, 1, "sharpening", ("sharpens on the one sequence", "no interval", "+0.100")),
        (-1e-5, (-2e-5, -1e-6), 9, "smoothing", ("changes by 0.000",)),
    ],
)
def test_one_pass_is_told_from_what_was_measured_with_how_sure_that_is(
    found, measured, interval, count, direction, pieces
):
    layer = dataclasses.replace(
        found.layers[0],
        measured=measured,
        measured_interval=interval,
        measured_sequences=count,
        direction=direction,
        regime="sharpening",
    )
    first, *rest = layer_verdict(layer, None, 1e-3)
    assert first.kind == "observed"
    for piece in pieces:
        assert piece in first.text
    if direction == "no clear change":
        assert "no clear sign" in rest[-1].text
        assert "agree in sign" not in rest[-1].text


def pre_norm_layer(source, interval, spread, *, is_causal=False):
    """A pre-norm layer of the eigenbasis form, on tokens whose scales differ by about `spread`."""
    weights = AttentionWeights(w_v=normal(source, 2, 3, 6), w_o=normal(source, 6, 2, 3))
    weights = kept_weights(weights, EigenvalueForm(low=interval[0], high=interval[1]))
    norms = {"attn_norm": Norm(kind="rms", weight=torch.ones(6, dtype=torch.float64))}
    layer = AttentionLayer(weights=dataclasses.replace(weights, norms=norms), dtype=torch.float64)
    x = nn.functional.normalize(normal(source, 7, 6), dim=1)
    x = x * (1 + spread * torch.linspace(-1, 1, 7, dtype=torch.float64))[:, None] * 6**0.5
    attention = random_attention(source, 2, 7, is_causal=is_causal)
    taken, _ = sample_layer(layer, attention, x, x + layer.exact(attention, x).output, solve=True)
    return layer, taken


@pytest.mark.parametrize("interval", [(-0.4, -0.1), (0.1, 1.0)])
def test_proved_is_said_only_where_all_token_scales_are_equal(interval):
    regime = "smoothing" if interval[0] > 0 else "sharpening"
    layer, equal = pre_norm_layer(generator(0), interval, 0.0)
    assert guarantee(layer, [equal]) == Guarantee(regime=regime, scale_spread=None)
    layer, spread = pre_norm_layer(generator(0), interval, 0.5)
    found = guarantee(layer, [spread])
    assert found.regime == regime
    assert found.scale_spread == pytest.approx(spread.scale_spread)
    statement = _guarantee_statement(found)
    assert statement.kind == "computed"
    assert statement.basis == "computed for any attention at measured scale"
    assert ("parallel, not equal" in statement.text) == (regime == "smoothing")
    layer, causal = pre_norm_layer(generator(0), interval, 0.5, is_causal=True)
    assert guarantee(layer, [causal]) is None


def test_eigenvalues_below_the_smallest_scale_guarantee_nothing():
    layer, taken = pre_norm_layer(generator(0), (-0.9, -0.85), 0.5)
    assert taken.smallest_scale < 0.85 < taken.scale  # the mean alone would have been enough
    assert guarantee(layer, [taken]) is None


def test_tokens_of_unequal_scales_become_parallel_and_not_equal(found):
    smoothing = dataclasses.replace(found.layers[0].folded, regime="smoothing", is_absolute=True)
    assert "all tokens become one vector, also in absolute size" in repetition_words(smoothing, None)
    said = repetition_words(smoothing, 0.41)
    for piece in ("would smooth", "parallel, but not equal", "spread 41%"):
        assert piece in said
    assert "one vector" not in said


def test_every_statement_has_a_kind_that_its_basis_agrees_with(found):
    statements = [*found.verdict, *(item for layer in found.layers for item in layer.verdict)]
    assert {statement.kind for statement in statements} == {"computed", "observed"}
    assert all(statement.basis.startswith(statement.kind) for statement in statements)


# --- edges ----------------------------------------------------------------------------------------------------------


def test_nan_in_the_stream_is_reported_and_left_out():
    model, inputs = tiny_model("torch-encoder")
    x = torch.cat([inputs[""], inputs[""]])
    x[1, 3] = torch.nan
    found = predict(model, [x])
    assert any("NaN" in problem for problem in found.problems)
    assert found.layers[0].rungs[5].sequences == 1


def test_an_interrupted_run_keeps_whole_batches():
    model, inputs = tiny_model("bert")

    def batches():
        yield inputs
        raise KeyboardInterrupt

    found = predict(model, batches())
    assert found.is_partial
    assert found.data.sequences == 1
    assert {layer.rungs[1].sequences for layer in found.layers} == {1}


def test_half_precision_is_predicted_within_its_digits():
    model, inputs = tiny_model("llama")
    exact = predict(model, [inputs])
    found = predict(model.to(torch.bfloat16), [inputs])
    for a, b in zip(found.layers, exact.layers, strict=True):
        assert a.identity_error < 0.1
        assert a.plain.rho_dc == pytest.approx(b.plain.rho_dc, rel=0.05)
    assert "bfloat16" in found.provenance.compute_dtype


def test_double_precision_agrees_with_single(found):
    model, inputs = tiny_model("vit")
    single, double = predict(model, [inputs]), predict(model.double(), [inputs], precision="float64")
    for a, b in zip(single.layers, double.layers, strict=True):
        assert a.folded.rho_ac == pytest.approx(b.folded.rho_ac, rel=2e-3)
        assert a.rungs[5].mean == pytest.approx(b.rungs[5].mean, abs=1e-4)


def test_two_tokens_are_enough_and_one_is_not():
    model, inputs = tiny_model("bert")
    found = predict(model, [{"input_ids": inputs["input_ids"][:, :2]}])
    assert all(layer.identity_error < 1e-3 for layer in found.layers)
    with pytest.raises(NoData):
        predict(model, [{"input_ids": inputs["input_ids"][:, :1]}])


def test_results_do_not_depend_on_global_seeds():
    model, inputs = tiny_model("bert")
    torch.manual_seed(1)
    first = predict(model, [inputs])
    torch.manual_seed(2)
    assert predict(model, [inputs]).layers == first.layers


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"solve": 0}, BadValue),
        ({"simulate": -1}, BadValue),
        ({"precision": "float16"}, UnknownName),
        ({"what_ifs": ["unknown"]}, UnknownName),
    ],
)
def test_options_are_checked_before_the_model_is_opened(options, error):
    with pytest.raises(error, match="what-if" if "what_ifs" in options else next(iter(options))):
        predict(nn.Linear(2, 2), [], **options)
