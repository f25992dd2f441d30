"""The metrics of hidden states: one decorated function each, with the sums that they share.

A metric is called with hidden states and a mask, `cosine(h, keep)`. `X` is the matrix of the n kept tokens of one
sequence, a row each; what `h` holds at dropped positions (padding, prefix tokens) never matters, not even NaN. Sums are
taken in float32, or in float64 if `h` is float64; no gradient is kept.

    HC(X) = X - 1 m^T and LC(X) = 1 m^T, with m the mean of the rows; HFC and LFC are their Frobenius norms.

**When there is no value.** A sequence with fewer than two kept tokens is the caller's to leave out (`measurable`);
given to a metric it raises. Every other sequence is answered for in `MetricValues`: where `defined` is True the value
is finite; where it is False there is none, because the formula has none (`Metric.missing_when`) or the token norms are
not finite, and `values` holds a meaningless 0. NaN never leaves this module.

**What it costs.** `evaluate` computes the metrics of one place from one `Moments`, whose parts are computed when first
asked for and shared. The default metrics write at most one temporary of the size of `h`. Matrix products are taken only
where neither autocast nor TF32 would silently shorten their digits.

A number of one place is a tensor of a few elements, one for each sequence, and every operation on it costs as much as one
on the numbers of all places. So a place leaves its sums behind, its tokens go, and metrics see the sums of all places as if
they were sequences of one large batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, pi
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oversmooth.environment import plugins
from oversmooth.errors import BadValue, UnknownName, UserCodeFailed, is_ours, user_code
from oversmooth.measurement.moments import Moments, behind_each_other, in_float64, made_of
from oversmooth.models.hooks.places import Place

# --- what a metric is, and the table of them ---


@dataclass(frozen=True, eq=False)
class MetricValues:
    """One metric on a batch: `values[i]` is a finite number where `defined[i]`, and means nothing where not."""

    values: Float[Tensor, " batch"]
    defined: Bool[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class Metric:
    """One measure of oversmoothing; call it with `(h, keep)`, or let `evaluate` share work between several."""

    name: str
    function: Callable[[Moments], Tensor]
    """One raw number per sequence, not finite where the formula has no value."""
    definition: str
    """The formula in one line, for reports."""
    smoothed: float | None = None
    """Value when all tokens are the same nonzero vector; None when that depends on the vector or on the sizes."""
    missing_when: str = ""
    """When a sequence of finite tokens has no value, for reports; empty when it always has one."""
    images_only: bool = False
    """Whether the kept tokens have to be a square grid of image patches, row by row."""
    scales: bool = False
    """Whether one token of large norm can decide the value; then `measure` also gives it without the largest token."""
    of_sums: bool = False
    """Whether it needs no tokens, only sums over them, so that `measure` computes it for all places together."""
    is_costly: bool = False
    """Whether `measure` takes it on every eighth sequence only, so that it stays cheap beside the forward pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.function.__doc__)

    def __call__(self, h: Float[Tensor, "batch token d_model"], keep: Bool[Tensor, "batch token"]) -> MetricValues:
        with torch.no_grad():
            return self.on(Moments.of(h, keep))

    def on(self, moments: Moments) -> MetricValues:
        """The values of this metric, from sums that other metrics may have asked for already."""
        raw = self.function(moments) if is_ours(self.function) else self._of_user(moments)
        defined = raw.isfinite() & moments.is_finite
        return MetricValues(raw.to(moments.dtype).masked_fill(~defined, 0), defined)

    def _of_user(self, moments: Moments) -> Tensor:
        """What a function of the user's own returns; it works on copies, so that nothing it writes reaches the run."""
        what = f"The metric {self.name!r}"
        given, tensors = copied(moments)
        versions = [tensor._version for tensor in tensors]
        with user_code(what, self.function):
            found = self.function(given)
        if [tensor._version for tensor in tensors] != versions:
            raise UserCodeFailed(
                what, "writes into the hidden states or sums that it was given; it must copy them first"
            )
        expected = (len(moments.n),)
        if not isinstance(found, Tensor) or found.is_complex():
            kind = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise UserCodeFailed(what, f"returns {kind}, not a tensor of one real number per sequence")
        if tuple(found.shape) != expected:
            shape = tuple(found.shape)
            raise BadValue(f"The shape that your metric {self.name} returns", shape, f"(batch,), here {expected}")
        return found.detach().to(moments.norms.device)


def copied(moments: Moments) -> tuple[Moments, list[Tensor]]:
    """A copy that shares no memory with the original, and the tensors in it whose versions can be told."""
    tensors: list[Tensor] = []

    def own(value: object) -> object:
        if isinstance(value, Moments):
            inner, more = copied(value)
            tensors.extend(more)
            return inner
        if isinstance(value, tuple):
            return tuple(own(part) for part in value)
        if not isinstance(value, Tensor):
            return value
        with torch.inference_mode(False):  # tensors of inference mode have no versions
            tensors.append(value.detach().clone())
        return tensors[-1]

    return made_of(type(moments), {name: own(value) for name, value in vars(moments).items()}), tensors


METRICS: dict[str, Metric] = {}


def metric(
    definition: str, smoothed: float | None = None, missing_when: str = "", **kinds: bool
) -> Callable[[Callable[[Moments], Tensor]], Metric]:
    """Enter a function into the table under its own name; the name then stands for the `Metric`."""

    def enter(function: Callable[[Moments], Tensor]) -> Metric:
        name = function.__name__
        METRICS[name] = Metric(name, function, definition, smoothed, missing_when, **kinds)
        return METRICS[name]

    return enter


# --- hidden states -> numbers: every measure of oversmoothing, defined once, one value per sequence ---

DEFAULT_METRICS = ("cosine", "hfc_lfc", "dirichlet", "token_norm")

_NO_PAIR = "fewer than two tokens are nonzero"
_NO_TOKEN = "every token is zero"


@metric("mean over i != j of x_i . x_j / (|x_i| |x_j|)", smoothed=1.0, missing_when=_NO_PAIR, of_sums=True)
def cosine(moments: Moments) -> Float[Tensor, " batch"]:
    """Mean cosine over pairs of distinct tokens, (|sum x_i/|x_i||^2 - n) / (n(n-1)); 1 means that all are parallel.

    Signed, at least -1/(n-1). Invariant to scaling each token by a positive factor, to rotating d_model and to token
    order. A pair with a zero token counts as cosine 0; without two nonzero tokens there is no angle and no value.
    """
    mean = (moments.unit_sum_squared - moments.nonzero) / (moments.n * (moments.n - 1))
    return mean.clamp(-1, 1).masked_fill(moments.nonzero < 2, torch.nan)


@metric("mean over all i, j of |x_i . x_j| / (|x_i| |x_j|)", smoothed=1.0, missing_when=_NO_PAIR)
def cosine_abs(moments: Moments) -> Float[Tensor, " batch"]:
    """Mean absolute cosine over all n^2 pairs, i = j included; 1 means that all tokens are parallel up to sign.

    The variant of Wang et al. 2022: orthogonal tokens give 1/n, not 0. Invariant to scaling each token, to rotating
    d_model and to token order. Takes n^2 numbers in float64. Zero tokens are treated as in `cosine`.
    """
    directions = in_float64(moments.x) * in_float64(moments.inverse_norms[..., None])
    mean = (directions @ directions.mT).abs().sum((1, 2)).to(moments.x.device, moments.x.dtype) / moments.n.square()
    return mean.clamp(max=1).masked_fill(moments.nonzero < 2, torch.nan)


@metric(
    "norm_F(HC(X)) / norm_F(LC(X))",
    smoothed=0.0,
    missing_when="the mean of the tokens is zero",
    scales=True,
    of_sums=True,
)
def hfc_lfc(moments: Moments) -> Float[Tensor, " batch"]:
    """Size of what differs between tokens over size of what they share, HFC / LFC; 0 means that all tokens are equal.

    Invariant to one common scale, to rotating d_model and to token order. Has no value when the mean of the tokens is
    zero to working precision: the ratio would be infinite, or made of rounding error.
    """
    return (moments.hfc_squared / moments.lfc_squared).sqrt()


@metric(
    "log(norm_F(HC(X)) / norm_F(LC(X)))",
    missing_when="all tokens are equal, or their mean is zero",
    scales=True,
    of_sums=True,
)
def log_hfc_lfc(moments: Moments) -> Float[Tensor, " batch"]:
    """Natural logarithm of `hfc_lfc`, log HFC - log LFC; a fall means smoothing, and falls add up over sub-blocks.

    Invariant like `hfc_lfc`. Has no value where that has none, nor where all tokens are equal (log 0).
    """
    return (moments.hfc_squared.log() - moments.lfc_squared.log()) / 2


@metric(
    "log(norm_F(HC(U)) / norm_F(LC(U))), u_i = x_i / |x_i|",
    missing_when="all tokens are parallel, cancel out, or are zero but one",
    of_sums=True,
)
def log_hfc_lfc_unit(moments: Moments) -> Float[Tensor, " batch"]:
    """`log_hfc_lfc` of tokens at length one, log((n-1)(1-c) / (1+(n-1)c)) / 2 with c = `cosine`; a fall means smoothing.

    Falls add up over sub-blocks to the change of what `cosine` shows: no token counts for more than another, however
    large. Invariant like `cosine`. Has no value where all tokens are parallel (log 0).
    """
    hfc_squared, lfc_squared = moments.unit_hfc_squared, moments.unit_lfc_squared
    is_rounding = lfc_squared <= (4 * torch.finfo(moments.dtype).eps) ** 2 * hfc_squared
    is_rounding |= moments.nonzero < 2
    return (hfc_squared.log() - lfc_squared.masked_fill(is_rounding, torch.nan).log()) / 2


@metric("(1/n) sum over i, j of |x_i - x_j|^2 = 2 norm_F(HC(X))^2", smoothed=0.0, scales=True, of_sums=True)
def dirichlet(moments: Moments) -> Float[Tensor, " batch"]:
    """Dirichlet energy on the complete graph, (1/n) sum_ij |x_i - x_j|^2 = 2 HFC^2; 0 means that all tokens are equal.

    Invariant to rotating d_model, to adding one vector to all tokens and to token order, but grows with the square of
    a common scale: compare it over depth only beside `token_norm`. Always has a value.
    """
    return 2 * moments.hfc_squared


@metric(
    "norm_1inf(X - 1 m^T) / norm_1inf(X), norm_1inf = sqrt(norm_1 norm_inf)",
    smoothed=0.0,
    missing_when=_NO_TOKEN,
    scales=True,
)
def residual(moments: Moments) -> Float[Tensor, " batch"]:
    """Size of X - 1 m^T over size of X in the norm sqrt(norm_1 norm_inf); 0 means that all tokens are equal.

    The residual of Dong et al. 2021 with m the token mean; norm_1 is the largest column sum of absolute values and
    norm_inf the largest row sum. Invariant to one common scale and to the order of tokens and of channels, but not to
    rotating d_model. Has no value when every token is zero.
    """
    return _norm_1inf(moments.centred) / _norm_1inf(moments.x)


def _norm_1inf(x: Float[Tensor, "batch span d_model"]) -> Float[Tensor, " batch"]:
    return (x.abs().sum(1).amax(1) * x.abs().sum(2).amax(1)).sqrt()


@metric("exp(-sum p_k log p_k), p = singular values / their sum", smoothed=1.0, missing_when=_NO_TOKEN, scales=True)
def effective_rank(moments: Moments) -> Float[Tensor, " batch"]:
    """exp of the entropy of (singular values / their sum), 0 log 0 = 0; 1 means that all tokens are parallel.

    After Roy & Vetterli 2007; at most min(n, d_model). Invariant to one common scale, to rotating d_model and to token
    order. The singular values come from a Gram matrix, so that equal tokens give 1 to about five digits. Has no value
    when every token is zero.
    """
    s = moments.singular_values
    return torch.special.entr(s / s.sum(1, keepdim=True)).sum(1).exp()


@metric("effective_rank / min(n, d_model)", missing_when=_NO_TOKEN, scales=True)
def effective_rank_share(moments: Moments) -> Float[Tensor, " batch"]:
    """`effective_rank` over the largest rank possible, min(n, d_model); 1 means that tokens fill the space evenly.

    Comparable between sequences of different length. Invariant and missing like `effective_rank`.
    """
    return effective_rank.function(moments) / moments.n.clamp(max=moments.x.shape[2])


@metric("norm_F(X)^2 / norm_2(X)^2", smoothed=1.0, missing_when=_NO_TOKEN, scales=True)
def stable_rank(moments: Moments) -> Float[Tensor, " batch"]:
    """Sum of the squared singular values over the largest, norm_F^2 / norm_2^2; 1 means that all tokens are parallel.

    Invariant to one common scale, to rotating d_model and to token order. One massive token brings it close to 1
    without any smoothing. Has no value when every token is zero.
    """
    squares = moments.singular_values.square()
    return squares.sum(1) / squares.amax(1)


@metric("mean over i of |x_i|", scales=True, of_sums=True)
def token_norm(moments: Moments) -> Float[Tensor, " batch"]:
    """Mean Euclidean norm of the tokens, (1/n) sum |x_i|; it says on what scale the features live, not how smooth.

    Invariant to rotating d_model and to token order; proportional to a common scale. Always has a value.
    """
    return moments.norms.sum(1) / moments.n


@metric("standard deviation over i of |x_i|", smoothed=0.0, scales=True, of_sums=True)
def token_norm_spread(moments: Moments) -> Float[Tensor, " batch"]:
    """Standard deviation (dividing by n) of the norms |x_i|; large beside `token_norm` means a few massive tokens.

    Such tokens carry the mean and with it LFC. Invariant like `token_norm`. Always has a value.
    """
    deviations = (moments.norms - token_norm.function(moments)[:, None]) * moments.mask
    return (deviations.square().sum(1) / moments.n).sqrt()


@metric(
    "max over i of |x_i| / median over i of |x_i|",
    smoothed=1.0,
    missing_when="half of the tokens are zero",
    of_sums=True,
)
def largest_norm(moments: Moments) -> Float[Tensor, " batch"]:
    """Norm of the largest token over the median norm; far above 1 means that one token carries HFC and LFC.

    Invariant to one common scale, to rotating d_model and to token order. Has no value where the median is zero.
    """
    kept = moments.norms.masked_fill(moments.mask == 0, torch.nan)
    return moments.norms.amax(1) / kept.nanmedian(1).values


@metric(
    "max over i, k of |x_ik| / median over i, k of |x_ik|", missing_when="half of the entries are zero", is_costly=True
)
def massive(moments: Moments) -> Float[Tensor, " batch"]:
    """Largest magnitude of any entry over the median magnitude; above 1000 it counts as a massive activation.

    After Sun et al. 2024. Invariant to one common scale, token and channel order. Has no value where the median is zero.
    """
    found = []
    for x, mask in zip(moments.x, moments.mask, strict=True):
        entries = (x if bool(mask.all()) else x[mask.bool()]).abs().flatten().cpu().numpy()
        middle = (len(entries) - 1) // 2
        largest = float(entries.max())
        entries.partition(middle)
        found.append(largest / float(entries[middle] or np.nan))
    return torch.tensor(found, dtype=torch.float64, device=moments.x.device)


@metric(
    "-sum p_k log p_k / log min(n, d_model), p = eigenvalues of X X^T / their sum",
    0.0,
    _NO_TOKEN,
    scales=True,
    is_costly=True,
)
def matrix_entropy(moments: Moments) -> Float[Tensor, " batch"]:
    """Entropy of the eigenvalues of the Gram matrix over the largest possible; 0: all tokens parallel, 1: orthonormal.

    Invariant to one common scale, rotation and token order; 0 where min(n, d_model) is 1. No value for zero tokens alone.
    """
    squares = moments.singular_values.square()
    entropy = torch.special.entr(squares / squares.sum(1, keepdim=True)).sum(1)
    size = moments.n.clamp(max=moments.x.shape[2]).to(entropy.dtype)
    return torch.where(size > 1, entropy / size.clamp(min=2).log(), 0 * entropy)


@metric("mean over channels of log(|F(pi, pi)| + 1e-6) - log(|F(0, 0)| + 1e-6)", images_only=True)
def high_frequency(moments: Moments) -> Float[Tensor, " batch"]:
    """Channel mean of log(|F(k, k)| + 1e-6) - log(|F(0, 0)| + 1e-6) at the highest frequency k; lower means smoother.

    The relative log amplitude of Park & Kim 2022. F is the unnormalised 2-D Fourier transform of one channel on the
    s x s grid that the kept tokens fill row by row, F(k, k) = sum over r, c of x[r, c] exp(-2 pi i k (r + c) / s);
    k = floor(s/2) is the corner (pi, pi) for even s and the frequency next to it for odd s. (Plots made with the
    paper's code end at s/2 - 1 for even s.) Invariant to transposing the grid and, while amplitudes are far above 1e-6,
    to one common scale. Raises when the kept tokens of a sequence are not a square number: drop the prefix tokens.
    """
    sides = torch.tensor([_side(n) for n in moments.n.tolist()], dtype=torch.long, device=moments.x.device)[:, None]
    place = moments.mask.long().cumsum(1) - 1
    turns = (sides // 2) * (place // sides + place % sides) % sides
    phase = (2 * pi * turns.double() / sides).to(moments.x.dtype)[..., None]
    highest = torch.hypot((moments.x * phase.cos()).sum(1), (moments.x * phase.sin()).sum(1))
    return ((highest + 1e-6).log() - (moments.x.sum(1).abs() + 1e-6).log()).mean(1)


def _side(n: int) -> int:
    if isqrt(n) ** 2 != n:
        advice = "Measure square images, with prefix tokens dropped."
        raise BadValue("The number of tokens for high_frequency", n, "a square, a grid of patches", advice)
    return isqrt(n)


OwnFunction = Callable[[Tensor, Tensor], Tensor]
"""A metric of the user's own: `f(h, keep)` returns one number per sequence, shape (batch,)."""
Choice = str | Metric | OwnFunction


def lookup(choices: Choice | Iterable[Choice]) -> tuple[Metric, ...]:
    """The metrics asked for by name or given as functions, in that order; a function goes by its `__name__`.

    Raises when a name is unknown, comes twice, or is a built-in name given to a function of the user's own.
    """
    if isinstance(choices, str) or callable(choices):
        choices = (choices,)
    metrics = tuple(_find(choice) for choice in choices)
    names = [metric.name for metric in metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadValue("metrics", twice, "names that are all different")
    return metrics


def all_metrics() -> dict[str, Metric]:
    """The table with what plugins add."""
    return plugins.fill(METRICS, "metrics", _accepted)


def _accepted(name: str, value: object) -> Metric:
    if not isinstance(value, Metric) and not callable(value):
        raise plugins.expected(name, value, "a Metric, or a function f(h, keep)")
    return replace(value if isinstance(value, Metric) else _own(value), name=name)


def _find(choice: Choice) -> Metric:
    if isinstance(choice, Metric):
        return choice
    if not isinstance(choice, str):
        return _own(choice)
    if choice not in (metrics := all_metrics()):
        raise UnknownName("metric", choice, tuple(metrics))
    return metrics[choice]


def _own(function: OwnFunction) -> Metric:
    name = getattr(function, "__name__", type(function).__name__)
    if name in METRICS:
        raise BadValue("The name of your metric", name, "none of the built-in ones", "Choose another name.")

    def own(moments: Moments) -> Any:
        return function(moments.h, moments.keep)

    own.__module__ = "user"  # where an error comes from, and what is not to be trusted
    return Metric(name, own, f"{name}(h, keep), defined by the user")


@torch.no_grad()
def evaluate(
    choices: Choice | Iterable[Choice], h: Float[Tensor, "batch token d_model"], keep: Bool[Tensor, "batch token"]
) -> dict[str, MetricValues]:
    """Several metrics of the same hidden states by name, one value per sequence; sums are shared between metrics.

    Raises `TooFewTokens` when a sequence keeps fewer than two tokens, `NotAGrid` when a metric needs a grid of them.
    """
    moments = Moments.of(h, keep)
    return {metric.name: metric.on(moments) for metric in lookup(choices)}


# --- numbers that need no tokens, only sums over them, are computed for all places of a batch together ---

SUMS = ("mask", "n", "norms", "mean_squared", "hfc_squared")
"""What metrics of states are made of."""
UNIT_SUMS = ("unit_sum_squared", "unit_hfc_squared")
"""The same of tokens at length one."""
LEAST_WITHOUT = 3
"""Tokens that a sequence needs for numbers without its largest one."""


def settled(moments: Moments, names: Iterable[str] = SUMS + UNIT_SUMS) -> Moments:
    """The sums alone, without the tokens."""
    return made_of(Moments, {name: getattr(moments, name) for name in names})


def joined(parts: Sequence[Moments]) -> Moments:
    """Sums of several places, one place behind the other."""
    names = vars(parts[0])
    return made_of(Moments, {name: behind_each_other([getattr(part, name) for part in parts]) for name in names})


@dataclass
class SharedSums:
    """The sums of one stack at every place of one batch, with and without the largest token of each sequence."""

    metrics: tuple[Metric, ...]
    """Those that were asked for and need sums only."""
    _seen: dict[Place, tuple[Moments, Moments | None]] = field(default_factory=dict)

    def see(self, place: Place, moments: Moments) -> None:
        """The batch has reached a place; what is seen twice counts as it was seen last."""
        needs_both = any(metric.scales for metric in self.metrics)
        others = settled(moments.without_largest, SUMS) if needs_both else None
        self._seen[place] = (settled(moments), others)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._seen)

    def join(self) -> tuple[Moments, Moments | None]:
        """All places together; the second without the largest tokens, if a metric needs it."""
        others = [other for _, other in self._seen.values() if other is not None]
        return joined([whole for whole, _ in self._seen.values()]), joined(others) if others else None

    def rows(self, found: MetricValues, wanted: Sequence[bool]) -> MetricValues:
        """Only what belongs to some places."""
        if all(wanted):
            return found
        rows = torch.tensor(wanted, device=found.values.device)
        values, defined = (part.unflatten(0, (len(wanted), -1))[rows] for part in (found.values, found.defined))
        return MetricValues(values.flatten(), defined.flatten())


def without_largest(metric: Metric, others: Moments) -> MetricValues:
    """The metric without the largest token, where a sequence has tokens enough."""
    found = metric.on(others)
    return MetricValues(found.values, found.defined & (others.n + 1 >= LEAST_WITHOUT))
