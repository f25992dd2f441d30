"""A run is watched in a real browser while it goes on; runs are compared from their folders."""

import json
import subprocess
import sys
import threading
import time

import pytest

from oversmooth.output.render import LOOPBACK, page_server
from oversmooth.output.run_pages import watched_page
from oversmooth.recipes.run_folder import Manifest, is_log, read_log, read_run_folder
from oversmooth.results.runs import grouped
from tests.browser import opened
from tests.command_line import oversmooth
from tests.end_to_end.test_report import until

TINY = ("model.depth=2", "model.width=16", "model.heads=2", "training.epochs=1", "watch.evaluate_every=0.5")


def run_folder(path, variant="vanilla", seed=0, overrides=()):
    path.mkdir()
    Manifest(
        name="digits",
        recipe={},
        overrides=list(overrides),
        variant=variant,
        seed=seed,
        fraction=1.0,
        command="",
        data={},
        steps=40,
    ).write(path)
    log(path, 0, loss=2.0)
    return path


def log(folder, step, **numbers):
    line = {"step": step, "smoothing/cosine/depth_2": 0.1 + step / 100, **numbers}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_the_page_follows_a_run_without_being_loaded_again(tmp_path):
    folder = run_folder(tmp_path / "run")
    with page_server(lambda: watched_page([read_run_folder(folder)])) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        with opened(f"http://{LOOPBACK}:{server.server_address[1]}/") as seen:
            assert seen.page.locator("#steps-loss svg.wide").count() == 1
            assert "step 0 of 40" in seen.page.locator("h1").inner_text()
            seen.page.evaluate("window.stayed = true")
            log(folder, 20, loss=1.0)
            until(
                seen.page,
                "document.querySelector('#steps-loss svg').getAttribute('aria-label').includes('from 2 to 1')",
            )
            assert "step 20 of 40; loss 1.000" in seen.page.locator("h1").inner_text()
            assert seen.page.evaluate("window.stayed") is True
            log(folder, 30, eval_accuracy=0.5)  # a figure that was not there: the page is loaded again
            seen.page.locator("#steps-accuracy").wait_for(state="attached")
            assert seen.errors == []
        server.shutdown()


def test_sentences_and_the_table_follow_the_runs_too_and_stay_sorted(tmp_path):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", variant="sharpen", seed=1)]
    log(folders[0], 10, loss=1.5)

    def rows():
        return [row.split("\t") for row in seen.page.locator("#runs-table tbody").inner_text().splitlines()]

    def steps():
        return [(row[0], row[2]) for row in rows()]

    with page_server(lambda: watched_page([read_run_folder(folder) for folder in folders])) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        with opened(f"http://{LOOPBACK}:{server.server_address[1]}/") as seen:
            seen.page.get_by_role("button", name="steps", exact=True).click()
            assert steps() == [("sharpen, seed 1", "0"), ("vanilla, seed 0", "10")]
            said = seen.page.locator("#findings").inner_text()
            seen.page.evaluate("window.stayed = true; document.getElementById('findings').textContent = 'old'")
            log(folders[1], 20, loss=1.0)
            until(seen.page, "document.querySelector('#runs-table tbody').innerText.includes('20')")
            assert steps() == [("vanilla, seed 0", "10"), ("sharpen, seed 1", "20")]
            assert seen.page.locator("#findings").inner_text() == said
            assert seen.page.evaluate("window.stayed") is True
            assert seen.errors == []
        server.shutdown()


def test_folds_of_a_variant_belong_together_like_seeds(tmp_path):
    folders = [
        run_folder(tmp_path / f"fold{k}", seed=k, overrides=["data.folds=5", f"data.fold={k}"]) for k in range(2)
    ]
    (group,) = grouped([read_run_folder(folder) for folder in folders])
    assert group.words == "vanilla (2 seeds)"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    done = oversmooth("watch", tmp_path)
    assert done.returncode == 2
    assert "expected the folder of a run, with manifest.json" in done.stderr


def trainer_folder(path, *, steps=(5, 10), planned=10):
    """What a Trainer leaves, with a loss at every checkpoint; the last one holds all lines."""
    history = []
    for step in steps:
        history.append({"step": step, "epoch": 0.5, "loss": 2.0 - step / 10, "note": "text"})
        (path / f"checkpoint-{step}").mkdir(parents=True)
        state = {"global_step": step, "max_steps": planned, "log_history": history}
        (path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    return path


def test_the_two_logs_of_a_trainer_are_put_together(tmp_path):
    folder = trainer_folder(tmp_path / "trained")
    log(folder, 10, loss=1.0)
    log(folder, 12)
    run = read_log(folder)
    assert [point["step"] for point in run.points] == [5, 10, 12]
    assert run.points[1] == {"step": 10, "epoch": 0.5, "loss": 1.0, "smoothing/cosine/depth_2": 0.2}
    assert (run.name, run.steps, run.is_finished) == ("trained", 10, True)
    assert not read_log(trainer_folder(tmp_path / "half", planned=20)).is_finished


def test_any_log_is_reported_on_watched_and_compared(tmp_path):
    folder = trainer_folder(tmp_path / "trained")
    log(folder, 10)
    page = tmp_path / "page.html"
    for place in (folder, folder / "metrics.jsonl", folder / "checkpoint-5" / "trainer_state.json"):
        assert watched_page([read_log(place)]).sections
        done = oversmooth("report", place, "-o", page)
        assert (done.returncode, done.stderr) == (0, "")
        assert "oversmooth: " in page.read_text()
    done = oversmooth("compare", folder, run_folder(tmp_path / "run"), "-o", page)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_of_a_trainer_is_a_model_and_no_log(tmp_path):
    checkpoint = trainer_folder(tmp_path / "trained") / "checkpoint-10"
    assert is_log(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    assert not is_log(checkpoint)
    assert not is_log(tmp_path / "absent")


@pytest.mark.parametrize("text", ["{", "[]", '{"log_history": 3}', '{"log_history": [3]}'])
def test_a_broken_state_of_a_trainer_is_refused(tmp_path, text):
    (tmp_path / "trainer_state.json").write_text(text)
    done = oversmooth("watch", tmp_path)
    assert done.returncode == 2
    assert "the trainer_state.json of a Trainer" in done.stderr


def test_runs_and_models_do_not_stand_on_one_page(tmp_path):
    done = oversmooth("compare", run_folder(tmp_path / "run"), tmp_path)
    assert done.returncode == 2
    assert "all folders of runs, or all models" in done.stderr


@pytest.mark.slow
def test_a_real_run_is_watched_while_it_trains_and_three_are_compared(tmp_path):
    folder = tmp_path / "vanilla"
    words = [word for setting in TINY for word in ("--set", setting)]
    train = [sys.executable, "-m", "oversmooth", "train", "digits", *words, "--output", str(folder)]
    training = subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (folder / "manifest.json").is_file():
        assert training.poll() is None, "the run ended before it began"
        time.sleep(0.1)
    with page_server(lambda: watched_page([read_run_folder(folder)])) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        with opened(f"http://{LOOPBACK}:{server.server_address[1]}/") as seen:
            first = seen.page.locator("h1").inner_text()
            assert training.wait(timeout=300) == 0
            until(seen.page, "document.querySelector('h1').textContent.includes('finished after 44 steps')")
            assert seen.page.locator("h1").inner_text() != first
            assert seen.errors == []
        server.shutdown()
    for variant in ("sharpen", "smooth"):
        assert (
            oversmooth("train", "digits", *words, "--variant", variant, "--output", tmp_path / variant).returncode == 0
        )
    page = tmp_path / "compare.html"
    done = oversmooth("compare", folder, tmp_path / "sharpen", tmp_path / "smooth", "-o", page)
    assert done.returncode == 0, done.stderr
    assert "Accuracy: vanilla" in done.stdout
    with opened(page) as seen:
        said = seen.page.locator(".findings").inner_text()
        assert "sharpen ended" in said
        assert "smooth ended" in said
        assert seen.errors == []
