"""Tables of an analysis as files that other programs read."""

import csv

import pytest

import oversmooth as osm
from oversmooth.output.exports import tables_of, write_tables
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def analysis():
    model, batch = tiny_model("bert")
    return osm.analyze(model, [batch], what_ifs=["no_skip"])


def test_every_table_is_written_in_both_formats_with_model_and_provenance(analysis, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    written = write_tables([analysis], tmp_path / "tables")
    names = {path.name for path in written}
    for table in ("spectra", "spectra_heads", "verification", "features", "attribution", "theory", "what_ifs"):
        assert {f"{table}.csv", f"{table}.parquet"} <= names
    for path in written:
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            again = pandas.read_parquet(path.with_suffix(".parquet"))
            assert list(again.columns) == list(rows[0])
            assert len(again) == len(rows)
            assert {row["weights_sha256"] for row in rows} == {analysis.inspection.provenance.weights_sha256}


def test_places_name_the_layer_whose_weights_act_there(analysis):
    tables = dict(tables_of(analysis))
    for name in ("features", "attribution"):
        found = {(row["depth"], row["place"]): row["layer"] for row in tables[name]}
        assert found[1, "attn_sum"] == 0
        assert found[2, "ffn_norm"] == 1
    assert {row["layer"] for row in tables["features"] if row["place"] == "embedding"} == {None}


def test_passes_through_shared_weights_name_the_same_layer():
    model, batch = tiny_model("albert")
    found = {
        value.depth: value.layer for value in osm.measure(model, [batch], metrics=["cosine"]).values if value.depth
    }
    layers = osm.inspect(model).layers
    assert found == {depth + 1: layer.layer for layer in layers for depth in layer.passes}
    assert len(found) > len(layers)


def test_layers_stay_whole_numbers_beside_places_that_have_none(analysis, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    write_tables([analysis], tmp_path)
    assert str(pandas.read_parquet(tmp_path / "features.parquet")["layer"].dtype) == "Int64"
    assert "0.0" not in pandas.read_csv(tmp_path / "features.csv", dtype=str)["layer"].tolist()


def test_tables_of_several_analyses_stand_below_each_other_under_their_names(analysis, tmp_path):
    write_tables([analysis, analysis], tmp_path, ["runs/a", "runs/b"])
    with (tmp_path / "spectra.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    layers = len(analysis.inspection.layers)
    assert [row["model"] for row in rows] == ["runs/a"] * layers + ["runs/b"] * layers


def test_attribution_rows_add_up_to_the_totals(analysis):
    rows = dict(tables_of(analysis))["attribution"]
    measured = analysis.measurement
    for found in (measured.attributions, measured.unit_attributions, measured.raw_attributions):
        changes = [row["change"] for row in rows if row["quantity"] == found[0].quantity]
        assert sum(changes) == pytest.approx(sum(item.total for item in found))
    assert {row["data_sha256"] for row in rows} == {measured.data.sha256}


def test_rows_of_a_table_have_the_same_columns_and_plain_values(analysis):
    for name, rows in tables_of(analysis):
        assert len({tuple(row) for row in rows}) == 1, name
        assert next(iter(rows[0])) == "model"
        for row in rows:
            assert all(value is None or isinstance(value, bool | int | float | str) for value in row.values())
