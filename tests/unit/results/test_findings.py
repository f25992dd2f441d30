"""What stands out is said, with where to look; nothing is said that the numbers do not show."""

import pytest

from oversmooth.results import Attribution, DominatingToken, KindChange, Part
from oversmooth.results.measurement import Measurement
from oversmooth.results.wording import NOTHING_STANDS_OUT, changes_by_depth, findings


def attribution(changes, kinds=()):
    parts = tuple(
        Part(stack="", depth=k + 1, part="attention", place="attn_sum", change=change, standard_error=None)
        for k, change in enumerate(changes)
    )
    return Attribution(
        stack="",
        quantity="log(HFC/LFC) of tokens at unit length",
        total=sum(changes),
        standard_error=None,
        sequences=4,
        start=0.0,
        end=sum(changes),
        parts=parts,
        kinds=tuple(
            KindChange(part=part, change=change, standard_error=None, interval=None, direction=direction)
            for part, change, direction in kinds
        ),
    )


def measured(changes, kinds=(), token=None):
    measurement = object.__new__(Measurement)
    for name, value in (
        ("unit_attributions", (attribution(changes, kinds),)),
        ("attributions", ()),
        ("dominating", (token,) if token else ()),
    ):
        object.__setattr__(measurement, name, value)
    return measurement


def texts(*words, **more):
    return [finding.text for finding in findings(measured(*words, **more))]


def test_a_layer_that_is_far_from_the_others_is_a_jump():
    (text,) = texts([-0.1, -0.12, -1.4, -0.09, -0.1, -0.11])
    assert text == "Jump at depth 3: this layer alone smooths by -1.40, where the median layer changes 0.11."
    assert findings(measured([-0.1, -0.12, 1.4, -0.09]))[0].section == "attribution"


@pytest.mark.parametrize("changes", [[-0.1, -0.12, -0.3, -0.09], [-0.5, -0.4, -1.1, -0.6], [-0.1, 0.9]])
def test_small_or_common_changes_are_none(changes):
    assert texts(changes) == [NOTHING_STANDS_OUT]


def test_neighbours_that_undo_each_other_are_named():
    assert "Depth 3 undoes depth 2: -0.80, then +0.75." in texts([-0.7, -0.8, 0.75, -0.2])
    assert "Depth 3 undoes depth 2: -0.80, then +0.75. So does one other pair." in texts([-0.7, -0.8, 0.75, -0.7])
    assert texts([-0.7, -0.8, 0.3, -0.7]) == [NOTHING_STANDS_OUT]


def test_a_sub_block_that_undoes_the_one_before_it_is_named():
    found = attribution([-0.2] * 3)
    parts = [
        Part(stack="", depth=depth, part=part, place="", change=change, standard_error=None)
        for depth, part, change in (
            (1, "attention", -0.9),
            (1, "feed-forward", 1.0),
            (2, "attention", -0.1),
            (2, "feed-forward", 0.1),
            (3, "attention", -0.4),
            (3, "feed-forward", 0.4),
        )
    ]
    object.__setattr__(found, "parts", tuple(parts))
    measurement = measured([0.0])
    object.__setattr__(measurement, "unit_attributions", (found,))
    (finding,) = findings(measurement)
    assert finding.text == "At depth 1 the feed-forward undoes attention: -0.90, then +1.00. So at depth 3."


def test_several_pairs_are_counted():
    assert "Depth 4 undoes depth 3: -0.90, then +0.90. So do 2 other pairs." in texts([-0.8, 0.8, -0.9, 0.9])


def test_kinds_that_work_against_each_other_are_named():
    kinds = (("attention", -2.0, "smoothing"), ("feed-forward", 1.9, "sharpening"), ("norm", 0.1, "no clear change"))
    assert "Attention and the feed-forward work against each other: -2.00 and +1.90." in texts([-0.1] * 4, kinds)
    unclear = (("attention", -2.0, "smoothing"), ("feed-forward", 1.9, "no clear change"))
    assert texts([-0.1] * 4, unclear) == [NOTHING_STANDS_OUT]


def test_a_token_that_outweighs_the_others_is_said_once_with_its_section():
    token = DominatingToken(
        stack="",
        depth=3,
        place="ffn_sum",
        ratio=90.0,
        position=0,
        position_share=1.0,
        token_id=None,
        channel=7,
        channel_share=0.9,
        made_at_depth=3,
        made_by="feed-forward",
    )
    (finding,) = findings(measured([-0.1] * 4, token=token))
    assert finding.text.startswith("Massive activation at depth 3")
    assert (finding.section, finding.title) == ("scale", "Tokens as they are")


def test_the_final_norm_is_no_layer():
    found = attribution([-0.2, -0.3])
    norm = Part(stack="", depth=2, part="final norm", place="final_norm", change=5.0, standard_error=None)
    object.__setattr__(found, "parts", (*found.parts, norm))
    assert changes_by_depth(found) == {1: -0.2, 2: -0.3}
