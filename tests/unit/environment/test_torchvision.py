"""torchvision beside a torch of another build: cured while it is imported if it has to be, else left alone."""

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import pytest
import torch

from oversmooth.environment import versions as torchvision_compat
from oversmooth.environment.versions import TorchvisionCure, cure_torchvision_on_import
from release import venv_torchvision
from tests.command_line import ROOT, fresh_python


class FakeLoader(Loader):
    def __init__(self, finder):
        self.finder = finder

    def exec_module(self, module):
        self.finder.imports += 1
        self.finder.execute()


class FakeTorchvision(MetaPathFinder):
    """A torchvision whose import runs the given function."""

    def __init__(self, execute):
        self.execute = execute
        self.imports = 0

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, FakeLoader(self)) if name == "torchvision" else None


@pytest.fixture
def torchvision(monkeypatch):
    """Installs a fake in place of the real package; `torch.library` is replaced, so nothing stays declared."""
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
        others = [
            finder
            for finder in sys.meta_path
            if type(finder).__name__ not in ("TorchvisionCure", "OversmoothTorchvision")
        ]
        monkeypatch.setattr(sys, "meta_path", [fake, *others])
        cure_torchvision_on_import()
        return fake

    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(torchvision_compat, "_kept", [])
    install.declared = declared
    yield install
    sys.modules.pop("torchvision", None)


def needs_operators(declared):
    if "torchvision::nms" not in declared:
        sys.modules["torchvision.half"] = sys.modules["torchvision"]
        raise RuntimeError("operator torchvision::nms does not exist")


def test_missing_operators_are_declared_and_the_import_is_tried_again(torchvision):
    fake = torchvision(needs_operators)
    importlib.import_module("torchvision")
    assert torchvision.declared == ["torchvision::nms", "torchvision::qnms"]
    assert fake.imports == 2
    assert "torchvision" in sys.modules
    assert "torchvision.half" not in sys.modules


def test_operators_are_declared_once(torchvision):
    torchvision(needs_operators)
    importlib.import_module("torchvision")
    del sys.modules["torchvision"]
    importlib.import_module("torchvision")
    assert torchvision.declared == ["torchvision::nms", "torchvision::qnms"]


def test_a_torchvision_that_works_is_left_alone(torchvision):
    fake = torchvision(lambda declared: None)
    importlib.import_module("torchvision")
    assert torchvision.declared == []
    assert fake.imports == 1


def test_nothing_is_imported_before_torchvision_is_asked_for(torchvision):
    fake = torchvision(needs_operators)
    assert importlib.util.find_spec("torchvision") is not None
    importlib.import_module("json")
    assert fake.imports == 0


def test_another_failure_of_torchvision_is_not_hidden(torchvision):
    def fails(declared):
        raise RuntimeError("something else")

    torchvision(fails)
    with pytest.raises(RuntimeError, match="something else"):
        importlib.import_module("torchvision")
    assert torchvision.declared == []


def test_without_torchvision_its_import_fails_as_ever(torchvision, monkeypatch):
    fake = torchvision(needs_operators)
    monkeypatch.setattr(fake, "find_spec", lambda *words: None)
    monkeypatch.setattr(sys, "path", [])
    assert importlib.util.find_spec("torchvision") is None
    with pytest.raises(ModuleNotFoundError, match="torchvision"):
        importlib.import_module("torchvision")


def test_the_finder_is_put_in_place_once():
    cure_torchvision_on_import()
    before = list(sys.meta_path)
    cure_torchvision_on_import()
    assert sys.meta_path == before
    assert any(type(finder).__name__ == TorchvisionCure.__name__ for finder in before)


@pytest.mark.parametrize(
    "statements",
    [
        "import oversmooth, timm; from transformers import ViTModel",
        "from transformers import AutoModel; import oversmooth; from transformers import ViTModel; import timm",
    ],
)
def test_timm_and_transformers_import_in_any_order_after_oversmooth(statements):
    known = "print(timm.is_model('vit_tiny_patch16_224'), ViTModel.__name__)"
    run = fresh_python(f"{statements}\n{known}")
    assert run.stdout.split() == ["True", "ViTModel"], run.stderr


def in_the_venv_of_the_makefile(tmp_path, code, cure=venv_torchvision.CURE):
    """Runs code in an interpreter that has read the `.pth` file, as that of the venv does when it starts."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    venv_torchvision.write(folder, cure)
    return fresh_python(f"import sys; before = set(sys.modules)\nimport site; site.addsitedir({str(folder)!r})\n{code}")


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("import timm", "timm.is_model('vit_tiny_patch16_224')"),
        ("import peft", "bool(peft.__version__)"),
        ("from transformers import LlamaConfig", "LlamaConfig().model_type == 'llama'"),
    ],
)
def test_the_venv_that_we_make_imports_them_without_oversmooth(statement, shown, tmp_path):
    run = in_the_venv_of_the_makefile(tmp_path, f"{statement}\nprint({shown})")
    assert run.stdout.split() == ["True"], run.stderr


def test_the_file_in_the_venv_imports_nothing_until_torchvision_is_asked_for(tmp_path):
    code = "print(sorted(set(sys.modules) - before)); import json; print('torch' in sys.modules, 'oversmooth' in sys.modules)"
    run = in_the_venv_of_the_makefile(tmp_path, code)
    assert run.stdout.splitlines() == ["[]", "False False"], run.stderr


def test_torchvision_is_cured_there_without_importing_oversmooth(tmp_path):
    run = in_the_venv_of_the_makefile(tmp_path, "import torchvision; print('oversmooth' in sys.modules)")
    assert run.stdout.split() == ["False"], run.stderr


def test_the_file_in_the_venv_changes_nothing_where_the_clone_is_gone(tmp_path):
    code = "import importlib.util; print(importlib.util.find_spec('torchvision'))"
    run = in_the_venv_of_the_makefile(tmp_path, code, tmp_path / "gone.py")
    assert "torchvision" in run.stdout, run.stderr


def test_make_writes_that_file_into_the_venv():
    installs = (ROOT / "Makefile").read_text(encoding="utf-8").partition("$(STAMP): $(READY)")[2]
    assert "release/venv_torchvision.py" in installs.partition("touch $@")[0]


@pytest.mark.parametrize("first", ["oversmooth, torchvision", "torchvision, oversmooth"])
def test_there_is_one_cure_even_if_the_file_of_the_venv_is_read_twice(first, tmp_path):
    counted = "sum(type(finder).__name__ == 'TorchvisionCure' for finder in sys.meta_path)"
    code = f"site.addsitedir(folder)\nimport {first}\nprint({counted})"
    again = in_the_venv_of_the_makefile(tmp_path, code.replace("folder", repr(str(tmp_path / "site-packages"))))
    assert again.stdout.split() == ["1"], again.stderr
