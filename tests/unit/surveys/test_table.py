"""The table of a survey: whole parts, nothing twice, one schema for every reader."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pyarrow.dataset
import pytest

import oversmooth as osm
from oversmooth.environment.files import held
from oversmooth.errors import BrokenFile, CannotResume, FolderInUse, UnknownName
from oversmooth.output.atlas import atlas_of
from oversmooth.surveys import survey as survey_module
from oversmooth.surveys import table as table_module
from oversmooth.surveys import worker as reading
from oversmooth.surveys.engines import serial
from oversmooth.surveys.rows import COLUMNS, EFFORT, NAMES
from oversmooth.surveys.table import SurveyTable, SurveyWarning, _parquet
from oversmooth.surveys.worker import Options
from tests.command_line import oversmooth
from tests.rude_server import head, rude_server
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


def test_the_row_of_a_model_says_how_far_its_layers_are_from_chance(surveyed, models):
    rows = osm.read_survey(surveyed[1], "model").set_index("target")
    row = rows.loc[str(models / "bert")]
    nulls = [layer.null for layer in osm.inspect(models / "bert", spectrum="extremes").layers]
    known = [null for null in nulls if null.excess is not None]
    assert known
    assert row.mean_excess == pytest.approx(sum(null.excess for null in known) / len(known))
    spread = sum(null.excess_spread**2 for null in known) ** 0.5 / len(known)
    assert row.mean_excess_spread == pytest.approx(spread)
    clear = [null.excess > 3 * null.excess_spread for null in known]
    assert row.above_chance_share == pytest.approx(sum(clear) / len(known))
    assert "tendency" not in rows.columns


def test_rows_of_layers_and_heads_are_what_inspect_says(surveyed, models):
    found = osm.read_survey(surveyed[1])
    expected = osm.inspect(models / "llama", spectrum="extremes", heads=True)
    mine = found[found.target == str(models / "llama")]
    layers = mine[mine.level == "layer"].sort_values("layer")
    nulls = [layer.null for layer in expected.layers]
    for name in ("excess", "excess_spread", "positivity"):
        found_here = [None if pandas.isna(value) else value for value in layers[name]]
        assert found_here == [getattr(null, name) for null in nulls], name
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


def levels_and_radii(frame):
    """Rows of each level, and the largest growth of every layer by target."""
    layers = frame[frame.level == "layer"].sort_values(["target", "layer"])
    return frame.level.value_counts().to_dict(), list(zip(layers.target, layers.layer, layers.rho_dc, strict=True))


def test_polars_reads_the_files_as_they_are_with_the_level_as_a_column(surveyed):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    out = surveyed[1]
    found = polars.read_parquet(out / "**" / "*.parquet", hive_partitioning=True)
    assert set(found.columns) == {*NAMES, "level"}
    assert levels_and_radii(found.to_pandas()) == levels_and_radii(osm.read_survey(out))


def test_duckdb_reads_the_files_as_they_are_with_the_level_as_a_column(surveyed):
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    out = surveyed[1]
    with duckdb.connect() as connection:
        found = connection.sql(f"select * from '{out}/*/*.parquet'").df()
    assert set(found.columns) == {*NAMES, "level"}
    assert levels_and_radii(found) == levels_and_radii(osm.read_survey(out))


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
    assert one.rho_dc.tolist() == two.rho_dc.tolist()
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


KILLED = """
import os, signal, sys
import oversmooth as osm
target, out, left = sys.argv[1], sys.argv[2], [int(sys.argv[3])]
def see(event, arguments):
    if event == "os.rename":
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(see)
osm.survey([target], out)
"""


@pytest.mark.parametrize("file", [1, 2, 3])
def test_a_survey_that_was_killed_before_any_of_its_first_files_had_its_name_is_continued(file, models, tmp_path):
    out, target = tmp_path / "table", str(models / "llama")
    done = subprocess.run([sys.executable, "-c", KILLED, target, str(out), str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(out.rglob("*.partial"))) == 1
    assert [(out / name).exists() for name in ("survey.json", "parts.json")] == [file > 1, file > 2]
    assert osm.survey([target], out).models == 1
    assert osm.read_survey(out).target.unique().tolist() == [target]
    assert not list(out.rglob("*.partial"))


def test_two_surveys_do_not_write_one_table(models, tmp_path):
    from tests.command_line import fresh_python

    with held(tmp_path / "table"):
        done = fresh_python(
            f"import oversmooth as osm; osm.survey([{str(models / 'llama')!r}], {str(tmp_path / 'table')!r})"
        )
    assert FolderInUse.__name__ in done.stderr


class Killed(Exception):
    """Where SIGKILL would end the process."""


@pytest.mark.parametrize("writes", range(5))
def test_a_part_that_was_killed_at_any_write_is_whole_or_gone(writes, tmp_path, monkeypatch):
    table = SurveyTable.at(tmp_path / "table", Options())
    row = dict.fromkeys(NAMES) | {"status": "read"}
    table.add([("model", row | {"target": "a"}), ("layer", row | {"target": "a"})])
    write, left = table_module._write, list(range(writes))

    def killed(path, content):
        if not left:
            path.with_name(f".{path.name}.partial").write_bytes(content[:9])
            raise Killed
        left.pop()
        write(path, content)

    monkeypatch.setattr(table_module, "_write", killed)
    with contextlib.suppress(Killed):
        table.add([("model", row | {"target": "b"}), ("layer", row | {"target": "b"})])
    monkeypatch.setattr(table_module, "_write", write)
    again = SurveyTable.at(tmp_path / "table", Options())
    expected = ["a", "b"] if writes >= 3 else ["a"]  # announced, then two files, then listed
    assert [row["target"] for row in again.models()] == expected
    assert osm.read_survey(tmp_path / "table").target.tolist() == sorted(expected * 2)
    files = [path.name for path in (tmp_path / "table").rglob("*") if path.is_file() and "level=" in str(path)]
    assert sorted(files) == sorted(again.parts() * 2)


def _delete(out, part):
    (out / "level=layer" / part).unlink()


def _flip(out, part):
    content = bytearray((out / "level=layer" / part).read_bytes())
    content[len(content) // 3] ^= 1
    (out / "level=layer" / part).write_bytes(content)


def _cut(out, part):
    path = out / "level=model" / part
    path.write_bytes(path.read_bytes()[:-30])


def _exchange(out, part):
    (out / "level=model" / part).write_bytes(_parquet([]))


@pytest.mark.parametrize("damage", [_delete, _flip, _cut, _exchange])
def test_a_resumed_survey_does_again_what_is_damaged_and_says_so(damage, models, tmp_path):
    out, chosen = tmp_path / "table", [str(models / "llama"), str(models / "bert")]
    for target in chosen:
        osm.survey([target], out, spectrum="extremes")
    whole = osm.read_survey(out).drop(columns=[column.name for column in EFFORT])
    damage(out, SurveyTable(out).parts()[0])
    for read in (osm.read_survey, atlas_of):
        with pytest.raises(BrokenFile, match="Run the same survey into this folder again"):
            read(out)
    with pytest.warns(SurveyWarning, match="not as they were written; their models are done again: part-00000"):
        counts = osm.survey(chosen, out)
    assert (counts.earlier, counts.read) == (1, 1)
    again = osm.read_survey(out).drop(columns=[column.name for column in EFFORT])
    pandas.testing.assert_frame_equal(again, whole)


def test_files_of_another_survey_do_not_become_rows(models, tmp_path):
    osm.survey([str(models / "llama")], tmp_path / "table")
    osm.survey([str(models / "bert")], tmp_path / "other")
    for file in (tmp_path / "other").rglob("*.parquet"):
        (tmp_path / "table" / file.parent.name / file.name).write_bytes(file.read_bytes())
    with pytest.raises(BrokenFile, match=r"a part of the survey that parts.json lists, found a file it does not list"):
        osm.read_survey(tmp_path / "table")
    with pytest.warns(
        SurveyWarning, match=r"does not list were renamed to _not-of-this-survey-.*: level=model/part-00000"
    ):
        osm.survey([str(models / "llama")], tmp_path / "table")
    assert set(osm.read_survey(tmp_path / "table").target) == {str(models / "llama")}
    found = pyarrow.dataset.dataset(tmp_path / "table", format="parquet", exclude_invalid_files=True)
    assert found.count_rows() == 3
    assert len(list((tmp_path / "table").rglob("_not-of-this-survey-*"))) == 2


def test_a_part_that_is_no_longer_listed_is_not_left_out_in_silence(models, tmp_path):
    for name in ("llama", "bert"):
        osm.survey([str(models / name)], tmp_path / "table")
    listed = json.loads((tmp_path / "table" / "parts.json").read_text())
    listed["parts"].popitem()
    (tmp_path / "table" / "parts.json").write_text(json.dumps(listed))
    with pytest.raises(BrokenFile, match="a file it does not list"):
        osm.read_survey(tmp_path / "table")
    done = oversmooth("report", tmp_path / "table", "-o", tmp_path / "atlas.html")
    assert (done.returncode, (tmp_path / "atlas.html").exists()) == (2, False)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"parts": {"../x": {"model": {"rows": 1, "sha256": ""}}}, "announced": {}}', None],
)
def test_a_list_of_parts_that_cannot_be_read_is_an_error_of_ours(content, models, tmp_path):
    osm.survey([str(models / "llama")], tmp_path / "table")
    place = tmp_path / "table" / "parts.json"
    place.unlink() if content is None else place.write_bytes(content)
    for read in (osm.read_survey, atlas_of, lambda out: osm.survey([str(models / "llama")], out)):
        with pytest.raises(BrokenFile, match=r"parts\.json"):
            read(tmp_path / "table")


def test_finished_rows_are_on_the_disk_while_the_next_target_takes_its_time(models, tmp_path, monkeypatch):
    monkeypatch.setattr(survey_module, "SHORTEST_PART_SECONDS", 0.05)
    monkeypatch.setattr(survey_module, "LOOK_SECONDS", 0.01)
    out, seen = tmp_path / "table", []

    def slow(targets, options, limits, workers):
        for outcome in serial(targets, options, limits):
            yield outcome
            until = time.monotonic() + 10
            while not seen and time.monotonic() < until:
                seen.extend(osm.read_survey(out, "model").target)

    monkeypatch.setattr(survey_module, "serial", slow)
    osm.survey([str(models / "llama")], out)
    assert seen == [str(models / "llama")]


def test_rows_are_written_when_the_survey_is_interrupted(models, tmp_path, monkeypatch):
    def interrupted(targets, options, limits, workers):
        yield from serial(targets, options, limits)
        raise KeyboardInterrupt

    monkeypatch.setattr(survey_module, "serial", interrupted)
    with pytest.raises(KeyboardInterrupt):
        osm.survey([str(models / "llama")], tmp_path / "table")
    assert len(osm.read_survey(tmp_path / "table", "model")) == 1


def test_a_server_that_asks_for_days_costs_its_own_targets_and_no_other(models, tmp_path):
    asked = []

    def answer(request):
        asked.append(request.path)
        yield head("429 Too Many Requests", Retry_After=999_999, Content_Length=0)

    with rude_server(answer) as url:
        listed = [f"{url}/a/", f"{url}/b/", str(models / "llama")]
        counts = osm.survey(listed, tmp_path / "table")
    assert (counts.read, counts.failed) == (1, 2)
    rows = osm.read_survey(tmp_path / "table", "model").set_index("target")
    for target in listed[:2]:
        assert "asks to wait 99999" in rows.loc[target, "reason"]
        assert "the longest wait is 900" in rows.loc[target, "reason"]
    assert len(asked) == 1  # and was not asked again


def test_models_that_failed_can_be_tried_again_and_the_others_stay(tmp_path):
    table = SurveyTable.at(tmp_path / "table", Options())
    rows = [
        dict.fromkeys(NAMES) | {"target": name, "status": status} for name, status in (("a", "read"), ("b", "failed"))
    ]
    table.add([("model", row) for row in rows])
    assert table.forget("failed") == 1
    assert [row["target"] for row in table.models()] == ["a"]


def test_a_folder_that_is_no_survey_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(BrokenFile, match="oversmooth survey LIST -o FOLDER"):
        osm.read_survey(tmp_path)


def test_a_level_that_does_not_exist_is_refused(surveyed):
    with pytest.raises(UnknownName, match="layr"):
        osm.read_survey(surveyed[1], "layr")


def test_the_columns_of_effort_are_the_last_ones():
    assert NAMES[-len(EFFORT) :] == tuple(column.name for column in EFFORT)
