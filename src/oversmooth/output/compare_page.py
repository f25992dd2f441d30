"""The page that compares several analyses: tokens of one text, and different texts, each before and after."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from oversmooth.output.blocks import Block, Card, Page, PageSection, Words, table_of
from oversmooth.output.card import STARTS, columns_panel, cosine_axis, fans_of
from oversmooth.output.charts import DASHES, Axis, Chart, Gauge, Line, Mark, Panel, extent, numbers, places
from oversmooth.output.page import answers_of
from oversmooth.output.sections import cosine_blocks
from oversmooth.results import Analysis, TaskLoss
from oversmooth.results.answer import SEEN, Answer, Told
from oversmooth.results.comparing import compare_words, deck_words, differences, sure_words
from oversmooth.results.measurement import PART_NAMES, OutputDrift
from oversmooth.results.reading import INPUT_BANDS, band_of, shown_layers, shown_parts, shown_total
from oversmooth.results.wording import (
    YARDSTICK,
    change_words,
    first_large,
    level,
    target_word,
)

# --- what models cost, beside what they do to features: the part of a comparison that losses fill ---

Found = TaskLoss | str
"""A loss, or why there is none."""


def losses_section(names: Sequence[str], analyses: Sequence[Analysis], losses: Sequence[Found]) -> PageSection:
    """A row per model: its loss and its features, each also as the difference to the first model."""
    rows = []
    first, before = losses[0], _output(analyses[0])
    for name, analysis, found in zip(names, analyses, losses, strict=True):
        if isinstance(found, str):
            continue
        cosine = _output(analysis)
        other = first.found.loss if isinstance(first, TaskLoss) and first.task == found.task else None
        rows.append(
            {
                "model": name,
                "task": found.task,
                "loss": found.found.loss,
                "±": found.found.standard_error,
                "perplexity": found.found.perplexity,
                "accuracy": found.found.accuracy,
                "loss grows by": None if other is None else found.found.loss - other,
                "mean cosine": cosine,
                "cosine moves by": None if cosine is None or before is None else cosine - before,
            }
        )
    blocks: list[Block] = [
        Words(text=f"{name} has no loss: {found}", kind="note")
        for name, found in zip(names, losses, strict=True)
        if isinstance(found, str)
    ]
    blocks += [table_of("losses-table", "Loss beside features", rows)] if rows else []
    return PageSection(id="losses", title="What it costs", lead=losses_words(names, analyses, losses), blocks=blocks)


def losses_words(names: Sequence[str], analyses: Sequence[Analysis], losses: Sequence[Found]) -> str:
    """How far each model moved the cosine of the first, and what that cost."""
    first, start = losses[0], _output(analyses[0])
    told = []
    for name, analysis, found in list(zip(names, analyses, losses, strict=True))[1:]:
        cosine = _output(analysis)
        if isinstance(found, str) or isinstance(first, str) or found.task != first.task:
            continue
        growth = found.found.loss - first.found.loss
        cost = f"its loss is {abs(growth):.3g} {'higher' if growth > 0 else 'lower'}"
        if start is not None and cosine is not None:
            told.append(f"{name} ends {cosine - start:+.3f} in mean cosine, and {cost}")
        else:
            told.append(f"{name}: {cost}")
    return "; ".join(told) + ("." if told else "")


def _output(analysis: Analysis) -> float | None:
    answers = answers_of(analysis)
    return answers[0].output if answers else None


def _where(names: Sequence[str], first: Answer, other: Answer) -> Told:
    total = shown_total(other.points) - shown_total(first.points)
    before, after = (shown_layers(answer.points, answer.layers) for answer in (first, other))
    mine = {layer.label: layer.change for layer in before}
    moved = {layer.label: layer.change - mine[layer.label] for layer in after if layer.label in mine}
    if len(moved) != len(first.layers) or len(moved) != len(other.layers):
        return Told(title="Not layer by layer", text=f"{names[0]} and {names[1]} differ in depth.")
    label = max(moved, key=lambda name: abs(moved[name]))
    place = label if label == "final norm" else f"layer {label}"
    if abs(moved[label]) < SEEN / 5:
        return Told(title="Nowhere", text=f"No layer differs by {SEEN / 5:g}.")
    return Told(
        title=f"Most in {place}", text=f"{change_words(moved[label])} of {change_words(total)} between the two."
    )


def between_curve(analysis: Analysis) -> list[float]:
    """How alike different inputs are at every place; empty where it was not measured."""
    measurement = analysis.measurement
    if measurement is None:
        return []
    final = measurement.final("between")
    points = [*measurement.curve("between"), *([final] if final is not None else [])]
    return [point.mean for point in points if point.mean is not None]


def _where_inputs(names: Sequence[str], analyses: Sequence[Analysis], labels: Sequence[str]) -> str:
    """The place at which the two models part most in what they do to different inputs."""
    a, b = (between_curve(analysis) for analysis in analyses)
    if not len(a) == len(b) == len(labels) > 1:
        return ""
    steps = [(y - x, v - u) for (x, y), (u, v) in zip(pairwise(a), pairwise(b), strict=True)]
    k = max(range(len(steps)), key=lambda k: abs(steps[k][1] - steps[k][0]))
    if abs(steps[k][1] - steps[k][0]) < SEEN:
        return ""
    place = labels[k + 1] if labels[k + 1] == "final norm" else f"layer {labels[k + 1]}"
    said = f"{change_words(steps[k][0])} in {names[0]}, {change_words(steps[k][1])} in {names[1]}"
    return f" Different inputs: most in {place}, {said}."


def _who(names: Sequence[str], first: Answer, other: Answer) -> Told:
    mine, theirs = (shown_parts(answer.points, answer.parts) for answer in (first, other))
    moved = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in PART_NAMES if name in mine or name in theirs}
    if not moved or max(abs(value) for value in moved.values()) < SEEN / 5:
        return Told(title="No part differs.")
    name = max(moved, key=lambda part: abs(moved[part]))
    before, after = (change_words(found.get(name, 0.0)) for found in (mine, theirs))
    title = f"{first_large(name)}: {before} in {names[0]}, {after} in {names[1]}."
    others = ", ".join(f"{part} {change_words(value)}" for part, value in moved.items() if part != name)
    return Told(title=title, text=f"Differences of the others: {others}." if others else "")


def _now(names: Sequence[str], targets: Sequence[str], first: Answer, other: Answer) -> Told:
    tokens, inputs = differences(first, other)
    a, b = (target_word(target) for target in targets)
    if tokens.interval is None:
        return Told(title="Compare them on the same inputs, 8 or more, before you choose one.")
    if inputs is not None and inputs.way > 0:
        title = f"Check {names[1]} on a task that tells inputs apart before you use it."
        return Told(title=title, command=f"oversmooth compare {a} {b} --loss")
    if other.state == "collapsed" or tokens.way > 0:
        return Told(title="See what it costs.", command=f"oversmooth compare {a} {b} --loss")
    return Told(
        title=f"{names[1]} got worse in neither. To keep it so, check it in CI:",
        command=f"oversmooth gate {b} --max-cosine {other.limit:.2f}",
    )


def _card(names: Sequence[str], analyses: Sequence[Analysis], answers: Sequence[Answer]) -> Card:
    first, other = answers
    gauges = [
        Gauge(
            id="tokens",
            alt=f"Gauge: mean cosine of tokens {level(first.output)} in {names[0]}, {level(other.output)} in {names[1]}.",
            title="Tokens of one input",
            value=other.output,
            said=f"{other.state} in {names[1]}",
            bands=STARTS,
            start=first.output,
            start_name=names[0],
            tone=line_style(1)[0],
            interval=other.interval,
        )
    ]
    if first.between is not None and other.between is not None:
        gauges.append(
            Gauge(
                id="inputs",
                alt=f"Gauge: mean cosine of different inputs {level(first.between[1])}, then {level(other.between[1])}.",
                title="Different inputs (their mean tokens)",
                value=other.between[1],
                said=f"{band_of(other.between[1], INPUT_BANDS).state} in {names[1]}",
                bands=tuple((max(band.start, 0.0), band.state) for band in INPUT_BANDS),
                start=first.between[1],
                start_name=names[0],
                tone=line_style(1)[0],
                interval=other.between_interval,
            )
        )
    targets = [analysis.inspection.provenance.target for analysis in analyses]
    where = _where(names, first, other)
    inputs = _where_inputs(names, analyses, [point.label for point in first.points])
    told = (
        ("Where", replace(where, text=where.text + inputs)),
        ("Who", _who(names, first, other)),
        ("How sure", sure_words(first, other)),
        ("What now", _now(names, targets, first, other)),
    )
    return Card(gauges=tuple(gauges), told=told, chart=_curves(names, analyses, answers), yardstick=YARDSTICK)


# --- curves: layer by layer where models have the same depth, otherwise by relative depth ---

RELATIVE = Axis(
    low=0.0,
    high=1.0,
    ticks=tuple((k / 4, f"{k / 4:g}") for k in range(5)),
    title="relative depth (0 = input, 1 = output)",
)


def line_style(index: int) -> tuple[str, str]:
    """Tone and dash of a model or run: the first four differ in both, the first sixteen in one of them."""
    return f"series-{index % 4 + 1}", DASHES[(index + index // 4) % len(DASHES)]


def _curves(names: Sequence[str], analyses: Sequence[Analysis], answers: Sequence[Answer]) -> Chart:
    labels = [tuple(point.label for point in answer.points) for answer in answers]
    is_same = len(set(labels)) == 1
    shown = ["norm" if label == "final norm" else label for label in labels[0]]
    marks: list[Mark] = []
    for k, answer in enumerate(answers if len(answers) == 2 and is_same else ()):
        tone, strength = ("fan", 0.3) if k == 0 else ("series-2", 0.16)
        marks += [
            replace(fan, tone=tone, strength=strength, name=f"80% of pairs, {names[k]}")
            for fan in fans_of(answer.points)[:1]
        ]
    for k, (name, answer) in enumerate(zip(names, answers, strict=True)):
        means = [point.mean for point in answer.points]
        marks.append(_line(name, means, k, is_same=is_same))
    curves = [answer.points for answer in answers]
    panels = [Panel(title="How alike tokens of one input are (mean cosine)", y=cosine_axis(curves), marks=tuple(marks))]
    panels += _texts(names, analyses, is_same=is_same)
    panels += [_difference(answers)] if is_same and len(answers) == 2 else []
    return Chart(
        id="curves",
        alt="Mean cosine over depth: "
        + "; ".join(f"{n} from {level(a.input)} to {level(a.output)}" for n, a in zip(names, answers, strict=True)),
        x=places(shown, "layer") if is_same else RELATIVE,
        panels=tuple(panels),
        notes=tuple((float(k), _note(names, answers, k)) for k in range(len(shown))) if is_same else (),
    )


def _line(name: str, values: Sequence[float], k: int, *, is_same: bool) -> Line:
    tone, dash = line_style(k)
    last = max(len(values) - 1, 1)
    x = tuple(float(i) if is_same else i / last for i in range(len(values)))
    return Line(name=name, x=x, y=tuple(values), tone=tone, dash=dash, dots=is_same, value=f"{values[-1]:.2f}")


def _note(names: Sequence[str], answers: Sequence[Answer], k: int) -> str:
    label = answers[0].points[k].label
    place = f"layer {label}" if label.isdigit() else label
    return "\n".join(
        [place, *(f"{name}: {answer.points[k].mean:.2f}" for name, answer in zip(names, answers, strict=True))]
    )


def _texts(names: Sequence[str], analyses: Sequence[Analysis], *, is_same: bool) -> Iterator[Panel]:
    """How alike different inputs are over depth, where that was measured in all."""
    curves = [between_curve(analysis) for analysis in analyses]
    if all(len(curve) > 1 for curve in curves):
        low = min([0.0, *(value for curve in curves for value in curve)])
        axis = Axis(low=low, high=1.0, ticks=((0.0, "0"), (0.5, "0.5"), (1.0, "1")))
        marks = tuple(
            _line(name, curve, k, is_same=is_same) for k, (name, curve) in enumerate(zip(names, curves, strict=True))
        )
        yield Panel(
            title="How alike different inputs are (mean cosine of their mean tokens)", y=axis, marks=marks, height=130
        )


def _difference(answers: Sequence[Answer]) -> Panel:
    """What the second model changed, part by part."""
    first, other = answers
    each = []
    for mine, theirs in zip(first.layers, other.layers, strict=True):
        before, after = dict(mine.parts), dict(theirs.parts)
        each.append(
            {
                name: after.get(name, 0.0) - before.get(name, 0.0)
                for name in PART_NAMES
                if name in before or name in after
            }
        )
    old, new = (shown_parts(answer.points, answer.parts) for answer in (first, other))
    sums = {
        name: new.get(name, 0.0) - old.get(name, 0.0) for name in PART_NAMES if any(name in layer for layer in each)
    }
    title = "What changed, part by part (up: more alike; down: more distinct)"
    return columns_panel(title, [k + 1.0 for k in range(len(each))], each, sums, sum(sums.values()))


# --- several analyses on one page ---


def names_of(analyses: Sequence[Analysis]) -> list[str]:
    """Short names that differ, numbered where they are the same."""
    names = []
    for analysis in analyses:
        answers = answers_of(analysis)
        names.append(answers[0].model if answers else analysis.inspection.provenance.name)
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({index + 1})" for index, name in enumerate(names)]


def compare_page(
    analyses: Sequence[Analysis], losses: Sequence[Found] = (), drifts: Sequence[OutputDrift | None] = ()
) -> Page:
    """The first analysis is what the others are compared with.

    `losses` are those of the same models, if asked for; `drifts` are those of the others' outputs, where they were run.
    """
    names = names_of(analyses)
    answers = [found[0] for analysis in analyses if (found := answers_of(analysis))]
    is_measured = len(answers) == len(analyses)
    notes = [block for name, analysis in zip(names, analyses, strict=True) for block in _notes(name, analysis)]
    known = [(name, drift) for name, drift in zip(names[1:], drifts, strict=False) if drift is not None]
    sections = [
        PageSection(id="top", blocks=notes),
        *([_outputs(names[0], known)] if known else []),
        *([losses_section(names, analyses, losses)] if losses else []),
        _weights(names, analyses),
        *([_numbers(names, answers)] if is_measured else []),
    ]
    page = Page(
        title="oversmooth: " + " / ".join(names),
        eyebrow=" / ".join(names),
        verdict="Weights compared; nothing was measured.",
        facts=(),
        sections=tuple(sections),
    )
    return _with_answers(page, names, analyses, answers) if is_measured else page


def _with_answers(page: Page, names: Sequence[str], analyses: Sequence[Analysis], answers: Sequence[Answer]) -> Page:
    if len(answers) == 2:
        verdict, summary = compare_words(names, *answers), deck_words(names, *answers)
        card = _card(names, analyses, answers)
    else:
        ends = sorted(zip((a.output for a in answers), names, strict=True))
        (low, sharpest), (high, smoothest) = ends[0], ends[-1]
        verdict = f"Tokens end most distinct in {sharpest} ({low:.2f}), most alike in {smoothest} ({high:.2f})."
        summary = "Mean cosine between tokens of one input, at the output of each model."
        card = Card(gauges=(), chart=_curves(names, analyses, answers), yardstick=YARDSTICK)
    drawn = [n for n, a in zip(names, analyses, strict=True) if a.measurement and a.measurement.data.origin == RANDOM]
    if drawn:
        which = "" if len(drawn) == len(names) else f" for {' and '.join(drawn)} only, so that the inputs differ"
        is_name = any(verdict.startswith(name) for name in names)
        verdict = f"On random token ids{which}: {verdict if is_name else verdict[:1].lower() + verdict[1:]}"
    subject = answers[0].subject if len({answer.subject for answer in answers}) == 1 else ""
    return replace(page, verdict=verdict, summary=summary, card=card, subject=subject)


RANDOM = "random ids"
"""The origin of data that were drawn, where a model has no tokenizer."""


def _notes(name: str, analysis: Analysis) -> list[Block]:
    """What is missing of one model, and what makes its numbers say less than they seem to."""
    texts = [f"{missing.field} is missing. {missing.reason}" for missing in analysis.missing]
    if analysis.measurement is not None:
        texts += analysis.measurement.data.warnings
        stream = analysis.measurement.stream
        texts += [f"{stream.partial}."] if stream is not None and stream.partial else []
    return [Words(text=f"{name}: {text}", kind="note") for text in texts]


def _numbers(names: Sequence[str], answers: Sequence[Answer]) -> PageSection:
    named = [replace(answer, stack=name) for name, answer in zip(names, answers, strict=True)]
    lead = "the mean cosine of each model at every place, part by part"
    return PageSection(id="numbers", title="All numbers", lead=lead, blocks=list(cosine_blocks(named)), is_closed=True)


def drift_words(first: str, name: str, drift: OutputDrift) -> str:
    """How far the output moved, and whether sequences became more alike."""
    text = (
        f"The output of {name} is {drift.relative_distance:.0%} away from that of {first} "
        f"(mean cosine {drift.cosine:.3f} token by token)"
    )
    if drift.similarity is None or drift.other_similarity is None:
        return f"{text}."
    return f"{text}; different inputs are {drift.other_similarity:.2f} alike in it, {drift.similarity:.2f} in {first}."


def _outputs(first: str, drifts: Sequence[tuple[str, OutputDrift]]) -> PageSection:
    rows = [
        {
            "model": name,
            "relative distance": drift.relative_distance,
            "cosine to the first": drift.cosine,
            "similarity between inputs": drift.other_similarity,
            f"the same in {first}": drift.similarity,
            "sequences": drift.sequences,
            "tokens": drift.tokens,
        }
        for name, drift in drifts
    ]
    return PageSection(
        id="outputs",
        title="Outputs",
        lead=" ".join(drift_words(first, name, drift) for name, drift in drifts),
        blocks=[table_of("outputs-table", "Outputs compared", rows)],
        is_closed=True,
    )


def _weights(names: Sequence[str], analyses: Sequence[Analysis]) -> PageSection:
    marks, values = [], []
    for index, (name, analysis) in enumerate(zip(names, analyses, strict=True)):
        own = [layer.plain.rho_dc for layer in analysis.inspection.layers if layer.plain is not None]
        if own:
            marks.append(_line(name, own, index, is_same=False))
            values += own
    low, high = extent(values)
    chart = Chart(
        id="compare-rho",
        alt="ρ_dc of every layer over relative depth, one line per model; the table has every number.",
        x=RELATIVE,
        panels=(Panel(title="ρ_dc: growth of what all tokens share", y=numbers(low, high), marks=tuple(marks)),),
        caption="From weights alone. Below 1 what all tokens share shrinks.",
    )
    rows = [
        {
            "model": name,
            **{key: row[key] for key in ("stack", "layer", "rho_dc", "min_real", "max_real", "excess", "positivity")},
        }
        for name, analysis in zip(names, analyses, strict=True)
        for row in analysis.inspection.rows()
    ]
    blocks: list[Block] = [*([chart] if marks else []), table_of("compare-weights", "Weights per layer", rows)]
    return PageSection(
        id="weights", title="Weights", lead="the eigenvalues of each layer", blocks=blocks, is_closed=True
    )
