"""`oversmooth finetune`: all ten sets end to end, toy tasks that can be learned and ones that cannot, a real encoder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import oversmooth as osm
from oversmooth.environment.versions import one_thread
from oversmooth.recipes.superglue import finetune
from oversmooth.recipes.superglue_tasks import MAIN, TASKS
from tests.command_line import oversmooth
from tests.real_models import minilm
from tests.superglue_files import BAD, FILLER, FOLDERS, GOOD, NAMES, Toy, write_superglue


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny crammed BERT that has learned nothing, with a vocabulary of the toy words."""
    from oversmooth.models.crammed_bert import CrammedBertConfig, CrammedBertModel, register
    from oversmooth.recipes.corpus import save_tokenizer, train_wordpiece

    register()
    folder = tmp_path_factory.mktemp("encoder")
    toy = Toy(0, False)
    texts = [" ".join([*GOOD, *BAD, *FILLER, *NAMES]), *(toy.sentence(i % 2 == 0) for i in range(50))]
    texts += ["is it good because so came home on that day was seen long here which"] * 3
    tokenizer = train_wordpiece(lambda: texts, 300, english_keyboard=True)
    save_tokenizer(tokenizer, folder, 48)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = CrammedBertConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=48, **sizes)
    CrammedBertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def everything(encoder, tmp_path_factory):
    """All ten sets, one epoch of a few records."""
    root = tmp_path_factory.mktemp("finetune")
    data = write_superglue(root / "data", train=8, val=6, test=4)
    words = ["--tasks", "superglue", "--data", data, "--output", root / "out"]
    with one_thread():
        done = oversmooth("finetune", encoder, *words, "--set", "training.epochs=1")
    assert done.returncode == 0, done.stderr
    return root, done


def test_all_ten_sets_have_their_official_metrics_and_an_overall_score(everything):
    root, done = everything
    table = json.loads((root / "out" / "results.json").read_text())
    assert [row["task"] for row in table["tasks"]] == list(TASKS)
    for row in table["tasks"]:
        names = TASKS[row["task"]].metrics
        assert set(names) <= set(row["metrics"])
        assert row["scores"] == pytest.approx([sum(row["metrics"][name][0] for name in names) / len(names)])
        assert row["spread"] is None
    mean = sum(row["mean"] for row in table["tasks"] if row["task"] in MAIN) / 8
    assert table["overall"] == pytest.approx([mean])
    assert "gender_parity" in table["tasks"][-1]["metrics"]
    for word in (*FOLDERS.values(), "Overall score", "smoothing layers"):
        assert word in done.stdout


def test_several_seeds_have_a_mean_and_a_spread(encoder, tmp_path):
    data = write_superglue(tmp_path / "data", train=8, val=6, test=2, names=("cb",))
    found = finetune(
        str(encoder), tmp_path / "out", tasks="cb", seeds=(0, 3), data=str(data), overrides=("training.epochs=1",)
    )
    (row,) = found.tasks
    assert row.seeds == (0, 3)
    assert all(len(values) == 2 for values in row.metrics.values())
    assert row.mean == pytest.approx(sum(row.scores) / 2)
    assert row.spread == pytest.approx(abs(row.scores[0] - row.scores[1]) / 2**0.5)
    assert len(row.after) == 2
    assert {path.name for path in (tmp_path / "out" / "submission").iterdir()} == {"seed0", "seed3"}
    assert found.overall is None


def test_the_encoder_is_analysed_once_before_the_runs_of_all_seeds(encoder, tmp_path, monkeypatch):
    from oversmooth.recipes import superglue as job

    data = write_superglue(tmp_path / "data", train=8, val=6, test=2, names=("cb", "rte"))
    calls = []

    def counted(*words, **more):
        calls.append(words)
        return osm.analyze(*words, **more)

    monkeypatch.setattr(job, "analyze", counted)
    settings = {"seeds": (0, 3), "data": str(data), "overrides": ("training.epochs=1",)}
    finetune(str(encoder), tmp_path / "out", tasks="cb,rte", **settings)
    assert len(calls) == 2, "one per task, whose own texts it reads"
    texts = {
        task: [(tmp_path / "out" / task / f"seed{seed}" / job.BEFORE).read_text() for seed in (0, 3)]
        for task in ("cb", "rte")
    }
    assert texts["cb"][0] == texts["cb"][1] != texts["rte"][0] == texts["rte"][1]


def test_the_score_stands_beside_the_smoothing_before_and_after(everything):
    root, _ = everything
    table = json.loads((root / "out" / "results.json").read_text())
    for row in table["tasks"]:
        if row["task"] in MAIN:
            assert -1 <= row["before"]["cosine"] <= 1
            assert row["before"]["layers"] == 2
            assert len(row["after"]) == 1
            assert row["after"][0]["cosine"] != row["before"]["cosine"]


def test_predictions_for_every_set_are_in_the_official_format(everything):
    root, _ = everything
    submission = root / "out" / "submission" / "seed0"
    assert {path.name for path in submission.iterdir()} == {f"{folder}.jsonl" for folder in FOLDERS.values()}
    for name, folder in FOLDERS.items():
        lines = [json.loads(line) for line in (submission / f"{folder}.jsonl").read_text().splitlines()]
        assert [line["idx"] for line in lines] == [10 * i if name == "record" else i for i in range(len(lines))]
        assert len(lines) == (6 if name in ("axb", "axg") else 4)
    validation = root / "out" / "boolq" / "seed0" / "predictions" / "validation" / "BoolQ.jsonl"
    guesses = [json.loads(line)["label"] for line in validation.read_text().splitlines()]
    golds = [json.loads(line)["label"] for line in (root / "data" / "BoolQ" / "val.jsonl").read_text().splitlines()]
    accuracy = sum(guess == str(gold).lower() for guess, gold in zip(guesses, golds, strict=True)) / 6
    table = json.loads((root / "out" / "results.json").read_text())
    assert table["tasks"][0]["metrics"]["accuracy"][0] == pytest.approx(accuracy)


def test_a_fine_tuned_encoder_is_an_ordinary_checkpoint_with_its_head_beside_it(everything):
    root, _ = everything
    folder = root / "out" / "wsc" / "seed0" / "model"
    assert len(osm.inspect(folder).layers) == 2
    assert osm.measure(folder).values
    head = load_file(folder / "head.safetensors")
    assert head["dense.weight"].shape == (32, 3 * 32)
    assert head["classifier.weight"].shape == (2, 32)


def test_finished_runs_are_kept_and_another_encoder_is_refused(everything, encoder):
    root, _ = everything
    words = ["--tasks", "superglue", "--data", root / "data", "--output", root / "out"]
    before = (root / "out" / "results.json").read_text()
    again = oversmooth("finetune", encoder, *words, "--set", "training.epochs=1", "--resume", "--format", "json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == json.loads(before)
    changed = oversmooth("finetune", encoder, *words, "--set", "training.epochs=2", "--resume")
    assert changed.returncode == 2
    assert "training.epochs was 1 and is now 2" in changed.stderr
    without = oversmooth("finetune", encoder, *words)
    assert without.returncode == 2
    assert "it holds a run already" in without.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("{encoder}", "--tasks", "bolq"), ("Unknown task 'bolq'", "Close: boolq")),
        (("{encoder}", "--seeds", "a"), ("--seeds must be a comma-separated list of whole numbers", "'a'")),
        (("{encoder}", "--seeds", "1,1"), ("--seeds must be seeds that are all different; got [1, 1]",)),
        (("{encoder}", "--setting", "squad"), ("Unknown setting 'squad'", "superglue, glue")),
        (("{encoder}", "--data", "{encoder}"), ("a folder BoolQ with train.jsonl",)),
        (("/nowhere",), ("Nothing was found at '/nowhere'",)),
        (("{bare}",), ("Fine-tuning is not supported for", "a tokenizer beside the weights")),
    ],
)
def test_a_wrong_word_ends_in_one_message_and_no_folder(encoder, tmp_path, words, parts):
    import shutil

    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(encoder / name, bare)
    words = [word.format(encoder=encoder, bare=bare) for word in words]
    done = oversmooth("finetune", *words, "--output", tmp_path / "out")
    assert done.returncode == 2
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_process_of_its_own_says_what_is_wrong_without_a_traceback(tmp_path):
    """Nothing has imported transformers there, and beside a CPU-only torch that needs our cure first."""
    code = "from oversmooth.cli import main; main()"
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-c", code, "finetune", str(tmp_path / "empty"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: Expected weights")


LEARNING = ("training.epochs=12", "optimizer.learning_rate=3e-3", "training.max_tokens=48")


def toy_score(encoder, tmp_path, name, *, shuffled):
    data = write_superglue(tmp_path / "data", train=160, val=100, test=1, names=(name,), shuffled=shuffled)
    found = finetune(str(encoder), tmp_path / "out", tasks=name, data=str(data), overrides=LEARNING)
    return found.tasks[0].metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", MAIN)
def test_a_task_that_can_be_learned_is_learned(encoder, tmp_path, name):
    metrics = toy_score(encoder, tmp_path, name, shuffled=False)
    for metric, (value,) in metrics.items():
        assert value > 0.9, metric


CHANCE = {"cb": 1 / 3, "record": 1 / 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAIN)
def test_a_task_with_shuffled_labels_stays_at_chance(encoder, tmp_path, name):
    metrics = toy_score(encoder, tmp_path, name, shuffled=True)
    if name == "multirc":
        assert metrics["em"][0] < 0.3  # an eighth of questions of three answers
        return
    (value,) = metrics["accuracy" if "accuracy" in metrics else "em"]
    deviation = (CHANCE.get(name, 0.5) * (1 - CHANCE.get(name, 0.5)) / 100) ** 0.5
    assert abs(value - CHANCE.get(name, 0.5)) < 4 * deviation


@pytest.mark.slow
def test_the_diagnostic_sets_are_answered_by_the_model_of_rte(encoder, tmp_path):
    data = write_superglue(tmp_path / "data", train=160, val=60, test=1, names=("rte", "axb", "axg"))
    found = finetune(str(encoder), tmp_path / "out", tasks="axb,axg", data=str(data), overrides=LEARNING)
    scores = {row.task: row.mean for row in found.tasks}
    assert scores.keys() == {"rte", "axb", "axg"}
    assert min(scores.values()) > 0.8
    assert found.overall is None


@pytest.mark.slow
def test_a_real_encoder_is_fine_tuned_on_three_tasks(tmp_path):
    data = os.environ.get("OVERSMOOTH_DATA")
    source = Path(data) / "superglue" if data else write_superglue(tmp_path / "data", train=32, val=24)
    words = ["--tasks", "cb,copa,wic", "--data", source, "--output", tmp_path / "out", "--set", "training.epochs=1"]
    done = oversmooth("finetune", minilm(), *words, "--set", "training.max_tokens=64", "--format", "json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [row["task"] for row in table["tasks"]] == ["cb", "copa", "wic"]
    for row in table["tasks"]:
        assert row["before"]["layers"] == 6
        assert 0 < row["before"]["cosine"] < 1
        assert row["after"][0]["cosine"] is not None
