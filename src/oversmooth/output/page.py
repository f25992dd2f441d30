"""The page of an `Analysis`, with the sections of plugins."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from oversmooth.environment import plugins
from oversmooth.errors import first_line
from oversmooth.output.blocks import Block, Items, Page, PageSection, Words, table_of
from oversmooth.output.card import brief_of, card_of
from oversmooth.output.sections import (
    cosine_blocks,
    heading,
    heads_section,
    layer_name,
    log_blocks,
    rank_words,
    theory_blocks,
    turn_blocks,
    why_section,
)
from oversmooth.results import Analysis, Provenance
from oversmooth.results.answer import Answer
from oversmooth.results.base import short_name
from oversmooth.results.wording import headline, how_made, how_much, weights_words

# --- sections of a report that plugins add: a function of the analysis ---

SectionMaker = Callable[[Analysis], PageSection | None]
"""Returns `None` where it has nothing to say about an analysis."""
SECTIONS: dict[str, SectionMaker] = {}
"""Name to function; only plugins add to it."""


def all_sections() -> dict[str, SectionMaker]:
    return plugins.fill(SECTIONS, "reports", _accepted)


def plugged_sections(analysis: Analysis) -> list[PageSection]:
    """What every plugin says about this analysis; one that fails is named in a warning and left out."""
    found = []
    for name, make in list(all_sections().items()):
        try:
            section = _checked(name, make(analysis))
        except Exception as error:  # whatever a stranger's function does: the report is written without it
            plugins.skip("reports", name, f"it raises {type(error).__name__}: {first_line(error)}")
            continue
        if section is not None:
            found.append(replace(section, id=f"plugin-{name}", is_closed=True))  # no section of ours has such an id
    return found


def _checked(name: str, section: object) -> PageSection | None:
    if section is not None and not isinstance(section, PageSection):
        raise plugins.expected(name, section, "a function that returns a Section or None")
    if section is not None and (other := [block for block in section.blocks if not isinstance(block, get_args(Block))]):
        raise plugins.expected(name, other[0], "a function whose Section holds blocks of oversmooth.output.blocks")
    return section


def _accepted(name: str, value: object) -> SectionMaker:
    if not callable(value):
        raise plugins.expected(name, value, "a function from an Analysis to a Section")
    return value


# --- an `Analysis` as a page: the answer first, then what it rests on ---

DEFINITIONS = (
    "H = W_V W_O is the value map of a layer, summed over heads; eigenvalues λ are those of H.",
    "ρ_dc = max |1 + λ|: growth per layer of what all tokens share, from weights alone.",
    "ρ_ac: growth per layer of what differs between tokens, at the measured attention.",
    "exponent = log ρ_ac - log ρ_dc: negative smooths, positive sharpens, per repetition of the layer.",
    "HFC and LFC are the Frobenius norms of X minus its mean token, and of the mean token repeated.",
)
LIMITS = (
    "The theorem speaks of infinitely many repetitions of one layer at fixed attention; a real layer acts once.",
    "Norm weights are folded in at one common token scale; real norms divide each token by its own scale.",
    "Feed-forward blocks are measured, not predicted.",
    "Measurements hold for the data they were made on; the data hash below says which.",
)


NOT_MEASURED = "Nothing was measured, and weights alone do not say whether a model oversmooths."


def page_of(analysis: Analysis, answers: Sequence[Answer] | None = None) -> Page:
    """The whole report: the card of the headline's stack, other stacks in brief, and three parts that a reader opens."""
    answers = answers_of(analysis) if answers is None else answers
    target = analysis.inspection.provenance.target
    sections = [
        _notes(analysis),
        why_section(analysis),
        heads_section(analysis),
        _numbers(analysis, answers),
        *plugged_sections(analysis),
    ]
    page = Page(
        title=f"oversmooth: {short_name(target)}",
        eyebrow=short_name(target),
        verdict=headline(analysis) if analysis.measurement is not None else NOT_MEASURED,
        summary=headline(analysis) if analysis.measurement is None else "",
        facts=_facts(analysis),
        sections=tuple(section for section in sections if section is not None),
    )
    if not answers:
        return page
    first, *others = answers
    return replace(
        page,
        title=f"oversmooth: {first.model}",
        eyebrow=first.model,
        subject=first.subject,
        verdict=first.headline,
        summary=first.deck,
        facts=(),
        card=card_of(first),
        briefs=tuple(brief_of(answer) for answer in others),
    )


def answers_of(analysis: Analysis) -> tuple[Answer, ...]:
    """One per stack, the one that speaks for the model first; none where nothing was measured."""
    first = analysis.answer
    return tuple(sorted(analysis.answers, key=lambda answer: answer != first))


def _notes(analysis: Analysis) -> PageSection:
    blocks: list[Block] = [Words(text=f"Missing here: {m.field}. {m.reason}", kind="note") for m in analysis.missing]
    if run := analysis.measurement or analysis.prediction:
        blocks += [Words(text=f"Warning: {warning}", kind="note") for warning in run.data.warnings]
    if analysis.measurement is None:
        note = analysis.inspection.provenance.note
        blocks += [Words(text=note, kind="note")] if note else []
        blocks += [Words(text=weights_words(analysis.inspection))]
        blocks += [table_of("weights", "What each layer's weights prefer, beside chance", _weights(analysis))]
    return PageSection(id="top", blocks=blocks)


def _weights(analysis: Analysis) -> list[dict[str, object]]:
    return [
        {
            "layer": layer_name(layer),
            "ρ_dc": layer.plain and layer.plain.rho_dc,
            "by chance": layer.null and layer.null.rho_dc,
            "excess": layer.null and layer.null.excess,
            "± by chance": layer.null and layer.null.excess_spread,
            "positivity": layer.null and layer.null.positivity,
            "note": layer.unreadable or "",
        }
        for layer in analysis.inspection.layers
    ]


def _numbers(analysis: Analysis, answers: Sequence[Answer]) -> PageSection:
    measurement = analysis.measurement
    ranks = [
        f"{answer.stack + ': ' if answer.stack else ''}{rank}" for answer in answers if (rank := rank_words(answer))
    ]
    inside = ["every table", *ranks, "definitions", "how to repeat it"]
    blocks: list[Block] = list(cosine_blocks(answers))
    if measurement is not None:
        blocks += [*log_blocks(measurement), *turn_blocks(measurement)]
    blocks += [*theory_blocks(analysis), *_methods(analysis), *_provenance(analysis)]
    return PageSection(id="numbers", title="All numbers", lead=", ".join(inside), blocks=blocks, is_closed=True)


def _facts(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    facts = []
    for stack in analysis.inspection.stacks:
        of = f" of {stack.blocks_in_model}" if stack.blocks != stack.blocks_in_model else ""
        name = f"{stack.name} " if stack.name else ""
        heads = f", {stack.n_heads} heads" if stack.n_heads else ""
        size = f"{stack.blocks}{of} {'blocks' if of else 'layers'}, width {stack.d_model}{heads}"
        facts.append((f"{name}{stack.family}", size))
        if stack.form:
            facts.append((f"{name}attention", stack.form))
    if analysis.verification:
        word = "fits" if analysis.verification.passed else "DOES NOT FIT"
        facts.append(("layout", f"{word} this model, max error {analysis.verification.largest_error:.0e}"))
    else:
        facts.append(("layout", "weights only, unverified"))
    if analysis.measurement and (stream := analysis.measurement.stream) is not None:
        facts.append(("stream", stream.partial or f"followed through {stream.links} links on the first batch"))
    return tuple(facts)


def _methods(analysis: Analysis) -> list[Block]:
    blocks: list[Block] = [heading("Definitions and limits"), Items(items=DEFINITIONS)]
    if analysis.measurement:
        rows = [{"metric": name, "definition": formula} for name, formula in analysis.measurement.definitions]
        blocks.append(table_of("definitions", "Definitions of the metrics", rows))
        prefix = analysis.measurement.prefix_tokens
        blocks.append(Words(text=f"Padding is never measured; prefix tokens (CLS, registers): {prefix}."))
    return [*blocks, Items(items=LIMITS)]


def _provenance(analysis: Analysis) -> list[Block]:
    provenance = analysis.inspection.provenance
    rows = [{"fact": name, "value": value} for name, value in (*_provenance_facts(provenance), *_facts(analysis))]
    if analysis.measurement:
        data = analysis.measurement.data
        rows += [
            {"fact": "data", "value": how_much(data)},
            *({"fact": "data, how read", "value": line} for line in how_made(data)),
            {"fact": "data SHA-256", "value": data.sha256},
            {"fact": "seed", "value": str(analysis.measurement.provenance.seed)},
        ]
    blocks: list[Block] = [heading("Provenance"), table_of("provenance-facts", "Provenance", rows)]
    if analysis.command:  # an analysis made from Python has none
        blocks += [Words(text="To repeat it:"), Words(text=analysis.command, kind="code")]
    return blocks


def _provenance_facts(provenance: Provenance) -> list[tuple[str, str]]:
    files = ", ".join(f"{file.name} ({file.size_bytes:,} bytes)" for file in provenance.files) or "a live module"
    known = provenance.found or f"declared as {', '.join(provenance.families)}"
    return [
        ("model", provenance.target),
        ("model type", f"{provenance.model_type}, {known}"),
        ("read as", f"{provenance.source}: {files}"),
        ("weights SHA-256", provenance.weights_sha256),
        ("bytes of tensors read", f"{provenance.bytes_read:,}"),
        ("dtypes", f"stored {', '.join(provenance.weight_dtypes)}; computed in {provenance.compute_dtype}"),
        ("versions", ", ".join(f"{package} {version}" for package, version in provenance.versions)),
    ]
