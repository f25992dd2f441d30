"""Permits and claims that all workers share."""

import pytest

from oversmooth.errors import RemoteUnavailable
from oversmooth.models.stores.remote import RateLimiter
from oversmooth.surveys.worker import LONGEST_PAUSE_SECONDS, Coordinator


class Clock:
    """A time that passes only when somebody waits."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def granted(desk, clock, seconds):
    """Times at which one eager worker gets its permits, which always waits as long as it is told."""
    times, end = [], clock.now + seconds
    while clock.now < end:
        wait = desk.permit("hub")
        if wait == 0:
            times.append(clock.now)
        clock.now += wait
    return times


@pytest.mark.parametrize("rate", [0.5, 3.0, 10.0, 40.0])
@pytest.mark.parametrize("burst", [1, 4])
def test_no_window_holds_more_permits_than_the_bucket_and_what_it_gains(rate, burst):
    clock = Clock()
    times = granted(Coordinator(rate, burst, clock=clock), clock, 30.0)
    assert len(times) == pytest.approx(30 * rate + burst, abs=2)
    for window in (1.0, 5.0):
        for first in times:
            assert sum(first <= at < first + window - 1e-6 for at in times) <= burst + rate * window + 1e-6


def test_a_bucket_that_nobody_used_holds_no_more_than_its_burst():
    clock = Clock()
    desk = Coordinator(1.0, 3, clock=clock)
    granted(desk, clock, 5)
    clock.now += 1000
    assert [desk.permit("hub") == 0 for _ in range(5)] == [True, True, True, False, False]


def test_without_a_limit_everybody_goes_at_once():
    desk = Coordinator(None)
    assert [desk.permit("hub") for _ in range(1000)] == [0.0] * 1000


def test_a_pause_holds_for_everybody_who_asks_that_host_and_ends():
    clock = Clock()
    desk = Coordinator(100.0, clock=clock)
    desk.pause("hub", 7.0)
    desk.pause("hub", 3.0)  # a shorter one does not end a longer one
    assert desk.permit("hub") == pytest.approx(7.0)
    clock.now += 7.0
    assert desk.permit("hub") == 0


def test_a_server_that_asks_for_days_stops_no_other_and_is_given_up():
    desk = Coordinator(1.0, clock=Clock())
    desk.pause("slow.org", 999_999.0)
    assert desk.permit("hub") == 0
    manners = RateLimiter(permit=desk.permit, longest_wait_seconds=LONGEST_PAUSE_SECONDS)
    with pytest.raises(
        RemoteUnavailable, match=r"slow\.org asks to wait 999999 seconds, and the longest wait is 900"
    ) as said:
        manners.wait_for_permit("https://slow.org/model/config.json")
    assert said.value.may_pass


def test_a_content_belongs_to_the_first_that_claims_it_until_it_gives_it_back():
    desk = Coordinator(known=["in the table"])
    assert not desk.claim("in the table", "a")
    assert desk.claim("new", "a")
    assert desk.claim("new", "a")
    assert not desk.claim("new", "b")
    desk.release("new", "b")
    assert not desk.claim("new", "b")
    desk.release("new", "a")
    assert desk.claim("new", "b")
