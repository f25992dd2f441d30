"""The verdicts of claims as Markdown and as a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from oversmooth.claims.claim import Claim, ClaimResult
from oversmooth.claims.context import Row
from oversmooth.claims.reproduce import Findings
from oversmooth.environment.files import line_text, table_text
from oversmooth.output.blocks import Block, Items, Page, PageSection, Words, table_of
from oversmooth.output.charts import EffectChart, EffectRow, extent, numbers
from oversmooth.output.render import render

# --- the comparisons of a claim as a picture: effects with their 95% intervals ---

CLEAR, EQUAL, OPEN = "clear by itself", "no difference larger than the margin", "undecided"
LOOKS = {CLEAR: ("ink", False), EQUAL: ("apart", False), OPEN: ("null", True)}
"""Tone, and whether the dot is open, by what a comparison came to."""


def effects_plot(id: str, rows: Sequence[Row]) -> tuple[EffectChart, ...]:
    """One picture of all comparisons that were run, the first at the top; none where none was."""
    there = [row for row in rows if row["effect"] is not None]
    if not there:
        return ()
    clear = sum(_kind(row) == CLEAR for row in there)
    low, high = extent([row[end] for row in there for end in ("low", "high")], zero=True)
    reach = max(row["margin"] for row in there)
    chart = EffectChart(
        id=id,
        title="Effects with 95% intervals over paired units",
        caption="Bands: the margins. Filled: clear by itself; green: no difference larger than the margin; open: undecided.",
        alt=f"Effects and 95% intervals of {len(there)} comparisons, {clear} of them clear by themselves; the table "
        "below has the same numbers.",
        x=numbers(min(low, -1.2 * reach), max(high, 1.2 * reach), is_change=True, title="effect"),
        rows=tuple(_row(row) for row in there),
    )
    return (chart,)


def _kind(row: Row) -> str:
    return CLEAR if row["outcome"] in ("higher", "lower") else str(row["outcome"])


def _row(row: Row) -> EffectRow:
    tone, is_open = LOOKS[_kind(row)]
    said = f"{row['effect']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
    return EffectRow(
        name=row["comparison"],
        value=row["effect"],
        low=row["low"],
        high=row["high"],
        margin=row["margin"],
        tone=tone,
        is_open=is_open,
        said=said,
    )


# --- findings as one Markdown page and one HTML page, to be read in five minutes ---

JUDGEMENTS = (
    *("confirmed", "theorem, checked", "refuted", "no difference larger than the margin", "undecided", "not run"),
)
"""In the order in which they are counted."""
SCALED_DOWN = (
    "A scaled-down check on two CPU cores: small models and data, three to five runs of each variant. It tests "
    "the mechanism, not the paper's own numbers; those take the GPU commands that `--scale full` prints."
)
SMOKE = (
    "A smoke check: a few steps of everything, to see that it runs. Nothing has converged, and no verdict on this "
    "page says anything about the paper."
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
    "What the weights of everything at hand say; no verdict rests on it. Shares of layers that sharpen or smooth "
    "under uniform attention, by the dominating eigenvalue of their update; the others tend to neither, as all "
    "layers of sharpened pre-norm models do, where what tokens share grows in no direction. `oversmooth atlas` shows "
    "survey/ layer by layer."
)


def counted(judgements: Sequence[str]) -> str:
    """How many claims came to what, in a sentence."""
    words = ", ".join(f"{judgements.count(word)} {word}" for word in JUDGEMENTS if word in judgements)
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
    rows = [
        {
            "claim": f"{claim.number} {claim.name}",
            "verdict": verdicts[claim.name].judgement,
            "says": claim.statement,
            "found": verdicts[claim.name].brief,
        }
        for claim in claims
    ]
    note = Words(text=SMOKE if is_quick else _plain(SCALED_DOWN), kind="note")
    rules = PageSection(
        id="rules",
        title="How to read it",
        lead="seeds, tests, margins, intervals",
        blocks=(Items(items=RULES),),
        is_closed=True,
    )
    smoke = "A smoke check, no evidence. " if is_quick else ""
    return Page(
        title="oversmooth: the paper's claims",
        eyebrow="Setting the Record Straight on Transformer Oversmoothing",
        subject="arXiv 2401.04301",
        verdict=f"{smoke}{counted([verdict.judgement for verdict in verdicts.values()])}",
        facts=tuple(facts.items()),
        sections=(
            PageSection(id="summary", blocks=(table_of("verdicts", "Verdicts", rows), note)),
            *(_section(claim, finding) for claim, finding in _each_table_once(claims, findings)),
            rules,
        ),
    )


def _spaced(rows: Sequence[Row]) -> list[Row]:
    return [{name.replace("_", " "): value for name, value in row.items()} for row in rows]


def _section(claim: Claim, finding: ClaimResult) -> PageSection:
    blocks: list[Block] = [Words(text=f"{finding.verdict.judgement}: {finding.verdict.because}.", mark="observed")]
    blocks += effects_plot(f"effects-{claim.number}", [row for row in finding.compared if row["counts"] == "primary"])
    for order, (title, rows) in enumerate(_tables(finding)):
        blocks.append(table_of(f"table-{claim.number}-{order}", title, _spaced(rows)))
    if finding.weights:
        weights = table_of(f"weights-{claim.number}", "Everything at hand", _spaced(finding.weights))
        blocks += [Words(text=_plain(WEIGHTS)), weights]
    blocks.append(Items(items=tuple(_plain(fact) for fact in _facts(claim))))
    return PageSection(id=f"claim-{claim.number}", title=f"{claim.number}. {claim.statement}", blocks=tuple(blocks))
