"""The headline follows the measurement, one quantity per sentence; theory speaks for itself beside it."""

import dataclasses

import pytest
import torch
from oversmooth.output.measured_sections import _parts_per_depth, curve_figure
from oversmooth.output.theory_sections import regime_strip

import oversmooth as osm
from oversmooth.output.tables import show_measurement
from oversmooth.results import Analysis
from oversmooth.results.wording import depth_words, dominating_words, headline, short_depth_words, summary, who_words
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def analysed():
    model, inputs = tiny_model("vit")
    images = torch.rand(4, *inputs["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(0))
    data = [{"pixel_values": images}]
    return Analysis(
        inspection=osm.inspect(model),
        measurement=osm.measure(model, data),
        prediction=osm.predict(model, data, heads=False),
    )


def with_total(analysed, **facts):
    attribution = dataclasses.replace(analysed.measurement.unit_attributions[0], **facts)
    return dataclasses.replace(
        analysed, measurement=dataclasses.replace(analysed.measurement, unit_attributions=(attribution,))
    )


@pytest.mark.parametrize(
    ("facts", "pieces"),
    [
        (
            {"total": -0.46, "interval": (-0.5, -0.4), "direction": "smoothing"},
            ("Smoother with depth", "-0.46", "-0.50 to -0.40"),
        ),
        (
            {"total": 0.22, "interval": (0.1, 0.3), "direction": "sharpening"},
            ("Sharper with depth", "+0.22", "+0.10 to +0.30"),
        ),
        (
            {"total": 0.22, "interval": (-0.1, 0.5), "direction": "no clear change"},
            ("No clear change with depth", "+0.22"),
        ),
        (
            {"total": -0.3, "interval": None, "sequences": 1, "direction": "smoothing"},
            ("Smoother with depth on the one sequence measured", "-0.30"),
        ),
    ],
)
def test_the_headline_says_what_was_measured_and_how_sure_it_is(analysed, facts, pieces):
    said = headline(with_total(analysed, **facts))
    for piece in pieces:
        assert piece in said
    assert "The final norm is included; " in summary(with_total(analysed, **facts))
    assert "tokens at unit length" in said
    assert "cosine" not in said  # one quantity per sentence
    assert "cosine" in summary(with_total(analysed, **facts))


def test_the_chart_ends_where_the_headline_ends(analysed):
    """The total counts the final norm, so the curve shows it: the last point is what leaves the model."""
    measurement = analysed.measurement
    final = measurement.final("hfc_lfc")
    assert final.place == "final_norm"
    figure = curve_figure(measurement, "hfc_lfc")
    assert figure["traces"][-1]["y"][-1] == pytest.approx(final.mean, rel=1e-3)
    assert figure["layout"]["xaxis"]["ticktext"][-1] == "norm"
    bars = _parts_per_depth(measurement.attributions[0])
    assert [trace["name"] for trace in bars["traces"]] == ["attention", "feed-forward", "final norm", "sum"]
    assert sum(bars["traces"][-1]["y"]) == pytest.approx(measurement.attributions[0].total, rel=1e-2, abs=1e-3)


def test_kinds_add_up_to_the_total_and_each_has_its_own_interval(analysed):
    attribution = analysed.measurement.attributions[0]
    assert sum(kind.change for kind in attribution.kinds) == pytest.approx(attribution.total)
    assert [kind.part for kind in attribution.kinds] == ["attention", "feed-forward", "final norm"]
    for kind in attribution.kinds:
        low, high = kind.interval
        assert low < kind.change < high
        assert (kind.direction == "no clear change") == (low <= 0 <= high)
        assert kind.part in who_words(attribution).lower()


def test_a_change_that_is_written_as_zero_has_no_direction(analysed):
    attribution = analysed.measurement.attributions[0]
    tiny = dataclasses.replace(attribution.kinds[-1], change=0.001, interval=(0.0005, 0.0015), direction="sharpening")
    said = who_words(dataclasses.replace(attribution, kinds=(tiny,)))
    assert said == "The final norm makes no clear change (0.00)."


def test_layer_cards_are_labelled_by_the_measurement_and_theory_has_its_own_line(analysed):
    layers = analysed.prediction.layers
    assert layers[0].measured_sequences == 4
    faked = dataclasses.replace(
        layers[0], measured=-1.04, measured_interval=(-1.2, -0.9), direction="smoothing", regime="sharpening"
    )
    strip = regime_strip(dataclasses.replace(analysed.prediction, layers=(faked,)))
    (card,) = strip.items
    assert "smooths" in card.word
    assert card.tone == "smoothing"
    assert card.lines == ("measured -1.04 (-1.20 to -0.90)", "would sharpen if repeated")


def test_page_table_and_json_say_the_same(analysed, capsys):
    attribution = analysed.measurement.unit_attributions[0]
    show_measurement(analysed.measurement)
    printed = " ".join(capsys.readouterr().out.split())
    assert depth_words(attribution) in printed
    assert headline(analysed) == short_depth_words(attribution)
    assert headline(analysed).partition(" (")[0].partition(" from embedding")[0] in depth_words(attribution)
    saved = analysed.measurement.to_dict()["unit_attributions"][0]
    assert saved["direction"] == attribution.direction
    assert tuple(saved["interval"]) == attribution.interval


def test_a_token_that_outweighs_the_others_is_named_with_channel_and_block(analysed):
    found = dataclasses.replace(analysed.measurement.dominating[0], ratio=185.7, word="The", position=0, channel=507)
    found = dataclasses.replace(found, depth=12, made_at_depth=12, made_by="feed-forward", position_share=1.0)
    for piece in ("token 'The' at position 0 is 186 times", "The feed-forward of depth 12 makes it"):
        assert piece in dominating_words(found)
    massive = dataclasses.replace(found, channel_share=0.997)
    assert "Massive activation" in dominating_words(massive)
    assert "nearly all of its squared length lies in channel 507" in dominating_words(massive)
    assert "60% of its squared length lies in channel 507" in dominating_words(
        dataclasses.replace(found, channel_share=0.6)
    )
    spread = dominating_words(dataclasses.replace(found, channel_share=0.1))
    assert spread.startswith("One token outweighs the others")
    assert "channel" not in spread
    assert dominating_words(dataclasses.replace(found, ratio=3.0)) == ""


def test_all_metrics_stand_whole_in_tables_that_fit_the_terminal(monkeypatch, capsys):
    from oversmooth.measurement.measure import measure
    from tests.contract.tiny_models import tiny_model

    model, inputs = tiny_model("gpt2")
    result = measure(model, [inputs], metrics="all")
    monkeypatch.setattr("oversmooth.output.tables.PIPE_WIDTH", 80)
    show_measurement(result)
    printed = capsys.readouterr().out
    assert "…" not in printed
    heads = [line.split() for line in printed.splitlines() if line.startswith("depth")]
    assert [name for head in heads for name in head[2:]] == [
        *(name for name, _ in result.definitions),
        "d",
        "cosine",
    ]
    cells = {
        value.metric: f"{value.mean:.4g}"
        for value in result.values
        if value.mean is not None and (value.depth, value.place) == (1, "attn_sum")
    }
    for shown in cells.values():
        assert shown in printed
