"""A section for a model card: the hub's evaluation results as YAML, and the same for readers."""

import json

from oversmooth.output.markdown_text import table_text
from oversmooth.output.report.words import headline
from oversmooth.results import Analysis, Measurement

SHOWN = {"cosine": "mean cosine between tokens", "hfc_lfc": "HFC/LFC", "effective_rank_share": "effective rank share"}
"""Metrics of a card, with what they are called there."""


def card(analysis: Analysis, name: str) -> str:
    """Front matter with `model-index`, and a Markdown section; `name` is that of the model."""
    return f"{model_index(analysis, name)}\n{card_section(analysis)}"


def model_index(analysis: Analysis, name: str) -> str:
    """The metadata block that the hub reads; every string is quoted as JSON is, which YAML understands."""
    lines = ["---", "model-index:", f"- name: {json.dumps(name)}", "  results:"]
    measurement = analysis.measurement
    results = _last(measurement) if measurement is not None else {}
    if measurement is None or not results:
        return "\n".join([*lines[:-1], "  results: []", "---", ""])
    lines += ["  - task:", "      type: feature-extraction", "      name: smoothing of token features"]
    lines += ["    dataset:", "      type: own", f"      name: {json.dumps(measurement.data.description)}"]
    lines += [f"      revision: {json.dumps(measurement.data.sha256)}", "    metrics:"]
    for metric, value in results.items():
        lines += [f"    - type: {metric}", f"      name: {json.dumps(SHOWN[metric] + ' after the last block')}"]
        lines += [f"      value: {value:.6g}"]
    return "\n".join([*lines, "---", ""])


def card_section(analysis: Analysis) -> str:
    """What a reader of the card should know, and how to repeat it."""
    parts = ["## Oversmoothing", headline(analysis)]
    if analysis.measurement is not None:
        parts.append(_over_depth(analysis.measurement))
        data = analysis.measurement.data
        sequences = f"{data.sequences} sequence{'s' * (data.sequences != 1)}"
        parts.append(f"Measured on {sequences}, {data.tokens:,} tokens: {data.description}.")
    version = dict(analysis.inspection.provenance.versions).get("oversmooth", "")
    parts.append(f"Made with oversmooth {version}" + (f": `{analysis.command}`." if analysis.command else "."))
    return "\n\n".join(parts) + "\n"


def _over_depth(measurement: Measurement) -> str:
    """First, middle and last block."""
    rows = []
    for metric in [name for name, _ in measurement.definitions if name in SHOWN]:
        curve = [point.mean for point in measurement.curve(metric) if point.mean is not None]
        if curve:
            rows.append([SHOWN[metric], *(f"{curve[i]:.3f}" for i in (0, len(curve) // 2, -1))])
    return table_text(["", "embedding", "half way", "after the last block"], rows)


def _last(measurement: Measurement) -> dict[str, float]:
    found = {}
    for metric in [name for name, _ in measurement.definitions if name in SHOWN]:
        curve = [point.mean for point in measurement.curve(metric) if point.mean is not None]
        if curve:
            found[metric] = curve[-1]
    return found
