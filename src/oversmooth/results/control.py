"""What an intervention did to a model."""

from dataclasses import dataclass
from typing import ClassVar

from oversmooth.results.base import Provenance, Row, SavedResult
from oversmooth.results.inspection import Spectrum
from oversmooth.results.worth import EditCurve


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
        return f"<Control of {self.provenance.target}: {self.change} in {len(self.layers)} layers{far}>"

    def _title(self) -> str:
        return f"{self.change}: {self.provenance.target}"


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
        return f"<Applied to {self.provenance.target}: {self.name} in {len(self.layers)} layers{added}>"

    def _title(self) -> str:
        return f"{self.name}: {self.provenance.target}"
