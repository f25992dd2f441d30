"""Results: plain, frozen, and the same after a round trip through JSON."""

import dataclasses
import json
import sys
import types
import typing
from dataclasses import replace

import pytest

from oversmooth import results
from oversmooth.errors import BrokenFile, MissingDependency, OversmoothError
from oversmooth.results import (
    SCHEMA_VERSION,
    Analysis,
    Attribution,
    DataFacts,
    FileFacts,
    HeadSpectrum,
    Inspection,
    LayerCheck,
    LayerInspection,
    Measurement,
    Missing,
    NormFacts,
    Part,
    PlaceValue,
    Provenance,
    SavedResult,
    Spectrum,
    StackFacts,
    Verification,
)
from oversmooth.results.base import format_cell, signed

HOSTILE = "<script>alert(1)</script>"

PROVENANCE = Provenance(
    target="a-model",
    source="folder",
    model_type="bert",
    families=("bert",),
    files=(FileFacts(name="model.safetensors", size_bytes=12),),
    weights_sha256="00",
    bytes_read=10,
    weight_dtypes=("float32",),
    compute_dtype="float64",
    versions=(("python", "3.11"),),
    seed=0,
)
SPECTRUM = Spectrum(
    size=4,
    rho_dc=1.5,
    dominating=(0.5, 0.0),
    spectral_radius=0.75,
    min_real=-0.75,
    max_real=0.5,
    negative_share=0.25,
    route="dense",
    residual=None,
    condition=1.0,
    is_defective=False,
    eigenvalues=((-0.75, 0.0), (0.5, 0.0)),
    missing=(Missing(field="residual", reason="direct"),),
)
HEAD = HeadSpectrum(
    head=0,
    kv_head=0,
    rho_dc=1.5,
    spectral_radius=0.5,
    min_real=0.5,
    max_real=0.5,
    negative_share=0.0,
    eigenvalues=((0.5, 0.0),),
)
NORMS = (
    NormFacts(role="attn_norm", kind="layer", negative_share=0.25, smallest=-0.5, largest=2.0),
    NormFacts(role="ffn_norm", kind="layer", negative_share=1.0, smallest=-9.0, largest=9.0),
)
LAYERS = (
    LayerInspection(
        stack="", layer=0, passes=(0, 1), plain=SPECTRUM, tendency=0.4, asymmetry=0.5, heads=(HEAD,), norms=NORMS
    ),
    LayerInspection(stack="", layer=1, passes=(2,), unreadable="w holds 1 values that are NaN or infinite"),
)
STACK = StackFacts(
    name="",
    family="bert",
    d_model=4,
    n_heads=1,
    n_kv=1,
    d_head=4,
    residual="post",
    norm="layer",
    blocks=2,
    blocks_in_model=2,
)
VALUE = PlaceValue(
    stack="",
    depth=0,
    place="embedding",
    metric="cosine",
    mean=0.5,
    standard_error=None,
    sequences=1,
    on_stream=True,
    missing=(Missing(field="standard_error", reason="one sequence"),),
)
ATTRIBUTION = Attribution(
    stack="",
    quantity="mean cosine",
    total=0.25,
    standard_error=None,
    sequences=1,
    start=0.5,
    end=0.75,
    parts=(Part(stack="", depth=1, part="attention", place="attn_sum", change=0.25, standard_error=None),),
)
EXAMPLES = {
    example.kind: example
    for example in (
        Inspection(provenance=PROVENANCE, stacks=(STACK,), layers=LAYERS),
        Verification(
            provenance=PROVENANCE, tolerance=1e-4, layers=(LayerCheck(stack="", layer=0, error=1e-6, tokens=12),)
        ),
        Measurement(
            provenance=PROVENANCE,
            data=DataFacts(description="one text", sha256="00", sequences=1, tokens=5, skipped=0),
            prefix_tokens="kept",
            is_partial=False,
            values=(VALUE, replace(VALUE, depth=1, place="block", mean=0.75)),
            attributions=(ATTRIBUTION,),
            definitions=(("cosine", "mean cosine"),),
        ),
    )
}
EXAMPLES["analysis"] = Analysis(
    **EXAMPLES, command="oversmooth report a-model", missing=(Missing(field="prediction", reason="not asked for"),)
)
"""Examples whose views are tested below."""
EXPORTED = [value for value in vars(results).values() if isinstance(value, type) and issubclass(value, SavedResult)]
KINDS = {value.kind: value for value in EXPORTED if value is not SavedResult}
PLAIN = {float: 0.5, int: 2, str: "text", bool: True}


def full(hint):
    """A value of the given type with every optional part present and one entry in every list."""
    options = [option for option in typing.get_args(hint) if option is not types.NoneType]
    if hint in PLAIN:
        return PLAIN[hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return options[0] if typing.get_origin(hint) is typing.Literal else full(options[0])
    if typing.get_origin(hint) is tuple:
        return tuple(full(option) for option in options if option is not Ellipsis)
    if typing.get_origin(hint) is dict:
        return {full(options[0]): full(options[1])}
    hints = typing.get_type_hints(hint)
    return hint(**{field.name: full(hints[field.name]) for field in dataclasses.fields(hint)})


def sparse(hint):
    """A value of the given type without anything that may be left out."""
    hints, values = typing.get_type_hints(hint), {}
    for name in (field.name for field in dataclasses.fields(hint)):
        options = typing.get_args(hints[name])
        is_list = typing.get_origin(hints[name]) is tuple and Ellipsis in options
        values[name] = () if is_list else None if types.NoneType in options else full(hints[name])
    return hint(**values)


def test_the_kinds_are_told_apart_by_their_names():
    assert set(EXAMPLES) <= set(KINDS)
    assert len(KINDS) == len(set(EXPORTED) - {SavedResult})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [full, sparse])
def test_a_result_is_the_same_after_a_round_trip_through_json(kind, make):
    example = make(KINDS[kind])
    restored = KINDS[kind].from_dict(json.loads(example.to_json()))
    assert restored == example
    assert restored.to_dict() == example.to_dict()
    assert example.to_dict()["schema"] == SCHEMA_VERSION


def test_the_round_trip_can_fail():
    data = json.loads(EXAMPLES["inspection"].to_json())
    data["layers"][0]["layer"] = 5
    assert Inspection.from_dict(data) != EXAMPLES["inspection"]


def test_the_round_trip_restores_types_and_not_only_values():
    restored = Inspection.from_dict(json.loads(EXAMPLES["inspection"].to_json()))
    assert isinstance(restored.layers[0].plain, Spectrum)
    assert restored.layers[0].plain.eigenvalues == ((-0.75, 0.0), (0.5, 0.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_cannot_be_changed(kind):
    example = sparse(KINDS[kind])
    for name in (field.name for field in dataclasses.fields(example)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(example, name, None)


def test_what_a_result_is_made_of_cannot_be_changed_either():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EXAMPLES["inspection"].layers[0].plain.rho_dc = 1.0


def test_a_result_takes_no_positional_arguments():
    with pytest.raises(TypeError):
        FileFacts("name", 3)


# --- what from_dict refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "way_out"), [(1, "Upgrade oversmooth"), (-1, "Make the result again")])
def test_another_schema_is_refused_with_the_way_out(kind, step, way_out):
    data = sparse(KINDS[kind]).to_dict() | {"schema": SCHEMA_VERSION + step}
    with pytest.raises(BrokenFile) as caught:
        KINDS[kind].from_dict(data, where="old.json")
    for part in (
        "old.json",
        f"schema {SCHEMA_VERSION}",
        f"schema {SCHEMA_VERSION + step}",
        way_out,
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"kind": "verification"}, "kind 'verification'"),
        ({"kind": None}, "kind None"),
        ({"schema": None}, "schema None"),
        ({"schema": "1"}, "schema '1'"),
    ],
)
def test_another_kind_of_file_is_refused(change, found):
    with pytest.raises(BrokenFile) as caught:
        Inspection.from_dict(EXAMPLES["inspection"].to_dict() | change)
    assert "a result of kind 'inspection'" in str(caught.value)
    assert found in str(caught.value)


def test_a_damaged_field_is_refused_by_its_place():
    data = EXAMPLES["inspection"].to_dict()
    data["layers"][0]["plain"]["rho_dc"] = "large"
    with pytest.raises(BrokenFile, match=r"layers\.0\.plain\.rho_dc"):
        Inspection.from_dict(data)


def test_a_part_that_does_not_exist_is_refused_by_its_place():
    data = full(Measurement).to_dict()
    data["attributions"][0]["kinds"][0]["part"] = "x"
    with pytest.raises(BrokenFile, match=r"attributions\.0\.kinds\.0\.part"):
        Measurement.from_dict(data)


def test_histograms_of_different_numbers_of_bins_are_refused():
    data = full(Measurement).to_dict()
    data["pairs"] = [data["pairs"][0], {**data["pairs"][0], "histogram": [0.5, 0.5]}]
    with pytest.raises(BrokenFile, match="histograms of pairs have different numbers of bins"):
        Measurement.from_dict(data)


@pytest.mark.parametrize("number", [1e308, -1e200, 10**400])
def test_a_number_that_no_axis_holds_is_refused(number):
    data = EXAMPLES["inspection"].to_dict()
    data["layers"][0]["plain"]["rho_dc"] = number
    with pytest.raises(BrokenFile, match=r"expected numbers up to 1e\+150, found a larger one"):
        Inspection.from_dict(data)


def test_a_missing_field_is_refused_by_its_place():
    data = EXAMPLES["inspection"].to_dict()
    del data["provenance"]["target"]
    with pytest.raises(BrokenFile, match=r"provenance\.target"):
        Inspection.from_dict(data)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_not_finite_is_refused_when_read(text):
    data = EXAMPLES["inspection"].to_json().replace('"rho_dc": 1.5', f'"rho_dc": {text}')
    with pytest.raises(BrokenFile, match="finite numbers"):
        Inspection.from_dict(json.loads(data))


@pytest.mark.parametrize("text", ["NaN", "inf", "1.5"])
def test_words_are_not_read_as_numbers(text):
    data = EXAMPLES["inspection"].to_json().replace('"rho_dc": 1.5', f'"rho_dc": "{text}"')
    with pytest.raises(BrokenFile, match=r"plain\.rho_dc.*valid number"):
        Inspection.from_dict(json.loads(data))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_our_own_mistake_when_written(number):
    layer = replace(LAYERS[0], tendency=number)
    with pytest.raises(AssertionError, match="None with a reason"):
        replace(EXAMPLES["inspection"], layers=(layer,)).to_json()


# --- views ----------------------------------------------------------------------------------------------------------


def test_rows_have_one_entry_per_layer_with_the_same_columns():
    first, second = EXAMPLES["inspection"].rows()
    assert first.keys() == second.keys()
    assert (first["layer"], first["passes"], first["rho_dc"], first["folded_rho_dc"]) == (0, 2, 1.5, None)
    assert (second["rho_dc"], second["unreadable"]) == (None, LAYERS[1].unreadable)


def test_norm_columns_speak_of_the_attention_norms_only():
    row = EXAMPLES["inspection"].rows()[0]
    assert (row["norm_negative_share"], row["norm_smallest"], row["norm_largest"]) == (0.25, -0.5, 2.0)


def test_head_rows_have_one_entry_per_head_without_long_lists():
    (row,) = EXAMPLES["inspection"].head_rows()
    assert row["layer"] == 0
    assert row["rho_dc"] == 1.5
    assert "eigenvalues" not in row


@pytest.mark.parametrize("kind", EXAMPLES)
def test_to_pandas_has_the_rows_as_columns(kind):
    pandas = pytest.importorskip("pandas")
    frame = EXAMPLES[kind].to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(EXAMPLES[kind].rows()[0])
    assert len(frame) == len(EXAMPLES[kind].rows())


def test_to_pandas_without_pandas_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependency, match=r"pip install 'oversmooth\[report\]'"):
        EXAMPLES["inspection"].to_pandas()


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("inspection", ("<Inspection of a-model", "2 layers", "1.500 ?")),
        ("verification", ("<Verification of a-model", "bert fits", "1.0e-06", "1 layers")),
        ("analysis", ("<Analysis of a-model", "measurement")),
        ("measurement", ("<Measurement of a-model", "1 sequences", "cosine 0.500 -> 0.750")),
    ],
)
def test_a_repr_is_one_line_with_what_matters(kind, parts):
    shown = repr(EXAMPLES[kind])
    assert "\n" not in shown
    for part in parts:
        assert part in shown


def test_the_repr_of_a_deep_model_is_cut():
    deep = replace(EXAMPLES["inspection"], layers=LAYERS[:1] * 40)
    assert repr(deep).endswith("1.500 ...>")
    assert "40 layers" in repr(deep)


def test_a_verification_that_fails_says_so():
    bad = replace(EXAMPLES["verification"], layers=(LayerCheck(stack="", layer=0, error=0.5, tokens=3),))
    assert not bad.passed
    assert bad.largest_error == 0.5
    assert "does not fit" in repr(bad)


@pytest.mark.parametrize("kind", ["inspection", "verification", "measurement", "analysis"])
def test_the_notebook_view_escapes_what_came_from_outside(kind):
    example = replace(EXAMPLES["inspection"] if kind == "analysis" else EXAMPLES[kind])
    html = replace(example, provenance=replace(PROVENANCE, target=f"a{HOSTILE}"))._repr_html_()
    assert "<table>" in html
    assert HOSTILE not in html
    assert "script&gt;" in html


def test_a_result_that_was_saved_is_loaded_whichever_kind_it_is(tmp_path):
    for kind, example in EXAMPLES.items():
        example.save(tmp_path / f"{kind}.json")
        assert results.load(tmp_path / f"{kind}.json") == example
    (tmp_path / "other.json").write_text('{"kind": "poem"}')
    with pytest.raises(BrokenFile, match="a result saved with"):
        results.load(tmp_path / "other.json")
    with pytest.raises(OversmoothError, match=r"missing\.json"):
        results.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (1.23456, "1.235"),
        (-3.331e-16, "0"),
        (1.5e-9, "1.5e-09"),
        (12345.678, "1.235e+04"),
        (3, "3"),
        (True, "True"),
        ("a", "a"),
    ],
)
def test_cells_show_four_digits_of_a_number(value, shown):
    assert format_cell(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.123, "+0.12"), (-0.126, "-0.13"), (-0.001, "0.00"), (0.0, "0.00"), (-3.331e-16, "0.00")]
)
def test_a_change_that_rounds_to_zero_has_no_sign(value, shown):
    assert signed(value) == shown
