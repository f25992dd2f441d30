"""What `--data` means, on small files that the tests write, with the real tokenizer where it is needed."""

import json

import pytest
import torch

from oversmooth.data.load import load_data
from oversmooth.data.options import DataOptions
from oversmooth.data.samples import sample_images, sample_sounds, sample_texts
from oversmooth.errors import OversmoothError, UnreadableData
from oversmooth.models.live import load_model
from oversmooth.models.open import open_source
from tests.contract.tiny_models import tiny_model
from tests.real_models import minilm


@pytest.fixture(scope="module")
def text_model():
    source = open_source(minilm())
    return source, load_model(source, "measure")


def texts_of(text_model, data, **options):
    source, model = text_model
    loaded = load_data(data, model, source, model.config.to_dict(), DataOptions(**options))
    return list(loaded.batches), loaded.description


def rows_of(batches):
    return sum(len(batch["input_ids"]) for batch in batches)


def test_paragraphs_of_a_text_file_are_sequences(text_model, tmp_path):
    (tmp_path / "a.txt").write_text("One two three.\n\nFour five.\nStill four.\n\n\n\nSix.\n")
    batches, description = texts_of(text_model, str(tmp_path / "a.txt"), batch_size=2)
    assert [len(batch["input_ids"]) for batch in batches] == [2, 1]
    assert description == str(tmp_path / "a.txt")


def test_files_of_a_folder_are_sequences(text_model, tmp_path):
    for name in ("b.txt", "a.py"):
        (tmp_path / name).write_text(f"contents of {name}\n\nmore")
    assert rows_of(texts_of(text_model, str(tmp_path))[0]) == 2


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv", "arrow"])
def test_the_text_column_of_a_table_is_found(text_model, tmp_path, ending):
    import datasets

    table = datasets.Dataset.from_dict({"label": [0, 1], "text": ["first text", "second text"]})
    path = tmp_path / f"data.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    elif ending == "parquet":
        table.to_parquet(path)
    elif ending == "csv":
        table.to_csv(path)
    else:
        table.save_to_disk(tmp_path / "saved")
        path = next((tmp_path / "saved").glob("*.arrow"))
    assert rows_of(texts_of(text_model, str(path))[0]) == 2


def test_texts_are_cut_at_max_tokens_and_samples_counted(text_model):
    batches, description = texts_of(text_model, None, max_tokens=10, max_samples=5)
    assert max(batch["input_ids"].shape[1] for batch in batches) == 10
    assert rows_of(batches) == 5
    assert "built-in samples" in description


def test_images_of_a_folder_are_resized_for_the_model(tmp_path):
    from PIL import Image

    model, _ = tiny_model("vit")
    for index, size in enumerate([(40, 30), (16, 16)]):
        folder = tmp_path / f"class{index}"
        folder.mkdir()
        Image.new("RGB", size, (255, 0, 0)).save(folder / "x.png")
    source = open_source(model)
    (batch,) = load_data(str(tmp_path), model, source, source.config, DataOptions()).batches
    assert batch["pixel_values"].shape == (2, 3, 16, 16)
    torch.testing.assert_close(batch["pixel_values"][0, 0], torch.ones(16, 16))  # (1 - 0.5) / 0.5
    torch.testing.assert_close(batch["pixel_values"][0, 1], -torch.ones(16, 16))


def test_images_of_a_parquet_table_are_found(tmp_path):
    import datasets
    from PIL import Image

    model, _ = tiny_model("vit")
    images = [Image.new("RGB", (8, 8), (0, 0, 0))]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"img": images, "label": [3]}, features=features).to_parquet(tmp_path / "x.parquet")
    source = open_source(model)
    (batch,) = load_data(str(tmp_path / "x.parquet"), model, source, source.config, DataOptions()).batches
    assert batch["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize("case", ["vit", "timm-vit", "wav2vec2", "whisper"])
def test_built_in_inputs_fit_the_kind_of_model(case):
    from oversmooth.measurement.measure import measure

    model, _ = tiny_model(case)
    result = measure(model, max_samples=2)
    assert result.data.sequences == 2


@pytest.mark.parametrize(
    ("case", "make", "text"),
    [
        ("vit", lambda p: (p / "x.txt").write_text("hello"), "images"),
        ("vit", lambda p: None, "images"),
        ("wav2vec2", lambda p: None, "audio"),
    ],
)
def test_data_of_another_kind_are_refused(case, make, text, tmp_path):
    model, _ = tiny_model(case)
    make(tmp_path)
    source = open_source(model)
    with pytest.raises(OversmoothError, match=text):
        load_data(str(tmp_path), model, source, source.config, DataOptions())


def test_a_broken_image_is_named(tmp_path):
    model, _ = tiny_model("vit")
    (tmp_path / "x.png").write_bytes(b"not an image")
    source = open_source(model)
    with pytest.raises(UnreadableData, match=r"x\.png"):
        list(load_data(str(tmp_path), model, source, source.config, DataOptions()).batches)


def test_binary_files_are_no_text(text_model, tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00abc")
    with pytest.raises(UnreadableData, match="UTF-8"):
        list(texts_of(text_model, str(tmp_path / "x.txt")))


def test_an_unknown_dataset_is_refused_with_what_was_expected(text_model):
    with pytest.raises(UnreadableData, match="a file, a folder or a dataset name"):
        texts_of(text_model, "no-such-dataset-anywhere")


def test_sample_texts_are_of_many_lengths():
    lengths = sorted(len(text.split()) for text in sample_texts())
    assert len(lengths) >= 16
    assert lengths[0] < 15
    assert lengths[-1] > 120


def test_sample_images_are_reproducible_and_smooth_at_large_scales():
    images = sample_images(2, 32, 32, 3, seed=0)
    torch.testing.assert_close(images, sample_images(2, 32, 32, 3, seed=0))
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    neighbours = (images[..., 1:] - images[..., :-1]).square().mean()
    assert neighbours < 0.5 * images.var()


def test_sample_sounds_are_standardised():
    sounds = sample_sounds(2, 16_000, seed=0)
    torch.testing.assert_close(sounds.std(1), torch.ones(2), rtol=1e-3, atol=1e-3)
