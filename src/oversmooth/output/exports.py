"""Every table of an analysis as CSV and Parquet, each row with the model and what its numbers rest on."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from oversmooth.errors import MissingDependency
from oversmooth.output.terminal.tables import write_csv
from oversmooth.output.whole_files import make_folder, write_whole
from oversmooth.results import Analysis, Attribution, DataFacts, Measurement, Provenance, Row


def write_tables(analysis: Analysis, folder: Path) -> list[Path]:
    """Writes every table that the analysis has in both formats and returns the paths (Parquet needs pandas, pyarrow)."""
    try:
        import pandas
        import pyarrow  # noqa: F401  (pandas writes Parquet with it)
    except ImportError as error:
        raise MissingDependency("pandas and pyarrow", "report", "--tables") from error
    make_folder(folder)
    written = []
    for name, rows in tables_of(analysis):
        for ending in ("csv", "parquet"):
            written.append(folder / f"{name}.{ending}")
        write_csv(written[-2], rows)
        write_whole(written[-1], pandas.DataFrame(rows).to_parquet)
    return written


def tables_of(analysis: Analysis) -> Iterator[tuple[str, list[Row]]]:
    """Name and rows of every table that is not empty; every row of a table has the same columns."""
    for name, provenance, data, rows in _parts(analysis):
        if rows:
            yield (
                name,
                _complete([{"model": provenance.target, **_flat(row), **_source(provenance, data)} for row in rows]),
            )


Part = tuple[str, Provenance, DataFacts | None, Sequence[Row]]


def _parts(analysis: Analysis) -> Iterator[Part]:
    inspection, verification = analysis.inspection, analysis.verification
    measurement, prediction = analysis.measurement, analysis.prediction
    yield "spectra", inspection.provenance, None, inspection.rows()
    yield "spectra_heads", inspection.provenance, None, inspection.head_rows()
    if verification is not None:
        yield "verification", verification.provenance, None, verification.rows()
    if measurement is not None:
        yield "features", measurement.provenance, measurement.data, measurement.rows()
        yield "attribution", measurement.provenance, measurement.data, attribution_rows(measurement)
    if prediction is not None:
        yield "theory", prediction.provenance, prediction.data, prediction.rows()
        yield "theory_heads", prediction.provenance, prediction.data, prediction.head_rows()
        yield "what_ifs", prediction.provenance, prediction.data, prediction.what_if_rows()


def attribution_rows(measurement: Measurement) -> list[Row]:
    """One flat row per sub-block: what it changed, for tokens as they are and at unit length."""
    found = (("as they are", measurement.attributions), ("unit length", measurement.unit_attributions))
    return [row for tokens, attributions in found for item in attributions for row in _attribution_rows(tokens, item)]


def _attribution_rows(tokens: str, attribution: Attribution) -> list[Row]:
    return [
        {
            "tokens": tokens,
            "stack": part.stack,
            "depth": part.depth,
            "place": part.place,
            "part": part.part,
            "change": part.change,
            "standard_error": part.standard_error,
            "direction": part.direction,
            "sequences": attribution.sequences,
        }
        for part in attribution.parts
    ]


def _source(provenance: Provenance, data: DataFacts | None) -> Row:
    """What a row rests on: the weights, the data, and what computed it."""
    return {
        "weights_sha256": provenance.weights_sha256,
        "data_sha256": data and data.sha256,
        "seed": provenance.seed,
        "compute_dtype": provenance.compute_dtype,
        "oversmooth": dict(provenance.versions).get("oversmooth", ""),
    }


def _flat(row: Row) -> Row:
    """Complex numbers as two columns; everything else that is no plain value as text."""
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, float) for part in value):
            flat |= {f"{name}_real": value[0], f"{name}_imaginary": value[1]}
        else:
            flat[name] = value if value is None or isinstance(value, bool | int | float | str) else str(value)
    return flat


def _complete(rows: Sequence[Row]) -> list[Row]:
    """The same columns in every row, in the order in which they first appear."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]
