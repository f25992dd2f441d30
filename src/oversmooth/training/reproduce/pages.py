"""Findings as one Markdown table and one HTML page; both are made of the same rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from oversmooth.output.report.blocks import Block, Items, Page, Section, Strip, StripItem, Words, table_of
from oversmooth.training.reproduce.claim import Claim, Evidence, Finding

TONES = {"confirmed": "sharpening", "refuted": "smoothing", "undecided": "undecided"}
"""Colours of the page, by judgement."""
SCALED_DOWN = (
    "A scaled-down check on two CPU cores: small models, embedded data, three seeds. It tests the mechanism, not the "
    "paper's own numbers; those take the GPU commands that `--scale full` prints."
)
Checked = Sequence[tuple[Claim, Finding]]


def numbers_of(checked: Checked) -> dict[str, Any]:
    """Everything that was found and nothing that differs between two runs: the same code and seeds give the same bytes."""
    return {
        claim.name: {
            "number": claim.number,
            "statement": claim.statement,
            "protocol": claim.protocol,
            **asdict(finding),
        }
        for claim, finding in checked
    }


def markdown_of(checked: Checked) -> str:
    """The summary first, then every claim with its protocol and tables."""
    files = "Numbers: [claims.json](claims.json). How they came about: [manifest.json](manifest.json)."
    lines = [
        "# The paper's claims, checked",
        "",
        SCALED_DOWN,
        "",
        files,
        "",
        "| claim | judgement | because |",
        "|---|---|---|",
    ]
    lines += [f"| {c.number} {c.name} | **{f.judgement}** | {_cell(f.because)} |" for c, f in checked]
    for claim, finding in checked:
        lines += ["", f"## {claim.number}. {claim.statement}", "", f"**{finding.judgement}**: {finding.because}.", ""]
        lines += [f"- Protocol: {claim.protocol}", f"- Confirmed if {claim.confirmed_if}."]
        lines += [f"- Refuted if {claim.refuted_if}.", "- Undecided otherwise.", f"- Cost: {_cost(claim)}."]
        if finding.runs:
            manifests = ", ".join(f"[{run.split('/')[-1]}]({run}/manifest.json)" for run in finding.runs)
            lines += [f"- Manifests: {manifests}"]
        for evidence in finding.evidence:
            lines += ["", *_markdown_table(evidence)]
    return "\n".join(lines) + "\n"


def _markdown_table(evidence: Evidence) -> list[str]:
    if not evidence.rows:
        return [f"{evidence.title}: no rows."]
    names = list(evidence.rows[0])
    lines = [f"### {evidence.title}", "", "| " + " | ".join(n.replace("_", " ") for n in names) + " |"]
    lines.append("|" + "---|" * len(names))
    return lines + ["| " + " | ".join(_cell(row[n]) for n in names) + " |" for row in evidence.rows]


def _cost(claim: Claim) -> str:
    command = f"`oversmooth reproduce {claim.name} --scale full`"
    return f"{claim.cost['cpu']} here; {claim.cost['full']} at the paper's scale ({command})"


def _plain(text: str) -> str:
    """Without the marks of Markdown."""
    return text.replace("`", "")


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")


def page_of(checked: Checked, facts: Mapping[str, str]) -> Page:
    """The judgements at a glance, then a section per claim."""
    counts = {word: sum(f.judgement == word for _, f in checked) for word in TONES}
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    strip = Strip(
        label="Judgements",
        items=tuple(
            StripItem(title=f"{c.number} {c.name}", word=f.judgement, tone=TONES[f.judgement], lines=(f.because,))
            for c, f in checked
        ),
    )
    first = Section(id="summary", blocks=(Words(text=_plain(SCALED_DOWN), kind="note"), strip))
    return Page(
        title="oversmooth: the paper's claims",
        eyebrow="Setting the Record Straight on Transformer Oversmoothing (arXiv 2401.04301)",
        verdict=f"Of {len(checked)} claim{'s' * (len(checked) != 1)}: {words}.",
        facts=tuple(facts.items()),
        sections=(first, *(_section(claim, finding) for claim, finding in checked)),
        footer="Made by oversmooth. This page needs no network and sends nothing anywhere.",
    )


def _section(claim: Claim, finding: Finding) -> Section:
    blocks: list[Block] = [Words(text=f"{finding.judgement}: {finding.because}.", mark="observed")]
    for order, evidence in enumerate(finding.evidence):
        blocks.append(Words(text=f"{evidence.title}:"))
        blocks.append(table_of(f"claim-{claim.number}-{order}", evidence.title, evidence.rows))
    facts = [_plain(claim.protocol), f"Confirmed if {claim.confirmed_if}.", f"Refuted if {claim.refuted_if}."]
    blocks.append(Items(items=(*facts, "Undecided otherwise.", f"Cost: {_plain(_cost(claim))}.")))
    if finding.runs:
        blocks.append(Words(text="Manifests: " + ", ".join(f"{run}/manifest.json" for run in finding.runs)))
    return Section(id=f"claim-{claim.number}", title=f"{claim.number}. {claim.statement}", blocks=tuple(blocks))
