"""Runs on one page: names, bands of seeds, what became of them, and whether they ended as intended."""

import dataclasses

import pytest
import torch

import oversmooth as osm
from oversmooth.output.charts import Fan, Line
from oversmooth.output.compare_page import line_style
from oversmooth.output.run_pages import (
    figures_over_steps,
    intention_words,
    runs_page,
    smoothing_figures,
    sparse,
    watched_page,
)
from oversmooth.recipes.run_folder import intention
from oversmooth.results.runs import TrainedRun, grouped, run_names
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def analysis():
    model, inputs = tiny_model("vit")
    images = torch.rand(4, *inputs["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(0))
    return osm.analyze(model, [{"pixel_values": images}], what_ifs=())


def with_end(analysis, cosine, **kinds):
    """The same analysis with another mean cosine at the output and other changes by kind of sub-block."""
    measurement = analysis.measurement
    values = tuple(
        dataclasses.replace(value, mean=cosine, standard_error=0.01) if value.metric == "cosine" else value
        for value in measurement.values
    )
    first = measurement.attributions[0]
    changed = tuple(dataclasses.replace(k, change=kinds.get(k.part.replace("-", "_"), k.change)) for k in first.kinds)
    return dataclasses.replace(
        analysis,
        measurement=dataclasses.replace(
            measurement, values=values, attributions=(dataclasses.replace(first, kinds=changed),)
        ),
    )


def run(variant="vanilla", seed=0, points=3, analysis=None, **more):
    logged = [
        {
            "step": 10 * k,
            "loss": 2.0 - 0.1 * k + seed,
            "smoothing/cosine/depth_0": 0.1,
            "smoothing/cosine/depth_2": 0.2 * k,
        }
        for k in range(points)
    ]
    return TrainedRun(
        where=f"runs/{variant}-{seed}",
        recipe="digits",
        variant=variant,
        seed=seed,
        intends=intention(variant),
        eigenvalues="eigenvalues in [-1, 0], the paper's form" if variant == "sharpen" else "",
        steps=20,
        is_finished=analysis is not None,
        points=logged,
        results={"eval_accuracy": 0.9, "eval_loss": 0.4} if analysis else {},
        analysis=analysis,
        **more,
    )


def marks(charts, id):
    (panel,) = next(chart for chart in charts if chart.id == id).panels
    return panel.marks


def test_lines_of_many_variants_differ_in_colour_or_dash():
    styles = [line_style(index) for index in range(16)]
    assert len(set(styles)) == 16
    assert len({dash for _, dash in styles[:4]}) == len({tone for tone, _ in styles[:4]}) == 4


def test_runs_are_named_by_variant_and_seed():
    runs = [run(), run(seed=1), run("sharpen"), run()]
    assert run_names(runs) == ["vanilla, seed 0 (1)", "vanilla, seed 1", "sharpen, seed 0", "vanilla, seed 0 (4)"]
    assert [group.words for group in grouped(runs)] == ["vanilla (3 runs)", "sharpen"]
    assert [group.words for group in grouped(runs[:3])] == ["vanilla (2 seeds)", "sharpen"]


def test_settings_that_differ_are_part_of_the_name():
    fast, slow = (run(settings=("model.depth=4", f"optimizer.learning_rate={rate}")) for rate in (0.1, 0.01))
    assert [group.name for group in grouped([fast, slow])] == [
        "vanilla, optimizer.learning_rate=0.1",
        "vanilla, optimizer.learning_rate=0.01",
    ]


def test_sentences_name_the_variant_alone_where_that_is_enough():
    _, hot = grouped([run(), run("sharpen", settings=("optimizer.learning_rate=0.03",))])
    assert (hot.name, hot.said) == ("sharpen, optimizer.learning_rate=0.03", "sharpen")
    cold, hot = grouped([run("sharpen"), run("sharpen", settings=("optimizer.learning_rate=0.03",))])
    assert hot.said == hot.name != cold.said


def test_seeds_are_a_band_around_their_mean():
    band, mean, other = marks(figures_over_steps([run(), run(seed=2), run("sharpen")]), "steps-loss")
    assert isinstance(band, Fan)
    assert mean.y == (3.0, 2.9, 2.8)
    assert band.high == (4.0, 3.9, 3.8)
    assert band.low == (2.0, 1.9, 1.8)
    assert (mean.name, other.name) == ("vanilla (2 seeds)", "sharpen")
    assert (band.name, band.tone) == ("", mean.tone)


def test_runs_of_different_length_are_averaged_where_all_have_a_value():
    _, mean = marks(figures_over_steps([run(), run(seed=1, points=2)]), "steps-loss")
    assert mean.x == (0.0, 10.0)


def test_smoothing_over_steps_is_that_of_the_last_depth():
    charts = figures_over_steps([run()])
    (line,) = marks(charts, "steps-mean-cosine-last-depth")
    assert isinstance(line, Line)
    assert line.y == (0.0, 0.2, 0.4)
    (panel,) = next(chart for chart in charts if chart.id == "steps-mean-cosine-last-depth").panels
    assert (panel.y.low, panel.y.high) == (0.0, 1.0)
    assert not any("accuracy" in chart.id for chart in charts), "nobody has logged one"


def test_every_depth_is_a_row_and_every_step_a_column():
    (heat,) = smoothing_figures(run().points)
    assert heat.rows == ("0", "2")
    assert heat.columns == ("0", "10", "20")
    assert heat.values == ((0.1, 0.1, 0.1), (0.0, 0.2, 0.4))
    assert (heat.low, heat.high) == (0.0, 1.0)


def test_of_many_steps_the_last_is_kept():
    assert sparse(list(range(1000)), 10) == list(range(99, 1000, 100))
    assert sparse([1, 2, 3], 10) == [1, 2, 3]
    assert sparse([], 10) == []


@pytest.mark.parametrize(
    ("variant", "wanted"), [("sharpen", "sharpening"), ("smooth-measured", "smoothing"), ("free", "")]
)
def test_a_variant_intends_what_its_eigenvalues_allow(variant, wanted):
    assert intention(variant) == wanted


def judged(analysis, cosine, variant="sharpen", **kinds):
    plain = with_end(analysis, 0.5, attention=-0.1, feed_forward=0.3)
    other = with_end(analysis, cosine, **kinds)
    return intention_words(grouped([run(analysis=plain), run(variant, analysis=other)]))


def test_a_run_that_ended_as_intended_is_said_so(analysis):
    assert judged(analysis, 0.2) == ["sharpen ended as intended: mean cosine 0.20 at the output, vanilla 0.50."]
    (text,) = judged(analysis, 0.8, "smooth")
    assert text.startswith("smooth ended as intended")


def test_a_run_that_ended_against_its_intention_is_said_why(analysis):
    (text,) = judged(analysis, 0.8, attention=-0.4, feed_forward=1.2)
    assert text.startswith(
        "sharpen ended against its intention (sharpening): mean cosine 0.80 at the output, vanilla 0.50."
    )
    assert "Against it works feed-forward: the mean cosine changes by +1.20 there, and by +0.30 in" in text
    assert "while its attention changes -0.40" in text


def test_the_token_scale_is_named_where_it_weakens_the_eigenvalues(analysis):
    layers = tuple(dataclasses.replace(layer, scale=5.0) for layer in analysis.prediction.layers)
    scaled = dataclasses.replace(analysis, prediction=dataclasses.replace(analysis.prediction, layers=layers))
    (text,) = judged(scaled, 0.8, feed_forward=1.2)
    assert "eigenvalues in [-1, 0], the paper's form, act divided by the token scale, 5.0 on average" in text


def test_what_lies_within_the_spread_is_no_difference(analysis):
    (text,) = judged(analysis, 0.51)
    assert (
        text
        == "sharpen ended where vanilla did, within what sequences differ: mean cosine 0.51 at the output, vanilla 0.50."
    )


def test_without_a_plain_run_or_before_the_end_nothing_is_judged(analysis):
    assert "needs a vanilla run beside it" in intention_words(grouped([run("sharpen", analysis=analysis)]))[0]
    assert "nothing is judged yet" in intention_words(grouped([run(), run("sharpen")]))[0]


def test_a_finished_run_without_an_analysis_is_not_called_unfinished(analysis):
    plain = run(analysis=with_end(analysis, 0.5))
    bare = dataclasses.replace(run("sharpen", analysis=analysis), analysis=None)
    assert runs_page([plain, bare]).verdict.endswith(" Not analysed: sharpen.")
    assert runs_page([plain, run("sharpen")]).verdict.endswith(" Not finished: sharpen.")


def test_the_page_has_accuracy_beside_smoothing_and_a_row_per_run(analysis):
    runs = [run(analysis=with_end(analysis, 0.5)), run("sharpen", analysis=with_end(analysis, 0.2)), run("sharpen", 1)]
    page = runs_page(runs)
    assert page.verdict == "Accuracy: vanilla 90.0%, sharpen 90.0%. Mean cosine: vanilla 0.50, sharpen 0.20."
    assert page.facts[1] == ("sharpen (2 seeds)", "1 of 2 finished; step 20 of 20")
    table = page.sections[-1].blocks[0]
    assert [row[0].shown for row in table.rows] == ["vanilla, seed 0", "sharpen, seed 0", "sharpen, seed 1"]
    assert {"runs-cosine", "runs-hfc-lfc", "steps-loss"} <= {chart.id for chart in page.figures}
    maps = {chart.id: chart.title for chart in page.figures if chart.id.startswith("training-")}
    assert maps == {
        "training-cosine-0": "Mean cosine between tokens, vanilla",
        "training-cosine-1": "Mean cosine between tokens, sharpen",
    }


def test_a_watched_run_says_how_far_it_is_and_what_its_counts_count():
    page = watched_page([run()])
    assert page.verdict == "vanilla, seed 0: step 20 of 20; loss 1.800."
    assert dict(page.facts)["steps with a loss"] == "3"
    assert dict(page.facts)["measurements of smoothing"] == "3"
    assert dict(page.facts)["evaluations"] == "0"
    empty = watched_page([dataclasses.replace(run(), points=())])
    assert empty.verdict == "vanilla, seed 0: step 0 of 20."


def test_the_headline_of_many_variants_says_between_which_they_lie(analysis):
    cosines = {"vanilla": 0.5, "sharpen": 0.1, "smooth": 0.9, "free": 0.6}
    page = runs_page([run(variant, analysis=with_end(analysis, cosine)) for variant, cosine in cosines.items()])
    assert page.verdict.endswith("Mean cosine: from 0.10 (sharpen) to 0.90 (smooth).")
    assert len(runs_page([run(f"v{k}") for k in range(9)]).verdict) < 60
