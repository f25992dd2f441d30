"""`read_survey`: the table of a survey as a DataFrame."""

from pathlib import Path
from typing import TYPE_CHECKING

from oversmooth.errors import BrokenFile, MissingDependency, UnknownName
from oversmooth.surveys.schema import LEVELS, NAMES
from oversmooth.surveys.table import ABOUT, SurveyTable, require_pyarrow

if TYPE_CHECKING:
    import pandas


def read_survey(folder: str | Path, level: str | None = None) -> "pandas.DataFrame":
    """The table of a survey, rows in the order of their targets; `level` is model, layer or head, and a column without it.

    Other tools read the same files: `polars.read_parquet("FOLDER/**/*.parquet", hive_partitioning=True)`, and in duckdb
    `select * from 'FOLDER/*/*.parquet'`; both have the level as a column too.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingDependency("pandas", "survey", "read_survey()") from error
    pyarrow = require_pyarrow()
    if level is not None and level not in LEVELS:
        raise UnknownName("level", level, LEVELS)
    place = Path(folder)
    if not (place / ABOUT).is_file():
        raise BrokenFile(
            str(folder), "the folder of a survey", f"no {ABOUT}", "Make one: oversmooth survey LIST --out FOLDER"
        )
    found = []
    for name in LEVELS if level is None else (level,):
        files = [place / f"level={name}" / part for part in SurveyTable(place).parts()]
        tables = [pyarrow.parquet.ParquetFile(file).read().to_pandas() for file in files if file.exists()]
        found += [table.assign(level=name) for table in tables if len(table)]
    if not found:
        return pandas.DataFrame(columns=[*NAMES, "level"])
    whole = pandas.concat([table.dropna(axis=1, how="all") for table in found], ignore_index=True)
    return whole.reindex(columns=[*NAMES, "level"]).sort_values("target", kind="stable", ignore_index=True)
