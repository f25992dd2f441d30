"""The page of an `Analysis`, with the sections of plugins."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from oversmooth.environment import plugins
from oversmooth.errors import first_line
from oversmooth.output.blocks import Block, Items, Page, PageSection, Strip, StripItem, Words, table_of
from oversmooth.output.measured_sections import (
    attention_section,
    attribution_section,
    first_figures,
    scale_section,
    worth_section,
)
from oversmooth.output.theory_sections import (
    head_exponents,
    heads_section,
    ladder_section,
    layer_name,
    norms_section,
    regime_strip,
    rho_ac_by_layer,
    short_place,
    spectra_section,
    verdict_section,
    what_if_section,
)
from oversmooth.results import Analysis, Provenance
from oversmooth.results.base import signed
from oversmooth.results.wording import findings, headline, how_made, how_much, known_range, summary

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
            found.append(replace(section, id=f"plugin-{name}"))  # no section of ours has such an id
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


def page_of(analysis: Analysis) -> Page:
    """The whole report, from top to bottom."""
    inspection, measurement, prediction = analysis.inspection, analysis.measurement, analysis.prediction
    residuals = {stack.name: stack.residual for stack in inspection.stacks}
    sections = [
        _first_screen(analysis),
        attribution_section(measurement) if measurement else None,
        scale_section(measurement) if measurement else None,
        worth_section(measurement) if measurement else None,
        attention_section(measurement) if measurement else None,
        ladder_section(prediction, residuals) if prediction else None,
        spectra_section(inspection, rho_ac_by_layer(prediction) if prediction else {}),
        heads_section(inspection, head_exponents(prediction) if prediction else {}),
        what_if_section(prediction) if prediction else None,
        norms_section(inspection),
        verdict_section(prediction) if prediction else None,
        *plugged_sections(analysis),
        _methods(analysis),
        _provenance(analysis),
    ]
    provenance = inspection.provenance
    return Page(
        title=f"oversmooth: {provenance.target}",
        eyebrow=provenance.target,
        verdict=headline(analysis),
        summary=summary(analysis),
        findings=findings(measurement) if measurement and measurement.shown_attributions else (),
        facts=_facts(analysis),
        sections=tuple(section for section in sections if section is not None),
        footer="Made by oversmooth. This page needs no network and sends nothing anywhere.",
    )


def _facts(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    facts = []
    for stack in analysis.inspection.stacks:
        of = f" of {stack.blocks_in_model}" if stack.blocks != stack.blocks_in_model else ""
        name = f"{stack.name} " if stack.name else ""
        heads = f", {stack.n_heads} heads" if stack.n_heads else ""
        facts.append(
            (
                f"{name}{stack.family}",
                f"{stack.blocks}{of} {'blocks' if of else 'layers'}, width {stack.d_model}{heads}",
            )
        )
        if stack.form:
            facts.append((f"{name}attention", stack.form))
    if analysis.measurement:
        data = analysis.measurement.data
        partial = " (interrupted)" if analysis.measurement.is_partial else ""
        sequences = f"{data.sequences} sequence{'s' * (data.sequences != 1)}"
        facts.append(("measured on", f"{sequences}, {data.tokens:,} tokens{partial}"))
    if analysis.verification:
        word = "fits" if analysis.verification.passed else "DOES NOT FIT"
        facts.append(("layout", f"{word} this model, max error {analysis.verification.largest_error:.0e}"))
    else:
        facts.append(("layout", "weights only, unverified"))
    if analysis.measurement and (stream := analysis.measurement.stream) is not None:
        facts.append(("stream", stream.partial or f"followed through {stream.links} links on the first batch"))
    return tuple(facts)


def _first_screen(analysis: Analysis) -> PageSection:
    blocks: list[Block] = [Words(text=f"Missing here: {m.field}. {m.reason}", kind="note") for m in analysis.missing]
    if run := analysis.measurement or analysis.prediction:
        blocks += [Words(text=f"Warning: {warning}", kind="note") for warning in run.data.warnings]
    if analysis.measurement:
        blocks.append(first_figures(analysis.measurement))
    blocks.append(regime_strip(analysis.prediction) if analysis.prediction else _strip(analysis))
    return PageSection(id="top", blocks=blocks)


def _strip(analysis: Analysis) -> Strip:
    items = []
    residuals = {stack.name: stack.residual for stack in analysis.inspection.stacks}
    for layer in analysis.inspection.layers:
        tendency = layer.tendency
        tone = "neutral" if not tendency else "smoothing" if tendency > 0 else "sharpening"
        word = {"smoothing": "▼ tends to smooth", "sharpening": "▲ tends to sharpen"}.get(tone, "= tends to neither")
        word = "no value" if tendency is None else word
        line = f"log ρ_dc {signed(tendency)}" if tendency is not None else "unreadable"
        known = known_range("tendency", residuals.get(layer.stack, ""))
        items.append(
            StripItem(
                title=layer_name(layer),
                word=word,
                tone=tone,
                lines=(line, *([f"known {known.words}"] if known else [])),
                short_title=short_place(layer.stack, layer.layer),
                short_word="unreadable" if tendency is None else f"{word[:1]} {signed(tendency)}",
            )
        )
    return Strip(label="Tendency of each layer's weights", items=tuple(items))


def _methods(analysis: Analysis) -> PageSection:
    blocks: list[Block] = [Items(items=DEFINITIONS)]
    if analysis.measurement:
        rows = [{"metric": name, "definition": formula} for name, formula in analysis.measurement.definitions]
        blocks.append(table_of("definitions", "Definitions of the metrics", rows))
        prefix = analysis.measurement.prefix_tokens
        blocks.append(Words(text=f"Padding is never measured; prefix tokens (CLS, registers): {prefix}."))
    blocks.append(Words(text="Limits:"))
    blocks.append(Items(items=LIMITS))
    return PageSection(id="methods", title="Methods and limits", blocks=blocks)


def _provenance(analysis: Analysis) -> PageSection:
    provenance = analysis.inspection.provenance
    rows = [{"fact": name, "value": value} for name, value in _provenance_facts(provenance)]
    if analysis.measurement:
        data = analysis.measurement.data
        rows += [
            {"fact": "data", "value": how_much(data)},
            *({"fact": "data, how read", "value": line} for line in how_made(data)),
            {"fact": "data SHA-256", "value": data.sha256},
            {"fact": "seed", "value": str(analysis.measurement.provenance.seed)},
        ]
    blocks: list[Block] = [table_of("provenance-facts", "Provenance", rows)]
    if analysis.command:  # an analysis made from Python has none
        blocks += [Words(text="To repeat it:"), Words(text=analysis.command, kind="code")]
    return PageSection(id="provenance", title="Provenance", blocks=blocks)


def _how_known(provenance: Provenance) -> str:
    return provenance.found or f"declared as {', '.join(provenance.families)}"


def _provenance_facts(provenance: Provenance) -> list[tuple[str, str]]:
    files = ", ".join(f"{file.name} ({file.size_bytes:,} bytes)" for file in provenance.files) or "a live module"
    return [
        ("model", provenance.target),
        ("model type", f"{provenance.model_type}, {_how_known(provenance)}"),
        ("read as", f"{provenance.source}: {files}"),
        ("weights SHA-256", provenance.weights_sha256),
        ("bytes of tensors read", f"{provenance.bytes_read:,}"),
        ("dtypes", f"stored {', '.join(provenance.weight_dtypes)}; computed in {provenance.compute_dtype}"),
        ("versions", ", ".join(f"{package} {version}" for package, version in provenance.versions)),
    ]
