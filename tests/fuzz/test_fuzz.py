"""A few hundred hostile inputs with every run of the tests, and proof that the harness would notice."""

import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save

from tests.command_line import ROOT, Done
from tests.fuzz import engine, oracles
from tests.fuzz.cases import Case
from tests.fuzz.engine import Result, run

CASES = 250


def test_hostile_input_is_refused_in_words_and_sound_input_is_read_as_it_is():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.fuzz", "--cases", str(CASES), "--seed", "7"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert f"{CASES} cases with seed 7: 0 failures" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


# --- the harness can fail -------------------------------------------------------------------------------------------


def one(judge) -> Result:
    (result,) = run(judge, [3], 1)
    assert result.index == 3
    return result


def test_a_case_that_raises_is_noticed():
    def raises(index):
        raise KeyError("missing")

    assert "KeyError: 'missing'" in one(raises).failure


def test_a_case_that_waits_forever_is_noticed(monkeypatch):
    monkeypatch.setattr(engine, "WALL_SECONDS", 0.3)
    assert "not over after 0.3 seconds" in one(lambda index: time.sleep(60)).failure


def test_a_case_that_computes_forever_is_noticed_by_its_processor_time(monkeypatch):
    monkeypatch.setattr(engine, "PROCESSOR_SECONDS", 1)

    def endless(index):
        while True:
            pass

    assert "more than 1 seconds of processor time" in one(endless).failure


def test_every_case_has_the_processor_time_for_itself(monkeypatch):
    monkeypatch.setattr(engine, "PROCESSOR_SECONDS", 1)

    def busy(index):
        end = time.process_time() + 0.7
        while time.process_time() < end:
            pass
        return Result(index, "x", "accepted")

    assert [result.outcome for result in run(busy, [0, 1, 2, 3], 1)] == ["accepted"] * 4


def test_a_case_that_kills_its_worker_is_noticed_and_the_others_go_on():
    def dies(index):
        if index == 1:
            os._exit(3)
        return Result(index, "x", "accepted")

    results = {result.index: result.outcome for result in run(dies, [0, 1, 2], 1)}
    assert results == {0: "accepted", 1: "died", 2: "accepted"}


def test_a_case_that_takes_too_much_memory_is_noticed(monkeypatch):
    monkeypatch.setattr(engine, "BYTES", 2**28)

    def greedy(index):
        assert torch.ones(2**27).sum() > 0  # half a gigabyte, touched
        return Result(index, "x", "accepted")

    assert "MB of memory" in one(greedy).failure


@pytest.mark.parametrize(
    ("done", "failure"),
    [
        (Done(3, "", "x"), "exit code 3"),
        (Done(2, "", "Traceback (most recent call last)"), "a traceback"),
        (Done(2, "", ""), "an error without a word"),
        (Done(2, "", "error: no"), "sound, and refused"),
        (Done(0, "", ""), ""),
    ],
)
def test_a_bad_end_is_noticed(done, failure):
    case = Case(kind="x", note="", files={}, arguments=(), is_sound=True)
    found = oracles._of_the_process(case, done)
    assert found.startswith(failure)
    assert bool(found) == bool(failure)


def test_a_wrong_number_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_bytes(save({"w": torch.arange(3.0)}))
    case = Case(kind="x", note="", files={}, arguments=(), reference="x.safetensors")
    assert oracles._of_the_tensors(case, tmp_path) == ""
    monkeypatch.setitem(oracles.REFERENCES, ".safetensors", lambda path: {"w": torch.tensor([0.0, 1.0, 3.0])})
    assert "differs" in oracles._of_the_tensors(case, tmp_path)
    monkeypatch.setitem(oracles.REFERENCES, ".safetensors", lambda path: 1 / 0)
    assert "the reference refuses it" in oracles._of_the_tensors(case, tmp_path)
