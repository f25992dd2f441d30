"""The answers of real models and of the program's own untrained ones, each next to the numbers that it must follow from."""

import copy
from dataclasses import replace

import pytest
import torch

import oversmooth as osm
from oversmooth.data.samples import sample_images
from tests.contract.tiny_models import tiny_model
from tests.real_models import albert, minilm, real_model


def near(value):
    return pytest.approx(value, abs=0.01)


@pytest.fixture(scope="module")
def small_bert():
    """MiniLM, and what was measured of it."""
    return osm.measure(str(minilm()), null=True, pairs=True, metrics=("cosine", "between"))


def test_minilm_stays_distinct_and_its_parts_are_not_netted(small_bert):
    answer = small_bert.answer
    assert (answer.model, answer.subject) == ("all-MiniLM-L6-v2", "6 layers, 20 built-in texts, 1,556 tokens")
    assert (answer.input, answer.output) == (near(0.07), near(0.33))
    assert answer.headline == "Tokens stay distinct: this model does not oversmooth."
    assert {part.part: round(part.change, 2) for part in answer.parts} == {
        "attention": near(0.37),
        "norm after attention": near(0.40),
        "feed-forward": near(-0.14),
        "norm after feed-forward": near(-0.38),
    }
    assert answer.who.title == "Attention and its norm raise the mean cosine; the norm after feed-forward lowers it"
    assert answer.where.title == "The rise comes from all six layers; layer 0 most"
    assert answer.where.text == "Layer 0 +0.07, layers 1 to 5 +0.19: +0.26 in all."
    assert answer.sure.title == "0.33, 95% interval 0.29 to 0.37"
    assert answer.between == (near(0.455), near(0.06))
    assert "look alike" not in answer.deck
    assert answer.now.command == "oversmooth gate all-MiniLM-L6-v2 --max-cosine 0.45"
    assert answer.limit == 0.45


def test_the_untrained_copy_of_minilm_starts_and_ends_elsewhere(small_bert):
    first, *_, last = small_bert.answer.points
    assert first.untrained > first.mean + 0.2
    assert abs(last.untrained - last.mean) < 0.1
    assert "An untrained copy goes from 0.34 to 0.3" in small_bert.answer.deck


def test_a_sharpened_sentence_encoder_that_no_longer_tells_texts_apart_says_so():
    """Tokens 0.33 to 0.10, different texts 0.06 to 0.64: both stand in its answer."""
    from transformers import AutoModel, AutoTokenizer

    from oversmooth.data.samples import sample_texts

    model, tokenizer = AutoModel.from_pretrained(minilm()), AutoTokenizer.from_pretrained(minilm())
    osm.sharpen(model)
    osm.bake(model)
    batch = tokenizer(list(sample_texts()), padding=True, truncation=True, max_length=128, return_tensors="pt")
    answer = osm.measure(model, [batch], metrics=("cosine", "between")).answer
    assert answer.output < 0.2
    assert answer.between[1] > 0.5
    assert answer.headline == (
        "Tokens stay distinct: this model does not oversmooth, but different sequences look alike."
    )
    assert answer.now.title == "See where different sequences become alike."
    assert answer.now.command == 'osm.measure(model, data, metrics="between")'
    assert "Different sequences look alike: their mean tokens have a cosine of 0.6" in answer.deck


def test_two_texts_are_too_few_to_judge_minilm():
    answer = osm.measure(str(minilm()), max_samples=2).answer
    assert not answer.is_sure
    assert answer.interval is None
    assert answer.headline == "In these two texts tokens stay distinct: too few to judge this model."
    assert len(answer.values) == 2
    assert answer.now.command.startswith("oversmooth report all-MiniLM-L6-v2 --data texts.txt --max-samples")


def test_albert_runs_its_one_layer_twelve_times_and_each_pass_counts():
    answer = osm.measure(str(albert())).answer
    assert [layer.label for layer in answer.layers] == [str(number) for number in range(12)]
    assert (answer.input, answer.output) == (near(0.15), near(0.24))
    assert answer.headline == "Tokens stay distinct: this model does not oversmooth."
    assert answer.where.title == "The rise comes from all twelve layers together; layer 0 most"


def test_dinov2_on_four_images_is_not_judged_and_its_last_layer_is_named():
    answer = osm.measure(str(real_model("dinov2-small")), max_samples=4).answer
    assert "four images are too few to tell which." in answer.headline
    assert answer.headline.startswith("Patches end between ")
    low, high = answer.interval
    assert low < 0.5 < high
    changes = {layer.label: layer.change for layer in answer.layers}
    assert max((label for label in changes), key=lambda label: changes[label]) == "11"
    assert "layer 11 +" in answer.where.text
    assert "the final norm \N{MINUS SIGN}" in answer.where.text
    assert "Only" not in answer.headline
    assert answer.now.title == "Measure more images first."
    assert answer.before_norm > answer.output + 0.05
    assert "Before the final norm it is" in answer.deck


def test_smollm2_on_two_texts_climbs_at_once_and_nothing_is_called_no_change():
    answer = osm.measure(str(real_model("smollm2-135m-instruct")), max_samples=2).answer
    assert answer.shape == "at once"
    assert answer.points[2].mean - answer.points[0].mean > 2 / 3 * (
        max(point.mean for point in answer.points) - answer.points[0].mean
    )
    assert "layers 0 and 1 of 30" in answer.headline
    assert answer.headline.startswith("In these two texts tokens ")
    assert answer.where.title == "Mostly layers 0 and 1 of 30"
    assert not answer.is_sure


# --- models of the program's own ---


def encoder(layers, gain=1.0):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.out_proj.weight.mul_(gain)
    return model


def features(count=8):
    return [torch.randn(count, 12, 32, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("layers", [1, 80])
def test_an_untrained_encoder_of_any_depth_is_told_by_its_numbers(layers):
    found = osm.measure(encoder(layers), features(), null=True)
    answer = found.answer
    assert len(answer.layers) == layers
    assert answer.output == pytest.approx(found.curve("cosine")[-1].mean, abs=1e-6)
    assert ("does not oversmooth" in answer.headline) == (answer.state == "distinct")
    assert "An untrained copy goes from " in answer.deck
    assert "architecture" not in answer.headline + answer.deck
    assert answer.now.command.startswith("osm.")


def test_an_encoder_whose_attention_averages_collapses():
    model = encoder(12)
    with torch.no_grad():
        for block in model.layers:
            value = block.self_attn.in_proj_weight[64:]
            value.copy_(torch.eye(32))
            block.self_attn.out_proj.weight.copy_(3 * torch.eye(32))
            block.self_attn.in_proj_weight[:64].zero_()
    answer = osm.measure(model, features(), pairs=True).answer
    assert answer.output > 0.9
    assert answer.state == "collapsed"
    assert "this model oversmooths" in answer.headline
    assert "draws tokens together" in answer.who.title
    assert answer.points[-1].share_above > 0.9
    assert answer.now.command == "osm.ablate(model, data)"


def test_an_encoder_decoder_has_two_answers_and_its_decoder_speaks():
    model, inputs = tiny_model("t5")
    inputs = {name: value.repeat(4, 1) for name, value in inputs.items()}
    found = osm.measure(model, [inputs])
    assert [answer.stack for answer in found.answers] == ["encoder", "decoder"]
    assert found.answer.stack == "decoder"
    assert "cross-attention" in {part.part for part in found.answer.parts}
    assert found.answer.subject.startswith("decoder: ")


def test_two_towers_have_words_of_their_own():
    model, inputs = tiny_model("clip")
    found = osm.measure(model, [inputs])
    subjects = [answer.subject.split(":")[0] for answer in found.answers]
    assert sorted(subjects) == ["text tower", "vision tower"]
    of_images = found.answers[subjects.index("vision tower")]
    assert "patch" in of_images.deck
    assert found.answer.output == max(answer.output for answer in found.answers)


def test_random_ids_say_nothing_about_text(tmp_path):
    model, _ = tiny_model("gpt2")
    copy.deepcopy(model).save_pretrained(tmp_path)
    answer = osm.measure(str(tmp_path), max_tokens=32).answer
    assert answer.headline.startswith("On random token ids ")
    assert answer.headline.endswith("; that says nothing about real text.")
    assert not answer.is_sure
    assert answer.now.command == f"oversmooth measure {tmp_path} --data texts.txt"
    assert "Random ids say nothing about real text." in answer.sure.text


def test_photographs_are_images_and_not_sequences():
    model, inputs = tiny_model("vit")
    shape = inputs["pixel_values"].shape
    images = sample_images(5, shape[2], shape[3], shape[1], seed=0)
    answer = osm.measure(model, [{"pixel_values": images}]).answer
    assert "5 images" in answer.subject
    assert "Five images" in answer.sure.text


def test_a_measurement_that_was_interrupted_says_after_how_many(small_bert):
    answer = replace(small_bert, is_partial=True).answer
    assert answer.headline == "Interrupted after 20 texts, in which tokens stay distinct."
    assert not answer.is_sure
