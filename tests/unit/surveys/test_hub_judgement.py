"""The judge of surveys: it excuses what no sender could hold back, and nothing else."""

import pytest

from tests.hub_judgement import NUMBERED, Arrival, Refusal, Sender, judged, pauses_in

REFUSAL = Refusal(0, at=10.0, seconds=2.0, run="a")


def request(at, asked, permit="1", run="a"):
    return Arrival(at, Sender(run=run, permit=permit, asked=asked))


def test_a_request_permitted_before_the_refusal_was_told_is_excused_however_late_it_arrives():
    found = judged([request(11.9, asked=10.29)], [REFUSAL], told={0: 10.3})
    assert (found.early, found.excused, found.latest) == ((), 1, pytest.approx(1.9))


@pytest.mark.parametrize("asked", [10.3, 10.4])
def test_a_request_permitted_after_it_was_told_is_not_excused_however_soon_it_arrives(asked):
    assert len(judged([request(asked + 0.001, asked)], [REFUSAL], told={0: 10.3}).early) == 1


def test_of_two_refusals_each_has_to_be_excused():
    later = Refusal(1, at=10.1, seconds=2.0, run="a")
    assert len(judged([request(10.5, asked=10.25)], [REFUSAL, later], told={0: 10.3, 1: 10.2}).early) == 1


@pytest.mark.parametrize(("at", "early"), [(10.0001, 1), (11.999, 1), (12.0, 0), (9.9, 0)])
def test_without_a_witness_nothing_is_excused(at, early):
    assert len(judged([Arrival(at)], [REFUSAL]).early) == early


def test_a_refusal_that_nobody_told_excuses_only_the_run_that_was_killed_with_it():
    arrivals = [request(10.5, 10.4, "1", "a"), request(10.5, 10.4, "2", "b")]
    assert len(judged(arrivals, [REFUSAL]).early) == 2
    found = judged(arrivals, [REFUSAL], killed=["a", "b"])
    assert (len(found.early), found.excused, found.unheard) == (1, 1, {"a": 1})


def test_a_permit_is_good_for_one_request():
    arrivals = [
        request(1.0, 0.9, "1"),
        request(2.0, 1.9, "2"),
        request(3.0, 1.9, "2"),
        Arrival(4.0, Sender.of("a none")),
    ]
    assert judged([*arrivals, Arrival(5.0)], []).without_permit == 3


def test_the_log_of_a_witness_names_refusals_by_their_pauses(tmp_path):
    (tmp_path / "log").write_text(f"a {2.0 + 7 * NUMBERED!r} 55.5\na {2.0 + 4321 * NUMBERED!r} 66.5\n")
    assert pauses_in(tmp_path / "log", 2.0) == {7: 55.5, 4321: 66.5}
    assert pauses_in(tmp_path / "missing", 2.0) == {}
