"""The table of a survey: whole parts, nothing twice, one schema for every reader."""

import json
from pathlib import Path

import pyarrow.dataset
import pytest

import oversmooth as osm
from oversmooth.errors import BrokenFile, CannotResume, FolderInUse, UnknownName
from oversmooth.output.held_folders import held
from oversmooth.surveys import reading
from oversmooth.surveys.reading import Options
from oversmooth.surveys.schema import COLUMNS, EFFORT, NAMES
from oversmooth.surveys.table import SurveyTable
from tests.small_checkpoints import FAMILIES, checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a model of every family and one that is broken."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        (folder / family).mkdir()
        for file, content in checkpoint(family, 0).items():
            (folder / family / file).write_bytes(content)
    (folder / "cut").mkdir()
    for file, content in checkpoint("llama", 1).items():
        (folder / "cut" / file).write_bytes(content[:-20])
    return folder


@pytest.fixture(scope="module")
def surveyed(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("survey") / "table"
    return osm.survey(models, out, heads=True), out


def test_every_model_is_a_row_and_what_is_broken_says_why(surveyed):
    counts, out = surveyed
    assert (counts.models, counts.read, counts.refused, counts.failed) == (11, 10, 1, 0)
    rows = osm.read_survey(out, "model").set_index("target")
    assert len(rows) == 11
    (broken,) = [name for name in rows.index if name.endswith("/cut")]
    assert rows.loc[broken, "status"] == "refused"
    assert rows.loc[broken, "error"] == "BrokenFile"
    assert "cut/config.json" in rows.loc[broken, "reason"]


def test_rows_of_layers_and_heads_are_what_inspect_says(surveyed, models):
    found = osm.read_survey(surveyed[1])
    expected = osm.inspect(models / "llama", extremes=True, heads=True)
    mine = found[found.target == str(models / "llama")]
    layers = mine[mine.level == "layer"].sort_values("layer")
    assert layers.tendency.tolist() == [layer.tendency for layer in expected.layers]
    assert layers.rho_dc.tolist() == [layer.plain.rho_dc for layer in expected.layers]
    assert layers.relative_depth.tolist() == [0.0, 1.0]
    assert set(layers.weights_sha256) == {expected.provenance.weights_sha256}
    heads = mine[mine.level == "head"].sort_values(["layer", "head"])
    assert heads.rho_dc.tolist() == [head.rho_dc for layer in expected.layers for head in layer.heads]


def test_the_table_is_one_dataset_for_every_reader_and_tells_its_schema(surveyed):
    out = surveyed[1]
    dataset = pyarrow.dataset.dataset(out, format="parquet", partitioning="hive", exclude_invalid_files=True)
    assert set(dataset.schema.names) == {*NAMES, "level"}
    assert dataset.count_rows() == len(osm.read_survey(out)) == 11 + 20 + 40
    assert dataset.schema.field("rho_dc").metadata[b"meaning"].startswith(b"largest |1 + lambda|")
    about = json.loads((out / "survey.json").read_text())
    assert [column["name"] for column in about["columns"]] == list(NAMES)
    assert all(column.meaning for column in COLUMNS)


def levels_and_tendencies(frame):
    """Rows of each level, and the tendency of every layer by target."""
    layers = frame[frame.level == "layer"].sort_values(["target", "layer"])
    return frame.level.value_counts().to_dict(), list(zip(layers.target, layers.layer, layers.tendency, strict=True))


def test_polars_reads_the_files_as_they_are_with_the_level_as_a_column(surveyed):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    out = surveyed[1]
    found = polars.read_parquet(out / "**" / "*.parquet", hive_partitioning=True)
    assert set(found.columns) == {*NAMES, "level"}
    assert levels_and_tendencies(found.to_pandas()) == levels_and_tendencies(osm.read_survey(out))


def test_duckdb_reads_the_files_as_they_are_with_the_level_as_a_column(surveyed):
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    out = surveyed[1]
    with duckdb.connect() as connection:
        found = connection.sql(f"select * from '{out}/*/*.parquet'").df()
    assert set(found.columns) == {*NAMES, "level"}
    assert levels_and_tendencies(found) == levels_and_tendencies(osm.read_survey(out))


def test_a_second_run_reads_nothing_and_changes_nothing(surveyed, models):
    out = surveyed[1]
    before = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    counts = osm.survey(models, out, heads=True)
    assert (counts.earlier, counts.read) == (11, 0)
    assert {path.name: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == before


def test_more_targets_are_added_to_the_table_that_is_there(models, tmp_path):
    osm.survey([str(models / "llama")], tmp_path / "table")
    osm.survey([str(models / "llama"), str(models / "bert")], tmp_path / "table")
    assert osm.read_survey(tmp_path / "table", "model").target.tolist() == [
        str(models / name) for name in ("bert", "llama")
    ]


@pytest.fixture
def copies(tmp_path):
    """A model, the same in another folder, and one that differs from it in one number."""
    files = checkpoint("llama", 5)
    different = bytearray(files["model.safetensors"])
    different[-100 * 4] ^= 1
    for name, weights in (
        ("one", files["model.safetensors"]),
        ("two", files["model.safetensors"]),
        ("three", different),
    ):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "model.safetensors").write_bytes(weights)
        (tmp_path / "models" / name / "config.json").write_bytes(files["config.json"])
    return tmp_path / "models"


def test_copies_on_this_machine_are_computed_once_and_have_the_same_rows(copies, tmp_path, monkeypatch):
    computed = []
    inspect = reading.inspect
    monkeypatch.setattr(
        reading, "inspect", lambda source, **how: computed.append(source.target) or inspect(source, **how)
    )
    counts = osm.survey(copies, tmp_path / "table")
    assert (counts.read, counts.copied) == (2, 1)
    assert sorted(Path(target).name for target in computed) == ["one", "three"]
    rows = osm.read_survey(tmp_path / "table", "layer").set_index("target")
    one, two = (rows.loc[str(copies / name)] for name in ("one", "two"))
    assert one.tendency.tolist() == two.tendency.tolist()
    assert two.copied.all()


def test_a_copy_that_is_added_later_is_not_computed(copies, tmp_path, monkeypatch):
    osm.survey([str(copies / "one")], tmp_path / "table")
    monkeypatch.setattr(reading, "inspect", None)
    assert osm.survey([str(copies / "two")], tmp_path / "table").copied == 1


def test_other_options_are_another_table(surveyed, models):
    with pytest.raises(CannotResume, match="'heads': True"):
        osm.survey(models, surveyed[1])


def test_a_folder_of_something_else_is_left_alone(models, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CannotResume, match=r"holds no survey\.json"):
        osm.survey(models, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_surveys_do_not_write_one_table(models, tmp_path):
    from tests.command_line import fresh_python

    with held(tmp_path / "table"):
        done = fresh_python(
            f"import oversmooth as osm; osm.survey([{str(models / 'llama')!r}], {str(tmp_path / 'table')!r})"
        )
    assert FolderInUse.__name__ in done.stderr


def test_what_a_killed_run_left_half_written_does_not_count_and_goes(tmp_path):
    table = SurveyTable.at(tmp_path / "table", Options())
    row = dict.fromkeys(NAMES) | {"target": "a", "status": "read"}
    table.add([("model", row), ("layer", row)])
    (whole,) = table.parts()
    layers = tmp_path / "table" / "level=layer"
    (layers / "part-00001-left.parquet").write_bytes((layers / whole).read_bytes())  # killed before its models
    (layers / ".part-00002.partial").write_bytes(b"PAR1")
    again = SurveyTable.at(tmp_path / "table", Options())
    assert again.parts() == [whole]
    assert [path.name for path in layers.iterdir()] == [whole]


def test_models_that_failed_can_be_tried_again_and_the_others_stay(tmp_path):
    table = SurveyTable.at(tmp_path / "table", Options())
    rows = [
        dict.fromkeys(NAMES) | {"target": name, "status": status} for name, status in (("a", "read"), ("b", "failed"))
    ]
    table.add([("model", row) for row in rows])
    assert table.forget("failed") == 1
    assert [row["target"] for row in table.models()] == ["a"]


def test_a_folder_that_is_no_survey_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(BrokenFile, match="oversmooth survey LIST --out FOLDER"):
        osm.read_survey(tmp_path)


def test_a_level_that_does_not_exist_is_refused(surveyed):
    with pytest.raises(UnknownName, match="layr"):
        osm.read_survey(surveyed[1], "layr")


def test_the_columns_of_effort_are_the_last_ones():
    assert NAMES[-len(EFFORT) :] == tuple(column.name for column in EFFORT)
