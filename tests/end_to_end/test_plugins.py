"""Packages that add to our tables: the example is installed and tested; broken ones are named, skipped and never fatal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT

EXAMPLE = ROOT / "examples" / "plugin"
COMMAND = (sys.executable, "-c", "from oversmooth.cli import main; main()")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder into which pip has installed the example, as a wheel of its own, without a network."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (folder, ROOT / "src")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)


def package(folder: Path, name: str, entries: dict[str, str], code: str) -> None:
    """What pip would leave of a package with one module and these entry points."""
    (folder / f"{name}.py").write_text(code)
    facts = folder / f"{name}-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (facts / "entry_points.txt").write_text("".join(f"[oversmooth.{k}]\n{v}\n" for k, v in entries.items()))


def test_the_example_package_passes_its_own_tests(installed):
    done = run(installed, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_installed_plugins_are_listed(installed):
    done = run(installed, *COMMAND, "list", "plugins", "--format", "json")
    assert [(row["adds to"], row["name"], row["state"]) for row in json.loads(done.stdout)] == [
        ("architectures", "ringformer", "used"),
        ("metrics", "farthest_pair", "used"),
        ("interventions", "dampen", "used"),
        ("reports", "flattest_layer", "used"),
    ]
    assert "oversmooth-example 0.1.0" in run(installed, *COMMAND, "list", "plugins").stdout


BROKEN = {
    "raises": ({"metrics": "sum = raises:sum"}, "raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "leaves": ({"metrics": "leave = leaves:leave"}, "import sys; sys.exit(3)", "SystemExit: 3"),
    "lacks": ({"metrics": "gone = lacks:gone"}, "", "AttributeError: module 'lacks' has no attribute 'gone'"),
    "repeats": ({"metrics": "cosine = repeats:f"}, "f = len", "already a built-in metric called 'cosine'"),
    "counts": ({"metrics": "three = counts:three"}, "three = 3", "must be a Metric, or a function f(h, keep); got 3"),
    "claims": (
        {"architectures": "mine = claims:MINE"},
        "from oversmooth.models.families import BERT as MINE",
        "must be a family of model types that are not declared yet; got 'bert'",
    ),
    "wears": (
        {"interventions": "hat = wears:Hat"},
        "class Hat: pass",
        "a class derived from oversmooth.control.interventions.Rule",
    ),
}


def test_broken_plugins_are_named_with_their_package_and_reason_and_the_others_work(tmp_path):
    for name, (entries, code, _) in BROKEN.items():
        package(tmp_path, name, entries, code)
    package(tmp_path, "works", {"metrics": "first = works:first"}, "def first(h, keep): return h[:, 0, 0]")
    rows = json.loads(run(tmp_path, *COMMAND, "list", "plugins", "--format", "json").stdout)
    by_package = {row["package"]: row["state"] for row in rows}
    assert by_package.pop("works 1.2") == "used"
    assert set(by_package) == {f"{name} 1.2" for name in BROKEN}
    for name, (_, _, said) in BROKEN.items():
        assert said in by_package[f"{name} 1.2"]


def test_a_plugin_that_raises_at_import_is_told_on_stderr_while_the_command_goes_on(tmp_path):
    entries, code, _ = BROKEN["raises"]
    package(tmp_path, "raises", entries, code)
    done = run(tmp_path, *COMMAND, "gate", "nowhere", "--rule", "max_cosin=0.9")
    assert "warning: The plugin 'sum' (oversmooth.metrics) of raises 1.2 is skipped: raises:sum raises" in done.stderr
    assert "Update or remove that package." in done.stderr
    assert "Unknown rule 'max_cosin'. Close: max_cosine" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


REPORT = """
import torch, warnings
import oversmooth as osm
layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
found = osm.analyze(model, [torch.randn(2, 6, 16)], what_ifs=())
with warnings.catch_warnings(record=True) as told:
    found.save_html("report.html")
print(len(told), told[0].message)
"""


def test_a_section_that_fails_is_left_out_of_the_report_and_named(tmp_path, monkeypatch):
    package(tmp_path, "fails", {"reports": "bad = fails:bad"}, "def bad(analysis): return 1 / 0")
    package(tmp_path, "tells", {"reports": "text = tells:text"}, "def text(analysis): return 'not a section'")
    monkeypatch.chdir(tmp_path)
    done = run(tmp_path, sys.executable, "-c", REPORT)
    assert done.stdout.startswith("2 The plugin 'bad' (oversmooth.reports) of fails 1.2 is skipped: it raises Zero")
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
