"""Folders, local and remote: exact byte ranges, failures in words, and retries only where they can help."""

import sys

import fsspec
import pytest
from huggingface_hub import constants

from oversmooth.errors import BrokenFile, MissingDependency, RemoteUnavailable
from oversmooth.models.stores import remote as attempts
from oversmooth.models.stores.remote import TRIES, cached_hub_folder, hub_folder, remote_folder, retried
from oversmooth.models.stores.store import Folder, LocalFolder, RangedFile, read_small


class Answer(Exception):
    """A failure as HTTP libraries raise it."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


@pytest.fixture
def pauses(monkeypatch):
    """The waits between retries, recorded instead of slept."""
    waited = []
    monkeypatch.setattr(attempts.time, "sleep", waited.append)
    return waited


# --- local ----------------------------------------------------------------------------------------------------------


def test_a_range_is_read_exactly():
    file = RangedFile("f", 10, lambda start, stop: b"0123456789"[start:stop])
    assert file.read(3, 7) == b"3456"
    assert file.read(10, 10) == b""


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (5, 4), (-1, 3)])
def test_a_range_beyond_the_file_is_refused(start, stop):
    file = RangedFile("f", 10, lambda start, stop: bytes(stop - start))
    with pytest.raises(BrokenFile, match="f cannot be read"):
        file.read(start, stop)


def test_fewer_bytes_than_asked_for_are_refused():
    file = RangedFile("f", 10, lambda start, stop: b"ab")
    with pytest.raises(BrokenFile, match="expected 5 bytes at 2, found 2"):
        file.read(2, 7)


def test_a_local_folder_lists_its_files_sorted_and_no_folders(tmp_path):
    (tmp_path / "b").write_bytes(b"xy")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "c").mkdir()
    folder = LocalFolder(tmp_path)
    assert isinstance(folder, Folder)
    assert folder.listing() == ["a", "b"]
    assert (folder.has("a"), folder.has("c"), folder.has("d")) == (True, False, False)
    assert folder.open("b").size == 2


def test_a_file_that_vanishes_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    file = LocalFolder(tmp_path).open("x")
    (tmp_path / "x").unlink()
    with pytest.raises(BrokenFile, match="No such file"):
        file.read(0, 3)


def test_only_small_files_are_read_whole(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert read_small(LocalFolder(tmp_path), "x", 3) == b"abc"
    with pytest.raises(BrokenFile, match="at most 2 bytes, found 3"):
        read_small(LocalFolder(tmp_path), "x", 2)


# --- remote, without any network ------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    """fsspec's own file system in memory: remote for us, nowhere for everyone else."""
    system = fsspec.filesystem("memory")
    system.pipe_file("/model/config.json", b'{"a": 1}')
    yield remote_folder("memory://model/")
    system.rm("/model", recursive=True)


def test_any_fsspec_location_is_a_folder(memory):
    assert isinstance(memory, Folder)
    assert memory.listing() is None
    assert (memory.has("config.json"), memory.has("other")) == (True, False)
    assert memory.open("config.json").read(1, 4) == b'"a"'
    assert read_small(memory, "config.json", 100) == b'{"a": 1}'


def test_a_remote_file_that_does_not_exist_is_refused(memory):
    with pytest.raises(RemoteUnavailable, match=r"model/other could not be read: there is no such file"):
        memory.open("other")


@pytest.mark.parametrize("url", ["foo://bar", "s3://bucket/model"])
def test_a_protocol_that_cannot_be_read_is_refused(url):
    with pytest.raises(RemoteUnavailable, match=rf"{url} could not be read.*\nUse http"):
        remote_folder(url)


@pytest.mark.parametrize(("package", "url"), [("fsspec", "memory://x"), ("aiohttp", "http://127.0.0.1:9")])
def test_a_missing_package_is_named_with_its_extra(package, url, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"'{package}'.*\n.*oversmooth\[hf\]"):
        remote_folder(url)


def test_a_failure_of_the_network_is_tried_again_after_a_pause(pauses):
    failures = [OSError("reset"), Answer(503)]

    def read():
        if failures:
            raise failures.pop()
        return "content"

    assert retried("label", read) == "content"
    assert pauses == [1, 2]


def test_a_failure_hidden_behind_not_found_is_tried_again(pauses):
    failures = [Answer(503)]

    def read():
        if failures:
            raise FileNotFoundError("x") from failures.pop()
        return "content"

    assert retried("label", read) == "content"
    assert pauses == [1]


def test_a_network_that_keeps_failing_is_given_up_with_the_real_cause(pauses):
    def read():
        raise FileNotFoundError("x") from ConnectionResetError("reset by peer")

    with pytest.raises(RemoteUnavailable, match="ConnectionResetError: reset by peer"):
        retried("label", read)
    assert len(pauses) == TRIES - 1


@pytest.mark.parametrize("cause", [None, Answer(404)])
def test_a_file_that_does_not_exist_is_not_tried_again(cause, pauses):
    def read():
        raise FileNotFoundError("x") from cause

    with pytest.raises(FileNotFoundError):
        retried("label", read)
    assert pauses == []


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_refused_access_is_not_tried_again_and_speaks_of_login(status, is_hidden, pauses):
    def read():
        if is_hidden:
            raise FileNotFoundError("x") from Answer(status)
        raise Answer(status)

    with pytest.raises(RemoteUnavailable, match=rf"access was refused \({status}\).*\n.*hf auth login"):
        retried("label", read)
    assert pauses == []


# --- the hub, offline -----------------------------------------------------------------------------------------------


def cached_model(cache, repo, files_, revision="main"):
    snapshot = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in files_:
        (snapshot / name).write_bytes(b"{}")
    references = snapshot.parents[1] / "refs"
    references.mkdir()
    (references / revision).write_text("0" * 40)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_model_in_the_hub_cache_is_found_without_the_network(cache):
    snapshot = cached_model(cache, "owner/name", ["config.json", "model.safetensors"])
    assert cached_hub_folder("owner/name").path == snapshot
    assert cached_hub_folder("owner/other") is None
    assert cached_hub_folder("owner/name", "v2") is None


def test_a_revision_in_the_hub_cache_is_found_by_its_name(cache):
    snapshot = cached_model(cache, "owner/name", ["config.json", "pytorch_model.bin"], revision="v2")
    assert cached_hub_folder("owner/name", "v2").path == snapshot
    assert cached_hub_folder("owner/name") is None


def test_a_cached_config_without_weights_is_no_model(cache):
    cached_model(cache, "owner/name", ["config.json", "tokenizer.json"])
    assert cached_hub_folder("owner/name") is None


def test_the_hub_is_not_asked_while_it_is_switched_off(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteUnavailable, match=r"'owner/name' could not be read: HF_HUB_OFFLINE is set"):
        hub_folder("owner/name")


def test_a_name_that_no_repository_can_have_is_refused(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert cached_hub_folder("owner/na--me") is None
    with pytest.raises(RemoteUnavailable, match=r"owner/na--me.*\nCheck its name"):
        hub_folder("owner/na--me")
