"""The hint of bitsandbytes that a kernel is missing, and only that one, is not shown where we import the Trainer."""

import logging

from oversmooth.environment.versions import HINT, LOGGER, without_kernel_hint
from tests.command_line import fresh_python


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_hint_is_dropped_inside_and_other_messages_are_not(caplog):
    logger = logging.getLogger(LOGGER)
    with without_kernel_hint():
        logger.warning(HINT + " from kernels-community: %s", "No module named 'kernels'")
        logger.warning("something else")
    logger.warning(HINT)
    assert messages(caplog) == ["something else", HINT]


def test_importing_what_trains_says_nothing():
    """Where bitsandbytes is installed and the processor has the instructions, this is where the hint came from."""
    done = fresh_python("import sys, oversmooth; oversmooth.SmoothingCallback; print('transformers' in sys.modules)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
