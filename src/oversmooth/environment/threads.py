"""How many threads torch uses for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """One thread inside: splitting small products costs more than it gains, most of all on a busy machine."""
    before = torch.get_num_threads()
    if when:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
