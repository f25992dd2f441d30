"""Results of running a model: `Measurement`, `Attribution`, `LengthCurves`, `OutputDrift`, `GateResult`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from oversmooth.results.base import Missing, Provenance, Row, SavedResult, fields_of, short_name
from oversmooth.results.inspection import StreamCheck

if TYPE_CHECKING:
    from oversmooth.output.figures import Drawing
    from oversmooth.results.answer import Answer


# --- what happens to features ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceValue:
    """One metric at one place, averaged over sequences with equal weight."""

    stack: str
    depth: int
    """0 for the embedding, k + 1 in block k; in passes, where layers are shared."""
    layer: int | None = None
    """The layer whose weights act there, as `inspect` counts them; `None` for the embedding and the final norm."""
    place: str
    metric: str
    mean: float | None
    standard_error: float | None
    sequences: int
    """How many sequences have a value."""
    on_stream: bool
    """Whether the place lies on the residual stream; a norm does in post-norm blocks only, a branch never does."""
    missing: tuple[Missing, ...] = ()
    mean_without_largest: float | None = None
    """The same without the token of the largest norm, which alone may decide it; `None` for metrics that no scale moves."""


PartName = Literal[
    "attention",
    "norm after attention",
    "cross-attention",
    "norm after cross-attention",
    "feed-forward",
    "norm after feed-forward",
    "other blocks",
    "between blocks",
    "final norm",
]
"""In the order in which they are drawn."""
PART_NAMES: tuple[str, ...] = get_args(PartName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """How much a number of the stream changes across one sub-block."""

    stack: str
    depth: int
    part: PartName
    place: str
    """Where the part ends."""
    change: float
    standard_error: float | None
    interval: tuple[float, float] | None = None
    """95% interval of the change over sequences (Student's t); `None` for a single sequence."""
    direction: str = ""
    """smoothing, sharpening, or no clear change where the interval holds zero; of one sequence only its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindChange:
    """How much all sub-blocks of one kind change it together."""

    part: PartName
    change: float
    standard_error: float | None
    interval: tuple[float, float] | None
    direction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Who smooths: the change of one number over one stack, split into sub-blocks that add up to it exactly."""

    stack: str
    quantity: str
    """What changes: the mean cosine, which rises where tokens become alike, or a log(HFC/LFC), which falls."""
    total: float
    """From the first to the last place of the residual stream; the sum of all `parts`, and `end - start`."""
    standard_error: float | None
    interval: tuple[float, float] | None = None
    """95% interval of the total over sequences (Student's t); `None` for a single sequence."""
    direction: str = ""
    """smoothing, sharpening, or no clear change where the interval holds zero; of one sequence only its sign."""
    sequences: int
    """Sequences that have a value at every place of the stream."""
    start: float
    """The number at the input of the first block, mean over these sequences."""
    end: float
    """The same at the last place: after the final norm where there is one."""
    end_interval: tuple[float, float] | None = None
    """95% interval of `end` over sequences; `None` for a single one."""
    end_values: tuple[float, ...] = ()
    """`end` of every sequence, of the first hundred."""
    parts: tuple[Part, ...]
    kinds: tuple[KindChange, ...] = ()
    """The same for every kind of sub-block; they add up to the total."""
    tokens: str = "text"
    """What the tokens of the stack are made from: text, image or audio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DominatingToken:
    """The largest token of one stack, at the place of the residual stream where it outweighs the others most."""

    stack: str
    depth: int
    place: str
    ratio: float
    """Its norm over the median norm, mean over sequences."""
    position: int
    """Where it stands in most sequences, counted from 0."""
    position_share: float
    """Share of the sequences in which it stands there."""
    token_id: int | None
    """Which token it is in most of them; `None` where no token ids entered the model."""
    channel: int
    """The channel in which it is largest, in most sequences."""
    channel_share: float
    """Share of its squared norm that lies in that channel, mean over sequences."""
    made_at_depth: int | None
    """The depth of the sub-block across which `ratio` grows most."""
    made_by: str | None
    """Which kind of sub-block that is."""
    word: str | None = None
    """The token as text, where a tokenizer is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAttention:
    """How one head attends, mean over sequences."""

    stack: str
    depth: int
    head: int
    entropy: float
    """Entropy of a query's attention over the largest possible: 0 looks at one token, 1 at all alike."""
    effective_tokens: float
    """exp of the entropy, mean over queries: how many tokens a query sees."""
    sink: float
    """Largest share of all attention that goes to one position."""
    sink_position: int
    """That position in most sequences, counted from 0 over the tokens that are measured."""
    rank: float
    """Participation ratio of the squared singular values: 1 if all queries look alike, n for the identity."""
    learned_sink: float | None = None
    """Share of all attention that goes to a learned sink beside the tokens; `None` where the model has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanDistances:
    """How far tokens turn between any two depths of one stack; rows and columns are `depths`."""

    stack: str
    depths: tuple[int, ...]
    """0 for the embedding, k + 1 behind block k."""
    angular_distance: tuple[tuple[float, ...], ...]
    """Mean of arccos(cos) / pi over tokens, then over sequences."""
    influence: tuple[tuple[float, ...], ...]
    """Mean of 1 - cos, likewise."""
    sequences: int
    tokens: int
    """Tokens of a sequence that were used at most; evenly spaced where that is not all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpread:
    """How the cosines of all pairs of tokens are spread at one depth; every sequence has equal weight."""

    stack: str
    depth: int
    """0 for the embedding, k + 1 for what leaves block k."""
    is_final_norm: bool
    """Whether this is after the final norm, which has the depth of the last block."""
    quantiles: tuple[float, float, float, float, float]
    """10, 25, 50, 75 and 90 per cent."""
    histogram: tuple[float, ...]
    """Share of pairs in equal bins from -1 to 1."""
    share_above: float
    """Share of pairs with a cosine of at least 0.9."""
    rank: float | None
    """Effective rank of the tokens at length one, minus their mean; mean over every eighth sequence."""
    largest_rank: float | None
    """The largest that could be, likewise: one less than there are tokens, or `d_model`."""
    sequences: int
    tokens: int
    """Tokens of a sequence that were used at most; a random choice where it has more than 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSimilarity:
    """How alike different sequences are at the output of one stack."""

    stack: str
    values: tuple[float, ...]
    """The mean cosine of each sequence's mean token with those of all others; their mean is the metric `between`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntrainedCurve:
    """The mean cosine over depth of the same architecture with fresh weights, on the same inputs."""

    stack: str
    seed: int
    levels: tuple[float, ...]
    """At the input, after each block, and after the final norm where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """How texts became tokens, and how much of them was used."""

    texts: int
    """Texts that were read: paragraphs, lines, files or rows."""
    characters: int | None
    """Of all texts that were given, without blank lines and margins."""
    characters_used: int
    """Of what became tokens; a text that was used in part counts by its share of tokens."""
    tokens: int
    """Made from text, without special tokens and padding."""
    unknown_tokens: int
    """Of these, the ones that stand for something the tokenizer does not know."""
    unknown_share: float
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What the model was run on."""

    description: str
    sha256: str
    """Hash over the tensors that entered the model, in order."""
    sequences: int
    tokens: int
    """Measured tokens of the first stack: without padding, and without prefix tokens where they were dropped; 0 where
    pictures were run and nothing measured."""
    skipped: int
    """Sequences left out because fewer than two tokens remained."""
    origin: str = "batches"
    """given (files or a dataset), built-in (samples), random ids (no tokenizer), or batches (of the caller's own)."""
    preprocessing: str = ""
    """How texts, pictures or sounds became what entered the model, in words; empty for batches."""
    text: TextFacts | None = None
    """`None` where no text was read."""
    warnings: tuple[str, ...] = ()
    """What makes the numbers say less than they seem to."""
    notes: tuple[str, ...] = ()
    """What else was done to the data."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Measurement(SavedResult):
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
    """Who changes the mean cosine; headlines, gates and tables speak of it."""
    definitions: tuple[tuple[str, str], ...]
    """Each metric's name and formula."""
    problems: tuple[str, ...] = ()
    """NaN or infinity in activations, with layer and place."""
    unit_attributions: tuple[Attribution, ...] = ()
    """The same for log(HFC/LFC) of tokens at length one, log((n-1)(1-c) / (1+(n-1)c)) / 2 with the mean cosine c."""
    raw_attributions: tuple[Attribution, ...] = ()
    """The same for log(HFC/LFC) of the tokens as they are, which one large token may decide."""
    dominating: tuple[DominatingToken, ...] = ()
    """The largest token of each stack."""
    heads: tuple[HeadAttention, ...] = ()
    """How every head attends, where metrics of attention were asked for."""
    spans: tuple[SpanDistances, ...] = ()
    """Distances between any two depths, where influence or angular distance was asked for."""
    pairs: tuple[PairSpread, ...] = ()
    """How the cosines of all pairs of tokens are spread, where that was asked for."""
    similarities: tuple[SequenceSimilarity, ...] = ()
    """How alike different sequences are, where `between` was asked for."""
    untrained: tuple[UntrainedCurve, ...] = ()
    """The same architecture untrained, stack by stack, where that was asked for."""
    untrained_missing: str = ""
    """Why it is not there although it was asked for."""
    stream: StreamCheck | None = None
    """The chain identity, checked on the first batch; `None` in results of older versions."""

    def __post_init__(self) -> None:
        if len({len(spread.histogram) for spread in self.pairs}) > 1:
            raise ValueError("the histograms of pairs have different numbers of bins")

    def rows(self) -> list[Row]:
        """One flat row per place and metric."""
        skip = ("missing",)
        return [{k: v for k, v in fields_of(value).items() if k not in skip} for value in self.values]

    def curve(self, metric: str, stack: str | None = None) -> list[PlaceValue]:
        """One metric over depth: the embedding, then the stream as it leaves each block."""
        stack = self.values[0].stack if stack is None else stack
        # Places come in the order in which the model passes them, so the last of a depth is what leaves the block.
        leaving = {
            value.depth: value
            for value in self.values
            if value.metric == metric
            and value.stack == stack
            and value.on_stream
            and value.place not in ("final_norm", "between")
        }
        return [leaving[depth] for depth in sorted(leaving)]

    def final(self, metric: str, stack: str | None = None) -> PlaceValue | None:
        """One metric after the norm behind the last block; `None` where the model has no such norm."""
        stack = self.values[0].stack if stack is None else stack
        wanted = (metric, stack, "final_norm")
        return next((value for value in self.values if (value.metric, value.stack, value.place) == wanted), None)

    @property
    def answers(self) -> "tuple[Answer, ...]":
        """Does it oversmooth, where, by which part: one answer per stack."""
        from oversmooth.results.wording import answers_of

        return answers_of(self)

    @property
    def answer(self) -> "Answer | None":
        """The answer that speaks for the model: the decoder's, or of several stacks the one whose tokens are most alike.

        `None` where no sequence has a value at every place, because activations are not finite or tokens are zero.
        """
        from oversmooth.results.wording import first_of

        return first_of(self.answers)

    def plot(self, metric: str = "cosine") -> "Drawing":
        """A chart of the metric over depth with bands of one standard error, shown in a notebook; `.save(path)` keeps it."""
        from oversmooth.output.figures import curve_drawing

        return curve_drawing(self, metric)

    def _repr_html_(self) -> str:
        chart = self.plot()._repr_html_() if self.answer is not None else ""
        return SavedResult._repr_html_(self) + chart

    def __repr__(self) -> str:
        metrics = [name for name, _ in self.definitions]
        curve = [value.mean for value in self.curve(metrics[0]) if value.mean is not None]
        ends = f"{metrics[0]} {curve[0]:.3f} -> {curve[-1]:.3f}" if curve else "no values"
        partial = (f", {self.provenance.shares}" if self.provenance.hybrids else "") + ", partial" * self.is_partial
        partial += f", {self.stream.partial}" if self.stream is not None and self.stream.partial else ""
        return f"<Measurement of {self.provenance.name}: {self.data.sequences} sequences{partial}, {ends}>"

    def _title(self) -> str:
        return f"Measurement of {self.provenance.name}"


# --- how features, and what the theory says about them, depend on the length of a text ---


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthValue:
    """One metric at one depth, of texts of one length."""

    length: int
    """Tokens of each text."""
    stack: str
    depth: int
    """0 for the embedding, k + 1 behind block k."""
    metric: str
    mean: float | None
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChange:
    """What the whole stack does to texts of one length."""

    length: int
    stack: str
    change: float
    """Of `log(HFC/LFC)` at unit length, from embedding to output; below 0 it smooths."""
    interval: tuple[float, float] | None
    """95% over texts; `None` for a single one."""
    direction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPrediction:
    """What the theory says about one layer on texts of one length."""

    length: int
    stack: str
    layer: int
    depth: int
    regime: str
    """What repetition at the attention of this length would do."""
    exponent: float | None
    """Growth of what differs between tokens over that of what they share, in logarithms, per repetition."""
    measured: float | None
    """Change of `log(HFC/LFC)` across the attention branch, as it was seen."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LengthCurves(SavedResult):
    """The same texts, cut to several lengths."""

    kind: ClassVar[str] = "length curves"
    provenance: Provenance
    data: DataFacts
    """Of the longest."""
    lengths: tuple[int, ...]
    texts: int
    """Texts that have as many tokens as the longest length."""
    left_out: int
    """Texts that are shorter."""
    values: tuple[LengthValue, ...]
    changes: tuple[LengthChange, ...]
    predictions: tuple[LengthPrediction, ...]
    """Empty where nothing was predicted."""
    verdict: str
    """One sentence."""

    def rows(self) -> list[Row]:
        """One flat row per length, depth and metric."""
        return [fields_of(value) for value in self.values]

    def prediction_rows(self) -> list[Row]:
        """One flat row per length and layer."""
        return [fields_of(item) for item in self.predictions]

    def last(self, metric: str, length: int, stack: str) -> LengthValue | None:
        """The value behind the last block."""
        found = [v for v in self.values if (v.metric, v.length, v.stack) == (metric, length, stack)]
        return max(found, key=lambda value: value.depth, default=None)

    def __repr__(self) -> str:
        span = f"{self.lengths[0]} to {self.lengths[-1]} tokens"
        return f"<LengthCurves of {self.provenance.name}: {self.texts} texts, {span}>"

    def _title(self) -> str:
        return f"Over length: {self.provenance.name}"


# --- how far the output of one model is from that of another on the same inputs ---


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDrift:
    """A model and its edit, compared where both end: behind the last block and the final norm."""

    sequences: int
    tokens: int
    relative_distance: float
    """`norm(Y' - Y) / norm(Y)` over all tokens: 0 where nothing changed."""
    cosine: float
    """Mean cosine between a token's features in the two models: 1 where no direction changed."""
    similarity: float | None
    """Mean cosine between the mean tokens of two different sequences in the first model; `None` for one sequence."""
    other_similarity: float | None
    """The same in the other. Near 1, a model says the same about everything."""


# --- whether a model keeps within limits ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A rule that does not hold, and where."""

    rule: str
    stack: str
    depth: int
    """k + 1 for what leaves block k; 0 where the rule is about the whole run."""
    value: float | None
    """What was found; `None` where there is nothing to be judged."""
    bound: float
    sub_block: str = ""
    """Which part of that block raises the mean cosine most; empty where none does, or that is not known."""
    sub_block_change: float | None = None
    """By how much."""

    @property
    def words(self) -> str:
        """One sentence: what was found where, and what was allowed."""
        where = "the run" if self.depth == 0 else f"after layer {self.depth - 1}"
        where = f"{self.stack} {where}" if self.stack else where
        side, _, metric = self.rule.partition("_")
        is_upper = metric == "cosine" if side == "against" else side == "max"
        name = "mean cosine" if metric == "cosine" else metric
        found = "has no value" if self.value is None else f"is {self.value:.4g}"
        allowed = f"at {'most' if is_upper else 'least'} {self.bound:.4g} is allowed"
        compared = " by the saved analysis" if side == "against" else ""
        why = ""
        if self.sub_block and self.sub_block_change is not None:
            raised = "it" if metric == "cosine" else "the mean cosine"
            why = f"; in that layer, {self.sub_block} raises {raised} most ({self.sub_block_change:+.2f})"
        return f"{where}: {name} {found}, {allowed}{compared}{why}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GateResult(SavedResult):
    """Rules, and where they do not hold."""

    kind: ClassVar[str] = "gate"
    target: str
    rules: tuple[tuple[str, float], ...]
    """Name and number of every rule that was judged."""
    against: str | None
    """The saved analysis that was compared with."""
    breaches: tuple[Breach, ...]

    @property
    def passed(self) -> bool:
        return not self.breaches

    def rows(self) -> list[Row]:
        """One flat row per breach."""
        return [fields_of(breach) for breach in self.breaches]

    def __repr__(self) -> str:
        word = "passed" if self.passed else f"{len(self.breaches)} breaches"
        return f"<GateResult of {short_name(self.target)}: {len(self.rules)} rules, {word}>"

    def _title(self) -> str:
        return f"Gate of {short_name(self.target)}"
