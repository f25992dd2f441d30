"""Surveys of a loopback hub that limits, gates, cuts and fails: every model is a row, nothing is read twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from huggingface_hub import constants

import oversmooth as osm
from oversmooth.errors import ClusterUnavailable
from oversmooth.models.stores import remote as attempts
from oversmooth.surveys.rows import EFFORT
from tests.command_line import ROOT
from tests.hub_judgement import witnessed
from tests.loopback_hub import Faults, Hub, environment_of, serving
from tests.small_checkpoints import FAMILIES, checkpoint, repositories

COST = [column.name for column in EFFORT]
"""Columns that differ between two surveys of the same models."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Repositories of all families and kinds, for this process."""
    found, kinds = repositories(24, seed=1)
    hub = Hub(found, gated=kinds["gated"])
    with serving(hub) as url:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield hub, kinds


def names_of(hub):
    return [f"hf://{name}" for name in hub.repositories]


def table_of(folder):
    """All rows without what reading them cost, in an order of their own."""
    found = osm.read_survey(folder).drop(columns=COST)
    return found.sort_values(["target", "level", "stack", "layer", "head"], ignore_index=True)


def assert_one_row_each(hub, kinds, folder):
    rows = osm.read_survey(folder, "model")
    assert sorted(rows.target) == sorted(names_of(hub))
    by_target = rows.set_index("target")
    refused = set().union(*(kinds[kind] for kind in ("gated", "broken", "refused", "empty")))
    assert {name.removeprefix("hf://") for name in by_target.index[by_target.status != "read"]} == refused
    assert set(by_target.status) <= {"read", "refused"}
    assert all(len(reason) > 20 for reason in by_target.reason[by_target.status == "refused"])


def test_every_repository_is_a_row_and_equal_files_are_read_once(hub, tmp_path):
    hub, kinds = hub
    counts = osm.survey(names_of(hub), tmp_path / "table", requests_per_second=None)
    assert_one_row_each(hub, kinds, tmp_path / "table")
    assert counts.copied == len(kinds["duplicate"]) > 0
    assert [name for name in kinds["duplicate"] if hub.reads[name] > 1] == []  # its header, and no tensor
    assert counts.bytes_received == osm.read_survey(tmp_path / "table", "model").bytes_received.sum()
    assert 0.9 * hub.bytes_sent <= counts.bytes_received <= hub.bytes_sent


def test_a_copy_has_the_rows_of_the_model_that_was_read(hub, tmp_path):
    hub, kinds = hub
    name = sorted(kinds["duplicate"])[0]
    original = next(other for other in hub.repositories if hub.repositories[other] == hub.repositories[name])
    osm.survey([f"hf://{original}", f"hf://{name}"], tmp_path / "table", requests_per_second=None)
    found = table_of(tmp_path / "table")
    mine, other = (found[found.target == f"hf://{one}"].drop(columns=["target", "commit"]) for one in (name, original))
    pandas.testing.assert_frame_equal(mine.reset_index(drop=True), other.reset_index(drop=True))
    assert osm.read_survey(tmp_path / "table", "model").copied.tolist().count(True) == 1


def test_a_small_model_costs_three_requests_of_the_hub_and_few_of_its_storage(hub, tmp_path):
    hub, _ = hub
    hub.repositories = {"owner/name": checkpoint("llama", 0)}
    counts = osm.survey(["hf://owner/name"], tmp_path / "table", requests_per_second=None)
    assert hub.resolves == 3  # the size of the config, the config, and where the weights are
    assert counts.requests == 3 + 3  # their size, their header, their tensors
    assert counts.failed == counts.refused == 0


def test_the_limit_of_requests_holds_and_a_busy_hub_is_obeyed(hub, tmp_path):
    hub, kinds = hub
    hub.repositories = dict(list(hub.repositories.items())[:10])
    kinds = {kind: names & hub.repositories.keys() for kind, names in kinds.items()}
    hub.limit, hub.faults, hub.retry_after = (30, 1.0), Faults(busy=0.1), 0.1
    osm.survey(names_of(hub), tmp_path / "table", requests_per_second=20.0)
    assert_one_row_each(hub, kinds, tmp_path / "table")
    assert hub.refusals
    assert (hub.over_limit, hub.judgement().early) == (0, ())


def test_cut_connections_and_broken_answers_are_tried_again(hub, tmp_path, monkeypatch):
    hub, kinds = hub
    hub.repositories = dict(list(hub.repositories.items())[:10])
    kinds = {kind: names & hub.repositories.keys() for kind, names in kinds.items()}
    hub.faults = Faults(cut=0.2, broken=0.1)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE", 0.01)
    osm.survey(names_of(hub), tmp_path / "table", requests_per_second=None)
    assert_one_row_each(hub, kinds, tmp_path / "table")


def test_what_fails_for_the_network_is_a_row_and_is_tried_again_when_asked(hub, tmp_path, monkeypatch):
    hub, _ = hub
    monkeypatch.setattr(attempts, "LONGEST_PAUSE", 0.001)
    targets = ["hf://llama/model-0004"]
    hub.repositories = {"llama/model-0004": checkpoint("llama", 4)}
    hub.faults = Faults(broken=1.0)
    counts = osm.survey(targets, tmp_path / "table", requests_per_second=None)
    assert (counts.failed, counts.read) == (1, 0)
    assert "500" in osm.read_survey(tmp_path / "table", "model").reason[0]
    hub.faults = Faults()
    assert osm.survey(targets, tmp_path / "table").earlier == 1
    counts = osm.survey(targets, tmp_path / "table", retry_failed=True, requests_per_second=None)
    assert (counts.failed, counts.read) == (0, 1)
    assert osm.read_survey(tmp_path / "table", "model").status.tolist() == ["read"]


def test_a_query_of_the_hub_is_a_list_with_years(hub, tmp_path):
    hub, _ = hub
    hub.repositories = {f"{owner}/{name}": checkpoint("bert", 0) for owner in ("a", "b") for name in ("x", "y")}
    hub.created = dict.fromkeys(hub.repositories, "2022-03-04T00:00:00.000Z")
    osm.survey(None, tmp_path / "table", author="a", top=2, requests_per_second=None)
    rows = osm.read_survey(tmp_path / "table", "model")
    assert rows.target.tolist() == ["hf://a/x", "hf://a/y"]
    assert rows.year.tolist() == [2022, 2022]


RATE, WORKERS = 20, 2
"""A rate that workers reach, so that the limit is what holds them back."""


def limit_of(rate: int, workers: int, window: float = 5.0) -> tuple[int, float]:
    """What a hub sees at most in a window: what the bucket gains, what it holds, and one late request of every worker."""
    return int(rate * window) + 4 + workers, window


def assert_limits_kept(hub, log, killed=()):
    """No request over the limit, none without a permit, and none that was permitted after a 429 had been told."""
    found = hub.judgement(log, killed)
    print(f"{len(hub.arrivals)} requests, at most {hub.busiest} of {hub.limit}; {len(hub.refusals)} refusals; {found}")
    assert hub.refusals
    assert (hub.over_limit, found.early, found.without_permit) == (0, (), 0)
    # A kill takes at most the one refusal with it that each worker was about to tell.
    assert {run: count for run, count in found.unheard.items() if run not in killed or count > WORKERS} == {}


# --- processes, kills, engines --------------------------------------------------------------------------------------


def command(listing: Path, out: Path, *options: object) -> list[str]:
    words = [sys.executable, "-m", "oversmooth", "survey", listing, "--output", out, "--format", "json", *options]
    return [str(word) for word in words]


def environment(url: str, folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, **environment_of(url, folder / "cache"), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def run(url, folder, out, *options, timeout=1500, **misdeeds):
    """What a survey says of itself; one with misdeeds is made to do what it should not."""
    words = command(folder / "list.txt", out, *options)
    env = witnessed(environment(url, folder), folder / "witness.log", out.name, **misdeeds)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cluster_where_nobody_listens_is_an_error_at_once(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    (tmp_path / "list.txt").write_text("owner/name")
    with pytest.raises(ClusterUnavailable, match=r"The cluster of Ray at '127\.0\.0\.1:9' cannot be used: .*refused"):
        osm.survey(tmp_path / "list.txt", tmp_path / "table", engine="ray", address="127.0.0.1:9")


def killed_again_and_again(url, folder, out, times, longest, *options, pause=0.2):
    """Starts the survey and kills it at random moments; the names of these runs for the witness."""
    draw = random.Random(0)
    runs = [f"{out.name}-killed-{number}" for number in range(times)]
    for name in runs:
        words = command(folder / "list.txt", out, *options)
        process = subprocess.Popen(
            words,
            env=witnessed(environment(url, folder), folder / "witness.log", name),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = len(list(out.glob("level=model/*.parquet")))
        until = time.monotonic() + 120
        while (
            len(list(out.glob("level=model/*.parquet"))) <= before
            and process.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.02)  # it has begun to write
        time.sleep(draw.uniform(0, longest))
        process.send_signal(signal.SIGKILL)  # this one only: its workers have to notice by themselves
        process.wait()
        time.sleep(pause)
    return runs


def test_a_survey_that_was_killed_goes_on_where_it_was(tmp_path):
    found, kinds = repositories(24, seed=1)
    hub = Hub(found, gated=kinds["gated"], latency=0.1)
    (tmp_path / "list.txt").write_text("\n".join(names_of(hub)))
    with serving(hub) as url:
        killed_again_and_again(url, tmp_path, tmp_path / "table", 1, 0.5, "--requests-per-second", 500)
        hub.latency = 0.0
        counts = run(url, tmp_path, tmp_path / "table", "--requests-per-second", 500)
        assert 0 < counts["earlier"] < 24
    assert_one_row_each(hub, kinds, tmp_path / "table")


@pytest.mark.slow
def test_worker_processes_say_the_same_as_one_and_end_with_the_survey(tmp_path):
    found, kinds = repositories(24, seed=1)
    hub = Hub(found, gated=kinds["gated"], latency=0.02)
    (tmp_path / "list.txt").write_text("\n".join(names_of(hub)))
    with serving(hub) as url:
        killed_again_and_again(url, tmp_path, tmp_path / "two", 1, 0.5, "--workers", 2, "--requests-per-second", 500)
        time.sleep(2.0)
        asked = hub.resolves
        time.sleep(2.0)
        assert hub.resolves == asked  # no worker outlives the survey
        run(url, tmp_path, tmp_path / "two", "--workers", 2, "--requests-per-second", 500)
        run(url, tmp_path, tmp_path / "one", "--requests-per-second", 500)
    assert_one_row_each(hub, kinds, tmp_path / "two")
    pandas.testing.assert_frame_equal(table_of(tmp_path / "two"), table_of(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "broken"), [("", set()), ("pauses", {"early"}), ("permits", {"without_permit", "over_limit"})]
)
def test_a_survey_that_ignores_what_a_hub_asks_for_is_caught(sabotage, broken, tmp_path):
    found, _ = repositories(60)
    hub = Hub(found, faults=Faults(busy=0.05), limit=limit_of(10, WORKERS), retry_after=1.0)
    (tmp_path / "list.txt").write_text("\n".join(names_of(hub)))
    options = ("--engine", "process", "--workers", WORKERS, "--requests-per-second", 10)
    with serving(hub) as url:
        run(url, tmp_path, tmp_path / "table", *options, sabotage=sabotage)
    if not sabotage:
        assert_limits_kept(hub, tmp_path / "witness.log")
    judgement = hub.judgement(tmp_path / "witness.log")
    faults = {"early": judgement.early, "without_permit": judgement.without_permit, "over_limit": hub.over_limit}
    assert broken <= {name for name, count in faults.items() if count}, faults


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "ray"])
def test_a_target_that_kills_its_worker_is_a_row_and_costs_no_other_its_own(engine, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray", reason="ray is not installed")
    found, kinds = repositories(12, seed=1)
    hub = Hub(found, gated=kinds["gated"])
    deadly = names_of(hub)[5]
    (tmp_path / "list.txt").write_text("\n".join(names_of(hub)))
    options = ("--engine", engine, "--workers", WORKERS, "--requests-per-second", 500)
    with serving(hub) as url:
        counts = run(url, tmp_path, tmp_path / "table", *options, deadly=deadly)
    assert (counts["models"], counts["failed"]) == (12, 1)
    rows = osm.read_survey(tmp_path / "table", "model")
    assert sorted(rows.target) == sorted(names_of(hub))
    failed = rows[rows.status == "failed"]
    assert failed[["target", "error"]].to_numpy().tolist() == [[deadly, "WorkerDied"]]


def survives_kills(engine, models, kills, folder):
    """A survey that was killed again and again has the table of one that nothing happened to."""
    found, kinds = repositories(models)
    assert len({name.split("/")[0] for name in found}) == len(FAMILIES) == 10
    faults = Faults(busy=0.01, cut=0.02, broken=0.01)
    hub = Hub(found, gated=kinds["gated"], faults=faults, limit=limit_of(RATE, WORKERS), retry_after=2.0)
    (folder / "list.txt").write_text("\n".join(names_of(hub)))
    options = ("--engine", engine, "--workers", WORKERS, "--requests-per-second", RATE)
    with serving(hub) as url:
        killed = killed_again_and_again(url, folder, folder / "table", kills, 4.0, *options, pause=hub.retry_after)
        counts = run(url, folder, folder / "table", *options)
        assert 0 < counts["earlier"] < models
        assert_limits_kept(hub, folder / "witness.log", killed)
        hub.faults, before = Faults(), hub.bytes_sent
        calm = run(url, folder, folder / "calm", "--engine", "serial", "--requests-per-second", RATE)
    assert calm["bytes_received"] == hub.bytes_sent - before
    assert_one_row_each(hub, kinds, folder / "table")
    pandas.testing.assert_frame_equal(table_of(folder / "table"), table_of(folder / "calm"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "ray"])
def test_a_thousand_checkpoints_of_ten_families_survive_ten_kills(engine, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray", reason="ray is not installed")
    survives_kills(engine, 1000, 10, tmp_path)


@pytest.mark.slow
def test_ray_says_the_same_as_one_process(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    found, kinds = repositories(60)
    hub = Hub(found, gated=kinds["gated"], faults=Faults(busy=0.02, cut=0.05, broken=0.02))
    (tmp_path / "list.txt").write_text("\n".join(names_of(hub)))
    with serving(hub) as url:
        for engine, workers in (("ray", 2), ("serial", 1)):
            run(
                url, tmp_path, tmp_path / engine, "--engine", engine, "--workers", workers, "--requests-per-second", 500
            )
    assert_one_row_each(hub, kinds, tmp_path / "ray")
    pandas.testing.assert_frame_equal(table_of(tmp_path / "ray"), table_of(tmp_path / "serial"))
