"""A few of the kills of `tests/kills.py`, and that it sees what it looks for; a hundred: `make kills`."""

import signal

import pytest

from tests.kills import VERBS, Case, Harness, Moment, unfinished


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("kills"), calm_runs=1)


@pytest.mark.parametrize(
    ("verb", "ended_by", "share"),
    [
        ("edit", signal.SIGTERM, 0.9),
        ("edit", signal.SIGKILL, 0.5),
        ("report", signal.SIGTERM, 1.0),
        ("edit", signal.SIGTERM, 0.4),
    ],
)
def test_a_verb_that_is_killed_leaves_nothing_half_written_and_ends_equal_when_run_again(
    harness, verb, ended_by, share
):
    calm = harness.calm_run(verb)
    case = Case(0, verb, Moment(ended_by, touches=max(1, round(share * calm.touches))))
    harness._judge(case, calm)
    assert (case.outcome, case.failures) == ("killed", [])


def test_half_a_file_at_the_final_path_is_seen(harness):
    calm, out = harness.calm_run("edit"), harness._fresh()
    (out / "model").mkdir()
    (out / "model" / "model.safetensors").write_bytes(b"\x08\0\0\0")
    not_whole, not_that, lacks = unfinished(VERBS["edit"], out, calm)
    assert not_whole.startswith("model/model.safetensors is not whole: SafetensorError")
    assert not_that == "model/model.safetensors is not that of a whole run"
    missing = lacks.removeprefix("the folder is there without ").split(", ")
    assert sorted(missing) == sorted(calm.left.keys() - {"model/model.safetensors"})
    assert "model/config.json" in missing
