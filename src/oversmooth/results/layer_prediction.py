"""What the theory says about one pass through one layer, beside what was measured there."""

from dataclasses import dataclass

from oversmooth.results.base import Complex, Missing


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
