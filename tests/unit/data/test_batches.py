"""Batches are named, moved, trimmed and refused before the model fails on them."""

import pytest
import torch
from torch import nn

from oversmooth.data.batches import hash_inputs, keep_mask, prepare, run_checked
from oversmooth.errors import WrongBatch
from oversmooth.measurement.measure import measure
from oversmooth.models.open import open_source
from tests.contract.tiny_models import tiny_model


def config_of(model):
    return open_source(model).config


def test_a_tensor_of_ids_becomes_input_ids():
    model, inputs = tiny_model("bert")
    assert prepare(model, config_of(model), inputs["input_ids"]).keys() == {"input_ids"}


def test_names_that_the_model_does_not_take_are_left_out():
    model, inputs = tiny_model("gpt2")
    batch = {**inputs, "token_type_ids_of_another": inputs["input_ids"], "labels": inputs["input_ids"]}
    assert prepare(model, config_of(model), batch).keys() == {"input_ids"}


def test_lists_become_tensors_and_rows_are_trimmed():
    model, inputs = tiny_model("bert")
    ids = inputs["input_ids"].repeat(4, 1).tolist()
    assert prepare(model, config_of(model), {"input_ids": ids}, 3)["input_ids"].shape[0] == 3


def test_encoder_decoders_read_the_text_again():
    model, inputs = tiny_model("t5")
    prepared = prepare(model, config_of(model), {"input_ids": inputs["input_ids"]})
    torch.testing.assert_close(prepared["decoder_input_ids"], inputs["input_ids"])


def test_audio_decoders_start_with_their_start_token():
    model, inputs = tiny_model("whisper")
    prepared = prepare(model, config_of(model), {"input_features": inputs["input_features"]})
    assert prepared["decoder_input_ids"][0, 0] == model.config.decoder_start_token_id


@pytest.mark.parametrize(
    ("case", "batch", "pieces"),
    [
        ("bert", {"input_ids": torch.tensor([[1, 2, 99]])}, ("token ids below 99", "ids from 1 to 99", "tokenizer")),
        ("bert", {"pixel_values": torch.randn(1, 3, 16, 16)}, ("'input_ids'", "pixel_values", "takes text")),
        ("bert", torch.randn(1, 3, 16, 16), ("'input_ids'", "(1, 3, 16, 16)", "takes text")),
        ("vit", {"input_ids": torch.tensor([[1, 2]])}, ("'pixel_values'", "input_ids", "takes images")),
        ("bert", {"text": ["hello"]}, ("'input_ids'", "text")),
        ("bert", {"input_ids": [[1, 2], [3]]}, ("lists of equal length", "input_ids of type list", "Pad")),
    ],
)
def test_what_does_not_fit_is_refused_with_facts(case, batch, pieces):
    model, _ = tiny_model(case)
    with pytest.raises(WrongBatch) as caught:
        prepare(model, config_of(model), batch)
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.mark.parametrize(
    ("case", "batch", "pieces"),
    [
        (
            "vit",
            torch.randn(1, 3, 17, 17),
            ("(1, 3, 17, 17)", "doesn't match", "(batch, 3, 16, 16)", "interpolate_pos"),
        ),
        ("timm-vit", torch.randn(1, 3, 8, 8), ("(1, 3, 8, 8)", "doesn't match", "(batch, 3, 16, 16)", "resize")),
        ("bert", {"input_ids": torch.ones(1, 100, dtype=torch.long)}, ("(1, 100)", "the model says")),
    ],
)
def test_what_the_model_refuses_is_refused_in_its_words_and_ours(case, batch, pieces):
    model, _ = tiny_model(case)
    inputs = prepare(model, config_of(model), batch)
    with pytest.raises(WrongBatch) as caught:
        run_checked(model, config_of(model), inputs)
    for piece in pieces:
        assert piece in str(caught.value)


def resized_timm():
    import timm

    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **sizes).eval()


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: tiny_model("dinov2")[0], {"pixel_values": torch.randn(2, 3, 24, 24)}),
        (lambda: tiny_model("vit")[0], {"pixel_values": torch.randn(2, 3, 24, 24), "interpolate_pos_encoding": True}),
        (resized_timm, torch.randn(2, 3, 24, 24)),
    ],
)
def test_sizes_that_the_model_takes_are_taken(make, batch):
    result = measure(make(), [batch], metrics="cosine")
    assert result.data.tokens == 2 * (1 + (24 // 4) ** 2)


def test_a_compiled_model_is_measured_as_what_was_compiled():
    model, inputs = tiny_model("bert")
    plain = measure(model, [inputs], metrics="cosine")
    compiled = torch.compile(model, backend="eager")
    assert measure(compiled, [inputs], metrics="cosine").values == plain.values


def test_a_model_that_was_compiled_in_place_is_measured_as_it_was_written():
    model, inputs = tiny_model("bert")
    plain = measure(model, [inputs], metrics="cosine")
    model.compile(backend="eager")
    model(**inputs)
    assert measure(model, [inputs], metrics="cosine").values == plain.values


class Wrapper(nn.Module):
    """Passes everything on, under names that its signature does not say."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.main_input_name = inner.main_input_name

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_a_wrapper_that_takes_anything_is_given_everything():
    model, inputs = tiny_model("bert")
    assert prepare(Wrapper(model), config_of(model), inputs).keys() == inputs.keys()


def test_switches_are_passed_on_as_they_are_and_change_the_hash():
    import hashlib

    model, inputs = tiny_model("vit")
    digests = []
    for switch in (True, False):
        prepared = prepare(model, config_of(model), {**inputs, "interpolate_pos_encoding": switch})
        assert prepared["interpolate_pos_encoding"] is switch
        digest = hashlib.sha256()
        hash_inputs(digest, prepared)
        digests.append(digest.hexdigest())
    assert digests[0] != digests[1]


def test_padding_and_prefix_tokens_are_not_kept():
    model, inputs = tiny_model("bert")
    (stack,) = open_source(model).stacks()
    h = torch.zeros(1, 4, 32)
    mask = torch.tensor([[1, 1, 1, 0]])
    keep = keep_mask(model, {**inputs, "attention_mask": mask}, stack, h, 1)
    assert keep.tolist() == [[False, True, True, False]]


def test_a_mask_of_another_shape_is_refused():
    model, inputs = tiny_model("bert")
    (stack,) = open_source(model).stacks()
    with pytest.raises(WrongBatch, match="attention mask of shape"):
        keep_mask(model, {**inputs, "attention_mask": torch.ones(1, 3)}, stack, torch.zeros(1, 4, 32), 0)


def test_torchs_own_padding_mask_is_understood():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1, enable_nested_tensor=False)
    (stack,) = open_source(model).stacks()
    padding = torch.tensor([[False, False, True]])
    keep = keep_mask(model, {"src_key_padding_mask": padding}, stack, torch.zeros(1, 3, 16), 0)
    assert keep.tolist() == [[True, True, False]]


def test_audio_masks_are_shortened_like_the_audio():
    model, inputs = tiny_model("wav2vec2")
    (stack,) = open_source(model).stacks()
    mask = torch.ones_like(inputs["input_values"], dtype=torch.long)
    mask[:, mask.shape[1] // 2 :] = 0
    tokens = model(**inputs).last_hidden_state.shape[1]
    keep = keep_mask(model, {"attention_mask": mask}, stack, torch.zeros(1, tokens, 32), 0)
    assert 0 < int(keep.sum()) < tokens


def test_texts_in_a_list_are_refused_with_what_to_give_instead():
    model, _ = tiny_model("bert")
    with pytest.raises(WrongBatch, match="found the text 'A cat sat'") as caught:
        prepare(model, {}, "A cat sat")
    assert "one a line" in caught.value.next_step


class Tower(nn.Module):
    """A part of a composite model: it inherits the name of a main input that it does not take."""

    main_input_name: object = "input_ids"

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, hidden_states, grid_thw=None, **kwargs):
        return self.proj(hidden_states)


@pytest.mark.parametrize("named", ["input_ids", ["images", "texts"]])
def test_a_tower_is_given_what_its_own_forward_takes(named):
    tower = Tower()
    tower.main_input_name = named
    batch = {"hidden_states": torch.randn(6, 4), "grid_thw": torch.tensor([[1, 2, 3]])}
    assert prepare(tower, {}, batch).keys() == batch.keys()
    with pytest.raises(WrongBatch, match="an input named 'hidden_states'"):
        prepare(tower, {}, {"pixel_values": torch.randn(1, 3, 4, 4)})


def test_ids_are_not_made_up_for_decoders_that_take_none():
    prepared = prepare(Tower(), {"is_encoder_decoder": True}, {"hidden_states": torch.randn(1, 6, 4)})
    assert prepared.keys() == {"hidden_states"}
