"""What is kept of a reproduction: its own runs, and earlier ones that are planned as they were."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from oversmooth.claims.experiments import MINI_BERT, runs_of
from oversmooth.claims.reproduce import CLAIMS
from oversmooth.recipes.train import load_recipe

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
VARIANTS = ("vanilla", "free", "sharpen", "smooth")
LANGUAGE = next(claim for claim in CLAIMS if claim.name == "language")


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    found = importlib.import_module("claims_table")
    monkeypatch.setattr(found, "KEPT", tmp_path / "kept")
    return found


def reproduction(folder: Path, experiments, loss: float) -> Path:
    """What `reproduce` leaves of claim 7 with the runs of some budgets; smooth has the lower loss."""
    rows = []
    for experiment in experiments:
        for run in runs_of(experiment, VARIANTS):
            out = folder / run.folder
            out.mkdir(parents=True)
            recipe = load_recipe(run.recipe, run.overrides).model_dump(mode="json")
            manifest = {"finished": True, "variant": run.variant, "seed": run.seed, "fraction": 1.0, "recipe": recipe}
            manifest["results"] = {"eval_loss": loss}
            (out / "manifest.json").write_text(json.dumps(manifest))
            value = loss - 0.5 * (run.variant == "smooth") + 0.001 * run.seed * len(run.variant)
            rows.append({"setting": experiment.name, "variant": run.variant, "unit": run.seed, "loss": value})
    (folder / "claims.json").write_text(json.dumps({"language": {"observed": {"runs": rows}}}))
    (folder / "manifest.json").write_text(json.dumps({"scale": "cpu", "rates": {}, "command": f"--out {folder}"}))
    return folder


def kept(table):
    claims = json.loads((table.KEPT / "claims.json").read_text())
    return claims["language"]["observed"]["runs"], json.loads((table.KEPT / "runs.json").read_text())


def test_runs_that_a_folder_lacks_stay_where_their_settings_are_the_same(table, tmp_path):
    table.keep(reproduction(tmp_path / "first", MINI_BERT, 5.0))
    before, _ = kept(table)
    table.keep(reproduction(tmp_path / "again", MINI_BERT[-1:], 4.0))
    rows, runs = kept(table)
    assert [(row["setting"], row["variant"], row["unit"]) for row in rows] == [
        (row["setting"], row["variant"], row["unit"]) for row in before
    ]
    for row in rows:
        is_new = row["setting"] == MINI_BERT[-1].name
        assert runs[f"{row['setting']}-{row['variant']}-seed{row['unit']}"]["results"] == {
            "eval_loss": 4.0 if is_new else 5.0
        }


def test_runs_whose_plan_has_changed_are_not_kept(table, tmp_path):
    table.keep(reproduction(tmp_path / "first", MINI_BERT, 5.0))
    runs = json.loads((table.KEPT / "runs.json").read_text())
    for name, run in runs.items():
        if name.startswith(MINI_BERT[0].name):
            run["recipe"]["optimizer"]["learning_rate"] = 1  # the recipe has changed, the overrides have not
    (table.KEPT / "runs.json").write_text(json.dumps(runs))
    table.keep(reproduction(tmp_path / "again", MINI_BERT[-1:], 4.0))
    rows, runs = kept(table)
    assert {row["setting"] for row in rows} == {experiment.name for experiment in MINI_BERT[1:]}
    assert not any(name.startswith(MINI_BERT[0].name + "-") for name in runs)


def test_the_verdict_is_made_anew_from_all_of_them(table, tmp_path):
    table.keep(reproduction(tmp_path / "first", MINI_BERT, 5.0))
    found = json.loads((table.KEPT / "claims.json").read_text())["language"]
    assert found["judgement"] == "refuted"
    assert LANGUAGE.protocol == found["protocol"]
    assert json.loads((table.KEPT / "manifest.json").read_text())["command"] == "--out first"
    assert "refuted" in (table.KEPT / "claims.md").read_text()
