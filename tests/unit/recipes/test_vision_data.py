"""Where images come from, how they are split, and what is refused."""

import io
import os
import pickle
import tarfile
from collections import Counter

import numpy
import pytest
from PIL import Image

from oversmooth.errors import BadRecipe, BadValue, BrokenFile, UnreadableData, UnsafePickle
from oversmooth.recipes.image_sets import ArrayImages, ImageSplit, cut_off, fold_out, share
from oversmooth.recipes.train import load_recipe
from tests.cifar_files import cifar_arrays, load_splits, write_cifar100, write_folder, write_parquet

CLASSES = 4
SETTINGS = load_recipe("cifar100", [f"data.classes={CLASSES}"]).data


@pytest.fixture(scope="module")
def arrays():
    return {"train": cifar_arrays(40, CLASSES, 0), "test": cifar_arrays(12, CLASSES, 1)}


def pixels_of(split):
    return numpy.stack([numpy.asarray(split.images.image(position).convert("RGB")) for position in split.positions])


@pytest.mark.parametrize("packed", [True, False])
def test_the_archive_of_the_authors_is_read_packed_or_not(tmp_path, arrays, packed):
    archive = write_cifar100(tmp_path, arrays, packed=packed)
    splits = load_splits(SETTINGS, str(archive), 1.0)
    numpy.testing.assert_array_equal(pixels_of(splits.train), arrays["train"][0])
    numpy.testing.assert_array_equal(pixels_of(splits.test), arrays["test"][0])
    assert list(splits.train.images.labels) == arrays["train"][1]


def test_parquet_and_image_folder_hold_the_same_images(tmp_path, arrays):
    tables, folder = write_parquet(tmp_path / "tables", arrays), write_folder(tmp_path / "folder", arrays)
    from_tables, from_folder = (load_splits(SETTINGS, str(path), 1.0) for path in (tables, folder))
    numpy.testing.assert_array_equal(pixels_of(from_tables.test), arrays["test"][0])
    assert from_tables.facts["source_sha256"] is not None
    order = sorted(range(12), key=lambda i: (arrays["test"][1][i], i))
    numpy.testing.assert_array_equal(pixels_of(from_folder.test), arrays["test"][0][order])
    assert list(from_folder.test.images.labels) == sorted(arrays["test"][1])


def test_digits_need_no_files():
    splits = load_splits(load_recipe("digits").data, None, 1.0)
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert not set(splits.train.positions) & set(splits.test.positions)
    assert pixels_of(splits.test).max() == 255


# --- splits ---------------------------------------------------------------------------------------------------------


def labelled(count, classes=CLASSES):
    return ImageSplit(ArrayImages(*cifar_arrays(count, classes, 2)), list(range(count)))


def test_validation_is_the_last_of_a_seeded_shuffle_and_watched_instead_of_test(tmp_path, arrays):
    archive = write_cifar100(tmp_path, arrays)
    settings = SETTINGS.model_copy(update={"validation_images": 10})
    splits = load_splits(settings, str(archive), 1.0)
    expected = numpy.random.default_rng(0).permutation(40)[-10:]
    assert splits.validation.positions == sorted(expected.tolist())
    assert splits.watched is splits.validation
    assert sorted(splits.train.positions + splits.validation.positions) == list(range(40))
    assert load_splits(SETTINGS, str(archive), 1.0).watched.images.labels == arrays["test"][1]


@pytest.mark.parametrize("count", [0, 40, 41])
def test_a_split_that_leaves_nothing_is_refused(count):
    with pytest.raises(BadValue, match=r"data\.validation_images must be above 0 and below 40"):
        cut_off(labelled(40), count, 0, "data.validation_images")


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_test_every_image_once_and_train_on_all_others(folds):
    whole = labelled(41)
    parts = [fold_out(whole, folds, fold, 0) for fold in range(folds)]
    assert sorted(position for _, tested in parts for position in tested.positions) == whole.positions
    for rest, tested in parts:
        assert sorted(rest.positions + tested.positions) == whole.positions
        assert abs(len(tested) - 41 / folds) < 1


@pytest.mark.parametrize("words", [("data.folds=5", "data.fold=5"), ("data.fold=1",), ("data.folds=1",)])
def test_a_fold_that_is_none_is_refused(words):
    with pytest.raises(BadRecipe, match=r"data.fold"):
        load_recipe("digits", words)


def test_a_fraction_takes_the_same_share_of_every_class_and_grows_by_adding():
    whole = labelled(400)
    small, large = share(whole, 0.1, 0), share(whole, 0.5, 0)
    for part, fraction in ((small, 0.1), (large, 0.5)):
        counts = Counter(part.images.labels[position] for position in part.positions)
        assert counts == {label: round(100 * fraction) for label in range(CLASSES)}
    assert set(small.positions) < set(large.positions)
    assert share(whole, 0.1, 0).positions == small.positions
    assert share(whole, 0.1, 1).positions != small.positions
    assert share(whole, 1.0, 0) is whole


def test_a_fraction_without_any_image_of_a_class_is_refused():
    with pytest.raises(BadValue, match="class 0 would have no image"):
        share(labelled(40), 0.01, 0)


def test_the_hash_of_a_split_knows_its_images_its_labels_and_its_order():
    split = labelled(8)
    facts = [
        split.facts(),
        ImageSplit(split.images, split.positions[::-1]).facts(),
        ImageSplit(split.images, [0]).facts(),
    ]
    relabelled = ArrayImages(split.images.pixels, [0] * 8)
    repainted = ArrayImages(255 - split.images.pixels, split.images.labels)
    facts += [ImageSplit(images, list(range(8))).facts() for images in (relabelled, repainted)]
    assert len({str(fact["sha256"]) for fact in facts}) == 5
    assert split.facts() == ImageSplit(split.images, list(range(8))).facts()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_wrong_number_of_classes_is_refused_before_anything_is_trained(tmp_path, arrays):
    archive = write_cifar100(tmp_path, arrays)
    with pytest.raises(UnreadableData, match=r"expected 100 classes.*found 4 classes, labels from 0 to 3, in train"):
        load_splits(load_recipe("cifar100").data, str(archive), 1.0)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, arrays):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = write_cifar100(tmp_path, arrays, packed=False)
    (folder / "train").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(UnsafePickle, match="system"):
        load_splits(SETTINGS, str(folder), 1.0)
    assert not (tmp_path / "ran").exists()


PIXELS = numpy.zeros((2, 3072), numpy.uint8)
BROKEN_BATCHES = [
    b"",
    b"\x80\x02",
    pickle.dumps({b"data": 1}),
    pickle.dumps([1, 2]),
    *(
        pickle.dumps({b"data": PIXELS, b"fine_labels": labels}, protocol=2)
        for labels in ([0], 3, None, {0: 1, 1: 2}, [0, None], [0, "one"], [0, -1], [0, 100], [0, 2**70], [[0], [1]])
    ),
    *(
        pickle.dumps({b"data": pixels, b"fine_labels": [0, 0]}, protocol=2)
        for pixels in (PIXELS.astype(float), PIXELS.astype(object), PIXELS[:0], PIXELS[:, :5], PIXELS[None])
    ),
    # An array of a terabyte that names its shape and brings no bytes.
    b"\x80\x02}(C\x04datacnumpy\nndarray\n(J\x00\x00\x00\x10M\x00\x0c\x86cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x86RC\x0bfine_labels]u.",
]


@pytest.mark.parametrize("content", BROKEN_BATCHES)
def test_a_broken_batch_is_refused_with_its_name(tmp_path, arrays, content):
    folder = write_cifar100(tmp_path, arrays, packed=False)
    (folder / "test").write_bytes(content)
    with pytest.raises((BrokenFile, UnsafePickle), match="cifar-100-python/test"):
        load_splits(SETTINGS, str(folder), 1.0)


def test_a_truncated_archive_is_refused(tmp_path, arrays):
    archive = write_cifar100(tmp_path, arrays)
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(BrokenFile, match="a CIFAR archive"):
        load_splits(SETTINGS, str(archive), 1.0)


@pytest.mark.parametrize("place", range(100, 2000, 190))
def test_a_damaged_archive_is_refused(tmp_path, arrays, place):
    archive = write_cifar100(tmp_path, arrays)
    content = bytearray(archive.read_bytes())
    content[place : place + 8] = bytes(255 - byte for byte in content[place : place + 8])
    archive.write_bytes(content)
    with pytest.raises((BrokenFile, UnsafePickle)):
        load_splits(SETTINGS, str(archive), 1.0)


def test_a_file_of_the_archive_that_says_to_be_huge_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.tar.gz"
    member = tarfile.TarInfo("cifar-100-python/train")
    member.size = 0
    member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "0", "GNU.sparse.size": str(1 << 40)}
    member.pax_headers["GNU.sparse.numblocks"], member.pax_headers["GNU.sparse.map"] = "1", f"{(1 << 40) - 1},0"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
        archive.addfile(tarfile.TarInfo("cifar-100-python/test"))
    with pytest.raises(BrokenFile, match=r"train cannot be read: expected at most 1073741824 bytes"):
        load_splits(SETTINGS, str(path), 1.0)


def test_another_archive_is_refused(tmp_path):
    path = tmp_path / "other.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("something/else"), io.BytesIO())
    with pytest.raises(BrokenFile, match="cifar-100-python or cifar-10-batches-py"):
        load_splits(SETTINGS, str(path), 1.0)


def test_folders_with_different_classes_are_refused(tmp_path, arrays):
    folder = write_folder(tmp_path, arrays)
    (folder / "test" / "odd").mkdir()
    with pytest.raises(UnreadableData, match="odd in one of them only"):
        load_splits(SETTINGS, str(folder), 1.0)


def test_a_folder_without_classes_and_a_missing_path_are_refused(tmp_path):
    with pytest.raises(UnreadableData, match="a folder of images for each class"):
        load_splits(SETTINGS, str(tmp_path), 1.0)
    with pytest.raises(UnreadableData, match="found nothing"):
        load_splits(SETTINGS, str(tmp_path / "none"), 1.0)


def test_tables_without_images_labels_or_test_are_refused(tmp_path, arrays):
    import pyarrow
    from pyarrow import parquet

    tables = write_parquet(tmp_path, arrays)
    with pytest.raises(UnreadableData, match="a column colour"):
        load_splits(SETTINGS.model_copy(update={"label_column": "colour"}), str(tables), 1.0)
    (tables / "test.parquet").unlink()
    with pytest.raises(BadValue, match=r"data\.test_images must be above 0"):
        load_splits(SETTINGS, str(tables), 1.0)
    for name in ("train", "test"):
        parquet.write_table(pyarrow.table({"fine_label": [0, 1]}), tables / f"{name}.parquet")
    with pytest.raises(UnreadableData, match="a column img or image"):
        load_splits(SETTINGS, str(tables), 1.0)


def test_a_dataset_that_is_not_on_the_hub_says_how_to_give_what_one_has():
    with pytest.raises(UnreadableData, match="--data"):
        load_splits(SETTINGS, "nobody/nothing", 1.0)


def test_an_unreadable_image_is_named(tmp_path, arrays):
    folder = write_folder(tmp_path, arrays)
    splits = load_splits(SETTINGS, str(folder), 1.0)
    broken = folder / "train" / splits.train.images.images.names[5]
    with Image.open(broken) as whole:
        whole.load()
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(UnreadableData, match=broken.name):
        splits.train.images.image(5)
