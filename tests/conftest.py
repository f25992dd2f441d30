"""Tests never reach for the network: the hub is switched off before anything imports it.

One thread for each worker of pytest: the tensors of tests are small, and the threads of two workers on two cores would
mostly wait for each other.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
