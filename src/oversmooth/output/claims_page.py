"""The verdicts of claims as Markdown and as a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oversmooth.claims.claim import Claim, ClaimResult
from oversmooth.claims.context import Row
from oversmooth.claims.reproduce import Findings
from oversmooth.environment.markdown import line_text, table_text
from oversmooth.output.blocks import Block, Items, Page, PageSection, Plot, Strip, StripItem, Words, table_of
from oversmooth.output.render import render

# --- the comparisons of a claim as a picture: effects with their 95% intervals ---

ROW_PIXELS = 46
"""For a line of words and the interval below it."""
CLEAR, EQUAL, OPEN = "clear by itself", "no difference larger than the margin", "undecided"
STYLES = {
    CLEAR: {"symbol": "circle", "color": "var(--series-1)"},
    EQUAL: {"symbol": "diamond", "color": "var(--series-3)"},
    OPEN: {"symbol": "circle-open", "color": "var(--neutral)"},
}
"""Of the marker, by what a comparison came to."""


def effects_plot(id: str, rows: Sequence[Row]) -> tuple[Plot, ...]:
    """One picture of all comparisons that were run, the first at the top; none where none was."""
    there = [row for row in rows if row["effect"] is not None]
    if not there:
        return ()
    heights = {row["comparison"]: len(there) - position for position, row in enumerate(there)}
    clear = sum(_kind(row) == CLEAR for row in there)
    figure = {
        "traces": [
            _trace(kind, found, heights) for kind in STYLES if (found := [row for row in there if _kind(row) == kind])
        ],
        "layout": {
            "height": 90 + ROW_PIXELS * len(there),
            "xaxis": {"title": {"text": "effect"}, "zeroline": True},
            "yaxis": {"showticklabels": False, "showgrid": False, "range": [0.4, len(there) + 0.8], "zeroline": False},
            "shapes": [_margin(row, heights[row["comparison"]]) for row in there],
            "annotations": [_words(name, height) for name, height in heights.items()],
            "margin": {"l": 12, "r": 12, "t": 14, "b": 44},
        },
    }
    plot = Plot(
        id=id,
        figure=figure,
        caption="Effects with 95% intervals over paired units; the bands are the margins.",
        alt=f"Effects and 95% intervals of {len(there)} comparisons, {clear} of them clear by themselves; the table "
        "below has the same numbers.",
    )
    return (plot,)


def _kind(row: Row) -> str:
    return CLEAR if row["outcome"] in ("higher", "lower") else str(row["outcome"])


def _trace(kind: str, rows: Sequence[Row], heights: Mapping[str, int]) -> dict[str, Any]:
    reach = [round(row["high"] - row["effect"], 4) for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [row["effect"] for row in rows],
        "y": [heights[row["comparison"]] for row in rows],
        "error_x": {"type": "data", "array": reach, "color": STYLES[kind]["color"]},
        "marker": {"size": 9, **STYLES[kind]},
        "text": [row["comparison"] for row in rows],
        "hovertemplate": "%{text}<br>%{x:+.3f} ± %{error_x.array:.3f}<extra></extra>",
    }


def _margin(row: Row, height: int) -> dict[str, Any]:
    return {
        "type": "rect",
        "layer": "below",
        "x0": -row["margin"],
        "x1": row["margin"],
        "y0": height - 0.28,
        "y1": height + 0.28,
        "fillcolor": "var(--grid)",
        "line": {"width": 0},
    }


def _words(name: str, height: int) -> dict[str, Any]:
    """Above the interval, from the left edge: beside it a narrow screen would have no room for both."""
    place = {"xref": "paper", "x": 0, "xanchor": "left", "y": height, "yanchor": "bottom", "yshift": 8}
    return {**place, "text": name, "showarrow": False, "font": {"size": 12}}


# --- findings as one Markdown page and one HTML page, to be read in five minutes ---

TONES = {
    "confirmed": "sharpening",
    "theorem, checked": "sharpening",
    "refuted": "smoothing",
    "no difference larger than the margin": "neutral",
    "undecided": "undecided",
    "not run": "undecided",
}
"""Colours of the page, by judgement."""
SCALED_DOWN = (
    "A scaled-down check on two CPU cores: small models and data, three to five runs of each variant. It tests "
    "the mechanism, not the paper's own numbers; those take the GPU commands that `--scale full` prints."
)
SMOKE = (
    "A smoke check: a few steps of everything, to see that it runs. Nothing has converged, and no verdict on this page says "
    "anything about the paper."
)
RULES = (
    "Training runs that are judged have seeds and folds of their own, and none had been looked at when their rules were "
    "written down. Runs with other seeds had been seen before, and so had the numbers of pretrained models (claims 1 to "
    "4); the project's docs say what was known when.",
    "Claims 2 and 5 to 8 have two tests each, one for confirmed and one for refuted, which cover all the conditions listed "
    "under the claim. Over all of them together, at most 5 of 100 studies would come to a wrong verdict (Holm; the p of a "
    "verdict is corrected for that). Claim 1 has a level of its own, and claims 3 and 4 are counts without a test.",
    "The p and the outcome of a single comparison are by themselves, uncorrected. Clear from: the difference that a verdict "
    "would have needed, at the spread that was seen and before any other part of its test.",
    "No difference larger than the margin is a finding too: both one-sided tests at 5%, that is, the 90% interval inside "
    "the margin; for each claim by itself.",
    "Intervals shown are 95%, by Student's t over paired units. Folds of digits share training images: their errors are "
    "larger by what Nadeau and Bengio's correction says.",
)
"""How to read the verdicts and the numbers."""
SHOWN = ("comparison", "effect", "interval", "margin", "units", "p", "clear_from", "outcome", "separates")
COUNTS = {"primary": "What decides", "beside it": "Beside it: where differences come from, and trends"}
"""Tables of comparisons, by what they count for."""
WEIGHTS = (
    "What the weights of everything at hand say; no verdict rests on it. Shares of layers that sharpen or smooth under "
    "uniform attention, by the dominating eigenvalue of their update; the others tend to neither, as all layers of sharpened "
    "pre-norm models do, where what tokens share grows in no direction. `oversmooth report` shows survey/ layer by layer."
)


def counted(judgements: Sequence[str]) -> str:
    """How many claims came to what, in a sentence."""
    words = ", ".join(f"{judgements.count(word)} {word}" for word in TONES if word in judgements)
    return f"Of {len(judgements)} claim{'s' * (len(judgements) != 1)}: {words}."


def claims_pages(
    claims: Sequence[Claim], findings: Findings, facts: Mapping[str, str], is_quick: bool
) -> dict[str, str]:
    """The pages that `reproduce` writes, by file name."""
    return {
        "claims.md": markdown_of(claims, findings, is_quick),
        "claims.html": render(page_of(claims, findings, facts, is_quick)),
    }


def markdown_of(claims: Sequence[Claim], findings: Findings, is_quick: bool) -> str:
    """The summary first, then every claim with its protocol, its comparisons, and what it does not show."""
    files = "Numbers: [claims.json](claims.json). How they came about: [manifest.json](manifest.json)."
    lines = ["# The paper's claims, checked", "", SMOKE if is_quick else SCALED_DOWN, ""]
    lines += [*(f"- {rule}" for rule in RULES), "", files, ""]
    verdicts = [(claim, findings[claim.name].verdict) for claim in claims]
    lines += [counted([verdict.judgement for _, verdict in verdicts]), ""]
    summary = [
        [f"{claim.number} {claim.name}: {claim.statement}", f"**{verdict.judgement}**", verdict.brief]
        for claim, verdict in verdicts
    ]
    lines.append(table_text(["claim", "verdict", "found"], summary))
    for claim, finding in _each_table_once(claims, findings):
        lines += ["", f"## {claim.number}. {claim.statement}", ""]
        lines += [f"**{finding.verdict.judgement}**: {line_text(finding.verdict.because)}.", ""]
        lines += [f"- {fact}" for fact in _facts(claim)]
        for title, rows in _tables(finding):
            lines += ["", f"{title}:", "", _markdown_table(rows)]
        if finding.weights:
            lines += ["", WEIGHTS, "", _markdown_table(finding.weights)]
    return "\n".join(lines) + "\n"


def _each_table_once(claims: Sequence[Claim], findings: Findings) -> Iterator[tuple[Claim, ClaimResult]]:
    """Claims with their findings; what the weights of everything say stands with the first claim that shows it."""
    shown: list[tuple[Row, ...]] = []
    for claim in claims:
        finding = findings[claim.name]
        yield claim, replace(finding, weights=()) if finding.weights in shown else finding
        shown.append(finding.weights)


def _comparisons(finding: ClaimResult) -> Iterator[tuple[str, list[Row]]]:
    """Those that decide, then the others; without columns that say nothing."""
    for counts, title in COUNTS.items():
        rows = [row | {"interval": _interval(row)} for row in finding.compared if row["counts"] == counts]
        names = [name for name in SHOWN if any(row[name] not in ("", None) for row in rows)]
        if rows:
            yield title, [{name: row[name] for name in names} for row in rows]


def _tables(finding: ClaimResult) -> Iterator[tuple[str, Sequence[Row]]]:
    """What a reader needs to check the verdict, each with its title; empty ones are left out."""
    yield from _comparisons(finding)
    tables = (
        ("What was observed", finding.by_model),
        ("Layers that do not smooth, or could not be told", finding.against),
        ("Learning rates, each chosen by one run on held-out training data", finding.rates),
        ("Left out", finding.left_out),
    )
    yield from ((title, rows) for title, rows in tables if rows)


def _interval(row: Row) -> str:
    return "" if row["low"] is None else f"[{row['low']:+.4f}, {row['high']:+.4f}]"


def _facts(claim: Claim) -> list[str]:
    return [
        f"Protocol ({claim.written}): {claim.protocol} Unit: {claim.unit}.",
        f"Confirmed if {claim.confirmed_if}. Refuted if {claim.refuted_if}. "
        + (f"No difference larger than the margin if {claim.equal_if}. " if claim.equal_if else "")
        + "Undecided otherwise.",
        f"Does not show {claim.does_not_show.rstrip('.')}.",
        f"Cost: {claim.cost['cpu']} here; {claim.cost['full']} at the paper's scale "
        f"(`oversmooth reproduce {claim.name} --scale full`).",
    ]


def _markdown_table(rows: Sequence[Row]) -> str:
    names = [name.replace("_", " ") for name in rows[0]]
    return table_text(names, [["" if value is None else str(value) for value in row.values()] for row in rows])


def _plain(text: str) -> str:
    """Without the marks of Markdown."""
    return text.replace("`", "")


def page_of(claims: Sequence[Claim], findings: Findings, facts: Mapping[str, str], is_quick: bool) -> Page:
    """The verdicts at a glance, then a section per claim."""
    verdicts = {claim.name: findings[claim.name].verdict for claim in claims}
    strip = Strip(
        label="Verdicts",
        items=tuple(
            StripItem(
                title=f"{claim.number} {claim.name}",
                word=verdicts[claim.name].judgement,
                tone=TONES[verdicts[claim.name].judgement],
                lines=(claim.statement, f"Found: {verdicts[claim.name].brief}."),
            )
            for claim in claims
        ),
    )
    first = PageSection(
        id="summary",
        blocks=(Words(text=SMOKE if is_quick else _plain(SCALED_DOWN), kind="note"), strip, Items(items=RULES)),
    )
    smoke = "A smoke check, no evidence. " if is_quick else ""
    return Page(
        title="oversmooth: the paper's claims",
        eyebrow="Setting the Record Straight on Transformer Oversmoothing (arXiv 2401.04301)",
        verdict=f"{smoke}{counted([verdict.judgement for verdict in verdicts.values()])}",
        facts=tuple(facts.items()),
        sections=(first, *(_section(claim, finding) for claim, finding in _each_table_once(claims, findings))),
        footer="Made by oversmooth. This page needs no network and sends nothing anywhere.",
    )


def _spaced(rows: Sequence[Row]) -> list[Row]:
    return [{name.replace("_", " "): value for name, value in row.items()} for row in rows]


def _section(claim: Claim, finding: ClaimResult) -> PageSection:
    blocks: list[Block] = [Words(text=f"{finding.verdict.judgement}: {finding.verdict.because}.", mark="observed")]
    blocks += effects_plot(f"effects-{claim.number}", [row for row in finding.compared if row["counts"] == "primary"])
    for order, (title, rows) in enumerate(_tables(finding)):
        blocks += [Words(text=f"{title}:"), table_of(f"table-{claim.number}-{order}", title, _spaced(rows))]
    if finding.weights:
        weights = table_of(f"weights-{claim.number}", "Everything at hand", _spaced(finding.weights))
        blocks += [Words(text=_plain(WEIGHTS)), weights]
    blocks.append(Items(items=tuple(_plain(fact) for fact in _facts(claim))))
    return PageSection(id=f"claim-{claim.number}", title=f"{claim.number}. {claim.statement}", blocks=tuple(blocks))
