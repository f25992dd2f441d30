"""Neighbouring reads of one remote file, merged into few: a request costs more than the bytes between two tensors."""

from bisect import bisect_right
from collections.abc import Iterable

from oversmooth.models.stores.files import RangedFile

LARGEST_RUN = 32 * 2**20
"""Bytes of one merged read; a single tensor may be larger."""

Span = tuple[int, int]


def merged(spans: Iterable[Span], gap: int, largest: int = LARGEST_RUN) -> list[Span]:
    """Spans in order, joined where at most `gap` bytes lie between them and the whole stays within `largest`.

    >>> merged([(0, 4), (6, 8), (20, 30)], gap=2)
    [(0, 8), (20, 30)]
    """
    runs: list[Span] = []
    for start, stop in sorted(set(spans)):
        if runs and start - runs[-1][1] <= gap and max(stop, runs[-1][1]) - runs[-1][0] <= largest:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    return runs


class MergedFile:
    """A file of which is known what will be read; a run is fetched once and forgotten when all of it was handed out."""

    def __init__(self, file: RangedFile, spans: Iterable[Span]):
        self._file = file
        self._wanted = set(spans)
        self._runs = merged(self._wanted, file.gap or 0)
        self._held: dict[Span, bytearray] = {}

    def read(self, start: int, stop: int) -> bytearray:
        if (start, stop) not in self._wanted:
            return self._file.read(start, stop)
        self._wanted.discard((start, stop))
        run = self._runs[bisect_right(self._runs, (start, self._file.size + 1)) - 1]
        if run == (start, stop):
            return self._file.read(start, stop)
        data = self._held.get(run)
        if data is None:
            data = self._held[run] = self._file.read(*run)
        part = data[start - run[0] : stop - run[0]]
        if not any(run[0] <= first and last <= run[1] for first, last in self._wanted):
            del self._held[run]
        return part
