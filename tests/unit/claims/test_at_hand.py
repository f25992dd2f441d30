"""The survey of everything at hand: models and finished runs, continued where a stopped run left it, shown and not judged."""

from types import SimpleNamespace

import pytest

from oversmooth.claims import context as at_hand
from oversmooth.claims.claim import ClaimResult, Verdict
from oversmooth.claims.context import ClaimContext
from oversmooth.claims.reproduce import CLAIMS
from oversmooth.errors import MissingDependency
from oversmooth.output.claims_page import markdown_of, page_of
from oversmooth.output.render import render
from oversmooth.surveys import worker as reading
from tests.small_checkpoints import LAYERS, checkpoint


def write(folder, family, seed):
    folder.mkdir(parents=True)
    for name, content in checkpoint(family, seed).items():
        (folder / name).write_bytes(content)


@pytest.fixture
def materials(tmp_path, monkeypatch):
    """One pretrained model, two finished runs of one condition, one run that is not finished and one without a model."""
    write(tmp_path / "models" / "bert", "bert", 0)
    out = tmp_path / "out"
    for seed in (0, 1, 2):
        write(out / "runs" / f"digits-12-layers-free-seed{seed}" / "model", "vit", seed)
    write(out / "runs" / "digits-rates-0.001-free-seed0" / "model", "vit", 3)  # only chose a rate
    (out / "runs" / "digits-12-layers-free-seed3").mkdir()
    is_finished = {"digits-12-layers-free-seed2": False}
    monkeypatch.setattr(at_hand, "read_manifest", lambda run: SimpleNamespace(finished=is_finished.get(run.name, True)))
    return ClaimContext(out=out, targets=(str(tmp_path / "models" / "bert"),))


def test_models_and_conditions_of_finished_runs_are_rows(materials):
    found = at_hand.weights_at_hand(materials)
    assert [(row["kind"], row["model"], row["models"], row["layers"]) for row in found] == [
        ("pretrained", "models/bert", 1, LAYERS),
        ("trained", "digits-12-layers-free", 2, 2 * LAYERS),
    ]
    assert all(0 < row["smoothing_share"] <= 1 - row["sharpening_share"] for row in found)


def test_a_stopped_run_goes_on_with_its_table(materials, monkeypatch):
    first = at_hand.weights_at_hand(materials)
    monkeypatch.setattr(reading, "inspect", None)
    assert at_hand.weights_at_hand(materials) == first


def test_nothing_at_hand_and_no_parquet_are_no_table(materials, tmp_path, monkeypatch):
    assert at_hand.weights_at_hand(ClaimContext(out=tmp_path / "empty", targets=())) == []

    def survey(*_, **__):
        raise MissingDependency("pyarrow", "survey", "a survey")

    monkeypatch.setattr(at_hand, "survey", survey)
    assert at_hand.weights_at_hand(materials) == []


def test_the_pages_show_the_table_beside_the_verdict(materials):
    verdict = Verdict(judgement="undecided", brief="numbers", because="of numbers")
    findings = {CLAIMS[0].name: ClaimResult(verdict=verdict, weights=tuple(at_hand.weights_at_hand(materials)))}
    text = markdown_of(CLAIMS[:1], findings, is_quick=False)
    assert "| model | kind | models | layers | sharpening share | smoothing share | mean tendency |" in text
    assert "| digits-12-layers-free | trained | 2 |" in text
    page = render(page_of(CLAIMS[:1], findings, {"command": "oversmooth reproduce 1"}, is_quick=False))
    assert "Everything at hand" in page
    assert "digits-12-layers-free" in page


def test_a_table_that_two_claims_share_is_shown_once(materials):
    verdict = Verdict(judgement="undecided", brief="numbers", because="of numbers")
    weights = tuple(at_hand.weights_at_hand(materials))
    findings = {claim.name: ClaimResult(verdict=verdict, weights=weights) for claim in CLAIMS[:2]}
    assert markdown_of(CLAIMS[:2], findings, is_quick=False).count("| digits-12-layers-free |") == 1
