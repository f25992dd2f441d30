"""How layers are taken through memory: read one by one, computed side by side, forgotten when done."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from oversmooth.control.constrain import bake, sharpen
from oversmooth.models.canonical import AttentionWeights
from oversmooth.output.tables import show_inspection
from oversmooth.spectra import inspect as inspection
from oversmooth.spectra.inspect import in_order, inspect
from oversmooth.surveys.rows import rows_of


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def small_layer(position=0):
    return AttentionWeights(w_v=torch.full((1, 2, 4), float(position)), w_o=torch.ones(4, 1, 2))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("room", [0, 10**9], ids=["one at a time", "side by side"])
def test_layers_are_read_once_and_computed_in_order(count, room, monkeypatch):
    monkeypatch.setattr(inspection, "SIDE_BY_SIDE_BYTES", room)
    read = []

    def reading(position):
        read.append((position, threading.get_ident()))
        return small_layer(position)

    found = list(in_order(count, reading, lambda position, weights: (position, weights.w_v[0, 0, 0].item())))
    assert found == [(position, float(position)) for position in range(count)]
    assert read == [(position, threading.get_ident()) for position in range(count)]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("room", "expected"), [(0, 2), (10**9, 1)], ids=["one at a time", "side by side"])
def test_a_layer_has_one_thread_where_others_run_beside_it_and_all_threads_otherwise(room, expected, monkeypatch):
    monkeypatch.setattr(inspection, "SIDE_BY_SIDE_BYTES", room)
    seen = list(in_order(4, small_layer, lambda position, weights: torch.get_num_threads()))
    assert seen == [expected] * 4
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_two_layers_really_run_side_by_side():
    both_are_in = threading.Barrier(2, timeout=30)
    assert list(in_order(4, small_layer, lambda position, weights: both_are_in.wait() in (0, 1))) == [True] * 4


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("room", "most"), [(0, 1), (10**9, 2)], ids=["one at a time", "side by side"])
def test_no_more_layers_are_in_memory_than_run_side_by_side(room, most, monkeypatch):
    monkeypatch.setattr(inspection, "SIDE_BY_SIDE_BYTES", room)
    alive = []
    largest = 0

    def reading(position):
        nonlocal largest
        weights = small_layer(position)
        alive.append(weakref.ref(weights))
        gc.collect()
        largest = max(largest, sum(each() is not None for each in alive))
        return weights

    assert len(list(in_order(6, reading, lambda position, weights: position))) == 6
    assert 1 <= largest <= most


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_one_layer_is_raised_and_gives_the_threads_back():
    def compute(position, weights):
        if position == 2:
            raise ValueError("layer two")
        return position

    with pytest.raises(ValueError, match="layer two"):
        list(in_order(5, small_layer, compute))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_numbers_do_not_depend_on_how_many_layers_run_side_by_side(monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    together = inspect(model)
    monkeypatch.setattr(inspection, "SIDE_BY_SIDE_BYTES", 0)
    alone = inspect(model)
    assert [layer.layer for layer in together.layers] == [0, 1, 2, 3]
    for first, second in zip(together.layers, alone.layers, strict=True):
        torch.testing.assert_close(
            (first.plain.rho_dc, first.folded.rho_dc), (second.plain.rho_dc, second.folded.rho_dc)
        )
    assert together.provenance == alone.provenance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_layer_that_is_not_finite_is_said_with_its_tensor_and_the_others_continue(value, dtype):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dtype=dtype)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[1].self_attn.out_proj.weight[2, 3:5] = value
    result = inspect(model)
    assert [layer.unreadable for layer in result.layers] == [
        None,
        "layers.1.self_attn.out_proj.weight holds 2 values that are NaN or infinite",
        None,
    ]
    assert [layer.plain is None for layer in result.layers] == [False, True, False]


@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1e80), (torch.float32, 1e38)])
def test_numbers_whose_products_overflow_are_said_with_their_tensor(dtype, value):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True, dtype=dtype)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[1].self_attn.out_proj.weight[2, 3] = value
    precision = {torch.float64: "float64", torch.float32: "float32"}[dtype]
    found = inspect(model, precision=precision).layers
    assert found[0].unreadable is None
    assert found[1].unreadable.startswith("layers.1.self_attn.out_proj.weight holds 1 values beyond ")


def sharpened_vit():
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, num_heads=2, depth=3, num_classes=2)
    sharpen(model, init="fresh")
    return bake(model)


def test_a_layer_dominated_by_what_it_leaves_alone_tends_to_neither():
    """LayerNorm removes one direction, on which H does nothing: with all others shrinking, the largest |1 + l| is 1."""
    found = inspect(sharpened_vit())
    assert [layer.tendency for layer in found.layers] == [0.0, 0.0, 0.0]
    assert all(layer.folded is not None and layer.folded.rho_dc == pytest.approx(1, abs=1e-5) for layer in found.layers)


@pytest.mark.parametrize(("rho", "expected"), [(1 + 2e-6, 0.0), (1 - 2e-6, 0.0), (1.001, 9.995e-4), (0.5, -0.693147)])
def test_only_rounding_is_a_tie(rho, expected):
    assert inspection._tendency(rho) == pytest.approx(expected, rel=1e-4)


def test_neither_is_said_in_table_and_survey(capsys):
    found = inspect(sharpened_vit())
    show_inspection(found, heads=False)
    assert "All 3 value maps prefer sharpening" in " ".join(capsys.readouterr().out.split())
    row = dict(rows_of(found, {"target": "sharp"}))["model"]
    assert (row["sharpening_share"], row["smoothing_share"]) == (0.0, 0.0)


def test_a_weight_that_is_zero_but_for_rounding_is_not_negative():
    """A norm whose only weight below zero is -1.5e-09 has no negative weights."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[0].norm1.weight[0] = -1.5e-9
        model.layers[0].norm2.weight[0] = -0.1
    shares = {norm.role: norm.negative_share for norm in inspect(model).layers[0].norms}
    assert shares["attn_norm"] == 0.0
    assert shares["ffn_norm"] == pytest.approx(1 / 8)
