"""What README and docs say is run and checked: code, commands, links, and where measured numbers come from."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer

from oversmooth.claims.reproduce import CLAIMS
from oversmooth.commands.verbs import EXAMPLES, app
from oversmooth.models.families import ARCHITECTURES, counted
from tests.browser import opened
from tests.command_line import fresh_python, oversmooth
from tests.real_models import minilm

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<mark><!-- run -->\n)?^(?P<indent> *)```(?P<kind>\w*)\n(?P<body>.*?)^ *```$", re.M | re.S)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
UsageError = typer.BadParameter.__base__  # typer does not export it


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    body: str
    line: int
    """Lines of the page before its body."""
    is_run: bool
    """Whether `<!-- run -->` stands on the line before it."""


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page, *kinds):
    text = text_of(page)
    return [
        Block(found["kind"], dedent(found["body"]), text.count("\n", 0, found.start("body")), bool(found["mark"]))
        for found in FENCE.finditer(text)
        if found["kind"] in kinds
    ]


def having(*kinds, run=False):
    return [page for page in PAGES if any(block.is_run or not run for block in blocks(page, *kinds))]


# --- code -----------------------------------------------------------------------------------------------------------


LONGEST = ("docs/control.md", "docs/guides/diagnose.md", "docs/guides/use-with-trainer.md")
"""Pages whose code takes more than ten seconds."""


def marked(page: str) -> Any:
    return pytest.param(page, marks=pytest.mark.slow) if page in LONGEST else page


@pytest.mark.parametrize("page", [marked(page) for page in having("python")])
def test_the_code_of_a_page_runs_in_a_fresh_interpreter_from_its_first_block_to_its_last(page, tmp_path):
    minilm()
    lines: list[str] = []
    for block in blocks(page, "python"):
        # Blank lines before it, so that a traceback shows the line of the page.
        lines += [""] * (block.line - len(lines)) + block.body.splitlines()
    done = fresh_python("\n".join(lines), tmp_path)
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"


LONG = ("docs/guides/train-a-sharpened-vit.md", "docs/guides/edit-a-checkpoint.md")
RUN = [pytest.param(page, marks=pytest.mark.slow) if page in LONG else page for page in having("bash", run=True)]


@pytest.mark.parametrize("page", RUN)
def test_blocks_that_are_marked_as_run_do_run(page, tmp_path):
    minilm()
    script = "\n".join(block.body for block in blocks(page, "bash") if block.is_run)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(["bash", "-e"], input=script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


# --- commands -------------------------------------------------------------------------------------------------------

COMMAND = re.compile(r"^(?:\$ |.*\$\(which (?=oversmooth\)))?(oversmooth)\)? ")
"""A line that starts our command, be it behind a prompt or under torchrun."""


def commands(text):
    """The arguments of every command of ours in the lines of a shell block."""
    for line in text.replace("\\\n", " ").splitlines():
        if COMMAND.match(line):
            words = shlex.split(COMMAND.sub("", line), comments=True)
            yield words[: words.index(">")] if ">" in words else words


def parsed(arguments):
    """Parses a command as the command line would, without running it; raises what the command line would say."""
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(group.make_context("oversmooth", list(arguments)), arguments)
    return command.make_context(name, rest)


def make_config(arguments, page):
    """The file that `--config` names: the page's own TOML, or what a run of that verb stores."""
    path = Path(arguments[arguments.index("--config") + 1])
    if path.suffix == ".toml":
        (block,) = blocks(page, "toml")
        path.write_text(block.body)
        return
    path = path if path.suffix else path / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": EXAMPLES[arguments[0]][0]}))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_understood_by_the_command_line(page, tmp_path, monkeypatch):
    """In shell blocks, and in the text wherever a command is written with its arguments."""
    monkeypatch.chdir(tmp_path)
    inline = re.findall(r"`(oversmooth [\w-]+ [^`]+)`", FENCE.sub("", text_of(page)))
    lines = [block.body for block in blocks(page, "bash", "console", "text")] + [" ".join(c.split()) for c in inline]
    for text in lines:
        for arguments in commands(text):
            if "--config" in arguments:
                make_config(arguments, page)
            parsed(arguments)


@pytest.mark.parametrize("words", ["inspect --no-such-option", "inspekt", "prune model", "measure --max-samples many"])
def test_a_command_that_the_command_line_does_not_know_is_found(words):
    with pytest.raises(UsageError):
        parsed(next(commands(f"$ oversmooth {words}   # a comment")))


def test_shown_output_of_inspect_is_what_the_command_prints(monkeypatch):
    minilm()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal, so that the width counts
    printed = re.sub(r"\x1b\[[\d;]*m", "", oversmooth("inspect").stdout)
    printed = [line.rstrip() for line in printed.splitlines()]
    page = "docs/guides/diagnose.md"
    (shown,) = [block.body for block in blocks(page, "text") if block.body.startswith("$ oversmooth inspect\n")]
    lines = [line.rstrip() for line in shown.splitlines()[1:]]
    first = printed.index(lines[0])
    assert printed[first : first + len(lines)] == lines
    saved = json.loads((RESULTS / "minilm_inspect.json").read_text())
    rho_dc = [f"{layer['plain']['rho_dc']:.3f}" for layer in saved["layers"]]
    assert rho_dc == [line.split()[1] for line in lines[3:]]


def test_the_answer_in_the_readme_is_what_measure_prints(monkeypatch):
    minilm()
    monkeypatch.setenv("COLUMNS", "80")
    printed = [line.rstrip() for line in oversmooth("measure").stdout.splitlines()]
    (shown,) = [block.body.splitlines() for block in blocks("README.md", "text")]
    first = printed.index(shown[0])
    assert printed[first : first + len(shown)] == shown


def test_the_benchmarks_of_the_docs_are_those_of_their_files():
    script = ROOT / "benchmarks" / "benchmarks_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 130


# --- links ----------------------------------------------------------------------------------------------------------

LINKING = [
    *PAGES,
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in RESULTS.rglob("*.md")),
]


def links(text):
    return LINK.findall(FENCE.sub("", text))


@pytest.mark.parametrize("page", LINKING)
def test_every_relative_link_leads_to_a_file(page):
    broken = [link for link in links(text_of(page)) if not (ROOT / page).parent.joinpath(link).is_file()]
    assert not broken


# --- measured numbers -----------------------------------------------------------------------------------------------

UNIT = r"(?:s|ms|seconds?|min|minutes?|h|hours?|days?|[KMGT]i?B|%|per cent|times|(?:images|tokens|steps)/s)"
QUANTITY = re.compile(
    rf"(?<![\w.])\d[\d.,]*(?: |-)?{UNIT}(?![\w/])"  # 13.4 s, 45%, 0.66 GiB
    r"|\b(?:a|one|few) (?:minute|hour|day)s?\b"
    r"|(?<![\w.])(?<!Python )\d{1,3}\.\d\d+(?![\w.])"  # 0.98
)
SOURCE = re.compile(r"benchmarks/results/|\.toml$|\.py$")


def paragraphs(text):
    """Every paragraph, list item and table row outside code, each after the first one of its section."""
    text = FENCE.sub("", re.sub(r"<!--.*?-->", "", text))
    parts = re.split(r"^(#+ .*)$", "\n" + text, flags=re.M)
    for body in parts[::2]:
        found = [p.strip() for p in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\|))", body) if p.strip()]
        for paragraph in found:
            yield found[0], paragraph


def has_source(text):
    return any(SOURCE.search(link) for link in LINK.findall(text))


def looks_measured(paragraph):
    words = re.sub(r"`[^`]*`|(?<=\])\([^)]*\)", "", paragraph)  # neither code nor addresses
    return not words.startswith("Measured on:") and QUANTITY.search(words)


def without_source(text):
    return [
        paragraph
        for lead, paragraph in paragraphs(text)
        if looks_measured(paragraph) and not has_source(paragraph) and not has_source(lead)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_number_points_to_the_file_it_comes_from(page):
    """In prose, lists and tables (not in code), what looks measured stands beside a link to its source.

    It looks measured if it is a number with a unit of time, size, speed or share, or has two or more decimals (names of
    machines after "Measured on:" aside). The link stands in the same paragraph, list item or table row, or in the first one
    of the section, which then speaks of that file. It leads to `benchmarks/results/`, or, for a setting, to the recipe or
    the code that holds it; whether a number is a setting is for the reviewer to see.
    """
    assert not without_source(text_of(page))


def test_a_measured_number_without_a_source_is_found():
    sourced = "It takes 3 s ([here](benchmarks/results/digits.json))."
    assert without_source("# A\n\nIt takes 3 s.\n\n- 12% less") == ["It takes 3 s.", "- 12% less"]
    assert not without_source(
        f"# A\n\n{sourced}\n\n| 4.25 |\n| 2 GiB |\n\n```\n5 s\n```\n\nPython 3.11 in 2 steps, `0.25`."
    )
    assert without_source(f"# A\n\n{sourced}\n\n# B\n\ncosine 0.98") == ["cosine 0.98"]


def provenance_problem(result):
    """What is missing for a reader who wants to repeat the numbers of a results file."""
    if "provenance" in result:  # written by --json of a command
        needed, found = ("versions", "weights_sha256", "target"), result["provenance"]
    else:  # written by a benchmark, or by a table of training runs
        needed, found = ("versions", "commit", "machine"), result
    for row in result.get("rows", ()):
        if "sessions" not in row.get("manifest", {}):
            return "a row without the manifest of its run"
    return next((f"no {name}" for name in needed if not found.get(name)), None)


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("*.json")))
def test_a_results_file_says_how_it_came_about(name):
    assert provenance_problem(json.loads((RESULTS / name).read_text())) is None


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in RESULTS.rglob("*.md")))
def test_a_table_of_results_links_to_its_numbers(page):
    assert [link for link in links(text_of(page)) if link.endswith(".json")]


def test_the_kept_claims_have_manifests():
    manifest = json.loads((RESULTS / "claims" / "manifest.json").read_text())
    assert all(manifest[name] for name in ("versions", "commit", "hardware", "scale", "models"))
    claims = json.loads((RESULTS / "claims" / "claims.json").read_text())
    assert set(claims) <= {claim.name for claim in CLAIMS}
    runs = json.loads((RESULTS / "claims" / "runs.json").read_text())
    assert all(run["finished"] and run["sessions"] for run in runs.values())


def test_the_docs_show_the_kept_verdicts():
    script = ROOT / "benchmarks" / "claims_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ALGORITHMS = ("inspect", "verify", "measure", "predict", "constrain", "bake", "edit", "train", "finetune", "reproduce")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_pseudocode_where_the_reproducibility_table_says(name):
    (number,) = re.findall(r"\(theory\.md#(\d+)-algorithms\)", text_of("docs/reproducibility.md"))
    (_, algorithms) = text_of("docs/theory.md").split(f"\n## {number}. Algorithms\n")
    assert re.search(rf"^{name}\(", algorithms, re.M)


def test_readme_counts_families_right():
    model_types = {model_type for arch in ARCHITECTURES.values() for model_type in arch.model_types}
    assert f"{len(model_types)} model types in {len(ARCHITECTURES)} families" in text_of("README.md")


def test_readme_counts_what_is_covered():
    types, families = counted("transformers"), counted("timm")
    found = types["declared"] + types["discovered"]
    assert f"{found} of the {types.total()} types of transformers" in text_of("README.md")
    assert f"{families['discovered']} of the {families.total()} families of timm" in text_of("README.md")
    assert f"{types['refused'] + families['refused']} refused" in text_of("README.md")


ABLATED = re.compile(r"^\|.*results/(ablation_[\w-]+)\.json\)\) \| [\w ]+ \| (.*) \| (.*) \| (.*) \|$", re.M)


def worth_telling(predictor):
    """A rank correlation with its interval as the guide shows it, bold where the interval excludes 0."""
    low, high = predictor["interval"]
    shown = f"{predictor['rank_correlation']:.2f} ({low:.2f} to {high:.2f})"
    return f"**{shown}**" if low > 0 or high < 0 else shown


def test_the_guide_shows_the_kept_rank_correlations_and_what_an_ablation_takes():
    rows = ABLATED.findall(text_of("docs/guides/is-this-layer-worth-it.md"))
    kept = sorted(path.stem for path in (ROOT / "benchmarks" / "results").glob("ablation_*.json"))
    assert sorted(name for name, *_ in rows) == kept
    for name, *shown in rows:
        numbers = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["numbers"]
        predictors = numbers["ablation"]["predictors"]
        influence = {one["part"]: one for one in predictors if one["name"] == "influence"}
        assert shown == [worth_telling(influence[part]) for part in ("block", "attention", "feed-forward")]
        layers = len({removal["layer"] for removal in numbers["ablation"]["removals"]})
        assert numbers["passes"] == pytest.approx(1.5 * layers + 0.5)
        assert numbers["passes"] <= 1.6 * layers


def test_headings_of_a_page_do_not_skip_a_level():
    for page in PAGES:
        levels = [len(hashes) for hashes in re.findall(r"^(#+) ", FENCE.sub("", text_of(page)), re.M)]
        assert levels[0] == 1, page
        assert all(deeper <= level + 1 for level, deeper in pairwise(levels)), page


def test_the_search_of_the_site_works_from_a_folder_without_a_request():
    site = ROOT / "site" / "index.html"
    if not site.is_file():
        pytest.skip("the site is not built (make docs)")
    with opened(site) as seen:
        seen.page.wait_for_function("document.readyState === 'complete'")
        seen.page.keyboard.press("/")
        seen.page.keyboard.type("norm tokens", delay=20)
        seen.page.wait_for_selector(".md-search-result__item", state="attached")
        assert all(request.startswith(("file:", "data:", "blob:", "about:")) for request in seen.requests)
