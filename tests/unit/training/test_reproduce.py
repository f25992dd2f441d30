"""`reproduce`: judgements follow their own rules, whatever the numbers; the pages show what was found."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from scipy import stats

from oversmooth import analyze
from oversmooth.commands.app import app
from oversmooth.errors import BrokenFile, NotWritable, RunFailed, TargetNotFound, UnknownName
from oversmooth.output.report.render import render
from oversmooth.training.recipes.train import load_recipe
from oversmooth.training.recipes.variants import require_variant
from oversmooth.training.reproduce import survey, training
from oversmooth.training.reproduce.claim import Evidence, Finding
from oversmooth.training.reproduce.claims import CLAIMS, chosen
from oversmooth.training.reproduce.pages import markdown_of, page_of
from oversmooth.training.reproduce.paired import paired_difference
from oversmooth.training.reproduce.reproduction import reproduce
from oversmooth.training.reproduce.workshop import Trained, Wanted, Workshop, run_command
from tests.contract.tiny_models import tiny_model

SEEDS = (0, 1, 2)


class PretendedRun(Trained):
    """A run of which only numbers are known."""

    def __init__(self, folder, value, analysis):
        results = {"eval_accuracy": value, "corruption_accuracy": value, "eval_loss": value}
        for name, given in (("folder", folder), ("analysis", analysis), ("value", value)):
            object.__setattr__(self, name, given)
        object.__setattr__(self, "manifest", SimpleNamespace(results=results))

    def last(self, metric):
        return self.value


class Pretended(Workshop):
    """Runs whose numbers the test chooses: `numbers[variant]` is one value per seed."""

    def __init__(self, numbers, analyses=()):
        super().__init__(out=Path("nowhere"), targets=(), seeds=SEEDS)
        self.numbers, self.analyses = numbers, analyses

    def surveyed(self):
        return list(self.analyses)

    def trained(self, wanted):
        analysis = self.analyses[0][1] if self.analyses else None
        return PretendedRun(wanted.folder, self.numbers[wanted.variant][wanted.seed], analysis)


@pytest.fixture(scope="module")
def analysed():
    model, inputs = tiny_model("gpt2")
    return analyze(model, [inputs])


# --- statistics -----------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_paired_t_test():
    a, b = [0.9, 0.8, 0.85], [0.7, 0.75, 0.6]
    found = paired_difference(a, b)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.sign == 0


@pytest.mark.parametrize(("shift", "sign"), [(0.5, 1), (-0.5, -1)])
def test_a_clear_difference_has_a_sign(shift, sign):
    assert paired_difference([shift, shift + 0.01, shift], [0.0, 0.0, 0.0]).sign == sign


# --- judgements -----------------------------------------------------------------------------------------------------

UP, DOWN, SAME = (0.5, 0.51, 0.5), (0.1, 0.11, 0.1), (0.3, 0.31, 0.3)


@pytest.mark.parametrize(
    ("sharpen", "smooth", "judgement"),
    [(DOWN, UP, "confirmed"), (UP, DOWN, "refuted"), ((0.1, 0.9, 0.2), (0.2, 0.1, 0.9), "undecided")],
)
def test_the_parametrization_decides_if_smooth_lies_above_sharpen(sharpen, smooth, judgement):
    found = training.parametrization_decides(Pretended({"vanilla": SAME, "sharpen": sharpen, "smooth": smooth}))
    assert found.judgement == judgement


@pytest.mark.parametrize(
    ("sharpen", "judgement"), [(UP, "confirmed"), (DOWN, "refuted"), ((0.1, 0.9, 0.2), "undecided")]
)
def test_accuracy_is_compared_with_vanilla(sharpen, judgement):
    found = training.vision_accuracy(Pretended({"vanilla": SAME, "sharpen": sharpen, "smooth": DOWN}))
    assert found.judgement == judgement
    assert len(found.evidence) == 4


def test_a_lower_loss_refutes_that_control_does_not_help_language():
    numbers = {"vanilla": SAME, "sharpen": UP, "smooth": UP}
    assert training.language_loss(Pretended(numbers)).judgement == "confirmed"
    assert training.language_loss(Pretended(numbers | {"smooth": DOWN})).judgement == "refuted"


def test_baselines_that_are_clearly_better_refute():
    numbers = {"sharpen": SAME, "smooth": DOWN, "attnscale": DOWN, "featscale": DOWN}
    assert training.against_baselines(Pretended(numbers)).judgement == "confirmed"
    assert training.against_baselines(Pretended(numbers | {"featscale": UP})).judgement == "refuted"


def with_regimes(analysis, regime, what_if):
    layers = tuple(
        replace(
            layer,
            what_ifs=tuple(
                replace(change, regime=regime) if change.name == what_if and not change.not_applicable else change
                for change in layer.what_ifs
            ),
        )
        for layer in analysis.prediction.layers
    )
    return replace(analysis, prediction=replace(analysis.prediction, layers=layers))


@pytest.mark.parametrize(
    ("regime", "judgement"), [("smoothing", "confirmed"), ("sharpening", "refuted"), ("undecided", "undecided")]
)
def test_one_layer_that_does_not_smooth_without_its_skip_refutes(analysed, regime, judgement):
    changed = with_regimes(analysed, regime, "no_skip")
    numbers = dict.fromkeys(training.VARIANTS, SAME)
    assert survey.without_skip(Pretended(numbers, [("tiny", changed)])).judgement == judgement


def with_signs(analysis, rungs, measured):
    """Every layer with a rung 0 and a measured change of the given signs, taken in turn."""
    layers = tuple(
        replace(
            layer,
            measured=measured[i % len(measured)],
            rungs=(replace(layer.rungs[0], mean=rungs[i % len(rungs)]), *layer.rungs[1:]),
        )
        for i, layer in enumerate(analysis.prediction.layers)
    )
    return replace(analysis, prediction=replace(analysis.prediction, layers=layers))


@pytest.mark.parametrize(
    ("rungs", "measured", "judgement", "because"),
    [
        ((-0.5, 0.5), (-0.1, 0.1), "confirmed", "in 16 of 16 layers; one answer for all layers would be right in 8"),
        ((-0.5, 0.5), (0.1, -0.1), "refuted", "in 0 of 16 layers"),
        ((-0.5,), (-0.1,), "undecided", "in 16 of 16 layers; one answer for all layers would be right in 16"),
    ],
)
def test_the_signs_of_rung_0_are_counted_against_the_measurement(analysed, rungs, measured, judgement, because):
    four = [layer for _ in range(2) for layer in analysed.prediction.layers][:4]
    even = replace(analysed, prediction=replace(analysed.prediction, layers=tuple(four)))
    changed = with_signs(even, rungs, measured)
    numbers = dict.fromkeys(training.VARIANTS, SAME)
    found = survey.dominating_eigenvalue(Pretended(numbers, [("tiny", changed)]))
    assert found.judgement == judgement
    assert because in found.because


def test_a_regime_that_flips_with_the_norms_confirms(analysed):
    numbers = dict.fromkeys(training.VARIANTS, SAME)
    other = {"smoothing": "sharpening"}.get(analysed.prediction.layers[0].regime, "smoothing")
    changed = with_regimes(analysed, other, "flip_norms")
    assert survey.sign_of_norms(Pretended(numbers, [("tiny", changed)])).judgement == "confirmed"


def test_a_survey_of_one_way_only_decides_nothing(analysed):
    found = survey.similarity_over_depth(Pretended({}, [("tiny", analysed)]))
    assert found.judgement == "undecided"
    assert found.evidence[0].rows[0]["model"] == "tiny"


# --- the table of claims --------------------------------------------------------------------------------------------


def test_every_claim_says_what_decides_and_what_it_costs():
    assert [claim.number for claim in CLAIMS] == list(range(1, 9))
    for claim in CLAIMS:
        assert set(claim.cost) == {"cpu", "full"}
        assert claim.commands
        assert claim.confirmed_if != claim.refuted_if


def test_every_run_that_a_claim_needs_has_a_recipe_that_exists():
    needed = {wanted for claim in CLAIMS for wanted in claim.needs(SEEDS)}
    assert len({wanted.folder for wanted in needed}) == len(needed), "no two runs share a folder"
    for recipe, overrides in {(wanted.recipe, wanted.overrides) for wanted in needed}:
        load_recipe(recipe, overrides)
    for variant in {wanted.variant for wanted in needed}:
        require_variant(variant)


def test_claims_are_chosen_by_name_or_number():
    assert chosen("3") == chosen("skip") == (CLAIMS[2],)
    assert chosen("all") == CLAIMS
    with pytest.raises(UnknownName, match="baselines"):
        chosen("baseline")


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    asked = []
    wanted = Wanted(recipe="digits", variant="smooth", seed=1, fraction=0.5, overrides=("a.b=1",), label="half")
    workshop = Workshop(out=tmp_path, targets=(), command=lambda arguments: asked.append(list(arguments)))
    workshop.train([wanted, wanted])
    folder = str(tmp_path / "runs/digits-half-smooth-seed1")
    words = "train digits --variant smooth --seed 1 --fraction 0.5 --set a.b=1 --out"
    assert asked == [[*words.split(), folder, "--resume"]]
    monkeypatch.setattr(Workshop, "_is_finished", lambda self, wanted: True)
    workshop.train([wanted])
    assert len(asked) == 1


def test_a_model_that_is_not_there_is_refused_before_anything_is_trained(tmp_path):
    workshop = Workshop(out=tmp_path / "out", targets=("/nowhere",), command=lambda arguments: pytest.fail("trained"))
    with pytest.raises(TargetNotFound, match="/nowhere"):
        reproduce(chosen("eigenvalue"), workshop)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for place, words in (("file", "it is a file"), ("file/below", "cannot be written")):
        with pytest.raises(NotWritable, match=words):
            reproduce(chosen("similarity"), Workshop(out=tmp_path / place, targets=()))


def test_a_broken_manifest_is_named(tmp_path):
    workshop = Workshop(out=tmp_path, targets=())
    wanted = Wanted(recipe="digits", variant="vanilla", seed=0)
    (tmp_path / wanted.folder).mkdir(parents=True)
    (tmp_path / wanted.folder / "manifest.json").write_text("{")
    with pytest.raises(BrokenFile, match="manifest of a run"):
        workshop.train([wanted])


def test_a_run_that_fails_names_its_command():
    with pytest.raises(RunFailed, match="oversmooth train no-such-recipe"):
        run_command(["train", "no-such-recipe"])


# --- what is written --------------------------------------------------------------------------------------------------


class SurveyOnly(Pretended):
    """Nothing to train."""

    def __init__(self, out, analyses):
        super().__init__({}, analyses)
        self.out = out

    def train(self, wanted):
        assert not wanted


def test_two_runs_write_the_same_numbers_beside_what_may_differ(tmp_path, analysed):
    for name in ("one", "two"):
        reproduce(chosen("similarity"), SurveyOnly(tmp_path / name, [("tiny", analysed)]), "oversmooth reproduce 1")
    first, second = ((tmp_path / name / "claims.json").read_bytes() for name in ("one", "two"))
    assert first == second
    assert json.loads(first)["similarity"]["judgement"] == "undecided"
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert manifest["seeds"] == list(SEEDS)
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["judgements"] == {"similarity": "undecided"}
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "claims.html",
        "claims.json",
        "claims.md",
        "manifest.json",
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_commands_of_the_papers_scale_are_understood_by_the_command_line(claim):
    command_line = typer.main.get_command(app)
    for words in (shlex.split(command) for command in claim.commands):
        verb = command_line.commands[words[1]]
        with verb.make_context(words[1], words[2:]):
            pass


# --- pages ----------------------------------------------------------------------------------------------------------


def test_the_pages_show_judgements_and_escape_what_they_are_given():
    finding = Finding(
        judgement="refuted",
        because="<script>alert(1)</script> | decided",
        evidence=(Evidence(title="Numbers", rows=({"model": "a|b", "value": 1.5},)),),
        runs=("runs/one",),
    )
    checked = [(CLAIMS[0], finding)]
    text = markdown_of(checked)
    assert "| 1 similarity | **refuted** |" in text
    assert "a\\|b" in text
    assert "runs/one/manifest.json" in text
    page = render(page_of(checked, {"command": "oversmooth reproduce 1"}))
    assert "Of 1 claim: 1 refuted." in page
    assert "<script>alert(1)" not in page
