"""torchvision beside a CPU-only torch: made importable where it fails for want of two operators, else left alone."""

import importlib.util
import subprocess
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import pytest
import torch

from oversmooth.environment import torchvision as torchvision_compat
from oversmooth.environment.torchvision import ensure_torchvision


class FakeTorchvision(MetaPathFinder, Loader):
    """A torchvision whose import runs the given function."""

    def __init__(self, execute):
        self.execute = execute
        self.imports = 0

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "torchvision" else None

    def exec_module(self, module):
        self.imports += 1
        self.execute()


@pytest.fixture
def torchvision(monkeypatch):
    """Installs a fake in front of the real package; `torch.library` is replaced, so nothing stays declared."""
    declared = []

    class Library:
        def __init__(self, namespace, kind):
            self.namespace = namespace

        def define(self, schema):
            declared.append(f"{self.namespace}::{schema.split('(')[0]}")

    def install(execute):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            monkeypatch.delitem(sys.modules, name)
        fake = FakeTorchvision(lambda: execute(declared))
        monkeypatch.setattr(sys, "meta_path", [fake, *sys.meta_path])
        return fake

    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(torchvision_compat, "_kept", [])
    install.declared = declared
    yield install
    sys.modules.pop("torchvision", None)


def needs_operators(declared):
    if "torchvision::nms" not in declared:
        raise RuntimeError("operator torchvision::nms does not exist")


def test_missing_operators_are_declared_and_the_import_is_tried_again(torchvision):
    fake = torchvision(needs_operators)
    ensure_torchvision()
    assert torchvision.declared == ["torchvision::nms", "torchvision::qnms"]
    assert fake.imports == 2
    assert "torchvision" in sys.modules


def test_operators_are_declared_once(torchvision):
    torchvision(needs_operators)
    ensure_torchvision()
    ensure_torchvision()
    assert torchvision.declared == ["torchvision::nms", "torchvision::qnms"]


def test_a_torchvision_that_works_is_left_alone(torchvision):
    fake = torchvision(lambda declared: None)
    ensure_torchvision()
    assert torchvision.declared == []
    assert fake.imports == 1


def test_another_failure_of_torchvision_is_not_hidden(torchvision):
    def fails(declared):
        raise RuntimeError("something else")

    torchvision(fails)
    with pytest.raises(RuntimeError, match="something else"):
        ensure_torchvision()
    assert torchvision.declared == []


def test_without_torchvision_nothing_happens(torchvision, monkeypatch):
    fake = torchvision(needs_operators)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ensure_torchvision()
    assert fake.imports == 0


def test_timm_and_transformers_vision_models_import_in_a_fresh_interpreter():
    code = (
        "from oversmooth.environment.torchvision import ensure_torchvision; ensure_torchvision();"
        "import timm; from transformers import ViTModel;"
        "print(timm.is_model('vit_tiny_patch16_224'), ViTModel.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "ViTModel"]
