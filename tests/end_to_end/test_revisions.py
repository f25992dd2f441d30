"""Revisions of a hub repository, served by loopback: what is run is what is inspected, and series are one target."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import TargetNotFound
from oversmooth.models.revisions import integrity, steps_of
from tests.command_line import ROOT, oversmooth
from tests.contract.tiny_models import tiny_model

FILE = re.compile(r"^/(?:api/models/)?owner/name/resolve/(?P<revision>[^/]+)/(?P<name>[^?]+)")
COMMIT = "0123456789abcdef0123456789abcdef0123456"
"""Of a revision, when its number is written behind it."""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download of one revision needs; `folder/REVISION/FILE` are its files."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET(with_body=False)

    def do_GET(self, *, with_body=True):
        folder: Path = self.server.folder
        revisions = sorted(entry.name for entry in folder.iterdir())
        commits = {name: f"{COMMIT}{number}" for number, name in enumerate(revisions)}
        names = commits | {commit: commit for commit in commits.values()}
        path = self.path.partition("?")[0]
        if path == "/api/models/owner/name/refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in commits.items()]
            return self._send(200, json.dumps({"branches": branches, "converts": [], "tags": []}).encode(), with_body)
        if match := re.fullmatch(r"/api/models/owner/name(?:/revision/(?P<r>[^/]+))?", path):
            commit = names[match["r"] or "main"]
            return self._send(200, json.dumps({"id": "owner/name", "sha": commit, "siblings": []}).encode(), with_body)
        match = FILE.match(path)
        if match is None or match["revision"] not in names:
            return self._send(404, b"{}", with_body)
        commit = names[match["revision"]]
        branch = next(name for name, known in commits.items() if known == commit)
        file = folder / branch / match["name"]
        if not file.is_file():
            return self._send(404, b"", with_body, {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        extra = {"X-Repo-Commit": commit, "ETag": f'"{branch}-{match["name"]}"', "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            start, stop = (int(part) if part else len(content) - 1 for part in wanted[6:].split("-"))
            extra |= {"Content-Range": f"bytes {start}-{stop}/{len(content)}"}
            return self._send(206, content[start : stop + 1], with_body, extra)
        return self._send(200, content, with_body, extra)

    def _send(self, status, body, with_body, extra=None):
        self.send_response(status)
        for name, value in {**(extra or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _write(folder, scale):
    model, _ = tiny_model("llama")
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.v_proj.weight.mul_(scale)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def hub(tmp_path):
    """A repository whose main branch and steps have different weights, but for two that have the same."""
    for name, scale in {"main": 9.0, "step1": 1.0, "step2": 1.5, "step3": 1.5, "step10": 2.0}.items():
        _write(tmp_path / "hub" / name, scale)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder = tmp_path / "hub"
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", tmp_path
    server.shutdown()
    server.server_close()


def _in_a_process(hub, code):
    """Python on its own, for which the loopback server is the hub."""
    url, folder = hub
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    changes = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "cache"), "no_proxy": "127.0.0.1"}
    environment = {**os.environ, **changes, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_revision_that_is_inspected_is_the_one_that_is_run_and_a_series_flags_equal_steps(hub):
    found = _in_a_process(
        hub,
        """
import json, torch
import oversmooth as osm
from oversmooth.models.revisions import integrity, steps_of
target = "hf://owner/name@step2"
batch = [{"input_ids": torch.arange(24).reshape(2, 12) + 3}]
inspected, measured = osm.inspect(target), osm.measure(target, batch)
steps = steps_of("hf://owner/name@step1..step10")
flags = integrity([step.number for step in steps], [osm.inspect(step.target) for step in steps])
print(json.dumps({
    "inspected": [layer.plain.rho_dc for layer in inspected.layers],
    "measured": [value.mean for value in measured.values],
    "steps": [[step.number, step.target] for step in steps],
    "flags": [flag.sentence for flag in flags],
}))
""",
    )
    folder, batch = hub[1] / "hub" / "step2", [{"input_ids": torch.arange(24).reshape(2, 12) + 3}]
    assert found["inspected"] == [layer.plain.rho_dc for layer in osm.inspect(folder).layers]
    assert found["measured"] == [value.mean for value in osm.measure(folder, batch).values]
    assert found["measured"] != [value.mean for value in osm.measure(hub[1] / "hub" / "main", batch).values]
    assert found["steps"] == [[n, f"hf://owner/name@step{n}"] for n in (1, 2, 3, 10)]
    assert found["flags"] == ["Step 3 has exactly the weights of step 2."]


def test_a_series_is_a_list_for_a_survey_with_the_commit_of_every_step(hub):
    found = _in_a_process(
        hub,
        """
import json
import oversmooth as osm
osm.survey("hf://owner/name@step1..step10", "table", requests_per_second=None)
rows = osm.read_survey("table", "model")
print(json.dumps([rows.target.tolist(), rows.status.tolist(), rows["commit"].nunique()]))
""",
    )
    targets, statuses, commits = found
    assert sorted(targets) == sorted(f"hf://owner/name@step{n}" for n in (1, 2, 3, 10))
    assert set(statuses) == {"read"}
    assert commits == 4


def test_a_folder_of_checkpoints_is_one_target_in_the_order_of_its_numbers(tmp_path):
    for number, scale in ((500, 1.0), (1000, 1.2), (20, 0.9)):
        _write(tmp_path / f"checkpoint-{number}", scale)
    assert [step.number for step in steps_of(str(tmp_path))] == [20, 500, 1000]
    page = tmp_path / "page.html"
    for command in ("report", "compare"):
        done = oversmooth(command, tmp_path, "-o", page, "--max-samples", 2)
        assert done.returncode == 0, done.stderr
        assert "Over 1000 steps the mean cosine" in page.read_text()
    assert steps_of(str(tmp_path / "checkpoint-500")) == ()


def test_steps_that_jump_back_are_flagged(tmp_path):
    inspections = []
    for number, scale in enumerate((1.0, 1.3, 1.6, 1.01, 1.9)):
        _write(tmp_path / str(number), scale)
        inspections.append(osm.inspect(tmp_path / str(number)))
    flags = integrity([10, 20, 30, 40, 50], inspections)
    assert [(flag.kind, flag.step, flag.other) for flag in flags] == [("back", 40, 10), ("back", 50, 30)]
    assert integrity([10, 20, 30], inspections[:3]) == ()


def test_a_page_of_a_series_says_which_steps_are_not_what_they_say(tmp_path):
    for number, scale in ((1, 1.0), (2, 1.2), (3, 1.2)):
        _write(tmp_path / f"checkpoint-{number}", scale)
    done = oversmooth("report", tmp_path, "-o", tmp_path / "page.html", "--max-samples", 2)
    assert done.returncode == 0, done.stderr
    assert "1 of 3 steps are not what their names say" in done.stdout
    assert "Step 3 has exactly the weights of step 2." in (tmp_path / "page.html").read_text()


def test_revisions_that_differ_in_more_than_a_number_are_no_series():
    with pytest.raises(TargetNotFound, match="differ only in a number"):
        steps_of("hf://owner/name@step1..main")
