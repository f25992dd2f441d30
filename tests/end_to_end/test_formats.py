"""Every verb that shows rows prints them as a table, Markdown, JSON or CSV, and writes files by their suffix."""

import csv
import json
import shutil

import pytest

from oversmooth.commands.verbs import app
from tests.command_line import oversmooth
from tests.unit.worth.test_task_loss import causal

ON_IDS = ("measure", "predict", "eval", "ablate", "edit --sweep", "prune")
OWN = {
    "edit --sweep": ("--sharpen", "--strength", "1"),
    "prune": ("--blocks", "1", "--output", "OUT"),
    "edit": ("--sharpen", "--output", "OUT"),
}
SHOWN = {
    "inspect": "| layer | rho_dc |",
    "verify": "| stack | layer | error | tokens |",
    "measure": "| layer | mean cosine | change |",
    "predict": "| layer | one pass | measured |",
    "eval": "causal-lm: loss",
    "ablate": "| layer | attention | feed-forward | block |",
    "prune": "removed blocks 1 of 2",
    "edit": "| layer | H moved |",
    "edit --sweep": "| strength | loss |",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small language model without a tokenizer, and token ids for it."""
    folder = tmp_path_factory.mktemp("model")
    causal().save_pretrained(folder)
    (folder / "ids.jsonl").write_text("\n".join(json.dumps(list(range(k, k + 12))) for k in (3, 20, 40, 60)))
    return folder


def run(verb, model, tmp_path, *options):
    own = [tmp_path / "out" if word == "OUT" else word for word in OWN.get(verb, ())]
    ids = ("--ids", model / "ids.jsonl") if verb in ON_IDS else ()
    name, *flags = verb.split()
    return oversmooth(name, model, *flags, *own, *ids, *options)


@pytest.mark.parametrize("verb", SHOWN)
def test_rows_are_markdown_csv_and_parquet_with_model_and_provenance(verb, model, tmp_path):
    pandas = pytest.importorskip("pandas")
    files = ("-o", tmp_path / "rows.csv", "-o", tmp_path / "rows.parquet")
    writes_folder = "OUT" in OWN.get(verb, ())
    done = run(verb, model, tmp_path, "--format", "md", *(() if writes_folder else files))
    assert (done.returncode, done.stderr) == (0, "")
    assert SHOWN[verb] in done.stdout
    assert "─" not in done.stdout, "no rules of a terminal in Markdown"
    if writes_folder:
        shutil.rmtree(tmp_path / "out")
        text = run(verb, model, tmp_path, "--format", "csv").stdout
    else:
        text = (tmp_path / "rows.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert {row["model"] for row in rows} == {str(model)}
    assert all(row["weights_sha256"] and row["oversmooth"] for row in rows)
    if writes_folder:
        return
    again = pandas.read_parquet(tmp_path / "rows.parquet")
    assert list(again.columns) == list(rows[0])
    assert len(again) == len(rows)


def test_files_hold_what_is_printed_in_their_format(model, tmp_path):
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "md", "csv")}
    done = oversmooth("inspect", model, *(word for path in files.values() for word in ("-o", path)))
    assert done.stdout == oversmooth("inspect", model).stdout, "the table is printed all the same"
    printed = {name: oversmooth("inspect", model, "--format", name).stdout for name in files}
    assert printed["csv"] == files["csv"].read_text()
    assert printed["md"] == files["md"].read_text()
    assert json.loads(printed["json"]) == json.loads(files["json"].read_text())


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (("--format", "xml"), ("xml", "table, json, md, csv")),
        (("--format", "parquet"), ("-o FILE.parquet",)),
        (("-o", "rows.xls"), ("rows.xls", ".json, .md, .csv, .parquet")),
        (("-o", "page.html"), ("page.html", "oversmooth report")),
        (("-o", "no/such/rows.parquet"), ("cannot be written",)),
    ],
)
def test_what_cannot_be_shown_is_said_before_any_work(words, pieces, tmp_path):
    done = oversmooth("inspect", tmp_path / "no-such-model", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(piece in done.stderr for piece in pieces)


def test_verbs_with_rows_have_the_same_options():
    found = {}
    for command in app.registered_commands:
        name = command.name
        found[name] = set(command.callback.__annotations__)
    shared = {"format", "output"}
    others = {"gate", "survey", "train", "finetune"}  # which print a verdict or a manifest
    assert {name for name, options in found.items() if shared <= options} - others == {
        verb.split()[0] for verb in SHOWN
    }
    assert all({"output", "tables"} <= found[name] for name in ("report", "compare"))


def test_a_comparison_is_markdown_and_tables_too(model, tmp_path):
    words = (
        "--ids",
        model / "ids.jsonl",
        "-o",
        tmp_path / "page.md",
        "--tables",
        tmp_path / "tables",
    )
    done = oversmooth("compare", model, model, *words)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("## oversmooth: ")
    assert "### All numbers" in page
    rows = list(csv.DictReader((tmp_path / "tables" / "attribution.csv").read_text().splitlines()))
    assert {"model", "layer", "place", "change", "data_sha256"} <= set(rows[0])
