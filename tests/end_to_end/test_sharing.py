"""Results for others: a model card's section that the hub reads, and a report for pull requests."""

import dataclasses

import pytest
import torch

import oversmooth as osm
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, _ = tiny_model("bert")
    ids = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    analysis = osm.analyze(model, [{"input_ids": ids}], solve=1, what_ifs=())
    path = tmp_path_factory.mktemp("sharing") / "analysis.json"
    path.write_text(analysis.to_json())
    return path, analysis


def test_the_card_holds_results_that_the_hub_reads(saved):
    from huggingface_hub import ModelCard

    path, analysis = saved
    card = path.parent / "card.md"
    assert oversmooth("report", path, "--name", "my: model", "--card", card).returncode == 0
    results = ModelCard(card.read_text()).data.eval_results
    last = analysis.measurement.curve("cosine")[-1].mean
    (cosine,) = [result.metric_value for result in results if result.metric_type == "cosine"]
    assert cosine == pytest.approx(last, rel=1e-5)
    assert "## Oversmoothing" in card.read_text()
    assert f"\n{analysis.answer.headline}\n" in card.read_text()
    assert f"- Where: **{analysis.answer.where.title}**" in card.read_text()


def test_a_report_for_pull_requests_is_markdown(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = saved
    done = oversmooth("report", path, "-o", "report.md")
    assert done.returncode == 0
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("## oversmooth: ")
    assert "| --- |" in text
    assert "<" not in text
    assert "ends in .html, .md, .json" in oversmooth("report", path, "-o", "report.pdf").stderr


def test_what_others_named_is_shown_as_it_is_and_makes_no_link(saved, tmp_path):
    _, analysis = saved
    name = "![x](http://evil) <img src=x>\n# big `code`"
    data = dataclasses.replace(analysis.measurement.data, description=name)
    measurement = dataclasses.replace(analysis.measurement, data=data)
    changed = dataclasses.replace(analysis, measurement=measurement, command="oversmooth report 'a`b'")
    (tmp_path / "a.json").write_text(changed.to_json())
    assert oversmooth("report", tmp_path / "a.json", "--card", tmp_path / "card.md").returncode == 0
    section = (tmp_path / "card.md").read_text().rpartition("---")[2]
    assert r"\!\[x\]\(http\://evil\) \<img src=x\> \# big \`code\`" in section
    assert "``oversmooth report 'a`b'``" in section
