"""Merged reads and what a server asks for."""

import random
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from oversmooth.models.stores.remote import RateLimiter, asked_to_wait, current_traffic, traffic
from oversmooth.models.stores.safetensors import MergedFile, merged
from oversmooth.models.stores.store import RangedFile

CONTENT = bytes(random.Random(0).randrange(256) for _ in range(1000))


def counted(gap):
    """A file that remembers what was read of it."""
    reads = []

    def fetch(start, stop):
        reads.append((start, stop))
        return CONTENT[start:stop]

    return RangedFile("file", len(CONTENT), fetch, gap=gap), reads


@pytest.mark.parametrize("gap", [0, 5, 50, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_merged_reads_are_the_same_bytes_in_no_more_requests(gap, seed):
    draw = random.Random(seed)
    edges = sorted(draw.sample(range(1001), 40))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    file, reads = counted(gap)
    reader = MergedFile(file, spans)
    draw.shuffle(spans)
    assert [bytes(reader.read(*span)) for span in spans] == [CONTENT[start:stop] for start, stop in spans]
    assert sorted(reads) == merged(spans, gap)
    assert reader._held == {}


def test_what_was_not_announced_and_what_is_read_again_is_read_by_itself():
    file, reads = counted(100)
    reader = MergedFile(file, [(0, 10), (20, 30)])
    for span in ((0, 10), (20, 30), (0, 10), (5, 15)):
        assert reader.read(*span) == CONTENT[span[0] : span[1]]
    assert reads == [(0, 30), (0, 10), (5, 15)]


def test_a_run_stays_within_what_memory_allows():
    assert merged([(0, 40), (40, 80), (80, 120)], gap=0, largest=80) == [(0, 80), (80, 120)]


def test_a_server_is_obeyed_in_seconds_as_a_date_and_by_the_window_of_its_limit():
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert asked_to_wait({"Retry-After": "17"}) == 17.0
    assert asked_to_wait({"Retry-After": later}) == pytest.approx(30, abs=3)
    assert asked_to_wait({"RateLimit": '"resolvers";r=0;t=55'}) == 55.0
    assert [asked_to_wait(headers) for headers in ({}, None, {"Retry-After": "soon"})] == [None] * 3


def test_manners_hold_inside_and_end_outside():
    own = RateLimiter(tries=9)
    with traffic(own):
        assert current_traffic() is own
    assert current_traffic().tries is None


def test_a_permit_is_asked_for_again_after_the_wait_it_names(monkeypatch):
    waits, slept = iter([0.5, 0.25, 0.0]), []
    monkeypatch.setattr(time, "sleep", slept.append)
    RateLimiter(permit=lambda host: next(waits)).wait_for_permit("https://hub/x")
    assert slept == [0.5, 0.25]
