"""Results of changing a model: `Control`, `Applied`, `Loss`, `Ablation`, `Pruning`, `EditCurve`."""

from dataclasses import dataclass
from typing import ClassVar

from oversmooth.results.base import Missing, Provenance, Row, SavedResult, fields_of
from oversmooth.results.inspection import ReadBack, Spectrum
from oversmooth.results.measurement import DataFacts

# --- what a model's parts are worth: its loss, and how it changes when a part is taken out ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How well a model does its task; lower is better."""

    loss: float
    """Mean cross-entropy in nats, or 1 - rank correlation of pairwise similarities with those of the original."""
    standard_error: float | None
    """Over sequences; `None` for similarities, which belong to pairs."""
    perplexity: float | None = None
    """exp of the loss, of language models."""
    accuracy: float | None = None
    """Share of correct answers: classes, or masked tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TaskLoss(SavedResult):
    """The loss of one model on data."""

    kind: ClassVar[str] = "task loss"
    provenance: Provenance
    data: DataFacts
    task: str
    """causal-lm, masked-lm, classification or similarity."""
    found: Loss
    counted: int
    """Predicted tokens, classified inputs, or pairs."""

    def rows(self) -> list[Row]:
        return [{"task": self.task, **fields_of(self.found), "counted": self.counted}]

    def __repr__(self) -> str:
        return f"<TaskLoss of {self.provenance.name}: {self.task} {self.found.loss:.4f}>"

    def _title(self) -> str:
        return f"Loss of {self.provenance.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One part of one block taken out."""

    stack: str
    layer: int
    part: str
    """attention, feed-forward or block."""
    increase: float | None
    """Loss without the part minus loss with it."""
    loss: float | None
    accuracy: float | None = None
    cheap: tuple[tuple[str, float], ...] = ()
    """Numbers about the part that need no removal: influence and its parts, contribution, tendency, rungs."""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """How well a cheap number ranks parts by what removing them costs."""

    part: str
    name: str
    rank_correlation: float
    """Spearman's, with the increase of the loss."""
    interval: tuple[float, float] | None
    """95%, by Fisher's transform with Bonett and Wright's error; `None` for fewer than four parts, or a perfect order."""
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ablation(SavedResult):
    """What removing each sub-block and each block costs."""

    kind: ClassVar[str] = "ablation"
    provenance: Provenance
    data: DataFacts
    task: str
    whole: Loss
    """Of the model as it is; similarities with itself are kept entirely, so there the loss is 0."""
    removals: tuple[Removal, ...]
    predictors: tuple[Predictor, ...]
    passes: float
    """Forward passes of the whole model that the loss and all removals took, per batch; `predict` is one more."""

    def rows(self) -> list[Row]:
        """One flat row per removed part."""
        return [
            {
                "stack": item.stack,
                "layer": item.layer,
                "part": item.part,
                "increase": item.increase,
                "loss": item.loss,
                **dict(item.cheap),
            }
            for item in self.removals
        ]

    def __repr__(self) -> str:
        return f"<Ablation of {self.provenance.name}: {len(self.removals)} removals, {self.task}>"

    def _title(self) -> str:
        return f"Ablation of {self.provenance.name}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pruning(SavedResult):
    """A checkpoint written without some of its blocks; also its manifest, `pruning.json` in the folder."""

    kind: ClassVar[str] = "pruning"
    provenance: Provenance
    """Of the model that was pruned."""
    data: DataFacts
    task: str
    removed: tuple[int, ...]
    """Numbers of the removed blocks in the original."""
    blocks_before: int
    by: str
    """hand, influence or loss: how they were chosen."""
    before: Loss
    after: Loss
    out: str
    read_back: ReadBack | None = None
    """How the folder was read back; `None` in results of older versions."""
    left_out: tuple[str, ...] = ()
    """Links in the original's folder that lead out of it or nowhere, and were not copied."""

    def rows(self) -> list[Row]:
        """One row per removed block."""
        return [{"removed": number, "by": self.by} for number in self.removed]

    def __repr__(self) -> str:
        return f"<Pruning of {self.provenance.name}: {len(self.removed)} of {self.blocks_before} blocks removed>"

    def _title(self) -> str:
        return f"Pruning of {self.provenance.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EditPoint:
    """The model with a change of one strength."""

    strength: float
    """0 is the model as it is."""
    loss: Loss
    increase: float
    """Loss minus that of the model as it is."""
    moved: float | None
    """Largest `norm(H' - H) / norm(H)` of a changed layer; `None` where H was zero."""
    cosine: float | None
    """Mean cosine between tokens behind the last block."""
    change: float | None
    """Of `log(HFC/LFC)` at unit length, from embedding to output; below 0 the model smooths."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EditCurve(SavedResult):
    """What a change of the value maps does to features, and what it costs, over its strength."""

    kind: ClassVar[str] = "edit curve"
    provenance: Provenance
    data: DataFacts
    task: str
    change_words: str
    """What is changed, in words."""
    max_loss_increase: float
    points: tuple[EditPoint, ...]
    """The model as it is first, then by strength."""
    best: float | None
    """The largest strength that costs no more than `max_loss_increase` and moves features as meant."""
    verdict: str
    """One sentence."""

    def rows(self) -> list[Row]:
        """One flat row per strength."""
        return [
            {
                "strength": point.strength,
                "loss": point.loss.loss,
                "increase": point.increase,
                "perplexity": point.loss.perplexity,
                "accuracy": point.loss.accuracy,
                "cosine": point.cosine,
                "change": point.change,
                "moved": point.moved,
            }
            for point in self.points
        ]

    def __repr__(self) -> str:
        return f"<EditCurve of {self.provenance.name}: {self.change_words}, {len(self.points) - 1} strengths>"

    def _title(self) -> str:
        return f"{self.change_words}: {self.provenance.name}"


# --- what an intervention did to a model ---


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMove:
    """How far the map of one head moved."""

    head: int
    kv_head: int
    """The value head it reads; equal to `head` unless value heads are shared."""
    moved: float | None
    """`norm(H_h' - H_h) / norm(H_h)`, Frobenius; `None` where the old map was zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerControl:
    """What was done to one layer."""

    stack: str
    layer: int
    passes: tuple[int, ...]
    """At which depths these weights run: one entry, more where layers are shared."""
    before: Spectrum
    """Spectrum of H as it was."""
    after: Spectrum
    """Spectrum of H as it is now."""
    moved: float | None
    """`norm(H' - H) / norm(H)`, Frobenius; `None` where H was zero."""
    heads: tuple[HeadMove, ...]
    constant_moved: float | None = None
    """How far `W_O b_V + b_O`, which every token receives, moved relative to its norm; `None` without such a constant."""
    norm_signs_changed: int = 0
    """How many weights of the attention's own norms changed their sign."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Control(SavedResult):
    """Which layers were brought into which form, and how far that moved them."""

    kind: ClassVar[str] = "control"
    provenance: Provenance
    change: str
    """What was done, in words."""
    low: float | None
    """Lower end of the interval of the eigenvalues; `None` where the change sets none."""
    high: float | None
    layers: tuple[LayerControl, ...]
    out: str | None = None
    """The folder that was written; `None` for a model changed in place."""
    cost: EditCurve | None = None
    """Loss and features without and with the change, where they were asked for."""
    read_back: ReadBack | None = None
    """How the folder was read back; `None` for a model changed in place, and in results of older versions."""
    left_out: tuple[str, ...] = ()
    """Links in the original's folder that lead out of it or nowhere, and were not copied."""

    def rows(self) -> list[Row]:
        """One flat row per layer: how far H moved, and its spectrum before and after."""
        return [
            {
                "stack": layer.stack,
                "layer": layer.layer,
                "passes": len(layer.passes),
                "moved": layer.moved,
                "largest_head_move": max((head.moved or 0.0 for head in layer.heads), default=None),
                "min_real_before": layer.before.min_real,
                "max_real_before": layer.before.max_real,
                "rho_dc_before": layer.before.rho_dc,
                "min_real": layer.after.min_real,
                "max_real": layer.after.max_real,
                "rho_dc": layer.after.rho_dc,
                "norm_signs_changed": layer.norm_signs_changed,
            }
            for layer in self.layers
        ]

    def head_rows(self) -> list[Row]:
        """One flat row per head."""
        return [
            {
                "stack": layer.stack,
                "layer": layer.layer,
                "head": head.head,
                "kv_head": head.kv_head,
                "moved": head.moved,
            }
            for layer in self.layers
            for head in layer.heads
        ]

    def __repr__(self) -> str:
        moves = [layer.moved for layer in self.layers if layer.moved is not None]
        far = f", H moved by {min(moves):.2f} to {max(moves):.2f} of its norm" if moves else ""
        return f"<Control of {self.provenance.name}: {self.change} in {len(self.layers)} layers{far}>"

    def _title(self) -> str:
        return f"{self.change}: {self.provenance.name}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Applied(SavedResult):
    """Which published intervention was put onto which layers."""

    kind: ClassVar[str] = "applied"
    provenance: Provenance
    name: str
    layers: tuple[tuple[str, int], ...]
    """Stack and layer, in the order of the stacks."""
    parameters: int
    """How many numbers were added that can be trained."""

    def rows(self) -> list[Row]:
        """One flat row per layer."""
        return [{"stack": stack, "layer": layer, "intervention": self.name} for stack, layer in self.layers]

    def __repr__(self) -> str:
        added = f", {self.parameters} new parameters" if self.parameters else ""
        return f"<Applied to {self.provenance.name}: {self.name} in {len(self.layers)} layers{added}>"

    def _title(self) -> str:
        return f"{self.name}: {self.provenance.name}"
