"""Attention as the model computes it: every way of computing it, and what cannot be seen or is no probability."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import oversmooth as osm
from oversmooth.errors import NoAttentionMaps, NotDiscovered
from oversmooth.models.hooks.attention_maps import AttentionMaps, NextAttention, _Watch, attention_watched
from oversmooth.models.open import open_source
from tests.contract.handwritten import D_HEAD, HEADS, WIDTH, Attention, Block, Model
from tests.contract.tiny_models import tiny_model


def watched(function):
    """The maps that a watch takes while the function runs, and what the function returns."""
    watch = _Watch()
    with watch:
        watch.arm(NextAttention(("", 0), "layer 0", 4))
        output = function()
    return watch.take(("", 0)), output


def qkv(heads=4, kv=4, queries=5, dtype=torch.float32):
    source = torch.Generator().manual_seed(0)
    shapes = ((2, heads, queries, 8), (2, kv, queries, 8), (2, kv, queries, 8))
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


EVERYTHING = torch.ones(5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "kv"),
    [
        ({}, 4),
        ({"is_causal": True}, 4),
        ({"scale": 0.3}, 4),
        ({"enable_gqa": True}, 2),
        ({"attn_mask": torch.ones(5, 5).tril().bool()}, 4),
        ({"attn_mask": torch.randn(1, 1, 5, 5, generator=torch.Generator().manual_seed(1))}, 4),
        ({"attn_mask": torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))}, 4),
    ],
)
def test_probabilities_of_the_fused_kernel_give_its_output(options, kv):
    q, k, v = qkv(kv=kv)
    maps, output = watched(lambda: F.scaled_dot_product_attention(q, k, v, **options))
    for sequence in range(2):
        found = maps.of(sequence, EVERYTHING)
        values = v[sequence].repeat_interleave(4 // kv, 0)
        torch.testing.assert_close(found @ values, output[sequence])


@pytest.mark.parametrize(
    "softmax",
    [
        lambda s: F.softmax(s, dim=-1),
        lambda s: torch.softmax(s, 3),
        lambda s: s.softmax(dim=-1),
        lambda s: s.softmax(-1),
    ],
)
def test_an_eager_softmax_is_taken_as_it_is(softmax):
    scores = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    maps, output = watched(lambda: softmax(scores))
    torch.testing.assert_close(maps.of(1, EVERYTHING), output[1])


def test_softmaxes_that_are_no_attention_are_let_pass():
    router = torch.randn(6, 3)
    scores = torch.randn(2, 4, 5, 5)

    def layer():
        F.softmax(router, dim=-1)
        scores.softmax(dim=1)
        return scores.softmax(-1)

    maps, output = watched(layer)
    torch.testing.assert_close(maps.of(0, EVERYTHING), output[0])


def test_only_the_first_attention_after_the_values_is_taken():
    own, cross = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)
    maps, (first, _) = watched(lambda: (own.softmax(-1), cross.softmax(-1)))
    torch.testing.assert_close(maps.of(0, EVERYTHING), first[0])


@pytest.mark.parametrize(("wanted", "averaged"), [(True, True), (True, False), (False, True)])
def test_torchs_attention_returns_what_its_caller_asked_for(wanted, averaged):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = module(x, x, x, need_weights=wanted, average_attn_weights=averaged)
        maps, found = watched(lambda: module(x, x, x, need_weights=wanted, average_attn_weights=averaged))
        _, each = module(x, x, x, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(maps.of(2, EVERYTHING), each[2])


@pytest.mark.parametrize("case", ["bert", "llama", "gemma2", "vit"])
def test_the_maps_are_those_that_the_library_returns(case):
    model, inputs = tiny_model(case)
    source = open_source(model)
    (stack,) = source.stacks()
    with torch.no_grad(), attention_watched((stack,), source.store) as take:
        model(**inputs)
        ours = [take((stack.label, position)) for position in range(len(stack.names.blocks))]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(**inputs, output_attentions=True).attentions
    for maps, expected in zip(ours, theirs, strict=True):
        keep = torch.ones(expected.shape[-1], dtype=torch.bool)
        torch.testing.assert_close(maps.of(0, keep), expected[0], rtol=1e-4, atol=1e-5)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_dropout_inside_the_kernel_is_refused():
    q, k, v = qkv()
    maps, _ = watched(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    with pytest.raises(NoAttentionMaps, match="layer 0"):
        maps.of(0, EVERYTHING)


def test_rows_that_do_not_sum_to_one_are_refused_with_the_reason():
    leaky = torch.full((2, 5, 5), 0.19)
    with pytest.raises(NoAttentionMaps, match=r"do not sum to one.*0\.05") as caught:
        AttentionMaps("layer 3", lambda sequence: leaky).of(0, EVERYTHING)
    for piece in ("layer 3", "Sinks", "dropout"):
        assert piece in str(caught.value)
    broken = AttentionMaps("layer 3", lambda sequence: torch.full((2, 5, 5), math.nan))
    with pytest.raises(NoAttentionMaps, match="sum to one"):
        broken.of(0, EVERYTHING)


def test_a_sink_column_is_refused():
    with pytest.raises(NoAttentionMaps, match="5 queries to 6 keys"):
        AttentionMaps("layer 0", lambda sequence: torch.full((2, 5, 6), 1 / 6)).of(0, EVERYTHING)


def test_attention_to_padding_is_refused():
    uniform = AttentionMaps("layer 0", lambda sequence: torch.full((2, 5, 5), 0.2))
    keep = torch.tensor([True, True, True, True, False])
    with pytest.raises(NoAttentionMaps, match="tokens that count"):
        uniform.of(0, keep)


def test_a_kernel_that_cannot_be_watched_is_named_with_what_to_do():
    watch = _Watch()
    with watch:
        watch.arm(NextAttention(("", 4), "layer 4", None))
    with pytest.raises(NoAttentionMaps, match="layer 4") as caught:
        watch.take(("", 4))
    for piece in ("kernel", 'attn_implementation="sdpa"', "eager"):
        assert piece in str(caught.value)


class ValuesLast(Attention):
    """The softmax of the scores comes before the values, which are the last thing computed."""

    def forward(self, x):
        q, k = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k))
        mixed = (q @ k.mT).softmax(-1) @ self.v(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2)
        return self.o(self.gained(mixed).transpose(1, 2).flatten(2))

    def gained(self, mixed):
        return mixed


class GainOnHeads(ValuesLast):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(HEADS, 1, 1))

    def gained(self, mixed):
        return self.gain * mixed


def test_a_softmax_before_the_values_is_named_and_not_blamed_on_a_kernel_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 7, WIDTH)
    with pytest.raises(
        NoAttentionMaps, match=r"or computed before the values[\s\S]*project the values before the softmax"
    ):
        osm.predict(Model([Block(ValuesLast) for _ in range(2)]).eval(), [x])
    with pytest.raises(NotDiscovered, match=r"expected the .* of layer 0 of Model, found none behind") as caught:
        osm.inspect(Model([Block(GainOnHeads) for _ in range(2)]).eval())
    assert ".." not in str(caught.value)


def test_hooks_and_mode_are_gone_afterwards_even_after_an_error():
    model, _ = tiny_model("bert")
    source = open_source(model)
    with pytest.raises(ZeroDivisionError), attention_watched(source.stacks(), source.store):
        raise ZeroDivisionError
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
