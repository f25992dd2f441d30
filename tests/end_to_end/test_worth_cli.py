"""`eval`, `ablate`, `prune`, `edit --sweep` and `--lengths` as a user types them; what cannot be is said on one screen."""

import csv
import json

import pytest
import torch

from tests.command_line import oversmooth
from tests.unit.worth.test_task_loss import causal


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small language model without a tokenizer, and token ids for it."""
    folder = tmp_path_factory.mktemp("model")
    causal().save_pretrained(folder)
    ids = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "ids.jsonl").write_text("\n".join(json.dumps(row) for row in ids))
    return folder


def on_ids(verb, model, *arguments):
    return oversmooth(verb, model, "--ids", model / "ids.jsonl", *arguments)


def test_an_ablation_is_a_table_of_losses_and_of_what_tells_them(model, tmp_path):
    done = on_ids("ablate", model, "-o", tmp_path / "rows.csv", "--details")
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole model, causal-lm: loss" in done.stdout
    assert "rank correlation" in done.stdout
    assert "rank correlation" not in on_ids("ablate", model).stdout
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [(row["layer"], row["part"]) for row in rows[:3]] == [
        ("0", "attention"),
        ("0", "feed-forward"),
        ("0", "block"),
    ]


def test_an_edit_shows_what_it_costs_beside_what_moved(model, tmp_path):
    words = ("--sharpen", "--strength", "0.5", "--loss", "--output", tmp_path / "out", "--layers", "1")
    done = on_ids("edit", model, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "at strength 0.5" in done.stdout
    assert "mean cosine" in done.stdout
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_curve_of_strengths_is_a_table_and_a_page_and_writes_no_checkpoint(model, tmp_path):
    words = ("--smooth", "--sweep", "--strength", "0.5,1", "-o", tmp_path / "curve.html", "--format", "json")
    done = on_ids("edit", model, *words)
    found = json.loads(done.stdout)
    assert [point["strength"] for point in found["points"]] == [0.0, 0.5, 1.0]
    assert found["verdict"] in (tmp_path / "curve.html").read_text()


def test_lengths_are_a_table_and_a_page(model, tmp_path):
    done = on_ids("measure", model, "--lengths", "4,8,12", "-o", tmp_path / "lengths.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 texts of at least 12 tokens" in done.stdout
    assert "mean cosine" in (tmp_path / "lengths.html").read_text()


def test_models_are_compared_by_loss_too(model, tmp_path):
    words = ("--loss", "--ids", model / "ids.jsonl", "-o", tmp_path / "compare.html")
    done = oversmooth("compare", model, model, *words)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "compare.html").read_text()
    assert "What it costs" in page
    assert "causal-lm" in page


@pytest.mark.parametrize(
    ("verb", "arguments", "pieces"),
    [
        ("prune", ("--blocks", "0-1", "--output", "OUT"), ("blocks that are left", "at least 1")),
        ("prune", ("--blocks", "7", "--output", "OUT"), ("layer", "7", "0, 1")),
        ("prune", ("--output", "OUT"), ("blocks", "budget")),
        ("eval", ("--task", "masked-lm"), ("masked-lm", "a head for causal-lm")),
        ("eval", ("--task", "sums"), ("sums", "classification")),
        ("edit", ("--sweep", "--sharpen", "--smooth"), ("--sharpen", "--smooth")),
        ("edit", ("--sweep", "--sharpen", "--strength", "0.5,two"), ("--strength", "several with commas")),
        ("edit", ("--sweep", "--sharpen", "--strength", "2"), ("strength", "at most 1")),
        ("edit", ("--sweep", "--sharpen", "--output", "OUT"), ("--output", "ends in", ".html")),
        ("edit", ("--sharpen",), ("--output", "--sweep")),
        ("edit", ("--sharpen", "--output", "OUT", "--strength", "0.5,1"), ("--strength", "one number", "--sweep")),
        ("edit", ("--sharpen", "--output", "OUT", "-o", "curve.html"), ("--output", "--sweep")),
        ("measure", ("--lengths", "4,many"), ("--lengths", "whole numbers")),
        ("measure", ("--lengths", "4"), ("lengths", "at least two")),
        ("measure", ("--lengths", "4,400"), ("texts of at least 400 tokens", "the longest of 12")),
        ("measure", ("-o", "page.html"), ("--output", "oversmooth report")),
        ("measure", ("--lengths", "4,8", "--at", "all"), ("--lengths", "--at")),
        ("predict", ("--lengths", "4,8", "--heads"), ("--lengths", "--heads")),
    ],
)
def test_what_cannot_be_is_said_in_one_message(model, verb, arguments, pieces, tmp_path):
    words = [tmp_path / "out" if word == "OUT" else word for word in arguments]
    done = on_ids(verb, model, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 4
    for piece in pieces:
        assert piece in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_classifier_needs_classes_and_an_embedding_model_an_original(tmp_path):
    from tests.contract.tiny_models import tiny_model

    model, _ = tiny_model("bert")
    model.save_pretrained(tmp_path / "bert")
    done = oversmooth("eval", tmp_path / "bert")
    assert done.returncode == 2
    assert "--original TARGET" in done.stderr
