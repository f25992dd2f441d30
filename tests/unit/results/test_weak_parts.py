"""How far sub-blocks turn tokens, in words."""

import pytest
import torch

import oversmooth as osm
from oversmooth.results.wording import PartReading, read_parts, worth_words
from tests.contract.tiny_models import tiny_model

STRONG = {"influence": 0.2, "smoothing": 0.05, "shared": 0.05, "differing": 0.1, "contribution": 0.6, "ceiling": 0.3}


def reading(depth=1, part="attention", undone=0.1, **numbers):
    return PartReading(stack="", depth=depth, part=part, undone=undone, **{**STRONG, **numbers})


@pytest.fixture(scope="module")
def measured():
    model, inputs = tiny_model("bert")
    return osm.measure(model, [inputs], metrics=("cosine", "steps", "attention"))


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({}, ""),
        ({"undone": None}, ""),
        ({"ceiling": 0.001, "influence": 0.0005}, "adds next to nothing"),
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


def test_turns_are_told_with_what_is_special_about_them_and_no_word_about_worth():
    small = {"ceiling": 0.001, "influence": 0.004}
    few = [reading(depth, **small) for depth in (1, 2, 3, 6)] + [reading(9, "feed-forward", undone=0.9), reading(4)]
    assert worth_words(few) == (
        "Sub-blocks turn tokens by 5 degrees (attention of layer 0) to 37 degrees (feed-forward of layer 8). "
        "Adds next to nothing: attention of layers 0-2, 5. Undone by the next one: feed-forward of layer 8."
    )
    assert "attention of 6 layers" in worth_words([reading(depth, **small) for depth in range(1, 13, 2)])
    usual = worth_words([reading(1), reading(2), reading(2, "block", **small)])
    assert usual.endswith("(attention of layer 0).")
    assert worth_words([]) == ""


def test_every_part_of_a_measurement_is_read_in_order(measured):
    readings = read_parts(measured)
    assert [(r.depth, r.part) for r in readings[:3]] == [(1, "attention"), (1, "feed-forward"), (1, "block")]
    for found in readings:
        torch.testing.assert_close(
            found.smoothing + found.shared + found.differing, found.influence, rtol=1e-4, atol=1e-6
        )
