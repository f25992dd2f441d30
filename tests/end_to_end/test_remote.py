"""Models behind a URL and on the hub, served by loopback: the same result for a few per cent of the bytes."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import oversmooth as osm
from oversmooth.errors import BrokenFile, NotLive, RemoteUnavailable, TargetNotFound
from oversmooth.models.open import open_source
from oversmooth.models.stores import remote as attempts
from tests.contract.tiny_models import GROUPED, tiny_model

HUB = re.compile(r"^/owner/name/resolve/(?P<revision>[^/]+)/")
CHUNK = 2**16


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.server.shop.answer(self, with_body=False)

    def do_GET(self):
        self.server.shop.answer(self, with_body=True)


class Shop:
    """A file server on 127.0.0.1 that counts what it hands out; its attributes say how it misbehaves."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.bytes_served = 0
        self.requests = []
        self.headers = []
        self.honours_ranges = True
        self.announces = {"Accept-Ranges": "bytes"}
        self.statuses = {}
        """File name to the status codes of its next answers."""
        self.cut_bodies = False
        self.redirect = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.shop = self
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request, *, with_body):
        path, _, _ = request.path.partition("?")
        self.requests.append((request.command, request.path))
        self.headers.append(request.headers)
        name = HUB.sub("", path).removeprefix("/")
        status = next(iter(self.statuses.get(name, [])), None)
        if status:
            self.statuses[name].pop(0)
        file = self.folder / name
        if status is None and not file.is_file():
            status = 404
        if status or self.redirect:
            extra = {} if status else {"Location": self.redirect + path}
            self._send(request, status or 302, b"", with_body=with_body, extra=extra)
            return
        content, wanted = file.read_bytes(), request.headers.get("Range")
        if wanted and self.honours_ranges:
            start, stop = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
            part, extra = content[start : stop + 1], {"Content-Range": f"bytes {start}-{stop}/{len(content)}"}
            self._send(request, 206, part, with_body=with_body, extra=extra)
        else:
            self._send(request, 200, content, with_body=with_body, extra={})

    def _send(self, request, status, body, *, with_body, extra):
        request.send_response(status)
        for name, value in {**self.announces, **extra, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if not with_body:
            return
        sent = body[: len(body) // 2] if self.cut_bodies else body
        try:
            for start in range(0, len(sent), CHUNK):
                request.wfile.write(sent[start : start + CHUNK])
                self.bytes_served += len(sent[start : start + CHUNK])
        except OSError:
            pass  # the reader had enough
        if self.cut_bodies:
            request.close_connection = True


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A small LLaMA with an embedding and a feed-forward that dwarf its value path, in shards."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**GROUPED, "vocab_size": 50_000, "intermediate_size": 4096})
    folder = tmp_path_factory.mktemp("model")
    AutoModel.from_config(config).save_pretrained(folder, max_shard_size="2MB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture
def single_folder(tmp_path, model_folder):
    """The same model in one file."""
    tensors = {}
    for shard in model_folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    return tmp_path


@pytest.fixture
def shop(model_folder):
    shop = Shop(model_folder)
    yield shop
    shop.close()


@pytest.fixture(autouse=True)
def quick_and_local(monkeypatch):
    """No waits between retries, and no proxy between us and ourselves."""
    monkeypatch.setattr(attempts.time, "sleep", lambda seconds: None)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def hub(shop, monkeypatch, tmp_path):
    """The hub, played by the server: `owner/name` is the model."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    template = shop.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    return shop


def size_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# --- the same result for fewer bytes --------------------------------------------------------------------------------


def test_a_sharded_model_behind_a_url_says_the_same_for_a_small_share_of_its_bytes(shop, model_folder):
    local, remote = osm.inspect(model_folder), osm.inspect(shop.url)
    assert remote.layers == local.layers
    assert remote.stacks == local.stacks
    assert remote.provenance.weights_sha256 == local.provenance.weights_sha256
    assert remote.provenance.source == "url"
    assert shop.bytes_served < 0.02 * size_of(model_folder)


def test_beside_the_tensors_only_headers_and_configs_are_fetched(shop, model_folder):
    tensors = osm.inspect(shop.url).provenance.bytes_read
    small = sum((model_folder / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in model_folder.glob("*.safetensors"))
    assert shop.bytes_served <= tensors + small + headers


def test_opening_a_remote_model_fetches_no_tensor(shop):
    open_source(shop.url).stacks()
    assert [path for command, path in shop.requests if command == "GET" and "-of-" in path] == []
    assert shop.bytes_served > 0


def test_a_single_file_behind_a_url_says_the_same(single_folder):
    shop = Shop(single_folder)
    local = osm.inspect(single_folder)
    assert osm.inspect(f"{shop.url}/model.safetensors").layers == local.layers
    assert shop.bytes_served < 0.02 * size_of(single_folder)
    assert osm.inspect(f"{shop.url}/").layers == local.layers
    shop.close()


def test_a_query_goes_with_every_file(single_folder):
    shop = Shop(single_folder)
    osm.inspect(f"{shop.url}/model.safetensors?download=true")
    assert {path.partition("?")[2] for _, path in shop.requests} == {"download=true"}
    shop.close()


def test_a_server_that_does_not_announce_ranges_but_has_them_is_read(shop, model_folder):
    shop.announces = {}
    assert osm.inspect(shop.url).layers == osm.inspect(model_folder).layers


# --- servers that misbehave -----------------------------------------------------------------------------------------


@pytest.fixture
def large_file(tmp_path):
    """A file of 40 MB, of which the value path is a hundredth."""
    tensors = {"embedding.weight": torch.zeros(10_000, 1000)}
    for name in ("attention.v_lin", "attention.out_lin"):
        tensors[f"transformer.layer.0.{name}.weight"] = torch.eye(64)
    for name in ("sa_layer_norm", "output_layer_norm"):
        tensors[f"transformer.layer.0.{name}.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_server_that_ignores_ranges_is_refused_and_not_downloaded(large_file):
    shop = Shop(large_file.parent)
    shop.honours_ranges, shop.announces = False, {}
    with pytest.raises(RemoteUnavailable) as caught:
        osm.inspect(f"{shop.url}/model.safetensors")
    shop.close()
    for part in (shop.url, "range", "Download the file and inspect the local copy"):
        assert part in str(caught.value)
    assert shop.bytes_served < 0.5 * large_file.stat().st_size


def test_a_server_that_declares_it_has_no_ranges_is_refused_and_not_downloaded(large_file):
    shop = Shop(large_file.parent)
    shop.honours_ranges, shop.announces = False, {"Accept-Ranges": "none"}
    with pytest.raises(RemoteUnavailable, match=r"refuses byte ranges.*\nDownload the file"):
        osm.inspect(f"{shop.url}/model.safetensors")
    shop.close()
    assert shop.bytes_served < 0.5 * large_file.stat().st_size


def test_the_same_server_with_ranges_is_read(large_file):
    shop = Shop(large_file.parent)
    result = osm.inspect(f"{shop.url}/model.safetensors")
    shop.close()
    assert [layer.plain.rho_dc for layer in result.layers] == pytest.approx([2.0])
    assert shop.bytes_served < 0.01 * large_file.stat().st_size


def test_a_folder_that_is_not_there_is_refused(shop):
    with pytest.raises(RemoteUnavailable, match=r"nowhere could not be read: it holds neither model\.safetensors nor"):
        osm.inspect(f"{shop.url}/nowhere")


def test_a_file_that_is_not_there_is_refused(shop):
    with pytest.raises(RemoteUnavailable, match=r"absent\.safetensors could not be read: there is no such file"):
        osm.inspect(f"{shop.url}/absent.safetensors")


def test_a_shard_that_is_not_there_is_refused_by_name(model_folder, tmp_path):
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    shop = Shop(tmp_path)
    with pytest.raises(BrokenFile, match=r"found no model-00001-of-\d+\.safetensors"):
        osm.inspect(shop.url)
    shop.close()


def test_a_refused_connection_is_said_in_words(shop):
    shop.close()
    with pytest.raises(RemoteUnavailable, match=r"Connect.*\nCheck the address and the connection"):
        osm.inspect(f"{shop.url}/model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_server_that_is_busy_for_a_moment_is_asked_again(name, single_folder):
    shop = Shop(single_folder)
    shop.statuses = {name: [503, 503, 503]}  # a HEAD, the GET that fsspec tries after it, and once more
    assert osm.inspect(f"{shop.url}/model.safetensors").layers == osm.inspect(single_folder).layers
    assert shop.statuses[name] == []
    shop.close()


def test_a_server_that_stays_broken_is_given_up_with_its_status(shop):
    shop.statuses = {"config.json": [500] * 100}
    with pytest.raises(RemoteUnavailable, match="500"):
        osm.inspect(shop.url)
    assert len(shop.requests) == 2 * attempts.TRIES


def test_a_body_that_is_cut_is_refused(single_folder):
    shop = Shop(single_folder)
    shop.cut_bodies = True
    with pytest.raises(RemoteUnavailable, match="Payload"):
        osm.inspect(f"{shop.url}/model.safetensors")
    shop.close()


def test_a_remote_file_that_lies_about_its_size_is_refused(single_folder):
    content = (single_folder / "model.safetensors").read_bytes()
    (single_folder / "model.safetensors").write_bytes(content[:-1000])
    shop = Shop(single_folder)
    with pytest.raises(BrokenFile, match="as its header promises"):
        osm.inspect(f"{shop.url}/model.safetensors")
    shop.close()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_a_format_that_cannot_be_streamed_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"content")
    shop = Shop(tmp_path)
    with pytest.raises(RemoteUnavailable, match=r"cannot be streamed\.\nOnly safetensors"):
        osm.inspect(f"{shop.url}/{name}")
    assert shop.bytes_served == 0
    shop.close()


def test_a_model_behind_a_url_is_not_run(shop):
    with pytest.raises(NotLive, match=r"never downloaded\.\nIts weights can still be read: oversmooth inspect http"):
        osm.verify(shop.url)


# --- the hub --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["owner/name", "hf://owner/name"])
def test_a_hub_model_says_the_same_for_a_small_share_of_its_bytes(target, hub, model_folder):
    result = osm.inspect(target)
    assert result.layers == osm.inspect(model_folder).layers
    assert (result.provenance.target, result.provenance.source) == (target, "hub")
    assert hub.bytes_served < 0.02 * size_of(model_folder)
    assert {HUB.match(path)["revision"] for _, path in hub.requests} == {"main"}


def test_a_revision_of_a_hub_model_is_asked_for_by_its_name(hub):
    osm.inspect("hf://owner/name@v2.0")
    assert {HUB.match(path)["revision"] for _, path in hub.requests} == {"v2.0"}


def test_one_file_of_a_hub_model_is_asked_for_by_its_name(hub, single_folder):
    hub.folder = single_folder
    result = osm.inspect("hf://owner/name/model.safetensors")
    assert result.layers == osm.inspect(single_folder).layers


def test_a_subfolder_of_a_hub_model_is_asked_for_by_its_name(hub, single_folder):
    hub.folder = single_folder.parent
    result = osm.inspect(f"hf://owner/name/{single_folder.name}")
    assert result.layers == osm.inspect(single_folder).layers


def test_the_users_token_goes_to_the_hub(hub):
    osm.inspect("owner/name")
    assert {headers.get("Authorization") for headers in hub.headers} == {"Bearer hf_test"}


def test_the_hub_is_told_who_asks_and_the_token_only_where_it_may_be_sent_by_itself(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    osm.inspect("owner/name")
    assert {headers.get("Authorization") for headers in hub.headers} == {None}
    assert {headers.get("User-Agent") for headers in hub.headers} == {f"oversmooth/{osm.__version__}"}


def test_the_users_token_does_not_follow_a_redirect_to_another_host(hub, model_folder):
    storage = Shop(model_folder)
    hub.redirect = storage.url
    osm.inspect("owner/name")
    storage.close()
    assert storage.bytes_served > 0
    assert {headers.get("Authorization") for headers in hub.headers} == {"Bearer hf_test"}
    assert {headers.get("Authorization") for headers in storage.headers} == {None}


def test_the_users_token_does_not_go_to_a_plain_url(hub):
    osm.inspect(hub.url)
    assert {headers.get("Authorization") for headers in hub.headers} == {None}


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("target", ["owner/name", "hf://owner/name"])
def test_a_gated_hub_model_is_refused_with_the_way_to_log_in(target, status, hub):
    hub.statuses = {"config.json": [status] * 10}
    with pytest.raises((RemoteUnavailable, TargetNotFound)) as caught:
        osm.inspect(target)
    for part in (f"access was refused ({status})", "hf auth login"):
        assert part in str(caught.value)


def test_a_hub_model_without_weights_is_refused(hub, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    hub.folder = tmp_path
    with pytest.raises(TargetNotFound, match=r"holds neither model\.safetensors nor an index"):
        osm.inspect("owner/name")


def test_a_timm_name_is_read_from_its_hub_repository(hub, tmp_path, monkeypatch):
    import timm

    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: type("Config", (), {"hf_hub_id": "owner/name"}))
    model, _ = tiny_model("timm-vit")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hub.folder = tmp_path
    result = osm.inspect("vit_tiny_patch16_224")
    assert result.layers == osm.inspect(model).layers
    assert result.provenance.source == "timm"
