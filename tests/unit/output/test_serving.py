"""A page served on this machine only, made anew whenever it is asked for."""

import http.client
import json
import socket
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from oversmooth.errors import BadValue, BrokenFile
from oversmooth.output.blocks import Page, PageSection, table_of
from oversmooth.output.charts import Chart, Line, Panel, numbers, places
from oversmooth.output.render import LOOPBACK, page_server
from oversmooth.results.wording import Highlight


def page(number):
    line = Line(name="loss", x=(0.0, 1.0), y=(0.0, float(number)), value=str(number))
    panel = Panel(title="", y=numbers(0.0, 3.0), marks=(line,))
    chart = Chart(id="loss", alt="", x=places(["0", "1"]), panels=(panel,))
    return Page(
        title="t",
        eyebrow="",
        verdict=f"step {number} <b>",
        facts=(("steps", str(number)),),
        findings=(Highlight(text=f"finding {number}", section="top", title="Top"),),
        sections=(PageSection(id="top", blocks=[chart, table_of("runs", "Runs", [{"run": "a", "steps": number}])]),),
    )


@contextmanager
def served(make):
    with page_server(make) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def get(port, path, host=None):
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    connection.request("GET", path, headers={"Host": host or f"{LOOPBACK}:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def test_page_and_numbers_are_made_when_they_are_asked_for():
    numbers = iter((1, 2, 3))
    with served(lambda: page(next(numbers))) as port:
        status, html, headers = get(port, "/")
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert "step 1 &lt;b&gt;" in html
        assert 'data-updates="figures.json"' in html
        assert "connect-src blob: data: 'self'" in html
        news = json.loads(get(port, "/figures.json")[1])
        assert news["verdict"] == "step 2 <b>"
        assert news["facts"] == [["steps", "2"]]
        assert ">loss 2</text>" in news["figures"]["loss"][0]
        assert news["findings"] == [{"text": "finding 2", "section": "top", "title": "Top"}]
        assert [cell["shown"] for cell in news["tables"]["runs"][0]] == ["a", "2"]
        assert f'data-parts="{news["parts"]}"' in html
        assert ">loss 3</text>" in json.loads(get(port, "/figures.json")[1])["figures"]["loss"][0]


def test_a_page_with_other_columns_or_without_sentences_has_other_parts():
    both = page(1)
    assert both.parts == page(2).parts
    assert replace(both, findings=()).parts != both.parts
    wider = PageSection(
        id="top", blocks=[*both.sections[0].blocks[:1], table_of("runs", "Runs", [{"run": "a", "of": 2}])]
    )
    assert replace(both, sections=(wider,)).parts != both.parts


def test_other_paths_and_other_names_for_this_machine_are_refused():
    with served(lambda: page(1)) as port:
        assert get(port, "/../etc/passwd")[0] == 404
        assert get(port, "/", host="evil.example:80")[0] == 403
        assert get(port, "/figures.json", host="evil.example")[0] == 403
        assert get(port, "/", host=f"localhost:{port}")[0] == 200


def test_a_file_that_cannot_be_read_just_now_is_said_and_asked_for_again():
    def broken():
        raise BrokenFile("metrics.jsonl", "a line", "half of one", "Wait.")

    with served(broken) as port:
        status, text, _ = get(port, "/figures.json")
        assert status == 503
        assert "metrics.jsonl" in text


def test_a_port_that_is_taken_is_refused():
    with served(lambda: page(1)) as port, pytest.raises(BadValue, match=r"--port must be a free port"):
        page_server(lambda: page(1), port)


def test_a_browser_that_goes_away_is_no_error(capfd):
    def slow():
        time.sleep(0.2)
        return replace(page(1), summary="x" * 5_000_000)

    with served(slow) as port:
        for _ in range(3):
            gone = socket.create_connection((LOOPBACK, port))
            gone.sendall(f"GET / HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\n\r\n".encode())
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not closed
            gone.close()
        time.sleep(1.0)
    assert capfd.readouterr().err == ""
