"""The columns of a survey, and the rows of one model.

A survey is one table with a row per model, per layer and per head, in files by level (`level=model/`, `level=layer/`,
`level=head/`). A column that does not apply at a level is empty there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from oversmooth.results import HeadSpectrum, Inspection, LayerInspection, Row, Spectrum, StackFacts
from oversmooth.results.inspection import CLEARLY

VERSION = 2
"""Raised by one whenever a column changes meaning or disappears."""
LEVELS = ("model", "layer", "head")
Kind = Literal["text", "whole", "number", "yes or no"]


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind
    meaning: str


IDENTITY = (
    Column("target", "text", "what was surveyed, as the list names it"),
    Column("status", "text", "read, refused (nothing to read, or not by us) or failed (may succeed another time)"),
    Column("error", "text", "kind of error of a model that was not read"),
    Column("reason", "text", "why a model was not read, or which layers of it could not be"),
    Column("year", "whole", "when it was made public, where the list says so"),
    Column("source", "text", "how it was read: hub, url, folder, safetensors, pickle, gguf, timm"),
)
MODEL = (
    Column("model_type", "text", "what its config calls it"),
    Column("family", "text", "the declaration that was applied, or several with commas"),
    Column("d_model", "whole", "width of the stream; of the first stack, at level model"),
    Column("n_heads", "whole", "query heads per layer"),
    Column("n_kv", "whole", "value heads per layer"),
    Column("d_head", "whole", "channels of a head"),
    Column("residual_form", "text", "pre, post or parallel"),
    Column("norm", "text", "layer or rms"),
    Column("n_layers", "whole", "layers with softmax attention; of all stacks, at level model"),
    Column("block_parameters", "whole", "12 * layers * d_model^2 over all blocks: a size class, not a count"),
    Column("mean_excess", "number", "mean of `excess` over the layers of a model that have one"),
    Column("mean_excess_spread", "number", "its standard deviation by chance"),
    Column("above_chance_share", "number", "share of these layers whose excess is clearly above chance, by 3 spreads"),
    Column("below_chance_share", "number", "share of them whose excess is clearly below it"),
    Column("mean_positivity", "number", "mean of `positivity` over the layers of a model that have one"),
    Column(
        "mean_tendency",
        "number",
        "mean of log folded_rho_dc, or of log rho_dc without norms: what claims are judged by",
    ),
    Column("sharpening_share", "number", "share of the layers of a model where that logarithm is below 0, likewise"),
    Column("smoothing_share", "number", "share where it is above 0, likewise"),
)
LAYER = (
    Column("stack", "text", "which stack of a model with several; empty otherwise"),
    Column("layer", "whole", "number of the block"),
    Column("relative_depth", "number", "0 at the first layer of its stack, 1 at the last; 0 for a single one"),
    Column("passes", "whole", "how often its weights run in one forward pass"),
    Column("rho_dc", "number", "largest |1 + lambda| of H = W_V W_O: growth of what all tokens share"),
    Column("dominating_real", "number", "the eigenvalue where it is largest"),
    Column("dominating_imag", "number", "its imaginary part, not negative"),
    Column("spectral_radius", "number", "largest |lambda|"),
    Column("min_real", "number", "smallest real part of an eigenvalue"),
    Column("max_real", "number", "largest real part of an eigenvalue"),
    Column(
        "negative_share", "number", "share of eigenvalues with negative real part; empty where only extremes are known"
    ),
    Column("route", "text", "dense: all eigenvalues; krylov: the extremes, certified by `residual`"),
    Column("residual", "number", "largest residual of a reported extreme, as a share of the spectral radius"),
    Column("folded_rho_dc", "number", "as rho_dc, with the norms and gains of the layer multiplied in"),
    *(
        Column(f"folded_{name}", "number", "likewise")
        for name in ("dominating_real", "dominating_imag", "spectral_radius", "min_real", "max_real", "negative_share")
    ),
    Column("folded_route", "text", "likewise"),
    Column("folded_residual", "number", "likewise"),
    Column("folding", "text", "what was multiplied in"),
    Column("null_rho_dc", "number", "rho_dc of maps of the same singular values in random directions"),
    Column("excess", "number", "log(rho_dc / null_rho_dc): 0 is chance; empty where chance was not worked out"),
    Column("excess_spread", "number", "its standard deviation by chance"),
    Column(
        "positivity", "number", "sum Re(lambda) / sum |lambda|: +1 only smooths, -1 only sharpens; empty for extremes"
    ),
    Column("positivity_spread", "number", "its standard deviation by chance"),
    Column("asymmetry", "number", "norm(H - H^T) / (2 norm(H)); empty where only extremes were asked for"),
    Column("value_norm", "number", "Frobenius norm of H; empty where only extremes were asked for"),
    Column("bias_norm", "number", "length of what the value bias adds to every token"),
    Column("norm_negative_share", "number", "share of negative weights in the norm of attention with the most of them"),
    Column("norm_smallest", "number", "smallest weight of a norm of attention"),
    Column("norm_largest", "number", "largest weight of a norm of attention"),
)
HEAD = (
    Column("head", "whole", "number of the head; the eigenvalues of its row are those of its own map"),
    Column("kv_head", "whole", "the value head it reads"),
)
PROVENANCE = (
    Column("weights_sha256", "text", "hash over name, dtype, shape and bytes of every tensor that was read"),
    Column(
        "file_sha256",
        "text",
        "hash of the weights and their layout (of files, as the server tells it; on this machine of tensors): equal ones are "
        "read once",
    ),
    Column("commit", "text", "commit of the repository, where its server tells it"),
    Column("weight_dtypes", "text", "how the tensors are stored"),
    Column("compute_dtype", "text", "precision of the eigenvalues"),
    Column("extremes", "yes or no", "whether only the extremes were asked for"),
    Column("oversmooth", "text", "version"),
    Column("torch", "text", "version"),
)
EFFORT = (
    Column("copied", "yes or no", "whether the rows are those of another target with the same files"),
    Column("bytes_read", "whole", "bytes of tensors that were read"),
    Column("bytes_received", "whole", "bytes that came over the network for this target"),
    Column("requests", "whole", "requests that were sent for this target"),
    Column("seconds", "number", "how long it took, waits included"),
    Column("surveyed_at", "text", "UTC, to the second"),
)
"""What reading cost; the only columns that differ between two surveys of the same models."""
COLUMNS = (*IDENTITY, *MODEL, *LAYER, *HEAD, *PROVENANCE, *EFFORT)
NAMES = tuple(column.name for column in COLUMNS)


def arrow_schema() -> Any:
    """The same for pyarrow; meanings and the version of the schema go into every file."""
    import pyarrow

    kinds = {"text": pyarrow.string(), "whole": pyarrow.int64(), "number": pyarrow.float64()}
    kinds["yes or no"] = pyarrow.bool_()
    fields = [pyarrow.field(each.name, kinds[each.kind], metadata={"meaning": each.meaning}) for each in COLUMNS]
    return pyarrow.schema(fields, metadata={"oversmooth_survey": str(VERSION)})


# --- an inspection as rows of the table; a model that was not read as one row with the reason ---

BY_CHANCE = ("excess", "excess_spread", "positivity", "positivity_spread")
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
    unknown = merged.keys() - set(NAMES)
    assert not unknown, f"the schema has no column {', '.join(sorted(unknown))}"
    return {name: merged.get(name) for name in NAMES}


def _provenance(inspection: Inspection) -> Row:
    provenance = inspection.provenance
    versions = dict(provenance.versions)
    same = ("source", "model_type", "weights_sha256", "compute_dtype", "bytes_read")
    return {
        "status": "read",
        **{name: getattr(provenance, name) for name in same},
        "weight_dtypes": ", ".join(provenance.weight_dtypes),
        **{name: versions.get(name) for name in ("oversmooth", "torch")},
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
        **_beyond_chance(inspection),
        "reason": "; ".join(said) or None,
    }


def _beyond_chance(inspection: Inspection) -> Row:
    """Excess and positivity of the layers that have them, together."""
    nulls = [layer.null for layer in inspection.layers if layer.null is not None]
    known = [(n.excess, n.excess_spread) for n in nulls if n.excess is not None and n.excess_spread is not None]
    positivities = [null.positivity for null in nulls if null.positivity is not None]
    found: Row = {"mean_positivity": fmean(positivities) if positivities else None}
    if known:
        found |= {
            "mean_excess": fmean(excess for excess, _ in known),
            "mean_excess_spread": math.hypot(*(spread for _, spread in known)) / len(known),
            "above_chance_share": fmean(excess > CLEARLY * spread for excess, spread in known),
            "below_chance_share": fmean(excess < -CLEARLY * spread for excess, spread in known),
        }
    return found


def _sizes(stack: StackFacts) -> Row:
    same = ("family", "d_model", "n_heads", "n_kv", "d_head", "norm")
    return {**{name: getattr(stack, name) for name in same}, "residual_form": stack.residual}


def _layer(layer: LayerInspection) -> Row:
    attention = [norm for norm in layer.norms if norm.role.startswith("attn")]
    return {
        "passes": len(layer.passes),
        **_spectrum(layer.plain, ""),
        **_spectrum(layer.folded, "folded_"),
        **{name: getattr(layer, name) for name in ("asymmetry", "value_norm", "bias_norm")},
        "null_rho_dc": layer.null and layer.null.rho_dc,
        **{name: layer.null and getattr(layer.null, name) for name in BY_CHANCE},
        "folding": layer.folding or None,
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
