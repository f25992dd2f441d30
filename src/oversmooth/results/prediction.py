"""What the theory says about every layer, and how it stands beside what was measured."""

from dataclasses import dataclass
from typing import ClassVar

from oversmooth.results.base import Missing, Provenance, Row, SavedResult, fields_of
from oversmooth.results.layer_prediction import LayerPrediction, Statement, WhatIfPrediction
from oversmooth.results.measurement import DataFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One rung beside the measurement, over the layers of a stack."""

    stack: str
    rung: int
    name: str
    layers: int
    sign_agreement: float | None
    """Share of layers whose sign is right."""
    rank_correlation: float | None
    """Spearman's, over layers."""
    mean_error: float | None
    """Mean absolute difference to the measurement."""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPrediction:
    """Attention of the whole stack, one layer after the other, at measured attention; for isotropic features."""

    stack: str
    layers: int
    sequences: int
    exponent: float | None
    """`(log growth_ac - log growth_dc) / layers`; negative smooths."""
    standard_error: float | None
    log_growth_dc: float | None
    log_growth_ac: float | None
    leading_exponent: float | None
    """The same for the directions that grow most among the probes."""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prediction(SavedResult):
    """What the theory says about every layer of a model on real inputs, beside what was measured there."""

    kind: ClassVar[str] = "prediction"
    provenance: Provenance
    data: DataFacts
    is_partial: bool
    solved: int
    """Sequences for which eigenvalue problems were solved (rung 0, heads, depth); the rest of the ladder uses all."""
    layers: tuple[LayerPrediction, ...]
    agreements: tuple[Agreement, ...]
    depths: tuple[DepthPrediction, ...]
    verdict: tuple[Statement, ...]
    problems: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        """One flat row per layer and pass: exponents, regime, rungs and the measurement."""
        return [_layer_row(layer) for layer in self.layers]

    def head_rows(self) -> list[Row]:
        """One flat row per head and pass."""
        return [
            {"stack": layer.stack, "layer": layer.layer, "depth": layer.depth, **_without(head, "missing")}
            for layer in self.layers
            for head in layer.heads
        ]

    def what_if_rows(self) -> list[Row]:
        """One flat row per layer and change, the layer as it is first."""
        return [row for layer in self.layers for row in _what_if_rows(layer)]

    def simulation_rows(self) -> list[Row]:
        """One flat row per layer and recorded repetition."""
        return [
            {"stack": layer.stack, "layer": layer.layer, "depth": layer.depth, **_without(step, "missing")}
            for layer in self.layers
            for step in layer.simulation
        ]

    def __repr__(self) -> str:
        seen, regimes = ([getattr(layer, name) for layer in self.layers] for name in ("direction", "regime"))
        counts = [
            ", ".join(f"{words.count(word)} {word or 'not measured'}" for word in dict.fromkeys(words))
            for words in (seen, regimes)
        ]
        partial = (f", {self.provenance.shares}" if self.provenance.hybrids else "") + ", partial" * self.is_partial
        return (
            f"<Prediction for {self.provenance.target}, {len(regimes)} layers: one pass {counts[0]}; "
            f"if repeated {counts[1]}{partial}>"
        )

    def _title(self) -> str:
        return f"Prediction for {self.provenance.target}"


def _without(record: object, *names: str) -> Row:
    return {name: value for name, value in fields_of(record).items() if name not in names}


def _layer_row(layer: LayerPrediction) -> Row:
    row: Row = {
        "stack": layer.stack,
        "layer": layer.layer,
        "depth": layer.depth,
        "direction": layer.direction,
        "regime": layer.regime,
    }
    for view, found in (("plain", layer.plain), ("folded", layer.folded)):
        row |= {
            f"{view}_{name}": found and getattr(found, name)
            for name in ("rho_dc", "rho_ac", "exponent", "half_life", "regime", "limit_rank", "residual")
        }
    row |= {f"rung_{rung.rung}": rung.mean for rung in layer.rungs}
    return row | {
        "measured": layer.measured,
        "measured_standard_error": layer.measured_standard_error,
        "measured_sequences": layer.measured_sequences,
        "measured_low": layer.measured_interval and layer.measured_interval[0],
        "measured_high": layer.measured_interval and layer.measured_interval[1],
        "identity_error": layer.identity_error,
        "carries": layer.carries,
        "explained_from": layer.explained_from,
        "scale": layer.scale,
        "scale_spread": layer.scale_spread,
        "leak": layer.leak,
        "is_causal": layer.is_causal,
    }


def _what_if_rows(layer: LayerPrediction) -> list[Row]:
    acting = layer.plain if layer.acting == "plain" or layer.folded is None else layer.folded
    original = WhatIfPrediction(
        name="as it is",
        not_applicable=None,
        rho_dc=acting.rho_dc,
        rho_ac=acting.rho_ac,
        regime=layer.regime,
        rungs=layer.rungs,
    )
    return [
        {
            "stack": layer.stack,
            "layer": layer.layer,
            "depth": layer.depth,
            "what_if": change.name,
            "rho_dc": change.rho_dc,
            "rho_ac": change.rho_ac,
            "regime": change.regime,
            **{f"rung_{rung.rung}": rung.mean for rung in change.rungs or ()},
            "not_applicable": change.not_applicable,
        }
        for change in (original, *layer.what_ifs)
    ]
