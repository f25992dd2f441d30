"""Files behind a web address: exactly the bytes asked for, in time, or a refusal in words."""

import gzip

import pytest

from oversmooth.errors import RemoteUnavailable
from oversmooth.models.stores import remote as attempts
from oversmooth.models.stores import remote as http
from oversmooth.models.stores.remote import HttpFolder, RateLimiter, traffic
from tests.rude_server import elapsed, head, honest, rude_server

CONTENT = bytes(range(100))


@pytest.fixture(autouse=True)
def quick_and_local(monkeypatch):
    """No waits between retries, and no proxy between us and ourselves."""
    monkeypatch.setattr(attempts.time, "sleep", lambda seconds: None)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


def refusal(to_range, to_head=None):
    """What is said of a server that answers a request for bytes 10 to 20 like this."""

    def answer(request):
        if request.method == "HEAD":
            return to_head() if to_head else honest(CONTENT, request)
        return to_range()

    with rude_server(answer) as url, pytest.raises(RemoteUnavailable) as caught:
        HttpFolder(url).open("x").read(10, 20)
    assert f"{url}/x could not be read" in str(caught.value)
    return str(caught.value)


def partial(said="bytes 10-19/100", body=CONTENT[10:20], **headers):
    yield head("206 Partial Content", **{"Content_Range": said, "Content_Length": len(body), **headers}) + body


def test_the_bytes_asked_for_are_read():
    with rude_server(lambda request: honest(CONTENT, request)) as url:
        file = HttpFolder(url).open("x")
        assert file.size == 100
        assert file.read(10, 20) == CONTENT[10:20]
        assert file.read(0, 100) == CONTENT
        assert file.read(7, 7) == b""


@pytest.mark.parametrize(
    "said",
    [
        "bytes 11-20/100",
        "bytes 10-20/100",
        "bytes 0-9/100",
        "bytes 10-19/101",
        "bytes */100",
        "items 10-19/100",
        "bytes 10-19",
        "nonsense",
        "bytes " + "9" * 5000 + "-19/100",
    ],
)
def test_another_range_than_asked_for_is_refused(said):
    text = refusal(lambda: partial(said))
    assert "bytes 10 to 19 of 100 were asked for, and the server answered with status 206 with" in text
    assert "Download the file and inspect the local copy" in text


def test_a_range_of_unknown_total_is_read():
    with rude_server(lambda r: honest(CONTENT, r) if r.method == "HEAD" else partial("bytes 10-19/*")) as url:
        assert HttpFolder(url).open("x").read(10, 20) == CONTENT[10:20]


def test_a_partial_answer_that_names_no_range_is_refused():
    answer = head("206 Partial Content", Content_Length=10) + CONTENT[10:20]
    assert "status 206 without a range" in refusal(lambda: iter([answer]))


@pytest.mark.parametrize("body", [CONTENT[10:20], CONTENT])
def test_a_whole_file_instead_of_a_range_is_refused(body):
    answer = head("200 OK", Content_Length=len(body)) + body
    assert "has no byte ranges, sent all" in refusal(lambda: iter([answer]))


@pytest.mark.parametrize("status", ["204 No Content", "203 Other", "416 Range Not Satisfiable"])
def test_another_status_is_refused(status):
    assert f"status {status[:3]} without a range" in refusal(lambda: iter([head(status, Content_Length=0)]))


@pytest.mark.parametrize(("count", "found"), [(9, "9 came"), (11, "more than 10 came"), (0, "0 came")])
def test_another_length_than_asked_for_is_refused(count, found):
    body = CONTENT[10 : 10 + count]
    assert f"10 bytes were asked for, and {found}" in refusal(lambda: partial(body=body))


def test_a_body_without_end_is_refused_without_reading_on():
    def endless():
        yield head("206 Partial Content", Content_Range="bytes 10-19/100")
        for _ in range(10_000):
            yield bytes(2**16)

    assert "more than 10 came" in refusal(endless)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "x" * 300])
def test_a_compressed_answer_is_refused(encoding):
    body = gzip.compress(CONTENT[10:20])
    text = refusal(lambda: partial(body=body, Content_Encoding=encoding))
    assert f"compressed ({encoding[:40]}) although plain bytes were asked for" in text


def test_a_size_that_only_a_compressed_answer_gives_is_not_believed():
    compressed = [head("200 OK", Content_Length=33, Content_Encoding="gzip")]
    assert "compressed" in refusal(lambda: partial(Content_Encoding="gzip"), lambda: iter(compressed))


@pytest.mark.parametrize("status", ["403 Forbidden", "405 Not Allowed", "500 Broken", "204 No Content"])
def test_a_size_that_head_does_not_give_is_asked_for_by_a_range(status):
    def answer(request):
        return iter([head(status, Content_Length=0)]) if request.method == "HEAD" else honest(CONTENT, request)

    with rude_server(answer) as url:
        assert HttpFolder(url).open("x").read(10, 20) == CONTENT[10:20]


@pytest.mark.parametrize("length", ["-5", "many", "9" * 30, ""])
def test_a_size_that_is_no_number_is_refused(length):
    def answer(request):
        yield head("200 OK", Content_Length=length)

    with rude_server(answer) as url, pytest.raises(RemoteUnavailable):
        HttpFolder(url).open("x")


@pytest.mark.parametrize(
    "raw", [b"", b"\r\n\r\n", b"nonsense\r\n\r\n", bytes(range(256)), b"HTTP/1.1 999999999 x\r\n\r\n"]
)
def test_what_is_no_http_is_refused(raw):
    with rude_server(lambda request: iter([raw])) as url, pytest.raises(RemoteUnavailable):
        HttpFolder(url).open("x")


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://a b/", "http://127.0.0.1:99999", "http://\ud800/"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(RemoteUnavailable):
        HttpFolder(url).open("x")


# --- in time --------------------------------------------------------------------------------------------------------

PATIENCE = 10.0
"""Seconds in which a server that sleeps for a minute has to be given up, on a busy machine too."""


@pytest.fixture
def short_limits(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(http, "SILENCE_SECONDS", 0.4)


def never():
    yield 60.0


def slow_headers():
    for letter in head("200 OK", Content_Length=100):
        yield bytes([letter])
        yield 0.3


def slow_body():
    yield head("206 Partial Content", Content_Range="bytes 10-19/100", Content_Length=10)
    for letter in CONTENT[10:20]:
        yield bytes([letter])
        yield 0.3


@pytest.mark.parametrize("slow", [never, slow_headers])
def test_a_server_that_never_finishes_its_headers_is_given_up(slow, short_limits):
    def ask():
        with rude_server(lambda request: slow()) as url, pytest.raises(RemoteUnavailable, match="not answer in time"):
            HttpFolder(url).has("x")

    assert elapsed(ask) < PATIENCE


@pytest.mark.parametrize("slow", [never, slow_headers, slow_body])
def test_a_server_that_trickles_is_given_up(slow, short_limits):
    assert elapsed(lambda: refusal(slow)) < PATIENCE


def test_a_server_that_is_only_a_little_slow_is_read():
    def answer(request):
        yield 0.1
        yield from honest(CONTENT, request)

    with rude_server(answer) as url:
        assert HttpFolder(url).open("x").read(10, 20) == CONTENT[10:20]


def test_every_request_to_the_place_itself_has_a_permit_of_its_own():
    """Also the one after storage has forgotten the signature that it was asked with."""
    place: list[str] = []
    valid = ["first"]

    def storage(request):
        known = request.path.endswith(valid[0])
        return honest(CONTENT, request) if known else iter([head("403 Forbidden", Content_Length=0)])

    def redirect(request):
        place.append(request.method)
        yield head("302 Found", Location=f"{stored}/x?{valid[0]}", Content_Length=0)

    permits: list[int] = []

    def permit(host):
        permits.append(len(place))
        return 0.0

    with rude_server(storage) as stored, rude_server(redirect) as url, traffic(RateLimiter(permit=permit)):
        file = HttpFolder(url).open("x")
        assert file.read(10, 20) == CONTENT[10:20]
        valid[0] = "second"
        assert file.read(20, 30) == CONTENT[20:30]
        assert file.read(30, 40) == CONTENT[30:40]
    assert place == ["HEAD", "GET"]
    assert permits == [0, 1]  # requests that had come before each permit was asked for


def test_redirects_in_a_circle_are_given_up():
    with (
        rude_server(lambda request: iter([head("302 Found", Location=request.path, Content_Length=0)])) as url,
        pytest.raises(RemoteUnavailable),
    ):
        HttpFolder(url).open("x")


def test_a_redirect_out_of_the_web_is_refused():
    with (
        rude_server(lambda request: iter([head("302 Found", Location="file:///etc/passwd", Content_Length=0)])) as url,
        pytest.raises(RemoteUnavailable),
    ):
        HttpFolder(url).open("x")
