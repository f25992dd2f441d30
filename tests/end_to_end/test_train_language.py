"""The language recipes on the shared runner: steps as the recipe says, resumed to the bit, the same in two processes."""

import json

import pytest
import torch
from safetensors.torch import load_file

import oversmooth as osm
from oversmooth.environment.versions import one_thread
from oversmooth.recipes import cramming as budget
from oversmooth.recipes import language as job
from oversmooth.recipes.cramming import triangle
from oversmooth.recipes.train import RunRequest, train
from oversmooth.results.runs import read_run
from tests.command_line import in_two_processes, killed, oversmooth
from tests.real_data import real_data

TINY = (
    "data.vocab_size=256",
    "data.length=16",
    "data.max_documents=40",
    "data.validation_fraction=0.2",
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.feed_forward=32",
    "training.steps=12",
    "training.batch=16",
    "training.ramp_quantum=4",
    "watch.log_every=1",
    "watch.save_every=5",
    "watch.evaluate_every=6",
    "watch.monitor_every=6",
    "watch.validation_sequences=32",
    "watch.probe_sequences=4",
)
"""Two narrow layers, 12 steps of 4 to 16 sequences of 16 tokens; saved every 5, evaluated and measured every 6."""
SETTINGS = [word for setting in TINY for word in ("--set", setting)]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """One cache for all tests here, and not that of the user."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OVERSMOOTH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def trained(out, *more, data=None, **request):
    return train(RunRequest(name="mini-bert", out=out, overrides=(*TINY, *more), **request), data)


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def losses(out):
    return [point["loss"] for point in read_run(out / "metrics.jsonl") if "loss" in point]


def assert_same_weights(left, right):
    first, second = weights(left), weights(right)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0, msg=lambda words, n=name: f"{n}: {words}")


@pytest.fixture(scope="module")
def sharpened(tmp_path_factory, _cache):
    out = tmp_path_factory.mktemp("runs") / "sharpen"
    with one_thread():
        done = oversmooth("train", "mini-bert", "--variant", "sharpen", "--output", out, *SETTINGS)
    assert done.returncode == 0, done.stderr
    return out, done


def test_a_run_ends_in_an_ordinary_checkpoint_with_its_tokenizer(sharpened):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    out, done = sharpened
    assert "eval_loss" in done.stdout
    assert "unigram_entropy" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForMaskedLM.from_pretrained(out / "model")
    logits = model(**tokenizer("a name is bound", return_tensors="pt")).logits
    assert logits.shape[-1] == len(tokenizer)
    assert not any("parametrizations" in name for name in model.state_dict())
    assert osm.verify(out / "model").passed
    assert osm.measure(out / "model").values
    for layer in osm.inspect(out / "model").layers:
        assert -1 - 1e-5 <= layer.plain.min_real <= layer.plain.max_real <= 1e-5


def test_the_manifest_names_the_corpus_by_its_hash(sharpened):
    manifest = json.loads((sharpened[0] / "manifest.json").read_text())
    assert manifest["finished"]
    assert len(manifest["data"]["hash"]) == 20
    assert manifest["data"]["sequences"]["train"] > 100
    assert manifest["results"]["unigram_entropy"] == manifest["data"]["unigram_entropy"]


def test_the_rate_of_every_step_is_the_triangle(sharpened):
    points = [p for p in read_run(sharpened[0] / "metrics.jsonl") if "learning_rate" in p]
    expected = [triangle(step / 12, peak=3e-3) for step in range(12)]
    assert [p["learning_rate"] for p in points] == pytest.approx(expected)


@pytest.mark.parametrize("variant", ["vanilla", "smooth", "attnscale", "neutreno"])
def test_every_kind_of_variant_trains(tmp_path, variant):
    run = trained(tmp_path / "run", "training.steps=3", variant=variant)
    assert run.manifest.finished
    words = run.manifest.read_back["model"]
    assert words.startswith(
        "Read back by" if variant in ("vanilla", "smooth") else "Not checked: the plain library does not"
    )
    assert run.results["eval_loss"] > 0


def test_accumulated_parts_of_unequal_size_are_the_same_step_as_the_whole_batch(tmp_path):
    trained(tmp_path / "whole")
    trained(tmp_path / "parts", "hardware.micro_batch=4")
    trained(tmp_path / "eights", "hardware.micro_batch=8")  # of batches of 4, 8, 12 and 16
    for name in ("parts", "eights"):
        torch.testing.assert_close(losses(tmp_path / name), losses(tmp_path / "whole"), rtol=1e-4, atol=1e-5)


def test_steps_clip_decay_and_batch_are_what_the_recipe_says(tmp_path, monkeypatch):
    """One hand-made step of AdamW beside the run: the first update of every weight."""
    seen = {}
    build = job.build_model

    def kept(recipe, vocabulary):
        model = build(recipe, vocabulary)
        seen["start"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen["model"] = model
        return model

    monkeypatch.setattr(job, "build_model", kept)
    trained(tmp_path / "run", "training.steps=1", "optimizer.weight_decay=0.5")
    recipe = kind_recipe("training.steps=1")
    corpus = job.load_corpus(recipe.data, None)
    vocabulary = int(corpus.facts["vocabulary"])
    reading = job.TrainingSequences(corpus, seed=0, shuffle=True)
    plan = job.plan_of(recipe)
    batches = job.StepBatches(reading, plan, steps=1, mask=0.25, vocabulary=vocabulary, seed=0)
    batch = batches[0]
    assert len(batch["input_ids"]) == 4
    model = build(recipe, vocabulary)
    model.load_state_dict({**model.state_dict(), **seen["start"]})
    model(**batch).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 0.5  # so that clipping does something
    rate = 3e-3 * 0.25
    after = weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        decay = 0.5 if parameter.ndim > 1 else 0.0
        expected = seen["start"][name] * (1 - rate * decay) - rate * parameter.grad / (parameter.grad.abs() + 1e-12)
        torch.testing.assert_close(
            after[name], expected.detach(), rtol=1e-4, atol=1e-6, msg=lambda w, n=name: f"{n}: {w}"
        )


def kind_recipe(*more):
    from oversmooth.recipes.train import load_recipe

    return load_recipe("mini-bert", (*TINY, *more))


def test_bfloat16_is_autocast_and_the_weights_stay_in_full_precision(tmp_path, monkeypatch):
    kinds = set()
    build = job.build_model

    def watched(recipe, vocabulary):
        model = build(recipe, vocabulary)
        model.encoder.layers[0].ffn.dense_in.register_forward_hook(lambda m, a, y: kinds.add((m.training, y.dtype)))
        return model

    monkeypatch.setattr(job, "build_model", watched)
    run = trained(tmp_path / "run", "training.steps=2", "hardware.precision=bfloat16")
    assert "outputs on 2 inputs agree" in run.manifest.read_back["model"]
    assert (True, torch.bfloat16) in kinds
    assert {tensor.dtype for tensor in weights(tmp_path / "run").values()} == {torch.float32}


def test_a_budget_of_hours_ends_by_the_clock_and_is_taken_up_again(tmp_path, monkeypatch):
    time = [0.0]

    class FakeClock(budget.ClockPlan):
        def __init__(self, hours, **growth):
            super().__init__(hours, now=lambda: time[0], **growth)

        def batch_of(self, step):
            time[0] += 360.0  # every step takes a tenth of the hour
            return super().batch_of(step)

    monkeypatch.setattr(job, "ClockPlan", FakeClock)
    hours = ("training.budget_hours=1.0", "training.steps=1000", "watch.save_every=4")
    run = trained(tmp_path / "run", *hours)
    points = [p for p in read_run(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in p]
    assert len(points) == 10
    expected = [triangle(share / 10, peak=3e-3) for share in range(10)]
    assert [p["learning_rate"] for p in points] == pytest.approx(expected)
    assert run.manifest.sessions[-1].to_step == 10
    clock = json.loads((tmp_path / "run" / "checkpoints" / "checkpoint-8" / "clock.json").read_text())
    assert clock["spent"] == pytest.approx(8 * 360.0)
    assert clock["place"] == sum((4, 4, 8, 12, 12, 16, 16, 16))


# --- repeating ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_the_same_again_with_the_same_seed_and_another_with_another(tmp_path):
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        trained(tmp_path / name, seed=seed)
    assert_same_weights(tmp_path / "first", tmp_path / "again")
    assert (tmp_path / "first" / "metrics.jsonl").read_text() == (tmp_path / "again" / "metrics.jsonl").read_text()
    assert losses(tmp_path / "first") != losses(tmp_path / "other")


@pytest.mark.parametrize(
    ("moment", "count"),
    [
        pytest.param("step", 8, marks=pytest.mark.slow),
        pytest.param("half_written", 4, marks=pytest.mark.slow),
        pytest.param("before_rename", 2, marks=pytest.mark.slow),
        pytest.param("final_model", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(tmp_path, moment, count):
    trained(tmp_path / "whole", variant="sharpen")
    words = ["train", "mini-bert", "--variant", "sharpen", "--output", tmp_path / "killed", *SETTINGS]
    assert killed(moment, count, *words).returncode == -9
    assert not json.loads((tmp_path / "killed" / "manifest.json").read_text())["finished"]
    trained(tmp_path / "killed", variant="sharpen", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")
    # The same lines; what is measured at the step of a checkpoint is measured again, and then stands behind its loss.
    kept = [sorted((tmp_path / name / "metrics.jsonl").read_text().splitlines()) for name in ("whole", "killed")]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    """At the same global batch, which grows: losses agree within 1e-3 of their size, which is rounding in another order."""
    trained(tmp_path / "one", variant="sharpen")
    done = in_two_processes("train", "mini-bert", "--variant", "sharpen", "--output", tmp_path / "two", *SETTINGS)
    assert done.returncode == 0, done.stderr[-3000:]
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-3, atol=0)
    first, second = (json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("one", "two"))
    assert second["sessions"][0]["hardware"]["processes"] == 2
    assert second["results"]["eval_loss"] == pytest.approx(first["results"]["eval_loss"], rel=1e-3)


# --- data -----------------------------------------------------------------------------------------------------------


def test_text_of_the_users_own_is_trained_on_and_its_defects_are_said(tmp_path, caplog):
    lines = [json.dumps({"text": f"a short story about number {i} and the sea " * 20}) for i in range(40)]
    lines.insert(3, '{"text": "cut off')
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(lines))
    run = trained(tmp_path / "run", "training.steps=2", data=str(path))
    assert run.manifest.data["skipped"] == {"not JSON": 1}
    assert f"{path}, line 4: not JSON" in caplog.text


def test_data_that_is_not_there_ends_in_one_message_and_no_folder(tmp_path):
    done = oversmooth("train", "mini-bert", "--data", "/nowhere/at/all", "--output", tmp_path / "run")
    assert done.returncode == 2
    assert "'/nowhere/at/all'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_real_text_is_learned_beyond_its_frequencies(tmp_path):
    text = real_data("text") / "tinyshakespeare.txt"
    request = RunRequest(name="mini-bert", out=tmp_path / "run", overrides=("training.steps=600", "model.layers=4"))
    run = train(request, str(text))
    assert run.results["eval_loss"] < run.results["unigram_entropy"] - 0.3
