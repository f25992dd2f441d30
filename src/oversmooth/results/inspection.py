"""Results of reading weights: `Inspection`, `Spectrum`, `Verification`, `SurveyCounts`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from oversmooth.results.base import Complex, Missing, Provenance, Row, SavedResult, fields_of

if TYPE_CHECKING:
    from oversmooth.output.figures import Drawing

# --- what the weights say ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Eigenvalues of a map M, where `I + M` is what a layer does to a vector shared by all tokens."""

    size: int
    """Number of eigenvalues of M, zeros included (the width of the model, or the head size)."""
    rho_dc: float
    """Largest `|1 + lambda|`: growth per layer of what all tokens have in common."""
    dominating: Complex
    """The eigenvalue lambda at which `|1 + lambda|` is largest."""
    spectral_radius: float
    """Largest `|lambda|`."""
    min_real: float
    max_real: float
    negative_share: float | None
    """Share of eigenvalues with negative real part among all `size` of them, in [0, 1]."""
    route: str
    """`dense`: every eigenvalue was computed; `krylov`: only the extremes, certified by `residual`."""
    residual: float | None
    """Krylov route: largest `norm(B x - lambda x) / radius` over the reported extremes, x of unit length, B being the
    smallest matrix with the nonzero eigenvalues of M; each is the exact eigenvalue of a matrix that close to B."""
    condition: float | None
    """Condition number of the dominating eigenvalue: how much a small change of M is amplified in it; 1 is best."""
    is_defective: bool | None
    """Whether M is, to working precision, not diagonalizable; the eigenvalues are still right, with fewer digits."""
    eigenvalues: tuple[Complex, ...] | None
    """Nonzero part of the spectrum, sorted by real part; zeros that the shape of the weights forces are left out."""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpectrum:
    """The `d_head` eigenvalues of one head's own map `H_h = W_V^h W_O^h` that are not forced to zero."""

    head: int
    kv_head: int
    """The value head it reads; equal to `head` unless value heads are shared."""
    rho_dc: float
    spectral_radius: float
    min_real: float
    max_real: float
    negative_share: float
    """Share among the `d_head` eigenvalues."""
    eigenvalues: tuple[Complex, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFacts:
    """Signs and size of one normalization weight."""

    role: str
    """attn_norm, attn_branch_norm, ffn_norm or ffn_branch_norm."""
    kind: str
    """layer or rms (a stored offset of one is already added)."""
    negative_share: float
    smallest: float
    largest: float


CLEARLY = 3.0
"""Standard deviations of the null from which on a number of the weights is no chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Null:
    """What chance gives: `H = W_V W_O` next to maps of the same singular values and random orientation.

    These numbers say what the weights prefer. They do not predict what one pass does to features.
    """

    rho_dc: float | None = None
    """`rho_dc` that a random orientation gives."""
    excess: float | None = None
    """`log(rho_dc / rho_dc of the null)`: above its spread, weights prefer what tokens share; within it, nothing."""
    excess_spread: float | None = None
    """Standard deviation of `log rho_dc` under the null, or the known error of the closed form."""
    how: str = ""
    """closed form, or how many rotations were sampled."""
    positivity: float | None = None
    """`sum Re(lambda) / sum |lambda|`: -1 for a map that only sharpens, +1 for one that only smooths, 0 by chance."""
    positivity_spread: float | None = None
    """Its standard deviation under the null."""
    why_no_excess: str = ""
    why_no_positivity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInspection:
    """What the weights of one layer say; every number is `None` when `unreadable` gives the reason."""

    stack: str
    """Which stack of the model the layer belongs to; empty for models with one stack."""
    layer: int
    passes: tuple[int, ...]
    """At which depths these weights run: one entry, more where layers are shared."""
    unreadable: str | None = None
    plain: Spectrum | None = None
    """Spectrum of `H = W_V W_O`."""
    folded: Spectrum | None = None
    """Spectrum with the layer's own norm weights and gains folded in, at unit token scale."""
    folding: str = ""
    """What was folded, in words; or why nothing was."""
    tendency: float | None = None
    """`log rho_dc` of `folded`, or of `plain` where no norm is known: above 0, attention that looks at all tokens
    equally would smooth; at 0, where a direction that nothing is written to dominates, it would do neither. Real attention
    does not look equally: this is a tendency of the weights, not a verdict."""
    null: Null | None = None
    """What chance gives, for `plain`; `None` where the layer is unreadable."""
    asymmetry: float | None = None
    """`norm(H - H^T) / (2 norm(H))`: 0 for symmetric H (real eigenvalues), about 0.7 for unstructured H."""
    value_norm: float | None = None
    """Frobenius norm of H."""
    bias_norm: float | None = None
    """Length of the vector that the value bias adds to every token alike; 0 without a value bias."""
    heads: tuple[HeadSpectrum, ...] = ()
    norms: tuple[NormFacts, ...] = ()
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """Sizes of one stack of layers, as found in the weights."""

    name: str
    family: str
    d_model: int
    n_heads: int | None
    n_kv: int | None
    d_head: int | None
    residual: str
    norm: str
    blocks: int
    """Softmax-attention blocks analysed."""
    blocks_in_model: int
    """Blocks in the stack; larger than `blocks` for hybrids."""
    is_causal: bool = False
    """Whether tokens see only those before them."""
    form: str = ""
    """What its attention has beyond `A X W_V W_O`, and at which gain it was inspected; empty for plain attention."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(SavedResult):
    """What a checkpoint's weights say about smoothing, layer by layer."""

    kind: ClassVar[str] = "inspection"
    provenance: Provenance
    stacks: tuple[StackFacts, ...]
    layers: tuple[LayerInspection, ...]
    missing: tuple[Missing, ...] = ()
    """Parts of a composite model that no family is declared for."""

    def rows(self) -> list[Row]:
        """One flat row per layer."""
        return [_inspection_row(layer) for layer in self.layers]

    def head_rows(self) -> list[Row]:
        """One flat row per head."""
        skip = ("eigenvalues",)
        return [
            {"stack": layer.stack, "layer": layer.layer, **{k: v for k, v in fields_of(head).items() if k not in skip}}
            for layer in self.layers
            for head in layer.heads
        ]

    def plot(self) -> "Drawing":
        """What repeating each layer would do to what tokens share, from weights alone; `.save(path)` keeps it."""
        from oversmooth.output.figures import inspection_drawing

        return inspection_drawing(self)

    def __repr__(self) -> str:
        rho = " ".join("?" if x.plain is None else f"{x.plain.rho_dc:.3f}" for x in self.layers[:12])
        more = " ..." if len(self.layers) > 12 else ""
        found = "".join(f", {words}" for words in (self.provenance.shares, self.provenance.found) if words)
        return f"<Inspection of {self.provenance.name}: {len(self.layers)} layers, rho_dc {rho}{more}{found}>"

    def _title(self) -> str:
        return f"Inspection of {self.provenance.name}"


def _inspection_row(layer: LayerInspection) -> Row:
    attn = [norm for norm in layer.norms if norm.role.startswith("attn")]
    row: Row = {"stack": layer.stack, "layer": layer.layer, "passes": len(layer.passes)}
    for name, spectrum in (("", layer.plain), ("folded_", layer.folded)):
        row |= {
            f"{name}rho_dc": spectrum and spectrum.rho_dc,
            f"{name}dominating_real": spectrum and spectrum.dominating[0],
            f"{name}dominating_imag": spectrum and spectrum.dominating[1],
            f"{name}min_real": spectrum and spectrum.min_real,
            f"{name}max_real": spectrum and spectrum.max_real,
            f"{name}negative_share": spectrum and spectrum.negative_share,
        }
    return row | {
        "null_rho_dc": layer.null and layer.null.rho_dc,
        "excess": layer.null and layer.null.excess,
        "excess_spread": layer.null and layer.null.excess_spread,
        "positivity": layer.null and layer.null.positivity,
        "positivity_spread": layer.null and layer.null.positivity_spread,
        "asymmetry": layer.asymmetry,
        "value_norm": layer.value_norm,
        "bias_norm": layer.bias_norm,
        "norm_negative_share": max((n.negative_share for n in attn), default=None),
        "norm_smallest": min((n.smallest for n in attn), default=None),
        "norm_largest": max((n.largest for n in attn), default=None),
        "unreadable": layer.unreadable,
    }


# --- whether a declaration fits a model ---


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCheck:
    """How well one layer of a live model fits its declaration."""

    stack: str
    layer: int
    error: float
    """Largest deviation from the equal-token identity, relative to the largest output."""
    tokens: int
    """Tokens in the sequence that was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCheck:
    """The chain identity on one batch: whether the features that are measured are the model's residual stream."""

    links: int
    """Places that were compared with the place before them: what a block gives is what the next one reads."""
    sums: int
    """Sub-blocks whose change of the stream was compared with what their modules gave."""
    between: tuple[str, ...] = ()
    """Inputs of blocks that something else than the block before makes, each with the modules that do it."""
    broken: tuple[tuple[str, str], ...] = ()
    """Pairs of places that should agree and do not, and that nothing explains."""
    unmatched: tuple[str, ...] = ()
    """Sub-blocks that do more than add what one of their modules gives."""
    ends: tuple[str, ...] = ()
    """What reads the stream behind the last block of each stack; empty where nothing was seen to read it as it is."""
    outside: tuple[str, ...] = ()
    """Modules with parameters that run between the first block and the last and are in no part."""
    outside_share: float = 0.0
    """Their share of all parameters that run there."""
    partial: str = ""
    """What the reading leaves out: parts of the stream, or a tenth or more of those parameters; empty where it is whole."""

    @property
    def passed(self) -> bool:
        """Whether every block reads what the one before it gives."""
        return not self.broken


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """A checkpoint that was loaded by the plain library, in another process, before it was handed over."""

    inputs: int
    """On how many inputs its outputs were compared with those of the changed model."""
    largest_difference: float | None = None
    """Of an output in float32, relative to the largest number in it; `None` where nothing was compared."""
    loss: float | None = None
    """What the plain library found on the same data; `None` where no loss is stated."""
    block_by_block: bool = False
    """Whether its weights do not fit into memory, and were read while it ran."""
    not_checked: str = ""
    """What could not be compared, and why; empty where everything was."""

    @property
    def words(self) -> str:
        """One line about it."""
        said = []
        if self.largest_difference is not None:
            said.append(f"outputs on {self.inputs} inputs agree to {self.largest_difference:.0e}")
        if self.loss is not None:
            said.append(f"loss {self.loss:.4f}")
        if self.block_by_block:
            said.append("read block by block")
        checked = f"Read back by the plain library: {', '.join(said)}." if said else ""
        return f"{checked} Not checked: {self.not_checked}.".strip() if self.not_checked else checked


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(SavedResult):
    """The equal-token identity, checked on a live model: does the declaration fit this very model?"""

    kind: ClassVar[str] = "verification"
    provenance: Provenance
    tolerance: float
    layers: tuple[LayerCheck, ...]
    stream: StreamCheck | None = None
    """The chain identity; `None` in results of older versions."""

    @property
    def largest_error(self) -> float:
        """Of all layers."""
        return max(layer.error for layer in self.layers)

    @property
    def passed(self) -> bool:
        """Whether every layer deviates by at most `tolerance`, and every block reads what the one before it gives."""
        return self.largest_error <= self.tolerance and (self.stream is None or self.stream.passed)

    def rows(self) -> list[Row]:
        """One flat row per layer."""
        return [fields_of(layer) for layer in self.layers]

    def __repr__(self) -> str:
        word = "fits" if self.passed else "does not fit"
        partial = f", {self.stream.partial}" if self.stream is not None and self.stream.partial else ""
        return (
            f"<Verification of {self.provenance.name}: {', '.join(self.provenance.families)} {word}, "
            f"largest error {self.largest_error:.1e} in {len(self.layers)} layers{partial}>"
        )

    def _title(self) -> str:
        return f"Verification of {self.provenance.name}"


# --- how far a survey is ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyCounts:
    """What became of the targets of a list, so far or in the end."""

    models: int
    """Targets of the list."""
    earlier: int = 0
    """Of them, those that the table had before."""
    read: int = 0
    copied: int = 0
    """Targets with the files of another one, whose rows they share."""
    refused: int = 0
    failed: int = 0
    requests: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.earlier + self.read + self.copied + self.refused + self.failed

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; `None` before the first model."""
        fresh = self.done - self.earlier
        return (self.models - self.done) * self.seconds / fresh if fresh else None
