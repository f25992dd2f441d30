"""Imports of the Trainer without a hint that concerns nobody who trains here.

The Trainer of transformers imports peft where that is installed, and peft bitsandbytes. On processors with instructions for
bfloat16 that one warns at its import that a package with a kernel for 4-bit products is missing. Our recipes multiply no
4-bit weights. Whoever does in a script of their own imports bitsandbytes there, and sees the hint.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = "bitsandbytes.backends.cpu.ops"
HINT = "Failed to load CPU gemm_4bit_forward"


@contextmanager
def without_kernel_hint() -> Iterator[None]:
    """Drops this one message inside, and no other."""
    logger = logging.getLogger(LOGGER)
    logger.addFilter(_is_another)
    try:
        yield
    finally:
        logger.removeFilter(_is_another)


def _is_another(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(HINT)
