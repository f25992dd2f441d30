"""Tests never reach for the network: the hub is switched off before anything imports it."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _importable_torchvision():
    """Tests import transformers themselves, as users do; beside a CPU-only torch that needs our cure first."""
    from oversmooth.environment.torchvision import ensure_torchvision

    ensure_torchvision()
