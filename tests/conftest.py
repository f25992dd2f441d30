"""Tests never reach for the network: the hub is switched off before anything imports it.

One thread for each worker of pytest: the tensors of tests are small, and the threads of two workers on two cores would
mostly wait for each other.
"""

import atexit
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "OVERSMOOTH_CACHE" not in os.environ:  # tests leave nothing in the user's cache
    os.environ["OVERSMOOTH_CACHE"] = tempfile.mkdtemp(prefix="oversmooth-tests-")
    atexit.register(shutil.rmtree, os.environ["OVERSMOOTH_CACHE"], ignore_errors=True)
