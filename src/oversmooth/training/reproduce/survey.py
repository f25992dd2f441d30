"""Claims 1 to 4: what pretrained and trained models do, and what their weights say."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from oversmooth.results import Analysis, LayerPrediction
from oversmooth.training.reproduce.claim import Evidence, Finding, Judgement
from oversmooth.training.reproduce.training import DIGITS, VARIANTS
from oversmooth.training.reproduce.workshop import Workshop

AGREEMENT = 0.75
"""Share of layers whose sign has to be right for "decides"; half of them would be chance."""


def similarity_over_depth(workshop: Workshop) -> Finding:
    """Claim 1: mean cosine at the embedding and after the last layer."""
    rows = []
    for name, analysis in workshop.surveyed():
        assert analysis.measurement is not None
        for stack in dict.fromkeys(value.stack for value in analysis.measurement.values):
            cosine = [p.mean for p in analysis.measurement.curve("cosine", stack=stack) if p.mean is not None]
            ratio = [p.mean for p in analysis.measurement.curve("hfc_lfc", stack=stack) if p.mean is not None]
            rises = sum(after > before for before, after in pairwise(cosine))
            rows.append(
                {
                    "model": f"{name} {stack}".strip(),
                    "cosine_embedding": round(cosine[0], 4),
                    "cosine_last": round(cosine[-1], 4),
                    "hfc_lfc_embedding": round(ratio[0], 4),
                    "hfc_lfc_last": round(ratio[-1], 4),
                    "layers_that_raise_it": f"{rises} of {len(cosine) - 1}",
                    "similarity": "rises" if cosine[-1] > cosine[0] else "falls",
                }
            )
    ways = Counter(row["similarity"] for row in rows)
    judgement: Judgement = "confirmed" if len(ways) == 2 else "undecided"
    because = f"similarity rises in {ways['rises']} and falls in {ways['falls']} of {len(rows)} stacks"
    return Finding(
        judgement=judgement,
        because=because + ("" if judgement == "confirmed" else "; too few models to say that the other never happens"),
        evidence=(Evidence(title="Similarity over depth", rows=tuple(rows)),),
    )


def dominating_eigenvalue(workshop: Workshop) -> Finding:
    """Claim 2: the sign of rung 0 beside the sign of the measured change, layer by layer."""
    analyses = _everything(workshop)
    rows, right, smoothed, total = [], 0, 0, 0
    for name, analysis in analyses:
        pairs = [
            (layer.rungs[0].mean, layer.measured)
            for layer in _layers(analysis)
            if layer.rungs[0].mean is not None and layer.measured is not None
        ]
        agree = sum((rung < 0) == (measured < 0) for rung, measured in pairs)
        measured_smoothing = sum(measured < 0 for _, measured in pairs)
        heads = [head for layer in _layers(analysis) for head in layer.heads]
        rows.append(
            {
                "model": name,
                "layers": len(pairs),
                "sign_right": agree,
                "measured_smoothing": measured_smoothing,
                **{
                    f"predicted_{word}": sum(layer.regime == word for layer in _layers(analysis))
                    for word in ("smoothing", "sharpening")
                },
                "heads_smoothing": sum(head.smoothing_share > 0.5 for head in heads),
                "heads": len(heads),
            }
        )
        right, smoothed, total = right + agree, smoothed + measured_smoothing, total + len(pairs)
    share, constant = right / total, max(smoothed, total - smoothed)
    decides = share >= AGREEMENT and right > constant
    judgement: Judgement = "confirmed" if decides else "refuted" if share <= 0.5 else "undecided"
    rungs = tuple(_agreement_by_rung(analyses))
    return Finding(
        judgement=judgement,
        because=f"the sign of the dominating eigenvalue is that of the measured change in {right} of {total} layers; "
        f"one answer for all layers would be right in {constant}",
        evidence=(
            Evidence(title="Dominating eigenvalue beside the measurement", rows=tuple(rows)),
            Evidence(title="The same on every rung of the ladder", rows=rungs),
        ),
        runs=_digits_folders(workshop),
    )


def without_skip(workshop: Workshop) -> Finding:
    """Claim 3: every layer with its skip connection taken away, at measured attention."""
    rows = [_changed_regimes(name, analysis, "no_skip") for name, analysis in _everything(workshop)]
    counts = Counter[str]()
    for row in rows:
        counts.update({word: row[word] for word in ("smoothing", "sharpening", "neutral", "undecided")})
    judgement: Judgement = (
        "refuted" if counts["sharpening"] or counts["neutral"] else "undecided" if counts["undecided"] else "confirmed"
    )
    return Finding(
        judgement=judgement,
        because=f"without the skip connection {counts['smoothing']} of {sum(counts.values())} layers smooth",
        evidence=(Evidence(title="Regimes without the skip connection", rows=tuple(rows)),),
        runs=_digits_folders(workshop),
    )


def sign_of_norms(workshop: Workshop) -> Finding:
    """Claim 4: every pre-norm layer with the signs of its norm weights flipped."""
    rows = []
    moved = flipped = total = 0
    for name, analysis in _everything(workshop):
        for layer in _layers(analysis):
            change = next(c for c in layer.what_ifs if c.name == "flip_norms")
            if change.not_applicable or change.rho_ac is None or change.rho_dc is None or layer.rungs[0].mean is None:
                continue
            exponent = math.log(change.rho_ac) - math.log(change.rho_dc)
            total += 1
            moved += abs(exponent - layer.rungs[0].mean) > 1e-3
            flipped += change.regime != layer.regime
            rows.append(
                {
                    "model": name,
                    "layer": layer.layer,
                    "exponent": round(layer.rungs[0].mean, 4),
                    "flipped": round(exponent, 4),
                    "regime": layer.regime,
                    "regime_flipped": change.regime,
                }
            )
    judgement: Judgement = "undecided" if not total else "confirmed" if flipped else "undecided" if moved else "refuted"
    return Finding(
        judgement=judgement,
        because=f"flipping signs moves the exponent of {moved} of {total} pre-norm layers and the regime of {flipped}",
        evidence=(Evidence(title="Flipped signs of the norm weights", rows=tuple(rows)),),
        runs=_digits_folders(workshop),
    )


def _layers(analysis: Analysis) -> tuple[LayerPrediction, ...]:
    return analysis.prediction.layers if analysis.prediction is not None else ()


def _digits(workshop: Workshop) -> Iterator[tuple[str, Analysis]]:
    """Models trained on digits, one of each variant."""
    for variant in VARIANTS:
        yield f"digits {variant}", workshop.trained(DIGITS.wanted(variant, workshop.seeds[0])).analysis


def _digits_folders(workshop: Workshop) -> tuple[str, ...]:
    return tuple(DIGITS.wanted(variant, workshop.seeds[0]).folder for variant in VARIANTS)


def _everything(workshop: Workshop) -> list[tuple[str, Analysis]]:
    return [*workshop.surveyed(), *_digits(workshop)]


def _changed_regimes(name: str, analysis: Analysis, change: str) -> dict[str, object]:
    found = [next(c for c in layer.what_ifs if c.name == change) for layer in _layers(analysis)]
    words = Counter(c.regime for c in found if not c.not_applicable)
    regimes = {word: words[word] for word in ("smoothing", "sharpening", "neutral")}
    return {"model": name, **regimes, "undecided": sum(words.values()) - sum(regimes.values())}


def _agreement_by_rung(analyses: list[tuple[str, Analysis]]) -> Iterator[dict[str, object]]:
    layers = [layer for _, analysis in analyses for layer in _layers(analysis) if layer.measured is not None]
    for rung in range(6):
        pairs = [(layer.rungs[rung].mean, layer.measured) for layer in layers]
        known = [(value, measured) for value, measured in pairs if value is not None and measured is not None]
        right = sum((value < 0) == (measured < 0) for value, measured in known)
        yield {"rung": f"{rung} {layers[0].rungs[rung].name}", "sign_right": right, "layers": len(known)}
