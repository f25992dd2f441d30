"""An inspection as rows of the table; a model that was not read as one row with the reason."""

from collections.abc import Mapping, Sequence
from typing import Any

from oversmooth.results import HeadSpectrum, Inspection, LayerInspection, Row, Spectrum, StackFacts
from oversmooth.surveys.schema import NAMES

SPECTRUM = ("rho_dc", "spectral_radius", "min_real", "max_real", "negative_share", "route", "residual")


def rows_of(inspection: Inspection, known: Mapping[str, Any]) -> list[tuple[str, Row]]:
    """Level and row of the model, of every layer and of every head; `known` is what all of them have."""
    shared = {**known, **_provenance(inspection)}
    stacks = {stack.name: stack for stack in inspection.stacks}
    counts = {name: sum(layer.stack == name for layer in inspection.layers) for name in stacks}
    found = [("model", _row(shared, _model(inspection)))]
    seen: dict[str, int] = {}
    for layer in inspection.layers:
        position = seen[layer.stack] = seen.get(layer.stack, -1) + 1
        place = {
            **_sizes(stacks[layer.stack]),
            "n_layers": counts[layer.stack],
            "stack": layer.stack,
            "layer": layer.layer,
            "relative_depth": position / max(counts[layer.stack] - 1, 1),
        }
        found.append(("layer", _row(shared, place, _layer(layer))))
        found += [("head", _row(shared, place, _head(head))) for head in layer.heads]
    return found


def row_without_numbers(known: Mapping[str, Any], *, status: str, error: str, reason: str) -> tuple[str, Row]:
    """The row of a model that was not read."""
    return "model", _row({**known, "status": status}, {"error": error, "reason": reason})


def _row(*parts: Mapping[str, Any]) -> Row:
    """Every column of the schema, in its order."""
    merged = {name: value for part in parts for name, value in part.items()}
    return {name: merged.pop(name, None) for name in NAMES} | _nothing_left(merged)


def _nothing_left(rest: Mapping[str, Any]) -> Row:
    assert not rest, f"the schema has no column {', '.join(rest)}"
    return {}


def _provenance(inspection: Inspection) -> Row:
    provenance = inspection.provenance
    versions = dict(provenance.versions)
    return {
        "status": "read",
        "source": provenance.source,
        "model_type": provenance.model_type,
        "weights_sha256": provenance.weights_sha256,
        "weight_dtypes": ", ".join(provenance.weight_dtypes),
        "compute_dtype": provenance.compute_dtype,
        "bytes_read": provenance.bytes_read,
        "oversmooth": versions.get("oversmooth"),
        "torch": versions.get("torch"),
    }


def _model(inspection: Inspection) -> Row:
    tendencies = [layer.tendency for layer in inspection.layers if layer.tendency is not None]
    unreadable = [layer for layer in inspection.layers if layer.unreadable]
    said = [f"layer {layer.layer}: {layer.unreadable}" for layer in unreadable[:3]]
    said += [f"{part.field}: {part.reason}" for part in inspection.missing[:3]]
    return {
        **_sizes(inspection.stacks[0]),
        "family": ", ".join(dict.fromkeys(stack.family for stack in inspection.stacks)),
        "n_layers": len(inspection.layers),
        "block_parameters": sum(12 * stack.blocks * stack.d_model**2 for stack in inspection.stacks),
        "mean_tendency": sum(tendencies) / len(tendencies) if tendencies else None,
        "sharpening_share": sum(one < 0 for one in tendencies) / len(tendencies) if tendencies else None,
        "smoothing_share": sum(one > 0 for one in tendencies) / len(tendencies) if tendencies else None,
        "reason": "; ".join(said) or None,
    }


def _sizes(stack: StackFacts) -> Row:
    return {
        "family": stack.family,
        "d_model": stack.d_model,
        "n_heads": stack.n_heads,
        "n_kv": stack.n_kv,
        "d_head": stack.d_head,
        "residual_form": stack.residual,
        "norm": stack.norm,
    }


def _layer(layer: LayerInspection) -> Row:
    attention = [norm for norm in layer.norms if norm.role.startswith("attn")]
    return {
        "passes": len(layer.passes),
        **_spectrum(layer.plain, ""),
        **_spectrum(layer.folded, "folded_"),
        "folding": layer.folding or None,
        "tendency": layer.tendency,
        "asymmetry": layer.asymmetry,
        "value_norm": layer.value_norm,
        "bias_norm": layer.bias_norm,
        "norm_negative_share": max((norm.negative_share for norm in attention), default=None),
        "norm_smallest": min((norm.smallest for norm in attention), default=None),
        "norm_largest": max((norm.largest for norm in attention), default=None),
        "reason": layer.unreadable,
    }


def _spectrum(spectrum: Spectrum | None, prefix: str) -> Row:
    if spectrum is None:
        return {}
    found = {f"{prefix}{name}": getattr(spectrum, name) for name in SPECTRUM}
    real, imaginary = spectrum.dominating
    return found | {f"{prefix}dominating_real": real, f"{prefix}dominating_imag": imaginary}


def _head(head: HeadSpectrum) -> Row:
    names = ("head", "kv_head", "rho_dc", "spectral_radius", "min_real", "max_real", "negative_share")
    return {name: getattr(head, name) for name in names}


def copied(rows: Sequence[tuple[str, Row]], own: Mapping[str, Any]) -> list[tuple[str, Row]]:
    """The rows of a target with the same files, under another name and with what that one cost."""
    return [(level, {**row, **own, "copied": True, "bytes_read": 0}) for level, row in rows]
