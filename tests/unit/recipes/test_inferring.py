"""What a recipe leaves open is taken from the images; a recipe that does not fit them is refused."""

import numpy
import pytest
from PIL import Image

from oversmooth.errors import BadValue, MissingValue, UnreadableData
from oversmooth.recipes.image_sets import ArrayImages, ImageSource, ImageSplit, open_images, splits_of
from oversmooth.recipes.train import load_recipe
from oversmooth.recipes.vision import completed, looked_at, require_fits
from tests.cifar_files import cifar_arrays, write_folder, write_parquet

OPEN = load_recipe("images")


def source(count=40, side=32, classes=4, grey=False, test=False):
    pixels = numpy.random.default_rng(0).integers(0, 200, (count, side, side) + (() if grey else (3,)), numpy.uint8)
    images = ArrayImages(pixels, [i % classes for i in range(count)])
    return ImageSource(images, images if test else None, "noise", classes=[f"kind {i}" for i in range(classes)])


def whole(images):
    return ImageSplit(images, list(range(len(images.labels))))


def test_everything_that_is_open_is_inferred_and_said():
    recipe, said = completed(OPEN, source(), "images")
    assert recipe.is_complete
    assert (recipe.data.classes, recipe.data.channels, recipe.data.image_size) == (4, 3, 32)
    assert (recipe.model.patch_size, recipe.data.test_images) == (2, 8)
    assert said[0] == "Inferred from noise: 32 images for training, 8 for test."
    for key in (
        "data.classes",
        "data.test_images",
        "data.image_size",
        "data.channels",
        "data.mean",
        "model.patch_size",
    ):
        assert any(line.startswith(f"{key} = ") for line in said), key
    assert "data.classes = 4: kind 0, kind 1, kind 2, kind 3" in said


@pytest.mark.parametrize(
    ("side", "size", "patch"), [(8, 8, 2), (20, 20, 2), (28, 28, 2), (33, 32, 4), (65, 64, 8), (300, 224, 16)]
)
def test_images_become_at_most_sixteen_whole_patches_a_side(side, size, patch):
    recipe, _ = completed(OPEN, source(count=10, side=side), "images")
    assert (recipe.data.image_size, recipe.model.patch_size) == (size, patch)


def test_grey_images_have_one_channel_and_its_statistics():
    images = source(grey=True).train
    seen = looked_at(whole(images))
    assert not seen.has_colour
    assert seen.mean == pytest.approx([images.pixels.mean() / 255], abs=1e-4)
    assert seen.std == pytest.approx([images.pixels.std() / 255], abs=1e-4)
    recipe, _ = completed(OPEN, source(grey=True), "images")
    assert (recipe.data.channels, len(recipe.data.mean)) == (1, 1)


def test_statistics_are_those_of_training_images_alone():
    pixels = numpy.zeros((20, 8, 8), numpy.uint8)
    train = ArrayImages(pixels, [0, 1] * 10)
    test = ArrayImages(pixels + 255, [0, 1] * 10)
    recipe, _ = completed(OPEN, ImageSource(train, test, "black and white"), "images")
    assert recipe.data.mean == [0.0]
    assert recipe.data.std == [1.0], "nothing varies, so nothing is divided"


def test_what_the_user_sets_is_not_inferred():
    settings = ["data.image_size=16", "data.mean=[0.5, 0.5, 0.5]", "data.channels=3", "model.patch_size=8"]
    recipe, said = completed(load_recipe("images", settings), source(), "images")
    assert (recipe.data.image_size, recipe.model.patch_size, recipe.data.mean) == (16, 8, [0.5, 0.5, 0.5])
    assert not any(line.startswith(("data.image_size", "data.mean", "model.patch_size")) for line in said)
    complete = load_recipe("cifar100")
    assert completed(complete, source(), "cifar100") == (complete, [])


def test_a_folder_of_classes_alone_is_cut_into_training_and_test(tmp_path):
    write_folder(tmp_path, {"train": cifar_arrays(40, 4, 0)})
    found = open_images(OPEN.data, str(tmp_path / "train"))
    assert found.test is None
    assert found.classes == ["class_0", "class_1", "class_2", "class_3"]
    recipe, _ = completed(OPEN, found, "images")
    splits = splits_of(recipe.data, found, 1.0)
    assert (len(splits.train), len(splits.test)) == (32, 8)


def test_a_table_may_have_words_for_labels_and_no_test_rows(tmp_path):
    pixels, labels = cifar_arrays(20, 2, 0)
    write_parquet(tmp_path, {"train": (pixels, [("cat", "dog")[label] for label in labels])})
    found = open_images(load_recipe("cifar100").data, str(tmp_path))
    assert (list(found.train.labels), found.classes, found.test) == (labels, ["cat", "dog"], None)


def test_without_data_the_recipe_for_own_images_says_what_it_needs():
    with pytest.raises(MissingValue, match=r"--data .a folder of images"):
        open_images(OPEN.data, None)


def test_an_empty_label_is_refused(tmp_path):
    pixels, labels = cifar_arrays(4, 2, 0)
    write_parquet(tmp_path, {"train": (pixels, [None, *labels[1:]])})
    with pytest.raises(UnreadableData, match=r"a whole number.* found an empty cell"):
        open_images(load_recipe("cifar100").data, str(tmp_path))


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "images", "words"),
    [
        ("digits", source(side=8), "data.channels must be 3, because the images have colour; got 1"),
        ("cifar100", source(side=40), "data.image_size must be 40, the size of the images.*got 32"),
        (
            "imagenet-deit-ti",
            source(side=32),
            "data.image_size must be at most 64: no image is larger than 32; got 224",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(name, images, words):
    with pytest.raises(BadValue, match=words):
        require_fits(load_recipe(name), whole(images.train))


def test_recipes_fit_the_images_they_were_made_for():
    require_fits(load_recipe("digits"), whole(source(side=8, grey=True).train))
    require_fits(load_recipe("cifar100"), whole(source(side=32).train))
    require_fits(load_recipe("digits"), whole(ArrayImages(numpy.full((4, 8, 8, 3), 7, numpy.uint8), [0, 1, 0, 1])))


def test_images_of_other_modes_are_looked_at_as_they_are():
    class Odd:
        labels = (0, 1)

        def image(self, position):
            return Image.new(("LA", "P")[position], (6, 9))

        def identity(self, position):
            return b""

    seen = looked_at(whole(Odd()))
    assert (seen.sizes, seen.has_colour) == ([(6, 9), (6, 9)], False)


def test_an_image_that_cannot_be_read_is_left_for_training_to_name(tmp_path):
    folder = write_folder(tmp_path, {"train": cifar_arrays(8, 2, 0), "test": cifar_arrays(4, 2, 1)})
    files = sorted((folder / "train").rglob("*.png"))
    files[0].write_bytes(b"no image")
    images = open_images(OPEN.data, str(folder)).train
    assert len(looked_at(whole(images)).sizes) == 7
    for file in files:
        file.write_bytes(b"no image")
    with pytest.raises(UnreadableData, match="expected an image"):
        looked_at(whole(open_images(OPEN.data, str(folder)).train))


def test_the_sample_is_spread_over_all_images():
    pixels = numpy.zeros((300, 4, 4), numpy.uint8)
    pixels[150:] = 255  # sorted by class, as the files of a folder are
    assert looked_at(whole(ArrayImages(pixels, [0] * 150 + [1] * 150))).mean == pytest.approx([0.5], abs=0.01)


def test_one_parquet_file_is_enough(tmp_path):
    file = write_parquet(tmp_path, {"test": cifar_arrays(6, 2, 0)}) / "test.parquet"
    found = open_images(OPEN.data, str(file))
    assert found.test is None
    assert len(found.train.labels) > 0


def folder_of(tmp_path, **classes):
    for name, files in classes.items():
        (tmp_path / name).mkdir()
        for file in files:
            Image.new("RGB", (4, 4)).save(tmp_path / name / file) if file.endswith("png") else (
                tmp_path / name / file
            ).write_text("words")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ({}, "at least two, found no folder"),
        ({"cats": ["a.png"]}, "at least two, found the one folder cats"),
        ({"cats": ["a.png"], "dogs": ["b.txt", "c.txt"]}, r"dogs.*found 2 files of other kinds \(\.txt\)"),
        ({"cats": ["a.png"], "dogs": []}, "dogs.*found nothing"),
    ],
)
def test_a_folder_without_classes_or_images_is_refused_with_what_is_there(tmp_path, classes, said):
    with pytest.raises(UnreadableData, match=said):
        open_images(OPEN.data, folder_of(tmp_path, **classes))


def test_another_number_of_classes_is_said_before_anything_else():
    with pytest.raises(UnreadableData, match=r"expected 100 classes.*found 4 classes"):
        splits_of(load_recipe("cifar100").data, source(), 1.0)


def test_a_folder_that_is_not_there_is_refused_with_near_names_and_without_asking_for_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    with pytest.raises(UnreadableData, match=r"the hub cannot be reached; close: pictures"):
        open_images(OPEN.data, "picture")
