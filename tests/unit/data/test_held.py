"""What people hold in Python: every kind gives the numbers of the batch that it stands for, or is refused with the reason."""

from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import oversmooth as osm
from oversmooth.data.held import InMemory, held, reusable
from oversmooth.errors import BadValue, Conflict, UnreadableData, WrongBatch
from tests.contract.tiny_models import tiny_model
from tests.real_models import minilm

TEXTS = ["The quick brown fox jumps over the lazy dog.", "A second text, longer than the first one by far.", "Third."]


@pytest.fixture(scope="module")
def bert():
    from transformers import AutoModel, AutoTokenizer

    folder = str(minilm())
    return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), folder


def cosines(measured):
    return [point.mean for point in measured.curve("cosine")]


def encoded(bert):
    return bert[1](TEXTS, return_tensors="pt", padding=True)


BATCHES = {
    "a tokenizer's output": lambda e: e,
    "a dict": dict,
    "a list of dicts": lambda e: [dict(e)],
    "an iterator of dicts": lambda e: iter([dict(e)]),
    "a loader of dicts": lambda e: DataLoader([{k: v[i] for k, v in e.items()} for i in range(3)], batch_size=3),
    "a loader of pairs": lambda e: [(dict(e), torch.zeros(3))],
    "a tokenized data set": lambda e: datasets.Dataset.from_dict(
        {"input_ids": [row[m.bool()].tolist() for row, m in zip(e["input_ids"], e["attention_mask"], strict=True)]}
    ),
    "lists of ids": lambda e: [
        row[m.bool()].tolist() for row, m in zip(e["input_ids"], e["attention_mask"], strict=True)
    ],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_every_kind_give_the_numbers_of_the_batch(bert, kind):
    expected = osm.measure(bert[0], [dict(encoded(bert))])
    found = osm.measure(bert[0], BATCHES[kind](encoded(bert)))
    assert found.data.sequences == 3
    torch.testing.assert_close(cosines(found), cosines(expected), rtol=1e-5, atol=1e-5)


HELD_TEXTS = {
    "a list": lambda: TEXTS,
    "a tuple": lambda: tuple(TEXTS),
    "an iterator": lambda: iter(TEXTS),
    "an array": lambda: np.array(TEXTS),
    "a column": lambda: pandas.Series(TEXTS),
    "a data frame": lambda: pandas.DataFrame({"text": TEXTS, "label": [0, 1, 0]}),
    "a data set": lambda: datasets.Dataset.from_dict({"label": [0, 1, 0], "text": TEXTS}),
    "a streamed data set": lambda: datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", HELD_TEXTS)
def test_texts_of_every_kind_are_read_by_the_model_s_own_tokenizer(bert, kind):
    expected = osm.measure(bert[0], [dict(encoded(bert))])
    found = osm.measure(bert[2], HELD_TEXTS[kind]())
    torch.testing.assert_close(cosines(found), cosines(expected), rtol=1e-5, atol=1e-5)
    assert found.data.origin == "given"
    assert found.data.text.texts == 3


def test_a_tokenizer_may_be_given_as_an_object(bert):
    found = osm.measure(bert[0], TEXTS, tokenizer=bert[1])
    torch.testing.assert_close(cosines(found), cosines(osm.measure(bert[2], TEXTS)))
    assert bert[1].name_or_path in found.data.preprocessing


def test_every_function_that_runs_a_model_takes_texts(bert):
    model = bert[2]
    assert osm.predict(model, TEXTS[:2], solve=1).layers
    assert osm.analyze(model, TEXTS, solve=0).measurement.data.sequences == 3
    assert osm.gate(model, TEXTS, rules={"max_cosine": 1.0}).passed
    assert osm.ablate(model, TEXTS, task="similarity", parts=["attention"], theory=False).rows()


def test_a_pipeline_is_its_model_and_its_tokenizer(bert):
    from transformers import pipeline

    whole = pipeline("feature-extraction", model=bert[0], tokenizer=bert[1])
    assert len(osm.inspect(whole).layers) == 6
    torch.testing.assert_close(cosines(osm.measure(whole, TEXTS)), cosines(osm.measure(bert[2], TEXTS)))


def test_a_state_dict_is_inspected_as_its_model_is(bert):
    found = osm.inspect(bert[0].state_dict(), model_type="bert", n_heads=12)
    expected = osm.inspect(bert[0])
    assert [layer.plain.rho_dc for layer in found.layers] == [layer.plain.rho_dc for layer in expected.layers]
    assert found.provenance.source == "state dict"


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_wrapped_models_are_measured_as_what_is_inside(bert, wrap):
    expected = cosines(osm.measure(bert[0], encoded(bert)))
    torch.testing.assert_close(cosines(osm.measure(wrap(bert[0]), encoded(bert))), expected)


def pictures():
    draw = np.random.default_rng(0)
    return [draw.integers(0, 255, (40, 48, 3), dtype=np.uint8) for _ in range(3)]


class TorchPictures(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return Image.fromarray(pictures()[number]), number


HELD_PICTURES = {
    "arrays": pictures,
    "PIL": lambda: [Image.fromarray(picture) for picture in pictures()],
    "pairs": lambda: [(Image.fromarray(picture), 0) for picture in pictures()],
    "a torch data set": TorchPictures,
    "a data set": lambda: datasets.Dataset.from_dict({"image": [Image.fromarray(one) for one in pictures()]}),
}


@pytest.mark.parametrize("kind", HELD_PICTURES)
def test_pictures_of_every_kind_are_prepared_as_the_model_was_trained(kind):
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    expected = osm.measure(model, HELD_PICTURES["PIL"]())
    found = osm.measure(model, HELD_PICTURES[kind]())
    assert found.data.sequences == 3
    assert cosines(found) == cosines(expected)
    assert osm.measure(model, HELD_PICTURES["PIL"]()[0]).data.sequences == 1


def test_tensors_are_one_batch_and_labels_are_left_out():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    pixels = torch.randn(3, 3, 32, 32)
    expected = cosines(osm.measure(model, [pixels]))
    loader = DataLoader(TensorDataset(pixels, torch.arange(3)), batch_size=3)
    for given in (pixels, pixels.numpy(), loader, TensorDataset(pixels, torch.arange(3))):
        torch.testing.assert_close(cosines(osm.measure(model, given)), expected)


def test_a_path_may_be_a_path(bert, tmp_path):
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    found = osm.measure(bert[2], Path(tmp_path / "texts.txt"))
    torch.testing.assert_close(cosines(found), cosines(osm.measure(bert[2], TEXTS)))


def test_what_was_understood_stays_as_it_is_and_can_be_used_again():
    texts = held(iter(TEXTS))
    assert held(texts) is texts
    assert reusable(texts) is texts
    assert list(texts.read("text").items) == list(texts.read("text").items) == TEXTS
    batches = reusable(iter([{"x": torch.zeros(1)}]))
    assert len(list(batches)) == len(list(batches)) == 1


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, WrongBatch, "an object of type int"),
        (["a text", 3], WrongBatch, "an object of type int at 1"),
        ([Image.new("RGB", (4, 4))], UnreadableData, "found image"),
        ("some text that is no path", UnreadableData, "a text itself goes into a list"),
        (pandas.DataFrame({"number": [1, 2]}), UnreadableData, "the columns number"),
        ([Image.new("RGB", (4, 4))], UnreadableData, "text, which this model takes"),
    ],
)
def test_what_is_no_data_is_refused_in_words(bert, given, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        osm.measure(bert[2], given)


def test_a_tokenizer_beside_batches_is_a_conflict(bert):
    with pytest.raises(Conflict, match="tokenizer"):
        osm.measure(bert[0], encoded(bert), tokenizer=bert[1])
    with pytest.raises(BadValue, match="tokenizer"):
        osm.measure(bert[0], TEXTS, tokenizer=3)


def test_a_mapping_without_tensors_is_no_state_dict():
    with pytest.raises(BadValue, match="a pipeline or a state dict"):
        osm.inspect({"a": 1})


def test_a_list_of_pictures_holds_nothing_else():
    with pytest.raises(WrongBatch, match="an object of type str at 1"):
        list(held([Image.new("RGB", (4, 4)), "text"]).read("image").items)


def test_an_encoder_decoder_takes_pairs_of_inputs_as_before():
    model, batch = tiny_model("t5")
    assert osm.measure(model, batch).values
    assert isinstance(held(["a"]), InMemory)


def test_lines_that_were_read_as_one_text_are_said_with_the_other_choice(bert, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS * 2))
    found = osm.measure(bert[2], str(file))
    assert "Paragraphs are texts: 1 here. By line (--per-line) there are 6." in found.data.notes
    assert found.answer.now.command.endswith("--per-line")
    assert osm.measure(bert[2], str(file), per_line=True).data.notes == ()


def test_commands_about_texts_held_in_python_are_of_python(bert):
    command = osm.measure(bert[2], TEXTS * 2).answer.now.command
    assert command.startswith("osm.")
    assert "--data" not in command


@pytest.mark.parametrize("text", ["今天天气很好，我们去公园散步吧。", "今天天气很好", "One text."])
def test_a_text_in_place_of_a_list_is_told_to_go_into_one(bert, text):
    with pytest.raises(UnreadableData, match=r"a text itself goes into a list: \[text\]"):
        osm.measure(bert[2], text)


@pytest.mark.parametrize("name", ["r.csv", "r.html", "r.PNG"])
def test_a_result_is_not_saved_as_json_under_the_name_of_something_else(bert, tmp_path, name):
    with pytest.raises(BadValue, match=r"ends in \.json"):
        osm.inspect(bert[2]).save(tmp_path / name)
    assert not (tmp_path / name).exists()
