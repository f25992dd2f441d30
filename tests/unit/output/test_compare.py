"""The headline of a comparison: tokens of one input and different inputs in one sentence, and what the inputs were."""

from dataclasses import replace

import pytest

import oversmooth as osm
from oversmooth.output.charts import Fan
from oversmooth.output.compare_page import _card, _curves, _where, _who, compare_page
from oversmooth.results.comparing import compare_words, differences, sure_words
from tests.answers import deep, minilm
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama")[0].save_pretrained(folder)
    return osm.analyze(folder, solve=0)


def sharpened(output=0.10, between=0.64, **more):
    """MiniLM after an edit that keeps tokens apart in attention of the last layer."""
    first = minilm()
    last = first.points[-1]
    moved = output - first.output
    attention = tuple(
        (name, change + moved if name == "attention" else change) for name, change in first.layers[-1].parts
    )
    return replace(
        first,
        model="minilm-sharp",
        output=output,
        points=(*first.points[:-1], replace(last, mean=output)),
        layers=(*first.layers[:-1], replace(first.layers[-1], change=first.layers[-1].change + moved, parts=attention)),
        parts=tuple(replace(p, change=p.change + moved * (p.part == "attention")) for p in first.parts),
        between=(0.01, between),
        **{
            "values": tuple(value + moved + 0.001 * (-1) ** k for k, value in enumerate(first.values)),
            "between_values": tuple(between + 0.02 * (-1) ** k for k in range(7)),
            **more,
        },
    )


NAMES = ("MiniLM", "sharp")


@pytest.mark.parametrize(
    ("output", "between", "said"),
    [
        (0.10, 0.64, "sharp keeps tokens more distinct, but MiniLM tells different inputs apart better."),
        (0.60, 0.64, "MiniLM keeps tokens more distinct and tells different inputs apart better."),
        (0.10, -0.20, "sharp keeps tokens more distinct and tells different inputs apart better."),
        (
            0.10,
            0.06,
            "sharp keeps tokens more distinct; in telling different inputs apart there is no difference that seven inputs "
            "can show.",
        ),
        (
            0.33,
            0.64,
            "MiniLM tells different inputs apart better; in how distinct tokens stay there is hardly a difference.",
        ),
        (0.32, 0.06, "Hardly a difference between MiniLM and sharp."),
    ],
)
def test_the_headline_says_which_model_is_better_at_what(output, between, said):
    assert compare_words(NAMES, minilm(), sharpened(output, between)) == said


def test_equal_models_show_no_difference_and_how_many_inputs_that_rests_on():
    same = "No difference between MiniLM and copy that seven inputs can show."
    assert compare_words(("MiniLM", "copy"), minilm(), minilm()) == same


def test_a_difference_that_a_few_inputs_make_is_not_called_one():
    noisy = sharpened(values=(-0.9, 0.9, -0.8, 0.9, -0.7, 0.3, 0.2), between=0.06)
    assert compare_words(NAMES, minilm(), noisy).startswith("No difference between MiniLM and sharp that seven inputs")


def test_what_was_not_measured_is_not_said_and_few_inputs_are():
    first, other = replace(minilm(), between=None), sharpened()
    assert compare_words(NAMES, first, other) == "sharp keeps tokens more distinct."
    few = [replace(answer, values=answer.values[:2]) for answer in (minilm(), sharpened())]
    said = (
        "On these inputs tokens end more distinct in sharp (0.10) than in MiniLM (0.33): two are too few to say which model "
        "is better."
    )
    assert compare_words(NAMES, *few) == said
    assert "not the same inputs" in compare_words(NAMES, minilm(), few[1])


def test_both_differences_have_an_interval():
    found = sure_words(minilm(), sharpened())
    assert found.title == "Tokens \N{MINUS SIGN}0.23, 95% interval \N{MINUS SIGN}0.23 to \N{MINUS SIGN}0.23"
    assert found.text.startswith("Different inputs +0.58, 95% interval +0.5")
    tokens, inputs = differences(minilm(), sharpened())
    assert tokens.is_clear
    assert inputs.interval[0] < 0.58 < inputs.interval[1]


def test_where_and_who_name_the_largest_difference_and_its_numbers():
    first, other = minilm(), sharpened()
    where, who = _where(NAMES, first, other), _who(NAMES, first, other)
    assert where.title == "Most in layer 5"
    assert where.text == "−0.23 of −0.23 between the two."
    assert who.title == "Attention: +0.37 in MiniLM, +0.14 in sharp."
    assert who.text.startswith("Differences of the others: norm after attention 0.00")


def test_inputs_are_compared_in_pairs_and_too_few_are_said():
    assert sure_words(minilm(), sharpened()).text.endswith("7 inputs in pairs.")
    few = [replace(answer, values=answer.values[:2]) for answer in (minilm(), sharpened())]
    assert sure_words(*few).title == "Not sure: too few inputs to compare in pairs"


def test_models_of_other_depth_are_compared_by_relative_depth(analysed):
    chart = _curves(NAMES, [replace(analysed, measurement=None)] * 2, [minilm(), deep(80)])
    (panel,) = chart.panels
    assert chart.x.title.startswith("relative depth")
    assert [line.x[-1] for line in panel.marks] == [1.0, 1.0]
    assert _where(NAMES, minilm(), deep(80)).title == "Not layer by layer"


def test_models_of_one_depth_share_an_axis_and_differences_add_up(analysed):
    answers = [minilm(), sharpened()]
    tokens, parts = _curves(NAMES, [replace(analysed, measurement=None)] * 2, answers).panels
    assert [mark.name for mark in tokens.marks if isinstance(mark, Fan)] == [
        "80% of pairs, MiniLM",
        "80% of pairs, sharp",
    ]
    (columns,) = parts.marks
    assert sum(sum(heights) for _, _, heights, _ in columns.parts) == pytest.approx(0.10 - 0.329)
    card = _card(NAMES, [analysed, analysed], answers)
    assert [(gauge.start, gauge.value) for gauge in card.gauges] == [(0.329, 0.10), (0.06, 0.64)]
    assert dict(card.told)["What now"].command.startswith("oversmooth compare")


def with_origin(analysis, origin):
    data = replace(analysis.measurement.data, origin=origin)
    return replace(analysis, measurement=replace(analysis.measurement, data=data))


def test_random_inputs_are_named_in_the_headline_and_explained_below(analysed):
    assert analysed.measurement.data.origin == "random ids"
    page = compare_page([analysed, analysed])
    assert page.verdict.startswith("On random token ids: ")
    notes = [block.text for block in page.sections[0].blocks if getattr(block, "kind", "") == "note"]
    assert sum("drawn at random" in note for note in notes) == 2


def test_random_inputs_of_one_model_only_are_named_with_the_model(analysed):
    page = compare_page([with_origin(analysed, "given"), analysed])
    assert page.verdict.startswith("On random token ids for llama (2) only, so that the inputs differ: ")


def test_more_than_two_models_are_lines_and_their_ends(analysed):
    page = compare_page([analysed] * 3)
    assert page.verdict.startswith("On random token ids: tokens end most distinct in llama (")
    (panel,) = [panel for panel in page.card.chart.panels if panel.title.startswith("How alike tokens")]
    assert [mark.name for mark in panel.marks] == ["llama (1)", "llama (2)", "llama (3)"]


def test_weights_alone_are_no_headline(analysed):
    page = compare_page([replace(analysed, measurement=None, prediction=None)] * 2)
    assert page.verdict == "Weights compared; nothing was measured."
    assert [chart.id for chart in page.figures] == ["compare-rho"]
