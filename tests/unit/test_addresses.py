"""The repository's address stands in `pyproject.toml`; whatever else names it says the same."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from release.readme_for_pypi import LINK, absolute

ROOT = Path(__file__).parents[2]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
OWN = re.compile(r"https://(?:github\.com/[\w.-]+/oversmooth\b|[\w-]+\.github\.io/oversmooth\b)")
"""An address of this project, whoever it belongs to."""
NAMING = ("README.md", "CITATION.cff", "mkdocs.yml", "docs/install.md", ".github/ISSUE_TEMPLATE/config.yml")
"""Files that cannot do without it."""


def pages(repository: str) -> str:
    """Where GitHub serves the site of a repository."""
    owner, name = repository.removeprefix("https://github.com/").split("/")
    return f"https://{owner}.github.io/{name}"


def others(text: str, repository: str) -> list[str]:
    return [found for found in OWN.findall(text) if found not in (repository, pages(repository))]


def tracked() -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    endings = (".md", ".py", ".toml", ".yml", ".cff", ".ipynb", ".txt")
    return [ROOT / name for name in listed if name.endswith(endings) and name != "tests/unit/test_addresses.py"]


def test_every_file_that_names_the_repository_says_the_address_of_pyproject():
    found = {str(path.relative_to(ROOT)): others(path.read_text(), URLS["Repository"]) for path in tracked()}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("name", NAMING)
def test_a_file_that_cannot_do_without_the_address_has_it(name):
    assert OWN.search((ROOT / name).read_text())


def test_the_urls_of_the_package_belong_together():
    assert URLS["Issues"].startswith(f"{URLS['Repository']}/")
    assert URLS["Changelog"].startswith(f"{URLS['Repository']}/")
    assert URLS["Documentation"] == f"{pages(URLS['Repository'])}/latest/"


def test_another_address_is_found():
    text = "See https://github.com/somebody/oversmooth/issues and https://github.com/huggingface/transformers."
    assert others(text, "https://github.com/a/oversmooth") == ["https://github.com/somebody/oversmooth"]
    assert others(text, "https://github.com/somebody/oversmooth") == []


def test_links_and_pictures_of_the_readme_become_absolute():
    text = "![p](docs/p.png) [a](docs/a.md#b) [c](https://x.org/c) [d](#here)"
    assert absolute(text, "https://h.org/r", "v1") == (
        "![p](https://h.org/r/raw/v1/docs/p.png) [a](https://h.org/r/blob/v1/docs/a.md#b) [c](https://x.org/c) [d](#here)"
    )
    readme = (ROOT / "README.md").read_text()
    paths = [found["path"].partition("#")[0] for found in LINK.finditer(readme)]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert LINK.search(absolute(readme, URLS["Repository"], "v1")) is None


def test_the_site_is_deployed_by_version():
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())["jobs"]["deploy"]["steps"]
    commands = "\n".join(step.get("run", "") for step in steps)
    assert "mike deploy --push dev" in commands
    assert "mike deploy --push --update-aliases" in commands
    assert "mike set-default --push latest" in commands


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_is_one_that_github_takes(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert all(set(link) == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= set(form)
    identifiers = [part["id"] for part in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(part["type"] in ("textarea", "input") and part["attributes"]["label"] for part in form["body"])


def dry_run(goal: str) -> str:
    """What `make` would do for a goal on a machine where nothing is installed."""
    command = ["make", "--dry-run", goal, "VENV=/nowhere/at-all"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_report_installs_only_what_it_needs_and_says_each_step():
    done = dry_run("report")
    assert re.findall(r"--editable '\.\[(.*?)\]'", done) == ["hf,report"]
    assert "rxnmapper" not in done
    installs = [line for line in done.splitlines() if " install " in line or "venv" in line.split("#")[0]]
    assert sum(line.startswith('echo "make: ') for line in done.splitlines()) == 4
    assert len(installs) >= 3


def test_the_tests_install_the_rest_after_that():
    extras = re.findall(r"--editable '\.\[(.*?)\]'", dry_run("test"))
    assert extras[0] == "hf,report"
    assert {"hf", "report", "dev", "docs"} <= set(extras[1].split(","))
