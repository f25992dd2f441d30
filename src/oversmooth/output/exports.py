"""Rows as CSV and Parquet files, gates as JUnit XML and annotations."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from xml.etree import ElementTree

from oversmooth.environment.files import make_folder, write_text_whole, write_whole
from oversmooth.errors import MissingDependency
from oversmooth.output.tables import csv_text
from oversmooth.results import Analysis, Attribution, DataFacts, GateResult, Measurement, Provenance, Row
from oversmooth.results.base import fields_of

# --- every table of an analysis as CSV and Parquet, each row with the model and what its numbers rest on ---


def write_tables(analyses: Sequence[Analysis], folder: Path, models: Sequence[str] = ()) -> list[Path]:
    """Writes every table of the analyses, one below the other, in both formats and returns the paths.

    `models` are names for the column `model` in place of the analyses' own targets. Parquet needs pandas and pyarrow.
    """
    require_parquet("--tables")
    make_folder(folder)
    tables: dict[str, list[Row]] = {}
    for analysis, model in zip_longest(analyses, models):
        for name, rows in tables_of(analysis):
            rows = [{**row, "model": model} for row in rows] if model else rows
            tables.setdefault(name, []).extend(rows)
    written = []
    for name, found in tables.items():
        rows = _complete(found)
        for ending in ("csv", "parquet"):
            written.append(folder / f"{name}.{ending}")
        write_text_whole(written[-2], csv_text(rows))
        write_parquet(written[-1], rows)
    return written


def require_parquet(asked: str) -> None:
    """Refuses an option that writes Parquet where nothing can, before the work whose rows it should receive."""
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401  (pandas writes Parquet with it)
    except ImportError as error:
        raise MissingDependency("pandas and pyarrow", "report", asked) from error


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Rows as Parquet; an existing file is replaced only by a whole new one."""
    import pandas

    frame = pandas.DataFrame(rows)
    for name in frame.columns:
        known = [row[name] for row in rows if row[name] is not None]
        if known and len(known) < len(rows) and all(type(value) is int for value in known):
            frame[name] = pandas.array([row[name] for row in rows], dtype="Int64")  # a layer stays 3, not 3.0
    write_whole(path, frame.to_parquet)


def tables_of(analysis: Analysis) -> Iterator[tuple[str, list[Row]]]:
    """Name and rows of every table that is not empty; every row of a table has the same columns."""
    for name, provenance, data, rows in _parts(analysis):
        if rows:
            yield name, sourced(rows, provenance, data)


def sourced(rows: Sequence[Row], provenance: Provenance, data: DataFacts | None) -> list[Row]:
    """The same rows with plain values and equal columns: the model in front, what the numbers rest on behind."""
    return _complete([{"model": provenance.target, **_flat(row), **_source(provenance, data)} for row in rows])


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
        yield (
            "attention_heads",
            measurement.provenance,
            measurement.data,
            [fields_of(head) for head in measurement.heads],
        )
        yield "spans", measurement.provenance, measurement.data, span_rows(measurement)
    if prediction is not None:
        yield "theory", prediction.provenance, prediction.data, prediction.rows()
        yield "theory_heads", prediction.provenance, prediction.data, prediction.head_rows()
        yield "what_ifs", prediction.provenance, prediction.data, prediction.what_if_rows()


def attribution_rows(measurement: Measurement) -> list[Row]:
    """One flat row per sub-block: what it changed of the mean cosine, and of log(HFC/LFC)."""
    found = (measurement.attributions, measurement.unit_attributions, measurement.raw_attributions)
    layers = {(value.stack, value.depth, value.place): value.layer for value in measurement.values}
    return [row for attributions in found for item in attributions for row in _attribution_rows(item, layers)]


def span_rows(measurement: Measurement) -> list[Row]:
    """One flat row per pair of depths: how far tokens turn between them."""
    return [
        {
            "stack": span.stack,
            "from_depth": span.depths[i],
            "to_depth": span.depths[j],
            "angular_distance": span.angular_distance[i][j],
            "influence": span.influence[i][j],
            "sequences": span.sequences,
        }
        for span in measurement.spans
        for i in range(len(span.depths))
        for j in range(i + 1, len(span.depths))
    ]


def _attribution_rows(attribution: Attribution, layers: Mapping[tuple[str, int, str], int | None]) -> list[Row]:
    return [
        {
            "quantity": attribution.quantity,
            "stack": part.stack,
            "depth": part.depth,
            "layer": layers.get((part.stack, part.depth, part.place)),
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


# --- the answer of the gate for machines: JUnit XML, and annotations of GitHub ---


def write_junit(result: GateResult, path: Path) -> None:
    """One test case per rule; a rule that is broken at several layers is one failure that names them all."""
    names = [*dict(result.rules), *dict.fromkeys(b.rule for b in result.breaches if b.rule not in dict(result.rules))]
    suite = ElementTree.Element("testsuite", name=f"oversmooth gate {result.target}", tests=str(len(names)))
    failed = 0
    for name in names:
        case = ElementTree.SubElement(suite, "testcase", classname="oversmooth.gate", name=name)
        words = [breach.words for breach in result.breaches if breach.rule == name]
        if words:
            failed += 1
            failure = ElementTree.SubElement(case, "failure", message=words[0])
            failure.text = "\n".join(words)
    suite.set("failures", str(failed))
    content = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    write_whole(path, lambda partial: partial.write_bytes(content))


def annotations(result: GateResult) -> list[str]:
    """Lines that GitHub shows beside a pull request."""
    return [f"::error title=oversmooth gate {_escaped(b.rule)}::{_escaped(b.words)}" for b in result.breaches]


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
