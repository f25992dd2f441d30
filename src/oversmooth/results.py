"""The values that flow through the library: frozen, keyword-only, made of plain numbers, torch-free.

Conventions, everywhere: a complex number is a pair `(real, imaginary)`; a number that does not exist is `None`, and a
`Missing` entry beside it says why; nothing is ever NaN. Every top-level result carries a `Provenance`.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from oversmooth.errors import BrokenFile

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas

SCHEMA_VERSION = 1
"""Raised by one whenever a field changes meaning or disappears; readers refuse anything newer."""

Progress = Callable[[int, int], None]
"""Called with (done, in all) while long work goes on; 0 in all where the end is not known."""


def no_progress(done: int, total: int) -> None:
    """Says nothing."""


Complex = tuple[float, float]
SavedResult = TypeVar("SavedResult", bound="_Saved")  # not `Self`, which the shape checks of the tests cannot read
Row = dict[str, Any]
"""One flat line of a table: column name to plain value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Why a field of the result beside it is `None`."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """A file that was opened, by name and size; its content is covered by `Provenance.weights_sha256`."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the numbers come from: enough to repeat them."""

    target: str
    """What the user pointed at."""
    source: str
    """How it was read: folder, safetensors, pickle, gguf, hub, url, timm or module."""
    model_type: str
    families: tuple[str, ...]
    """The declarations that were applied, one per stack."""
    files: tuple[FileFacts, ...]
    weights_sha256: str
    """Hash over name, dtype, shape and bytes of every tensor that was read, in the order of reading."""
    bytes_read: int
    """Bytes of tensors that were read; a small part of the checkpoint."""
    weight_dtypes: tuple[str, ...]
    compute_dtype: str
    versions: tuple[tuple[str, str], ...]
    """Package and version, sorted."""
    seed: int | None = None
    """Seed of everything random in the result; `None` when nothing is."""


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
    """Krylov route: largest residual `norm(B x - mu x) / |mu|` over the reported extremes, B being M or `I + M`; each
    is the exact eigenvalue of a matrix that close to B."""
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
    equally would smooth. Real attention does not look equally: this is a tendency of the weights, not a verdict."""
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


class _Saved:
    """JSON round trip shared by the top-level results."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only; `from_dict` restores the identical result."""
        body = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {"schema": SCHEMA_VERSION, "kind": self.kind, **_plain(body)}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls: "type[SavedResult]", data: dict[str, Any], where: str = "the result") -> "SavedResult":
        """Restores what `to_dict` wrote; refuses a newer schema, another kind of result, or a damaged one."""
        from pydantic import TypeAdapter, ValidationError

        body = dict(data)
        schema, kind = body.pop("schema", None), body.pop("kind", None)
        if not isinstance(schema, int) or kind != cls.kind:
            raise BrokenFile(where, f"a result of kind {cls.kind!r}", f"kind {kind!r}", "Open the right file.")
        if schema > SCHEMA_VERSION:
            raise BrokenFile(
                where,
                f"schema {SCHEMA_VERSION} or older",
                f"schema {schema}, written by a newer oversmooth",
                "Upgrade: pip install --upgrade oversmooth",
            )
        try:
            return TypeAdapter(cls).validate_python(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise BrokenFile(where, f"a valid field {place!r}", first["msg"], "Write the file again.") from error

    def rows(self) -> list[Row]:
        """One flat row per layer, for tables and CSV."""
        raise AssertionError("each result says what its rows are")

    def to_pandas(self) -> "pandas.DataFrame":
        """The same rows as a DataFrame (needs pandas)."""
        from oversmooth.errors import MissingDependency

        try:
            import pandas
        except ImportError as error:
            raise MissingDependency("pandas", "report", "to_pandas()") from error
        return pandas.DataFrame(self.rows())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection(_Saved):
    """What a checkpoint's weights say about smoothing, layer by layer."""

    kind: ClassVar[str] = "inspection"
    provenance: Provenance
    stacks: tuple[StackFacts, ...]
    layers: tuple[LayerInspection, ...]

    def rows(self) -> list[Row]:
        return [_inspection_row(layer) for layer in self.layers]

    def head_rows(self) -> list[Row]:
        """One flat row per head."""
        skip = ("eigenvalues",)
        return [
            {"stack": layer.stack, "layer": layer.layer, **{k: v for k, v in _fields(head).items() if k not in skip}}
            for layer in self.layers
            for head in layer.heads
        ]

    def __repr__(self) -> str:
        rho = " ".join("?" if x.plain is None else f"{x.plain.rho_dc:.3f}" for x in self.layers[:12])
        more = " ..." if len(self.layers) > 12 else ""
        return f"<Inspection of {self.provenance.target}: {len(self.layers)} layers, rho_dc {rho}{more}>"

    def _repr_html_(self) -> str:
        return html_table(f"Inspection of {self.provenance.target}", self.rows())


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
        "tendency": layer.tendency,
        "asymmetry": layer.asymmetry,
        "value_norm": layer.value_norm,
        "bias_norm": layer.bias_norm,
        "norm_negative_share": max((n.negative_share for n in attn), default=None),
        "norm_smallest": min((n.smallest for n in attn), default=None),
        "norm_largest": max((n.largest for n in attn), default=None),
        "unreadable": layer.unreadable,
    }


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
class Verification(_Saved):
    """The equal-token identity, checked on a live model: does the declaration fit this very model?"""

    kind: ClassVar[str] = "verification"
    provenance: Provenance
    tolerance: float
    layers: tuple[LayerCheck, ...]

    @property
    def largest_error(self) -> float:
        return max(layer.error for layer in self.layers)

    @property
    def passed(self) -> bool:
        return self.largest_error <= self.tolerance

    def rows(self) -> list[Row]:
        return [_fields(layer) for layer in self.layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceValue:
    """One metric at one place, averaged over sequences with equal weight."""

    stack: str
    depth: int
    """0 for the embedding, k + 1 in block k; in passes, where layers are shared."""
    place: str
    metric: str
    mean: float | None
    standard_error: float | None
    sequences: int
    """How many sequences have a value."""
    on_stream: bool
    """Whether the place lies on the residual stream; a norm does in post-norm blocks only, a branch never does."""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """How much `log(HFC/LFC)` changes across one sub-block; below 0 it smooths."""

    stack: str
    depth: int
    part: str
    """attention, cross-attention, feed-forward, norm or other."""
    place: str
    """Where the part ends."""
    change: float
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Who smooths: the change of `log(HFC/LFC)` over one stack, split into sub-blocks that add up to it."""

    stack: str
    total: float
    """From the first to the last place of the residual stream; the sum of all `parts`."""
    standard_error: float | None
    sequences: int
    """Sequences that have a value at every place of the stream."""
    attention: float
    cross_attention: float
    feed_forward: float
    norms: float
    other: float
    """Blocks without softmax attention, in hybrids."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What the model was run on."""

    description: str
    sha256: str
    """Hash over the tensors that entered the model, in order."""
    sequences: int
    tokens: int
    """Measured tokens of the first stack: without padding, and without prefix tokens where they were dropped."""
    skipped: int
    """Sequences left out because fewer than two tokens remained."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Measurement(_Saved):
    """What happens to features over depth, on real inputs."""

    kind: ClassVar[str] = "measurement"
    provenance: Provenance
    data: DataFacts
    prefix_tokens: str
    """kept, dropped, or none where the model has none."""
    is_partial: bool
    """Whether the run was interrupted before all data were seen."""
    values: tuple[PlaceValue, ...]
    attributions: tuple[Attribution, ...]
    definitions: tuple[tuple[str, str], ...]
    """Each metric's name and formula."""
    problems: tuple[str, ...] = ()
    """NaN or infinity in activations, with layer and place."""

    def rows(self) -> list[Row]:
        skip = ("missing",)
        return [{k: v for k, v in _fields(value).items() if k not in skip} for value in self.values]

    def curve(self, metric: str, stack: str | None = None) -> list[PlaceValue]:
        """One metric over depth: the embedding, then the stream as it leaves each block."""
        stack = self.values[0].stack if stack is None else stack
        # Places come in the order in which the model passes them, so the last of a depth is what leaves the block.
        leaving = {
            value.depth: value
            for value in self.values
            if value.metric == metric and value.stack == stack and value.on_stream and value.place != "final_norm"
        }
        return [leaving[depth] for depth in sorted(leaving)]

    def plot(self, metric: str = "cosine") -> "matplotlib.figure.Figure":
        """A figure of the metric over depth with bands of one standard error (needs matplotlib)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            from oversmooth.errors import MissingDependency

            raise MissingDependency("matplotlib", "report", "plot()") from error
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        for stack in dict.fromkeys(value.stack for value in self.values):
            points = [point for point in self.curve(metric, stack) if point.mean is not None]
            depth = [point.depth for point in points]
            mean = [point.mean or 0.0 for point in points]
            error = [point.standard_error or 0.0 for point in points]
            axes.plot(depth, mean, marker="o", label=stack or None)
            low, high = zip(*((m - e, m + e) for m, e in zip(mean, error, strict=True)), strict=True)
            axes.fill_between(depth, low, high, alpha=0.25)
        axes.set(xlabel="depth (0 = embedding)", ylabel=metric, title=self.provenance.target)
        if len({value.stack for value in self.values}) > 1:
            axes.legend()
        return figure

    def __repr__(self) -> str:
        metrics = [name for name, _ in self.definitions]
        curve = [value.mean for value in self.curve(metrics[0]) if value.mean is not None]
        ends = f"{metrics[0]} {curve[0]:.3f} -> {curve[-1]:.3f}" if curve else "no values"
        partial = ", partial" if self.is_partial else ""
        return f"<Measurement of {self.provenance.target}: {self.data.sequences} sequences{partial}, {ends}>"

    def _repr_html_(self) -> str:
        return html_table(f"Measurement of {self.provenance.target}", self.rows())


def html_table(title: str, rows: list[Row]) -> str:
    """A small HTML table for notebooks; every cell is escaped."""
    from html import escape

    if not rows:
        return f"<p>{escape(title)}: no rows</p>"
    shown = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    head = "".join(f"<th>{escape(name)}</th>" for name in shown)
    body = "".join("<tr>" + "".join(f"<td>{escape(format_cell(row[n]))}</td>" for n in shown) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def format_cell(value: object) -> str:
    """A number with four significant digits, anything else as it is, nothing for a missing value."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fields(record: object) -> Row:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    """Tuples to lists; refuses NaN and infinity, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise AssertionError(f"a result holds {value}, which should have been a None with a reason")
    return value
