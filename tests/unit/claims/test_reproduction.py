"""`reproduce`: protocols are complete, runs are trained once, pages show what was found and nothing else."""

import json
import shlex
import tomllib
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import typer
from typer.testing import CliRunner

from oversmooth.claims import context as tuning
from oversmooth.claims import trained
from oversmooth.claims.claim import ClaimResult, Verdict
from oversmooth.claims.context import INPUTS, ClaimContext
from oversmooth.claims.experiments import (
    DEEP,
    DEEP_TUNING,
    DIGITS,
    FOLDS,
    FRESH,
    MINI_BERT,
    RATES,
    TEXT_TUNING,
    TUNING,
    TUNINGS,
    PlannedRun,
    runs_of,
    train_one,
)
from oversmooth.claims.reproduce import CLAIMS, chosen, found_models, reproduce
from oversmooth.claims.trained import OWN
from oversmooth.commands.verbs import app
from oversmooth.errors import BrokenFile, Conflict, NotWritable, RunFailed, TargetNotFound, UnknownName
from oversmooth.models.example_model import example_model
from oversmooth.output.claims_page import SMOKE, claims_pages, markdown_of, page_of
from oversmooth.output.render import render
from oversmooth.recipes.train import load_recipe
from oversmooth.recipes.variants import require_variant

# --- the table of claims --------------------------------------------------------------------------------------------


def test_every_claim_says_what_decides_what_it_costs_and_what_it_does_not_show():
    assert [claim.number for claim in CLAIMS] == list(range(1, 9))
    for claim in CLAIMS:
        assert set(claim.cost) == {"cpu", "full"}
        assert claim.commands
        assert claim.confirmed_if != claim.refuted_if
        assert claim.does_not_show
        assert claim.written.startswith("20")


def test_every_table_of_the_protocols_is_a_claim():
    text = (resources.files("oversmooth.claims") / "protocols.toml").read_text(encoding="utf-8")
    assert [name for name, table in tomllib.loads(text).items() if isinstance(table, dict)] == [c.name for c in CLAIMS]


def every_run(is_quick: bool) -> list[PlannedRun]:
    needs = [(each.for_scale(is_quick), variants) for claim in CLAIMS for each, variants in claim.needs]
    rates = [
        run
        for each, variants in needs
        if each.tuned_by
        for run in tuning.rate_runs(each.tuned_by, variants, is_quick).values()
    ]
    return list(dict.fromkeys([*rates, *(run for each, variants in needs for run in runs_of(each, variants))]))


@pytest.mark.parametrize("is_quick", [False, True])
def test_every_run_that_a_claim_needs_has_a_recipe_that_exists(is_quick):
    needed = every_run(is_quick)
    assert len({planned.folder for planned in needed}) == len(needed), "no two runs share a folder"
    for recipe, overrides in {(planned.recipe, planned.overrides) for planned in needed}:
        load_recipe(recipe, overrides)
    for variant in {planned.variant for planned in needed}:
        require_variant(variant)


def test_a_smoke_check_runs_a_fraction_of_everything():
    assert len(every_run(True)) < len(every_run(False)) / 3


def test_every_comparison_is_of_runs_that_are_made():
    for claim in CLAIMS:
        made = {(experiment.name, variant) for experiment, variants in claim.needs for variant in variants}
        for compare in claim.compares:
            compared = {compare.of, compare.against} - {OWN}
            assert {(compare.setting, variant) for variant in compared} <= made


def test_folds_are_units_and_a_tuned_variant_runs_at_its_own_rate():
    found = runs_of(DIGITS, ("smooth",), {"digits-rates": {"smooth": 3e-3}, "digits-12-layers-rates": {"smooth": 1e-3}})
    assert [run.seed for run in found] == [FRESH + fold for fold in range(FOLDS)]
    for fold, run in enumerate(found):
        assert {f"data.fold={fold}", f"data.split_seed={FRESH}", "optimizer.learning_rate=0.003"} <= set(run.overrides)
    deep = runs_of(DEEP, ("smooth",), {"digits-rates": {"smooth": 3e-3}})
    assert not any("learning_rate" in word for run in deep for word in run.overrides), "another depth, another rate"


class Rated(ClaimContext):
    """Runs of which only the score on held-out training data is known: it is worse the farther a rate is from the best."""

    def train(self, planned):
        self.asked = [each.folder for each in planned]

    def scores(self, planned):
        rate = float(planned.overrides[-1].partition("=")[2])
        best = {"sharpen": 1e-3, "smooth": 3e-3}.get(planned.variant, 3e-4)
        return {"eval_accuracy": 0.9 - abs(rate - best), "eval_loss": 5.0 + abs(rate - best)}


def test_every_variant_gets_the_rate_that_its_validation_images_prefer(tmp_path):
    materials = Rated(out=tmp_path, targets=())
    rates = tuning.chosen_rates(materials, {TUNING: ("vanilla", "sharpen", "smooth"), DEEP_TUNING: ("smooth",)})
    assert rates == {
        TUNING.name: {"vanilla": 3e-4, "sharpen": 1e-3, "smooth": 3e-3},
        DEEP_TUNING.name: {"smooth": 3e-3},
    }
    assert len(materials.asked) == len(set(materials.asked)) == 4 * len(RATES)
    assert len(materials.validation) == 4 * len(RATES)
    accuracies = [
        (TUNING, "sharpen", 0.8),
        (TUNING, "smooth", 0.7),
        (TUNING, "smooth", 0.9),
        (DEEP_TUNING, "sharpen", 1.0),
    ]
    materials.validation = [
        {"chosen_by": by.name, "variant": variant, "validation_accuracy": value} for by, variant, value in accuracies
    ]
    assert trained.chosen_of_ours(materials) == "smooth"
    materials.validation = [row for row in materials.validation if row["variant"] != "smooth"]
    assert trained.chosen_of_ours(materials) is None, "nothing was chosen between"


def test_readers_see_every_rate_that_was_tried_and_a_choice_at_the_edge():
    validation = [
        {"chosen_by": TUNING.name, "variant": variant, "rate": rate, "validation_accuracy": value}
        for variant, values in {"sharpen": (0.5, 0.9), "smooth": (0.5, 0.4), "free": (0.1, 0.2)}.items()
        for rate, value in zip((0.001, 0.01), values, strict=True)
    ]
    found = tuning.rates_table(validation, [(DIGITS, ("sharpen", "smooth", "vanilla")), (MINI_BERT[0], ("sharpen",))])
    assert found == [
        {
            "chosen on": TUNING.name,
            "variant": "sharpen",
            "accuracy at 0.001": 0.5,
            "accuracy at 0.01": 0.9,
            "chosen": "0.01, the largest tried",
        },
        {
            "chosen on": TUNING.name,
            "variant": "smooth",
            "accuracy at 0.001": 0.5,
            "accuracy at 0.01": 0.4,
            "chosen": "0.001",
        },
    ]


def test_a_variant_of_which_not_every_rate_was_tried_waits(tmp_path):
    class Incomplete(Rated):
        def there(self, planned):
            return [run for run in planned if run.folder != "runs/digits-rates-0.0003-sharpen-seed0"]

    materials = Incomplete(out=tmp_path, targets=(), trains=False)
    rates = tuning.chosen_rates(materials, {TUNING: ("sharpen", "smooth")})
    assert rates == {TUNING.name: {"smooth": 3e-3}}
    assert {run.variant for run in runs_of(DIGITS, ("sharpen", "smooth"), rates)} == {"smooth"}
    quick = Rated(out=tmp_path, targets=(), is_quick=True)
    rates = tuning.chosen_rates(quick, {TUNING: ("vanilla", "smooth"), DEEP_TUNING: ("smooth",)})
    assert rates == {TUNING.name: {"vanilla": None, "smooth": RATES[1]}, DEEP_TUNING.name: {"smooth": None}}
    assert {run.variant for run in runs_of(DIGITS, ("vanilla", "smooth"), rates)} == {"vanilla", "smooth"}


def test_text_chooses_the_rate_with_the_lowest_loss_on_sequences_that_it_does_not_train_on(tmp_path):
    materials = Rated(out=tmp_path, targets=())
    rates = tuning.chosen_rates(materials, {TEXT_TUNING: ("sharpen", "smooth")})
    assert rates == {TEXT_TUNING.name: {"sharpen": 1e-3, "smooth": 3e-3}}
    assert all(row["validation_loss"] >= 5.0 for row in materials.validation)
    recipe = load_recipe(TEXT_TUNING.recipe, TEXT_TUNING.overrides)
    assert recipe.data.tuning_sequences == recipe.watch.validation_sequences
    (run,) = runs_of(MINI_BERT[0], ("smooth",), rates)[:1]
    assert "optimizer.learning_rate=0.003" in run.overrides
    assert not any("tuning_sequences" in word for word in run.overrides)


def test_no_run_that_is_judged_shares_its_seed_or_folds_with_one_that_chose_a_rate():
    choosing = {run for tuned in TUNINGS for run in tuning.rate_runs(tuned, ("vanilla",), is_quick=False).values()}
    judged = [run for claim in CLAIMS for experiment, variants in claim.needs for run in runs_of(experiment, variants)]
    assert {run.seed for run in choosing}.isdisjoint(run.seed for run in judged)
    assert not any("split_seed" in word for run in choosing for word in run.overrides)
    folded = [run for run in judged if run.recipe == "digits"]
    assert all(f"data.split_seed={FRESH}" in run.overrides for run in folded)


def test_claims_are_chosen_by_name_or_number():
    assert chosen("3") == chosen("skip") == (CLAIMS[2],)
    assert chosen("all") == CLAIMS
    with pytest.raises(UnknownName, match="baselines"):
        chosen("baseline")


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    asked = []
    overrides = ("model.depth=3",)
    planned = PlannedRun(recipe="digits", variant="smooth", seed=1, fraction=0.5, overrides=overrides, label="half")
    materials = ClaimContext(out=tmp_path, targets=(), train_all=lambda planned, out, progress: asked.extend(planned))
    materials.train([planned, planned])
    folder = str(tmp_path / "runs/half-smooth-seed1")
    words = "train digits --variant smooth --seed 1 --fraction 0.5 --set model.depth=3 --output"
    assert asked == [planned]
    assert planned.arguments(tmp_path) == [*words.split(), folder, "--resume"]
    recipe = load_recipe("digits", overrides).model_dump(mode="json")
    found = {"variant": "smooth", "seed": 1, "fraction": 0.5, "recipe": recipe}
    manifest = SimpleNamespace(finished=True, model_dump=lambda mode: found)
    monkeypatch.setattr("oversmooth.claims.context.read_manifest", lambda folder: manifest)
    materials.train([planned])
    assert len(asked) == 1
    recipe["model"]["depth"] = 4  # as if the recipe had changed since, with the same overrides
    with pytest.raises(NotWritable, match=r"a run with other settings.*: model.depth was 4 and would be 3"):
        materials.train([planned])
    assert replace(materials, trains=False).there([planned]) == [], "nothing has to make room where nothing is trained"
    recipe["model"]["depth"] = 3
    for name, other in (("fraction", 1.0), ("variant", "vanilla"), ("seed", 2)):
        mine, found[name] = found[name], other
        with pytest.raises(NotWritable, match=f"{name} was {other!r} and would be {mine!r}"):
            materials.train([planned])
        found[name] = mine


def test_runs_that_choose_a_rate_are_not_analysed_and_all_others_are(tmp_path):
    choosing = [run for tuned in TUNINGS for run in tuning.rate_runs(tuned, ("vanilla",), is_quick=False).values()]
    judged = [run for claim in CLAIMS for experiment, variants in claim.needs for run in runs_of(experiment, variants)]
    assert all("--no-analyze" in run.arguments(tmp_path) for run in choosing)
    assert not any("--no-analyze" in run.arguments(tmp_path) for run in judged)


def test_without_training_what_is_missing_counts_as_not_run(tmp_path):
    materials = ClaimContext(out=tmp_path, targets=(), trains=False, train_all=lambda *_: pytest.fail("trained"))
    findings = reproduce(CLAIMS, materials, claims_pages)
    judgements = {name: finding.verdict.judgement for name, finding in findings.items()}
    assert set(judgements.values()) <= {"not run", "undecided"}
    assert judgements["vision"] == judgements["language"] == judgements["skip"] == "not run"


def test_a_model_that_is_not_there_is_refused_before_anything_is_trained(tmp_path):
    materials = ClaimContext(out=tmp_path / "out", targets=("/nowhere",), train_all=lambda *_: pytest.fail("trained"))
    with pytest.raises(TargetNotFound, match="/nowhere"):
        reproduce(chosen("eigenvalue"), materials, claims_pages)


def test_a_folder_that_holds_something_is_only_used_to_go_on(tmp_path):
    (tmp_path / "claims.md").touch()
    with pytest.raises(NotWritable, match="not empty"):
        ClaimContext(out=tmp_path, targets=()).require_place(resume=False)
    ClaimContext(out=tmp_path, targets=()).require_place(resume=True)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [({"scale": "cpu"}, "results of scale 'cpu'"), ({"variant": "smooth"}, "something else than a reproduction")],
)
def test_results_of_another_scale_and_other_folders_are_not_written_over(tmp_path, manifest, words):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(NotWritable, match=words):
        ClaimContext(out=tmp_path, targets=(), is_quick=True).require_place(resume=True)


def test_a_claim_that_is_run_again_leaves_the_others_as_they_are(tmp_path):
    reproduce(chosen("language"), ClaimContext(out=tmp_path, targets=(), trains=False), claims_pages)
    manifest = json.loads((tmp_path / "manifest.json").read_text()) | {"models": {"a/model": "its hash"}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    reproduce(chosen("vision"), ClaimContext(out=tmp_path, targets=(), trains=False), claims_pages)
    assert list(json.loads((tmp_path / "claims.json").read_text())) == ["vision", "language"], "in their order"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["judgements"] == {"vision": "not run", "language": "not run"}
    assert manifest["models"] == {"a/model": "its hash"}, "of numbers that stay"
    assert set(manifest["rates"]) == {tuned.name for tuned in TUNINGS}
    assert "Of 2 claims: 2 not run." in (tmp_path / "claims.md").read_text()


def test_a_model_counts_once_whatever_it_is_called(tmp_path):
    model = example_model()
    link = tmp_path / model.parent.name / model.name
    link.parent.mkdir()
    link.symlink_to(model)
    materials = ClaimContext(out=tmp_path / "out", targets=(str(model), str(link), str(model)))
    assert len(materials.names) == len(set(materials.names.values())) == 2
    assert [name for name, _ in materials.live_models()] == [materials.names[str(model)]]
    (left_out,) = materials.left_out()
    assert left_out["reason"] == f"it has the weights of {materials.names[str(model)]}"


def test_a_finished_run_without_its_analysis_is_named(tmp_path, monkeypatch):
    planned = PlannedRun(recipe="digits", variant="smooth", seed=1)
    found = {"variant": "smooth", "seed": 1, "fraction": 1.0, "recipe": planned.settings["recipe"]}
    manifest = SimpleNamespace(finished=True, model_dump=lambda mode: found)
    monkeypatch.setattr("oversmooth.claims.context.read_manifest", lambda folder: manifest)
    run = SimpleNamespace(analysis=None, points=[])
    monkeypatch.setattr("oversmooth.claims.context.read_run_folder", lambda folder: run)
    with pytest.raises(BrokenFile, match=r"digits-smooth-seed1.*whole analysis[\s\S]*Remove that run"):
        ClaimContext(out=tmp_path, targets=()).trained(planned)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for place, words in (("file", "it is a file"), ("file/below", "cannot be written")):
        with pytest.raises(NotWritable, match=words):
            reproduce(chosen("similarity"), ClaimContext(out=tmp_path / place, targets=()), claims_pages)


def test_a_broken_manifest_is_named(tmp_path):
    materials = ClaimContext(out=tmp_path, targets=())
    planned = PlannedRun(recipe="digits", variant="vanilla", seed=0)
    (tmp_path / planned.folder).mkdir(parents=True)
    (tmp_path / planned.folder / "manifest.json").write_text("{")
    with pytest.raises(BrokenFile, match="manifest of a run"):
        materials.train([planned])


def test_a_run_that_fails_says_why(tmp_path):
    planned = PlannedRun(recipe="no-such-recipe", variant="vanilla", seed=0)
    assert "Unknown recipe 'no-such-recipe'" in train_one(planned, tmp_path)


@pytest.mark.slow
def test_a_run_that_fails_in_a_process_of_its_own_names_its_command(tmp_path):
    planned = PlannedRun(recipe="no-such-recipe", variant="vanilla", seed=0)
    with pytest.raises(RunFailed, match="oversmooth train no-such-recipe"):
        ClaimContext(out=tmp_path, targets=()).train([planned])


# --- what is written --------------------------------------------------------------------------------------------------


def test_two_runs_write_the_same_numbers_beside_what_may_differ(tmp_path):
    for name in ("one", "two"):
        materials = ClaimContext(out=tmp_path / name, targets=(str(example_model()),), is_quick=True)
        reproduce(chosen("similarity"), materials, claims_pages, "oversmooth reproduce 1 --quick")
    first, second = ((tmp_path / name / "claims.json").read_bytes() for name in ("one", "two"))
    assert first == second
    kept = json.loads(first)["similarity"]
    assert kept["judgement"] == "undecided"
    assert len(kept["observed"]["inputs"]) == INPUTS
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert manifest["scale"] == "quick, a smoke check"
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["judgements"] == {"similarity": "undecided"}
    assert SMOKE in (tmp_path / "one" / "claims.md").read_text()
    assert "A smoke check, no evidence." in (tmp_path / "one" / "claims.html").read_text()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "claims.html",
        "claims.json",
        "claims.md",
        "manifest.json",
        "survey",
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_commands_of_the_papers_scale_are_understood_by_the_command_line(claim):
    command_line = typer.main.get_command(app)
    for words in (shlex.split(command) for command in claim.commands):
        verb = command_line.commands[words[1]]
        with verb.make_context(words[1], words[2:]):
            pass


def test_the_papers_scale_prints_every_command_once_and_takes_no_other_options():
    done = CliRunner().invoke(app, ["reproduce", "all", "--scale", "full"])
    commands = [line for line in done.stdout.splitlines() if line.startswith("oversmooth ")]
    assert done.exit_code == 0
    assert set(commands) == {command for claim in CLAIMS for command in claim.commands}
    assert len(commands) == len(set(commands))
    assert "# and 9 commands that stand above" in done.stdout
    refused = CliRunner().invoke(app, ["reproduce", "all", "--scale", "full", "--quick", "--resume"])
    assert isinstance(refused.exception, Conflict)
    assert list(refused.exception.options) == ["--scale full", "--quick", "--resume"]


# --- pages ----------------------------------------------------------------------------------------------------------


def test_the_pages_show_verdicts_comparisons_and_escape_what_they_are_given():
    row = {"comparison": "a|b", "effect": 0.5, "low": 0.4, "high": 0.6, "margin": 0.02, "units": 5, "p": 0.01}
    finding = ClaimResult(
        verdict=Verdict(judgement="refuted", brief="<b>few</b> words", because="<script>alert(1)</script> | decided"),
        compared=(
            row | {"clear_from": 0.2, "counts": "beside it", "outcome": "undecided", "separates": "size"},
            row | {"clear_from": 0.2, "counts": "primary", "outcome": "higher", "separates": ""},
        ),
    )
    findings = {CLAIMS[0].name: finding}
    text = markdown_of(CLAIMS[:1], findings, is_quick=False)
    assert f"| 1 similarity: {CLAIMS[0].statement} | **refuted** |" in text
    assert "a\\|b" in text
    decides, beside = text.partition("Beside it")[::2]
    assert "| higher |" in decides
    assert "separates" not in decides, "a column that says nothing"
    assert "| undecided | size |" in beside
    assert "| [+0.4000, +0.6000] |" in decides
    assert "Does not show" in text
    page = render(page_of(CLAIMS[:1], findings, {"command": "oversmooth reproduce 1"}, is_quick=False))
    assert "Of 1 claim: 1 refuted." in page
    assert "<script>alert(1)" not in page
    assert "Effects and 95% intervals of 1 comparisons, 1 of them clear" in page, "of those that decide"


def test_every_judgement_is_counted_in_the_headline():
    from typing import get_args

    from oversmooth.claims.claim import Judgement
    from oversmooth.output.claims_page import JUDGEMENTS

    assert set(JUDGEMENTS) == set(get_args(Judgement))


def test_models_at_hand_are_folders_with_a_config_and_single_gguf_files(tmp_path, monkeypatch):
    for name in ("b/config.json", "a/model.gguf", "parts/1.gguf", "parts/2.gguf", "notes/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("OVERSMOOTH_MODELS", str(tmp_path))
    assert found_models()[-2:] == (str(tmp_path / "a" / "model.gguf"), str(tmp_path / "b"))


def test_models_of_the_full_list_that_the_hubs_cache_holds_are_at_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("OVERSMOOTH_MODELS", raising=False)
    before = found_models()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = {"openai-community/gpt2": ("config.json", "model.safetensors"), "albert/albert-base-v2": ("config.json",)}
    for repo, files in cached.items():
        folder = tmp_path / f"models--{repo.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        snapshot = folder / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        for name in files:
            (snapshot / name).touch()
    assert found_models() == (*before, "openai-community/gpt2"), "one without weights is not at hand"
