"""Why a weak sub-block is weak, in words and as bars."""

import pytest
import torch
from oversmooth.output.measured_sections import attention_section, attention_words, worth_section

import oversmooth as osm
from oversmooth.results import HeadAttention
from oversmooth.results.wording import PartReading, read_parts, worth_words
from tests.contract.tiny_models import tiny_model

STRONG = {"influence": 0.2, "smoothing": 0.05, "shared": 0.05, "differing": 0.1, "contribution": 0.6, "ceiling": 0.3}


def reading(depth=1, part="attention", undone=0.1, **numbers):
    return PartReading(stack="", depth=depth, part=part, undone=undone, **{**STRONG, **numbers})


def head(**numbers):
    usual = {"entropy": 0.5, "effective_tokens": 4.0, "sink": 0.1, "sink_position": 0, "rank": 2.0}
    return HeadAttention(stack="", depth=1, head=0, **{**usual, **numbers})


@pytest.fixture(scope="module")
def measured():
    model, inputs = tiny_model("bert")
    return osm.measure(model, [inputs], metrics=("cosine", "steps", "attention"))


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({}, ""),
        ({"undone": None}, ""),
        ({"ceiling": 0.001, "influence": 0.0005}, "too small to matter"),
        ({"influence": 0.001}, "only lengthens or shortens tokens"),
        ({"undone": 0.7}, "undone by the next one"),
        ({"shared": 0.18, "differing": 0.01, "smoothing": 0.01}, "moves only what all tokens share"),
    ],
)
def test_a_weak_part_is_weak_for_one_reason(numbers, reason):
    assert reading(**numbers).reason == reason


def test_the_angle_of_a_right_turn_and_of_none():
    assert reading(influence=1.0).angle == pytest.approx(90.0)
    assert reading(influence=0.0).angle == 0.0


def test_the_verdict_names_weak_layers_by_reason_and_counts_them_where_there_are_many():
    small = {"ceiling": 0.001}
    few = [reading(depth, **small) for depth in (1, 2, 3, 6)] + [reading(9, "feed-forward", undone=0.9), reading(4)]
    assert worth_words(few) == (
        "5 of 6 sub-blocks do little on these data. Too small to matter: attention of layers 0-2, 5; "
        "undone by the next one: feed-forward of layer 8."
    )
    assert "attention of 6 layers" in worth_words([reading(depth, **small) for depth in range(1, 13, 2)])
    assert "none is undone" in worth_words([reading(1), reading(2), reading(2, "block", **small)])


def test_every_layer_has_a_row_whose_bars_are_as_long_as_the_turn(measured):
    readings = read_parts(measured)
    assert [(r.depth, r.part) for r in readings[:3]] == [(1, "attention"), (1, "feed-forward"), (1, "block")]
    section = worth_section(measured)
    bars = next(block for block in section.blocks if block.kind == "bars")
    assert [row.title for row in bars.rows] == ["layer 0", "layer 1", "layer 2"]
    lengths = [sum(segment.percent for segment in bar.segments) for row in bars.rows for bar in row.bars]
    angles = [r.angle for r in readings if r.part != "block"]
    expected = [100 * angle / max(angles) for angle in angles]
    torch.testing.assert_close(torch.tensor(lengths), torch.tensor(expected), rtol=0, atol=0.02)


def test_measurements_without_steps_or_attention_have_no_such_sections():
    model, inputs = tiny_model("bert")
    plain = osm.measure(model, [inputs])
    assert worth_section(plain) is None
    assert attention_section(plain) is None


def test_heads_are_a_heat_map_of_layers_by_heads(measured):
    section = attention_section(measured)
    (entropy, sinks) = next(block for block in section.blocks if block.kind == "pair").plots
    for plot in (entropy, sinks):
        (trace,) = plot.figure["traces"]
        assert (len(trace["z"]), len(trace["z"][0])) == (3, 4)
    assert trace["z"][1][2] == pytest.approx(
        next(h.sink for h in measured.heads if (h.depth, h.head) == (2, 2)), rel=1e-3
    )


def test_sinks_and_idle_heads_are_counted_in_words():
    heads = [head(), head(sink=0.6), head(sink=0.9, entropy=0.01, sink_position=3), head(sink=0.5), head(entropy=0.99)]
    assert attention_words(heads) == (
        "3 of 5 heads give more than 0.3 of their attention to one position, 2 of them at position 0. "
        "1 looks at hardly more than one token, 1 at all tokens nearly alike."
    )
    assert attention_words([head()]).startswith("0 of 1 heads give more than 0.3 of their attention to one position.")
    both = attention_words([head(learned_sink=0.5), head(learned_sink=0.1)])
    assert both.endswith("To a learned sink beside the tokens goes 30% of attention.")
