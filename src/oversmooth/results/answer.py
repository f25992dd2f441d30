"""Everything about one model: weights, measurement and prediction together."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from oversmooth.results.base import Missing, Row, SavedResult
from oversmooth.results.inspection import Inspection, Verification
from oversmooth.results.measurement import Measurement
from oversmooth.results.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Analysis(SavedResult):
    """What a report is made from. Parts that could not be made are `None`, with the reason in `missing`."""

    kind: ClassVar[str] = "analysis"
    inspection: Inspection
    verification: Verification | None = None
    measurement: Measurement | None = None
    prediction: Prediction | None = None
    command: str = ""
    """The command that repeats it."""
    missing: tuple[Missing, ...] = ()

    def rows(self) -> list[Row]:
        """One flat row per layer of what the weights say."""
        return self.inspection.rows()

    def _title(self) -> str:
        return f"Analysis of {self.inspection.provenance.target}"

    def save_html(self, path: str | Path) -> None:
        """Writes the report as one self-contained HTML file (needs plotly and jinja2)."""
        from oversmooth.output.page import page_of
        from oversmooth.output.render import write_page

        write_page(page_of(self), Path(path))

    def __repr__(self) -> str:
        parts = [name for name in ("measurement", "prediction") if getattr(self, name) is not None]
        return f"<Analysis of {self.inspection.provenance.target}: inspection{''.join(', ' + part for part in parts)}>"
