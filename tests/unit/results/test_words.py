"""What the terminal, print and a notebook show: the same numbers and sentences, whole at 80 columns."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

import oversmooth as osm
from oversmooth.errors import OtherModel
from oversmooth.output.tables import ANSWER_LINES, answer_lines, show_ablation, show_measurement
from oversmooth.results.changes import Ablation, Loss, Removal
from oversmooth.results.reading import shown_layers
from oversmooth.results.wording import ablation_words, change_words, dominating_words, findings, headline, level
from tests.contract.tiny_models import tiny_model
from tests.unit.results.measured import PROVENANCE, attribution, facts, measured
from tests.unit.results.test_answer import CASES


@pytest.fixture(scope="module")
def vision():
    model, inputs = tiny_model("vit")
    images = torch.rand(4, *inputs["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(0))
    return osm.measure(model, [{"pixel_values": images}], null=True, pairs=True)


@pytest.fixture(scope="module")
def analysed():
    model, inputs = tiny_model("vit")
    images = torch.rand(4, *inputs["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(0))
    return osm.analyze(model, [{"pixel_values": images}])


@pytest.mark.parametrize("name", CASES)
def test_the_answer_has_twelve_lines_of_eighty_columns_at_most(name):
    answer = CASES[name][0].answer
    lines = answer_lines(answer, 80)
    assert len(lines) <= ANSWER_LINES
    command = answer.now.command
    assert all(len(line) <= 80 for line in lines if command not in line)
    told = " ".join(" ".join(lines).split())
    assert answer.headline in told
    assert command in told
    assert f"{level(answer.output)} {answer.state}" in told
    assert change_words(answer.output - answer.input) in told


def test_the_gauge_marks_input_and_output_on_one_scale():
    (line,) = [line for line in answer_lines(CASES["collapsed"][0].answer, 80) if line.startswith("  0 ")]
    assert line.index("\N{WHITE CIRCLE}") < line.index("\N{BLACK CIRCLE}")
    (line,) = [line for line in answer_lines(CASES["sharpened"][0].answer, 80) if line.startswith("  0 ")]
    assert line.index("\N{BLACK CIRCLE}") < line.index("\N{WHITE CIRCLE}")


def test_measure_prints_a_row_per_layer_and_the_answer_last(vision, capsys):
    show_measurement(vision)
    printed = capsys.readouterr().out
    answer = vision.answer
    for point, layer in zip(answer.points[1:], shown_layers(answer.points, answer.layers), strict=True):
        row = next(line for line in printed.splitlines() if line.strip().startswith(point.label))
        assert row.split()[-4 if point.label != "final norm" else -3 :]
        assert level(point.mean) in row
        assert change_words(layer.change) in row
        assert level(point.untrained) in row
    assert printed.rstrip().endswith(answer.now.command)


@pytest.mark.parametrize("kind", ["inspection", "measurement", "prediction", "analysis"])
def test_all_four_results_are_printed_by_rich_as_by_print_and_have_a_chart_and_a_table(analysed, kind):
    pytest.importorskip("pandas")
    result = analysed if kind == "analysis" else getattr(analysed, kind)
    console = Console(file=io.StringIO(), width=80, highlight=False, color_system=None)
    console.print(result)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert " ".join(console.file.getvalue().split()) == " ".join(str(result).split()), "wrapped, and nothing cut"
    assert max(map(len, lines)) <= 80 or kind == "inspection"
    assert result.plot().svg().startswith("<svg")
    assert len(result.to_pandas()) == len(result.rows()) > 0
    assert "<table" in result._repr_html_()


def test_print_and_notebook_show_the_same_as_the_terminal(vision):
    answer = vision.answer
    printed, html = str(vision), vision._repr_html_()
    assert answer.headline in " ".join(printed.split())
    assert answer.headline in html
    assert html.count("<tr>") == 1 + len(answer.points)
    for point in answer.points:
        assert f"<td>{level(point.mean)}</td>" in html
    assert repr(vision).startswith("<Measurement of ")


def test_print_shows_the_answer_of_an_analysis_and_the_table_of_an_inspection():
    model, inputs = tiny_model("bert")
    inspection = osm.inspect(model)
    assert "rho_dc" in str(inspection)
    assert max(map(len, str(inspection).splitlines())) <= 80
    analysis = osm.Analysis(inspection=inspection, measurement=osm.measure(model, [inputs]))
    assert analysis.answer.headline in " ".join(str(analysis).split())
    assert "rho_dc" not in str(analysis)
    weights = osm.Analysis(inspection=inspection)
    assert "rho_dc" in str(weights)
    assert str(weights).endswith("Not measured.")
    assert headline(weights) == "Not measured."


def test_what_a_model_is_called_in_html_is_escaped():
    hostile = dataclasses.replace(PROVENANCE, target="<script>alert(1)</script>")
    html = measured(attribution([0.1, 0.2, 0.3]), provenance=hostile)._repr_html_()
    assert "<script>" not in html
    assert "script&gt;" in html


def test_where_nothing_could_be_measured_the_reason_is_printed():
    broken = dataclasses.replace(
        CASES["distinct"][0], attributions=(), problems=("NaN or infinity in 2 of 2 sequences",)
    )
    assert str(broken) == "No sequence could be measured: NaN or infinity in 2 of 2 sequences."


def test_a_token_that_outweighs_the_others_is_named_with_channel_and_layer(vision):
    found = dataclasses.replace(vision.dominating[0], ratio=185.7, word="The", position=0, channel=507)
    found = dataclasses.replace(found, depth=12, made_at_depth=12, made_by="feed-forward", position_share=1.0)
    for piece in (
        "after layer 11: the token 'The' at position 0 is 186 times",
        "The feed-forward of layer 11 makes it",
    ):
        assert piece in dominating_words(found)
    assert "decides" not in dominating_words(found)
    massive = dataclasses.replace(found, channel_share=0.997)
    assert "Massive activation" in dominating_words(massive)
    assert "nearly all of its squared length lies in channel 507" in dominating_words(massive)
    spread = dominating_words(dataclasses.replace(found, channel_share=0.1))
    assert spread.startswith("One token outweighs the others")
    assert dominating_words(dataclasses.replace(found, ratio=3.0)) == ""


def test_a_sub_block_that_takes_back_what_the_one_before_it_did_is_named():
    found = measured(attribution([0.2, 0.21, 0.3], parts={"feed-forward": -0.4}))
    (finding,) = findings(found)
    minus = "\N{MINUS SIGN}"
    assert finding.text == (
        f"In layer 0 the feed-forward undoes the attention: +0.21, then {minus}0.20 of the mean cosine."
    )
    assert findings(measured(attribution([0.2, 0.3, 0.4]))) == ()


def test_all_metrics_stand_whole_in_tables_that_fit_the_terminal(monkeypatch, capsys):
    model, inputs = tiny_model("gpt2")
    result = osm.measure(model, [inputs], metrics="all", at="all")
    monkeypatch.setattr("oversmooth.output.tables.PIPE_WIDTH", 80)
    show_measurement(result)
    printed = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    heads = {name for line in printed.splitlines() if line.split()[:1] == ["layer"] for name in line.split()[1:]}
    assert {name for name, _ in result.definitions} - {"cosine"} <= heads
    for value in result.values:
        if value.mean is not None and (value.depth, value.place) == (1, "attn_branch"):
            assert f"{value.mean:.4g}" in printed


# --- ablate ends with its conclusion ---


def removal(layer, part, increase):
    return Removal(stack="", layer=layer, part=part, increase=increase, loss=None, cheap=(("influence", 0.1),))


def ablation(*removals):
    return Ablation(
        provenance=PROVENANCE,
        data=facts(4),
        task="causal-lm",
        whole=Loss(loss=2.0, standard_error=0.01),
        removals=removals,
        predictors=(),
        passes=2.0,
    )


def test_ablate_names_the_cheapest_and_the_dearest_part_of_each_kind(capsys):
    costs = {"attention": (0.5, 0.004, 0.2, 0.06, 0.3), "block": (0.9, 0.1, 0.3, 0.2, 2.0)}
    found = ablation(*(removal(k, part, cost) for part, each in costs.items() for k, cost in enumerate(each)))
    assert ablation_words(found) == [
        "Attention, cheapest to remove: layer 1 (+0.004), layer 3 (+0.060) and layer 2 (+0.200); "
        "dearest: layer 0 (+0.500).",
        "Block, cheapest to remove: layer 1 (+0.100), layer 3 (+0.200) and layer 2 (+0.300); dearest: layer 4 (+2.000).",
        "Increases near 0.004 are within the spread of the loss itself (±0.01).",
    ]
    show_ablation(found)
    printed = capsys.readouterr().out
    assert "influence" not in printed
    assert " ".join(printed.split()).endswith("within the spread of the loss itself (±0.01).")
    show_ablation(found, details=True)
    assert "influence" in capsys.readouterr().out


def test_ablate_of_parts_that_cannot_be_removed_says_so():
    assert ablation_words(ablation(removal(0, "attention", None))) == ["No part could be removed."]


# --- two models ---


def test_an_edit_that_sharpens_tokens_and_makes_texts_alike_is_told_with_both():
    """MiniLM sharpened: tokens 0.33 to 0.10, different texts 0.06 to 0.64."""
    before = measured(attribution([0.07, 0.2, 0.33]), between=(0.46, 0.06))
    after = measured(attribution([0.07, 0.09, 0.10]), between=(0.46, 0.64))
    found = osm.compare(before, after)
    assert found.headline == (
        "a-model (2) keeps tokens more distinct, but a-model (1) tells different inputs apart better."
    )
    for piece in (
        "0.33 in a-model (1), 0.10 in a-model (2)",
        "Between different inputs (their mean tokens): 0.06 in a-model (1), 0.64 in a-model (2).",
    ):
        assert piece in found.deck
    assert [round(row["difference"], 2) for row in found.rows()] == [0.0, -0.11, -0.23]
    assert found.headline in " ".join(str(found).split())
    assert type(found).from_dict(found.to_dict()) == found


def test_models_that_end_alike_are_not_called_smoother_because_they_start_elsewhere():
    found = osm.compare(measured(attribution([0.1, 0.2, 0.33])), measured(attribution([0.3, 0.31, 0.34])))
    assert found.headline == "Hardly a difference between a-model (1) and a-model (2)."


def test_models_of_different_depth_are_compared_without_a_table_of_layers():
    found = osm.compare(measured(attribution([0.1, 0.2, 0.33])), measured(attribution([0.1, 0.2, 0.3, 0.34])))
    assert found.rows() == []
    assert str(found).endswith("The models differ in depth, so no layer stands beside another.")


def test_results_on_other_inputs_are_not_compared():
    other = measured(attribution([0.1, 0.2]), data=dataclasses.replace(facts(20), sha256="11"))
    with pytest.raises(OtherModel, match="hash of the inputs"):
        osm.compare(measured(attribution([0.1, 0.2])), other)
