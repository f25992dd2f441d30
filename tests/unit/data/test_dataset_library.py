"""Datasets of the hub: asked for once, refused at once, tried from the cache where there is no network."""

import pytest

from oversmooth.data import raw as dataset_library
from oversmooth.data.raw import load_hub_rows
from oversmooth.errors import UnreadableData

huggingface_hub = pytest.importorskip("huggingface_hub")
datasets = pytest.importorskip("datasets")


@pytest.fixture
def asked(monkeypatch):
    """A hub that answers with `answers`; every question and every attempt to load is kept."""
    log = []

    def answering(error):
        def dataset_info(self, name, **_):
            log.append(("asked", name))
            if error is not None:
                raise error

        def load_dataset(name, **_):
            log.append(("loaded", huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
            return "rows"

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return log

    return answering


def not_found():
    from unittest.mock import Mock

    from huggingface_hub.errors import RepositoryNotFoundError

    return RepositoryNotFoundError("404", response=Mock())


def test_a_dataset_that_is_there_is_loaded_from_the_hub(asked):
    log = asked(None)
    assert load_hub_rows("owner/name", "a dataset", "owner/name") == "rows"
    assert log == [("asked", "owner/name"), ("loaded", False, False)]


def test_a_name_that_the_hub_does_not_know_is_refused_at_once_with_near_names(asked, tmp_path, monkeypatch):
    log = asked(not_found())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    with pytest.raises(UnreadableData, match="no such name here or on the hub; close: images"):
        load_hub_rows("image", "a dataset", "image")
    assert log == [("asked", "image")]


def test_without_a_network_only_the_cache_is_tried_and_settings_are_put_back(asked):
    log = asked(ConnectionError("no network"))
    assert load_hub_rows("owner/name", "a dataset", "owner/name") == "rows"
    assert log[1:] == [("loaded", True, True)]
    assert (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def test_near_names_say_where_the_folder_is_missing_too(tmp_path):
    assert "is not there either" in dataset_library.near_names(tmp_path / "no" / "file.txt")
