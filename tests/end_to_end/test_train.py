"""Training on the command line: what a run writes, that it repeats itself, and what happens when things go wrong."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import oversmooth as osm
from oversmooth.environment.versions import one_thread
from oversmooth.errors import CannotControl, TrainingStopped
from oversmooth.recipes.augment import DrawSampler
from oversmooth.recipes.train import RunRequest, parts_of_a_batch, process_group_ends, train
from oversmooth.recipes.variants import VARIANTS, leaves_ordinary_weights
from oversmooth.results import Analysis
from oversmooth.results.runs import read_run
from tests.cifar_files import cifar_arrays, write_cifar100, write_folder
from tests.command_line import in_two_processes, killed, oversmooth
from tests.real_data import real_data

ROOT = Path(__file__).parent.parent.parent
TINY = (
    "model.depth=2",
    "model.width=16",
    "model.heads=2",
    "training.epochs=1.5",
    "training.batch=96",
    "training.warmup_epochs=0.5",
    "watch.log_every=0.07",
    "watch.save_every=0.36",
    "watch.evaluate_every=0.71",
    "watch.monitor_every=0.5",
    "watch.probe_images=8",
)
"""Two narrow layers, 21 steps of 96 digits (14 in an epoch); saved every 5, evaluated every 10, measured every 7."""
SETTINGS = [word for setting in TINY for word in ("--set", setting)]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def trained(out, *more, **request):
    return train(RunRequest(name="digits", out=out, overrides=(*TINY, *more), **request))


def weights(out, model="model"):
    return load_file(out / model / "model.safetensors")


def assert_same_weights(left, right, model="model"):
    first, second = weights(left, model), weights(right, model)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0, msg=lambda words, n=name: f"{n}: {words}")


@pytest.fixture(scope="module")
def sharpened(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "sharpen"
    with one_thread():
        done = oversmooth("train", "digits", "--variant", "sharpen", "--output", out, *SETTINGS, "--seed", 3)
    assert done.returncode == 0, done.stderr
    return out, done


# --- what a run writes ----------------------------------------------------------------------------------------------


def test_a_run_says_how_it_ended_and_where_it_is(sharpened):
    out, done = sharpened
    assert "eval_accuracy 0." in done.stdout
    assert "model: Read back by the plain library: outputs on 2 inputs agree to" in done.stdout
    assert f"run: {out}" in done.stdout


def test_the_model_is_an_ordinary_one_of_timm_inside_the_interval(sharpened):
    import timm

    out, _ = sharpened
    model = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True)
    assert not any("parametrizations" in name for name in model.state_dict())
    assert osm.verify(str(out / "model")).passed
    for layer in osm.inspect(str(out / "model")).layers:
        assert -1 - 1e-5 <= layer.plain.min_real <= layer.plain.max_real <= 1e-5


def test_the_accuracy_is_that_of_the_saved_model_on_every_test_image(sharpened):
    import timm

    from oversmooth.recipes.augment import EvaluationImages, evaluation_batch
    from oversmooth.recipes.train import load_recipe
    from tests.cifar_files import load_splits

    out, _ = sharpened
    recipe = load_recipe("digits", TINY)
    images = EvaluationImages(load_splits(recipe.data, None, 1.0).test, recipe)
    batch = evaluation_batch([images[i] for i in range(len(images))])
    model = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True).eval()
    with torch.no_grad():
        accuracy = (model(batch["x"]).argmax(1) == batch["labels"]).double().mean().item()
    assert len(images) == 360
    assert json.loads((out / "manifest.json").read_text())["results"]["eval_accuracy"] == pytest.approx(accuracy)


def test_the_manifest_says_what_was_run_on_what_and_what_it_cost(sharpened):
    out, _ = sharpened
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["variant"], manifest["seed"], manifest["steps"]) == ("sharpen", 3, 21)
    assert manifest["finished"] is True
    assert manifest["recipe"]["model"]["depth"] == 2
    assert manifest["overrides"] == list(TINY)
    assert {split: manifest["data"][split]["images"] for split in ("train", "test")} == {"train": 1437, "test": 360}
    assert len(manifest["data"]["train"]["sha256"]) == 64
    session = manifest["sessions"][0]
    assert session["versions"]["torch"] == torch.__version__
    assert {"cpu", "cores", "threads", "processes"} <= session["hardware"].keys()
    cost = manifest["cost"]
    assert cost["seconds_per_step"] == pytest.approx(cost["seconds"] / 21)
    assert cost["examples_per_second"] == pytest.approx(96 / cost["seconds_per_step"])


def test_the_metrics_hold_losses_accuracies_and_smoothing_curves(sharpened):
    out, _ = sharpened
    points = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [p["step"] for p in points if "loss" in p] == list(range(1, 22))
    assert [p["step"] for p in points if "eval_accuracy" in p] == [10, 20, 21]
    assert [p["step"] for p in points if "smoothing/cosine/depth_2" in p] == [0, 7, 14, 21]
    assert len(read_run(out / "metrics.jsonl")) == 22
    assert oversmooth("report", out / "metrics.jsonl", "-o", out / "run.html").returncode == 0


def test_the_analysis_is_that_of_the_final_model(sharpened):
    out, _ = sharpened
    analysis = Analysis.from_dict(json.loads((out / "analysis.json").read_text()))
    inspected = osm.inspect(str(out / "model"))
    assert analysis.measurement is not None
    assert analysis.prediction is not None
    for ours, theirs in zip(analysis.inspection.layers, inspected.layers, strict=True):
        assert ours.plain.rho_dc == pytest.approx(theirs.plain.rho_dc)


def test_a_run_without_its_analysis_has_the_same_weights_and_scores(sharpened, tmp_path):
    words = ("--variant", "sharpen", *SETTINGS, "--seed", 3, "--no-analyze")
    with one_thread():
        done = oversmooth("train", "digits", "--output", tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "analysis.json").exists()
    assert_same_weights(sharpened[0], tmp_path / "run")
    kept, bare = (json.loads((out / "manifest.json").read_text()) for out in (sharpened[0], tmp_path / "run"))
    assert kept["results"] == bare["results"]


def test_a_picture_of_the_first_batch_is_there(sharpened):
    from PIL import Image

    with Image.open(sharpened[0] / "first-batch.png") as picture:
        assert picture.size == (8 * 9 + 1, 8 * 9 + 1)


def test_a_run_that_is_done_is_not_run_again(sharpened):
    out, _ = sharpened
    before = (out / "manifest.json").stat().st_mtime_ns
    done = oversmooth("train", "digits", "--variant", "sharpen", "--output", out, *SETTINGS, "--seed", 3, "--resume")
    assert done.returncode == 0
    assert "eval_accuracy" in done.stdout
    assert (out / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "variant",
    ["smooth", "attnscale", *(pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS[3:] if v != "attnscale")],
)
def test_every_kind_of_variant_trains(tmp_path, variant):
    run = trained(tmp_path / "run", "training.epochs=0.3", variant=variant)
    assert run.manifest.finished
    assert 0 <= run.results["eval_accuracy"] <= 1
    names = weights(tmp_path / "run").keys()
    with_weights_of_their_own = ("attnscale", "featscale", "gfsa", "layerscale", "value_residual", "gate")
    assert any(variant in name for name in names) == (variant in with_weights_of_their_own)
    words = run.manifest.read_back["model"]
    if leaves_ordinary_weights(variant):
        assert words.startswith("Read back by the plain library: outputs on 2 inputs agree")
    else:
        assert (
            words == f"Not checked: the plain library does not know {variant}, which no ordinary weights can express."
        )


# --- repeating ------------------------------------------------------------------------------------------------------


def test_a_convolution_before_the_patches_leaves_an_ordinary_model_of_timm(tmp_path):
    import timm

    trained(tmp_path / "run", "model.stem=convolution", "model.patch_size=4", variant="sharpen")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'run' / 'model'}", pretrained=True)
    assert loaded.patch_embed.grid_size == (2, 2)
    assert loaded.patch_embed.backbone.conv.kernel_size == (7, 7)
    for name, tensor in weights(tmp_path / "run").items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
    for layer in osm.inspect(str(tmp_path / "run" / "model")).layers:
        assert layer.plain is not None
        assert -1 - 1e-5 <= layer.plain.min_real <= layer.plain.max_real <= 1e-5


def test_a_run_is_the_same_again_with_the_same_seed_and_another_with_another(tmp_path):
    more = ("augmentation.crop=pad", "augmentation.padding=1", "model.drop_path=0.2", "augmentation.mixup=0.8")
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        trained(tmp_path / name, *more, seed=seed)
    assert_same_weights(tmp_path / "first", tmp_path / "again")
    assert (tmp_path / "first" / "metrics.jsonl").read_text() == (tmp_path / "again" / "metrics.jsonl").read_text()
    name = "blocks.0.attn.qkv.weight"
    assert not torch.equal(weights(tmp_path / "first")[name], weights(tmp_path / "other")[name])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A vanilla run to compare others with."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    with one_thread():
        trained(out)
    return out


def test_accumulated_parts_are_the_same_step_as_the_whole_batch(tmp_path, plain):
    trained(tmp_path / "parts", "hardware.micro_batch=32")
    losses = [[p["loss"] for p in read_run(o / "metrics.jsonl") if "loss" in p] for o in (plain, tmp_path / "parts")]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def test_an_average_of_the_weights_is_kept_judged_and_saved(tmp_path):
    run = trained(tmp_path / "run", "training.ema_decay=0.5", "training.epochs=0.3", variant="smooth")
    assert {"eval_accuracy", "eval_average_accuracy"} <= run.results.keys()
    average = load_file(tmp_path / "run" / "model-average" / "model.safetensors")
    assert not torch.equal(average["head.weight"], weights(tmp_path / "run")["head.weight"])


def test_a_validation_split_is_watched_and_the_test_split_judged_once(tmp_path):
    run = trained(tmp_path / "run", "data.validation_images=200", "training.epochs=0.3", fraction=0.5)
    assert {"eval_accuracy", "test_accuracy"} <= run.results.keys()
    sizes = {name: run.manifest.data[name]["images"] for name in ("train", "validation", "test")}
    assert (sizes["validation"], sizes["test"]) == (200, 360)
    assert abs(sizes["train"] - (1437 - 200) / 2) <= 5


@pytest.mark.parametrize(
    ("moment", "count"),
    [
        pytest.param("step", 8, marks=pytest.mark.slow),
        ("half_written", 4),  # three files of the first checkpoint, then one of the second
        pytest.param("before_rename", 2, marks=pytest.mark.slow),
        pytest.param("after_rename", 2, marks=pytest.mark.slow),
        pytest.param("step", 2, marks=pytest.mark.slow),  # before any checkpoint
        pytest.param("final_model", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(tmp_path, moment, count):
    more = ("augmentation.crop=pad", "augmentation.padding=1", "model.drop_path=0.2", "training.ema_decay=0.9")
    more += ("watch.log_every=0.3", "watch.monitor_every=0.36")  # a line spans a checkpoint; smoothing falls on one
    trained(tmp_path / "whole", *more, variant="sharpen")
    settings = [word for setting in (*TINY, *more) for word in ("--set", setting)]
    words = ["train", "digits", "--variant", "sharpen", "--output", tmp_path / "killed", *settings]
    assert killed(moment, count, *words).returncode == -9
    assert not json.loads((tmp_path / "killed" / "manifest.json").read_text())["finished"]
    run = trained(tmp_path / "killed", *more, variant="sharpen", resume=True)
    for model in ("model", "model-average"):
        assert_same_weights(tmp_path / "whole", tmp_path / "killed", model)
    kept = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    assert kept[0] == kept[1]
    expected = {("step", 8): 5, ("half_written", 4): 5, ("before_rename", 2): 5, ("after_rename", 2): 10}
    assert run.manifest.sessions[-1].from_step == expected.get((moment, count), 0 if moment == "step" else 21)


def test_a_run_killed_while_it_wrote_its_first_file_can_be_resumed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json.123.partial").write_text("{")
    assert trained(tmp_path / "run", "training.epochs=0.1", resume=True).manifest.finished


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    """At the same global batch: losses agree within 1e-3 of their size, which is rounding in another order."""
    more = ("augmentation.mixup=0.8", "augmentation.mix_group=48", "augmentation.crop=pad", "augmentation.padding=1")
    trained(tmp_path / "one", *more, variant="sharpen")
    settings = [word for setting in (*TINY, *more) for word in ("--set", setting)]
    done = in_two_processes("train", "digits", "--variant", "sharpen", "--output", tmp_path / "two", *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [[p["loss"] for p in read_run(tmp_path / n / "metrics.jsonl") if "loss" in p] for n in ("one", "two")]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
    first, second = (json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("one", "two"))
    assert second["sessions"][0]["hardware"]["processes"] == 2
    assert abs(first["results"]["eval_accuracy"] - second["results"]["eval_accuracy"]) <= 2 / 360
    assert done.stdout.count("run: ") == 1


def test_the_process_group_ends_with_the_command():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with process_group_ends():
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()


# --- when things go wrong -------------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, plain, monkeypatch):
    import errno

    save, written = torch.save, []

    def full(value, file, *words, **more):
        written.append(file)
        if len(written) > 3:  # the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        save(value, file, *words, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(
            TrainingStopped, match=r"(?s)checkpoint-10 cannot be written.*No space left.*of step 5 is complete"
        ):
            trained(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-5"]
    trained(tmp_path / "run", resume=True)
    assert_same_weights(plain, tmp_path / "run")


@pytest.fixture(scope="module")
def cifar():
    return {"train": cifar_arrays(48, 4, 0), "test": cifar_arrays(8, 4, 1)}


CIFAR = (
    "data.classes=4",
    "model.depth=2",
    "model.width=24",
    "model.patch_size=8",
    "training.batch=8",
    "augmentation.mix_group=4",
    "hardware.workers=0",
    "training.epochs=2",
    "training.warmup_epochs=0",
    "evaluation.corruption_images=4",
    "watch.save_every=0.5",
)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_unreadable_image_in_the_middle_of_an_epoch_is_named_and_nothing_is_lost(tmp_path, cifar, workers):
    folder = write_folder(tmp_path / "images", cifar)
    files = [path for name in sorted((folder / "train").iterdir()) for path in sorted(name.iterdir())]
    good = files[list(DrawSampler(48, seed=1))[34][0]]  # in the fifth of six batches
    content = good.read_bytes()
    good.write_bytes(content[: len(content) // 2])
    settings = (*CIFAR, f"hardware.workers={workers}", "training.epochs=1", "evaluation.corruptions=false")
    request = {"name": "cifar100", "out": tmp_path / "run", "overrides": settings, "seed": 1}
    with pytest.raises(TrainingStopped) as caught:
        train(RunRequest(**request), str(folder))
    assert good.name in str(caught.value)
    assert "--resume" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "of step 3 is complete" in str(caught.value)
    good.write_bytes(content)
    assert train(RunRequest(**request, resume=True), str(folder)).manifest.finished


@pytest.mark.slow
def test_cifar100_trains_end_to_end_from_its_archive(tmp_path, cifar):
    """The recipe as published on an archive of the true format; only sizes are smaller."""
    archive = write_cifar100(tmp_path, cifar)
    settings = [word for setting in CIFAR for word in ("--set", setting)]
    arguments = ("train", "cifar100", "--data", archive, "--output", tmp_path / "run", "--variant", "smooth", *settings)
    done = oversmooth(*arguments)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["steps"] == 2 * 48 // 8
    assert manifest["recipe"]["augmentation"]["rand_augment"] == "rand-m9-n2-mstd1.0"
    results = manifest["results"]
    kinds = [name for name in results if name.startswith("corruption/")]
    assert len(kinds) == 15
    mean = sum(results[name] for name in kinds) / 15
    assert results["corruption_accuracy"] == pytest.approx(mean)
    assert osm.inspect(str(tmp_path / "run" / "model")).layers[0].plain.min_real > -1e-5


@pytest.mark.slow
def test_real_images_are_learned_from_parquet(tmp_path):
    """A tenth of CIFAR-10's 10,000 images, two epochs: better than chance, and repeatable."""
    data, recipe = real_data("cifar10"), ROOT / "benchmarks" / "cifar10_small.toml"
    settings = ("training.epochs=2", "training.warmup_epochs=0.5", "evaluation.corruptions=false", "training.batch=32")
    runs = [
        train(RunRequest(name=str(recipe), out=tmp_path / name, overrides=settings, fraction=0.1, seed=1), str(data))
        for name in ("first", "again")
    ]
    assert runs[0].manifest.data["train"]["images"] == 1000
    assert runs[0].manifest.data["test"]["images"] == 2000
    assert runs[0].results["eval_accuracy"] > 0.15
    assert runs[0].results == runs[1].results


@pytest.mark.slow
def test_real_photographs_are_augmented_as_for_imagenet(tmp_path):
    """The recipe of ImageNet on a folder of photographs, its model made small."""
    photographs = real_data("images")  # one of each class, so the same for training and test
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(photographs)
    classes = len([entry for entry in photographs.iterdir() if entry.is_dir()])
    settings = (f"data.classes={classes}", "model.width=48", "model.depth=2", "training.batch=8")
    settings += (
        "training.epochs=1",
        "hardware.precision=float32",
        "hardware.workers=0",
        "evaluation.corruptions=false",
    )
    run = train(RunRequest(name="imagenet-deit-ti", out=tmp_path / "run", overrides=settings), str(tmp_path))
    assert run.manifest.finished
    assert "eval_average_accuracy" in run.results


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(TrainingStopped, match=r"the loss is (nan|inf); lower optimizer.learning_rate"):
        trained(tmp_path / "run", "optimizer.learning_rate=1e20", "optimizer.clip_norm=0", "training.warmup_epochs=0")


def test_fsdp_with_an_eigenbasis_is_refused(tmp_path, monkeypatch):
    from transformers import Trainer

    monkeypatch.setattr(Trainer, "is_fsdp_enabled", True, raising=False)
    made = Trainer.create_accelerator_and_postprocess

    def sharded(self):
        made(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", sharded)
    with pytest.raises(CannotControl, match=r"(?s)FSDP cannot be applied to a sharpened.*torchrun without FSDP"):
        trained(tmp_path / "run", variant="sharpen")


def test_another_run_is_neither_overwritten_nor_resumed(sharpened, tmp_path):
    out, _ = sharpened
    again = oversmooth("train", "digits", "--variant", "sharpen", "--output", out, *SETTINGS)
    assert again.returncode == 2
    assert "it holds a run already" in again.stderr
    assert "--resume" in again.stderr
    other = oversmooth("train", "digits", "--variant", "sharpen", "--output", out, *SETTINGS, "--seed", 4, "--resume")
    assert other.returncode == 2
    assert "seed was 3 and is now 4" in other.stderr
    (tmp_path / "file").write_text("mine")
    foreign = oversmooth("train", "digits", "--output", tmp_path, *SETTINGS)
    assert foreign.returncode == 2
    assert "the folder is not empty" in foreign.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("digit",), ("Unknown recipe 'digit'", "Close: digits")),
        (("digits", "--variant", "sharp"), ("Unknown variant 'sharp'", "Close: sharpen")),
        (("digits", "--set", "training.batch=x"), ("training.batch must be a valid integer", "got 'x'")),
        (("digits", "--set", "training.batch=2000"), ("training.batch must be at most 1437", "got 2000")),
        (("digits", "--fraction", "0"), ("fraction must be above 0",)),
        (("digits", "--data", "/nowhere/at/all"), ("'/nowhere/at/all' cannot be used", "found nothing")),
        (
            ("digits", "--set", "hardware.micro_batch=7"),
            ("The batch of one process must be divisible by hardware.micro_batch (7); got 32",),
        ),
    ],
)
def test_a_wrong_word_ends_in_one_message_and_no_folder(tmp_path, words, parts):
    done = oversmooth("train", *words, "--output", tmp_path / "run")
    assert done.returncode == 2
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even root can write to: /proc, on Linux only")
def test_a_folder_that_cannot_be_made_ends_in_one_message():
    done = oversmooth("train", "digits", "--output", "/proc/run", *SETTINGS)
    assert done.returncode == 2
    assert "/proc/run cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_is_cut_into_equal_parts():
    assert parts_of_a_batch(96, 2, 0) == (48, 1)
    assert parts_of_a_batch(96, 1, 32) == (32, 3)
    assert parts_of_a_batch(512, 4, 64) == (64, 2)
    assert parts_of_a_batch(8, 4, 64) == (2, 1)
