"""Results of theory: `Prediction`, `LayerPrediction`, `Rung`, `Statement`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from oversmooth.results.base import Complex, Missing, Provenance, Row, SavedResult, fields_of
from oversmooth.results.inspection import StreamCheck
from oversmooth.results.measurement import DataFacts

if TYPE_CHECKING:
    from oversmooth.output.figures import Drawing

# --- what the theory says about one pass through one layer, beside what was measured there ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Asymptotic:
    """Infinite repetition of one layer at fixed attention; numbers are means over the sequences it was solved for."""

    view: str
    """`plain`: value and output weights alone. `folded`: with norms and gains, at the measured token scale."""
    rho_dc: float
    """Growth per repetition of what all tokens share."""
    rho_ac: float
    """Growth per repetition of what differs between tokens."""
    rho_ac_low: float
    rho_ac_high: float
    """Bounds of rho_ac, from the residual where the search converged and from norms where it did not."""
    exponent: float | None
    """`log rho_ac - log rho_dc`; negative smooths."""
    standard_error: float | None
    half_life: float | None
    """Repetitions after which HFC/LFC has halved (or doubled)."""
    regime: str
    """smoothing, sharpening, neutral, or mixed where at least two sequences each are in two of these; else undecided."""
    sequences: int
    smoothing: int
    sharpening: int
    neutral: int
    undecided: int
    """How many sequences are in each regime."""
    dimension: float
    """Eigenvalues that share the largest modulus: 1 for a real one, 2 for a conjugate pair, more for ties."""
    limit_rank: float | None
    """Effective rank of the features in the limit; of a conjugate pair, which turns forever, its mean over a turn."""
    angle_convergence: bool | None
    """Whether all tokens become parallel, up to sign, in the limit."""
    is_absolute: bool
    """Whether tokens of one common scale become equal in absolute size too (`rho_ac < 1`)."""
    route: str
    """`dense`, `krylov` or `diagonals` (causal attention)."""
    residual: float
    """Largest relative residual of rho_ac over the sequences; 0 where every eigenvalue was computed."""
    applications: float
    """Mean number of products with the layer that finding rho_ac took."""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPrediction:
    """One head by itself, with the skip connection: the one-head theorem; means over sequences."""

    head: int
    rho_dc: float
    rho_ac: float
    exponent: float | None
    smoothing_share: float
    """Share of sequences for which the pair with the eigenvalue 1 of attention dominates."""
    value_eigenvalue: Complex
    """Eigenvalue of the head's H in the dominating pair."""
    attention_eigenvalue: Complex
    """Eigenvalue of the head's attention in the dominating pair; 1 smooths."""
    dobrushin: float
    """Largest total variation distance between two rows of attention, in [0, 1]; below 1, attention contracts."""
    certificate: str
    """smoothing or sharpening where the signs of its eigenvalues guarantee it for any attention; otherwise empty."""
    certified_rate: float | None
    """Factor per layer that the certificate bounds: at most (smoothing) or at least (sharpening)."""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rung of the ladder from the theorem to the measurement: a predicted change of `log(HFC/LFC)`."""

    rung: int
    name: str
    mean: float | None
    standard_error: float | None
    sequences: int
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPrediction:
    """The ladder of a changed layer, on the same features."""

    name: str
    not_applicable: str | None
    """Why the change means nothing here; everything else is empty then."""
    rho_dc: float | None = None
    rho_ac: float | None = None
    regime: str | None = None
    rungs: tuple[Rung, ...] = ()
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One layer repeated so many times at fixed attention, on the first sequence."""

    step: int
    cosine: float | None
    cosine_abs: float | None
    hfc_lfc: float | None
    effective_rank: float | None
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One part of a verdict and how it is known."""

    text: str
    basis: str
    """The kind, and for what is computed also where: proved, computed at measured attention, computed at measured
    attention and scale, computed for any attention at measured scale, or observed."""
    kind: str = ""
    """proved: every assumption of a theorem holds here. computed: from the weights, at what was measured. observed: seen
    on these inputs. Empty in results of versions before 0.2."""
    is_remark: bool = False
    """Whether it should be read even where only a table is shown: a guarantee, a disagreement, or nothing decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrediction:
    """One pass through one attention layer."""

    stack: str
    layer: int
    """Index of the block whose weights act."""
    depth: int
    """Depth at which it runs, counted in passes from 1, as in a measurement."""
    is_causal: bool
    tokens: float
    """Mean number of tokens per sequence."""
    regime: str
    """What infinite repetition would do, of the operator that acts across the branch: `rungs[0]`. What one pass was seen
    to do is `direction`."""
    acting: str
    """Which view acts across the branch: `folded` in pre-norm layers, `plain` where the norm follows the sum."""
    plain: Asymptotic
    folded: Asymptotic | None
    scale: float | None
    """Common token scale that the norms divide by (mean over tokens); `None` where none acts before the sum."""
    scale_spread: float | None
    """Standard deviation of the scale over tokens, relative to its mean."""
    rungs: tuple[Rung, ...]
    """Rungs 0 to 5, or 6 where gains act on what is written; the last equals `measured` up to rounding."""
    leak: float | None = None
    """How much of what all tokens share a gate, a sink or a norm on heads turns into differences, in [0, 1]: the size of
    the part of `T(1 w^T)` that differs between tokens, w their mean. 0 where every token writes with the same gains."""
    measured: float | None
    """Observed change of `log(HFC/LFC)` across the attention branch; negative smooths."""
    measured_standard_error: float | None
    measured_sequences: int = 0
    measured_interval: tuple[float, float] | None = None
    """95% interval of the observed change over sequences (Student's t); `None` for a single sequence."""
    direction: str = ""
    """What one pass was seen to do: smoothing, sharpening, or no clear change where the interval holds zero."""
    identity_error: float
    """Largest difference between the last rung and the measurement over the sequences."""
    carries: str | None
    """The step between rungs that changes most: repetition, features, coupling, biases, token scale or gains."""
    explained_from: int | None
    """The lowest rung from which on every rung has the sign of the measurement."""
    heads: tuple[HeadPrediction, ...] = ()
    what_ifs: tuple[WhatIfPrediction, ...] = ()
    simulation: tuple[SimulatedStep, ...] = ()
    verdict: tuple[Statement, ...] = ()
    missing: tuple[Missing, ...] = ()

    @property
    def whole(self) -> Asymptotic:
        """Infinite repetition of the layer with its norms, wherever they stand."""
        return self.plain if self.folded is None else self.folded


# --- what the theory says about every layer, and how it stands beside what was measured ---


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
    stream: StreamCheck | None = None
    """The chain identity, checked on the first batch; `None` in results of older versions."""

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

    def plot(self) -> "Drawing":
        """The ladder from the theorem to the measurement, layer by layer; `.save(path)` keeps it."""
        from oversmooth.output.figures import prediction_drawing

        return prediction_drawing(self)

    def __repr__(self) -> str:
        seen, regimes = ([getattr(layer, name) for layer in self.layers] for name in ("direction", "regime"))
        counts = [
            ", ".join(f"{words.count(word)} {word or 'not measured'}" for word in dict.fromkeys(words))
            for words in (seen, regimes)
        ]
        partial = (f", {self.provenance.shares}" if self.provenance.hybrids else "") + ", partial" * self.is_partial
        partial += f", {self.stream.partial}" if self.stream is not None and self.stream.partial else ""
        return (
            f"<Prediction for {self.provenance.name}, {len(regimes)} layers: one pass {counts[0]}; "
            f"if repeated {counts[1]}{partial}>"
        )

    def _title(self) -> str:
        return f"Prediction for {self.provenance.name}"


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
