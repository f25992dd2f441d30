"""Configs, saved analyses, data files, servers and command lines."""

import csv
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

from safetensors.torch import save

from tests.fuzz.cases import Case
from tests.fuzz.draws import HOSTILE, NAMES, changed, damaged, json_text, some_bytes
from tests.fuzz.tiny_checkpoints import FAMILIES, tiny_checkpoint
from tests.rude_server import Parts, Request, head, honest

FREE = {"model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "residual_multiplier"}
"""Fields that may change the spectrum; those that a family declares come to them."""
MORE_KEYS = (
    *("head_dim", "d_kv", "n_head", "depth", "quantization_config", "architecture", "model_args", "text_config"),
    *(
        "num_register_tokens",
        "num_prefix_tokens",
        "encoder_layers",
        "is_decoder",
        "residual_multiplier",
        "gguf_architecture",
    ),
)


def _sound_files(rng: random.Random) -> tuple[dict[str, bytes], dict[str, Any], set[str]]:
    tiny = tiny_checkpoint(rng, rng.choice(FAMILIES))
    files = {"model.safetensors": save({name: tensor.contiguous() for name, tensor in tiny.tensors.items()})}
    files["config.json"] = json.dumps(tiny.config).encode()
    return files, tiny.config, FREE | {condition.key for condition in tiny.arch.when}


def config_case(rng: random.Random) -> Case:
    sound, config, free = _sound_files(rng)
    note, key = "", ""
    if rng.random() < 0.92:
        if rng.random() < 0.6:
            config, place = changed(rng, config)
            key = str(place[0])
        else:
            key = rng.choice(MORE_KEYS)
            config = {**config, key: rng.choice(HOSTILE)}
        note = f"{key} changed"
    text = json_text(rng, config) if note else sound["config.json"]
    is_free = key in free or text != json.dumps(config).encode()
    return Case(
        kind="config",
        note=note,
        files={**sound, "config.json": text},
        arguments=("inspect", "{folder}", "--format", "json"),
        is_sound=not note,
        same_as={} if is_free else sound,
    )


def analysis_case(rng: random.Random, analysis: dict[str, Any]) -> Case:
    note, value = "", analysis
    if rng.random() < 0.93:
        for _ in range(rng.choice((1, 1, 1, 3))):
            value, place = changed(rng, value)
            note = f"{'.'.join(map(str, place))} changed"
            if not isinstance(value, dict):
                break
    content = json_text(rng, value) if note else json.dumps(value).encode()
    arguments = ("report", "{folder}/a.json", "-o", "{folder}/out.html")
    return Case(kind="analysis", note=note, files={"a.json": content}, arguments=arguments, is_sound=not note)


# --- data -----------------------------------------------------------------------------------------------------------


def data_case(rng: random.Random, text_model: str, image_model: str) -> Case:
    name, content = rng.choice((_plain_text, _json_lines, _table, _parquet, _image))(rng)
    note = f"{name}"
    if rng.random() < 0.4:
        content, note = damaged(rng, content), f"{name} damaged"
    is_image = name.endswith((".png", ".jpg"))
    where = "{folder}/data" if is_image else f"{{folder}}/{name}"
    files = {f"data/{name}" if is_image else name: content}
    model = image_model if is_image else text_model
    arguments = ("measure", model, "--data", where, "--max-samples", "3", "--max-tokens", "16", "--format", "json")
    return Case(kind="data", note=note, files=files, arguments=arguments)


def _words(rng: random.Random) -> str:
    odd = ("\0", "\ud7ff", "\U0001f600", "é" * 50, "a" * 2000, "\u202e", "[UNK]", "\t", " \n", "\r\n\r\n", "\ufeff")
    return " ".join(rng.choice((*("the", "a", "cat", "sat", "on"), *odd)) for _ in range(rng.randrange(12)))


def _plain_text(rng: random.Random) -> tuple[str, bytes]:
    lines = [_words(rng) for _ in range(rng.randrange(6))]
    return "x.txt", rng.choice(("\n", "\n\n", "\n \n", "")).join(lines).encode("utf-8", "surrogatepass")


def _json_lines(rng: random.Random) -> tuple[str, bytes]:
    rows = [
        {rng.choice(("text", "content", "x")): rng.choice((_words(rng), *HOSTILE))} for _ in range(rng.randrange(5))
    ]
    return "x.jsonl", b"\n".join(json_text(rng, row) for row in rows)


def _table(rng: random.Random) -> tuple[str, bytes]:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([rng.choice(("text", "label", "", "x"))] * rng.randrange(3))
    for _ in range(rng.randrange(5)):
        writer.writerow([_words(rng) for _ in range(rng.randrange(4))])
    return "x.csv", out.getvalue().encode("utf-8", "surrogatepass")


def _parquet(rng: random.Random) -> tuple[str, bytes]:
    import pyarrow
    from pyarrow import parquet

    columns = rng.choice(
        (
            {"text": ["the cat sat", None, "a cat"]},
            {"text": [None, None]},
            {"text": [1, 2]},
            {"text": [["a", "b"], []]},
            {"image": [b"no image", b""]},
            {"image": [{"bytes": some_bytes(rng, 40), "path": None}]},
            {"text": [], "image": []},
            {"x": ["the cat sat on a cat"]},
        )
    )
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out)
    return "x.parquet", out.getvalue()


def _image(rng: random.Random) -> tuple[str, bytes]:
    """A PNG whose header says one size and whose data hold another."""
    width, height = rng.choice(((16, 16), (1, 1), (60_000, 60_000), (0, 4), (2**31 - 1, 1), (40, 3)))
    rows = b"".join(b"\0" + some_bytes(rng, 3 * 16) for _ in range(16))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return rng.choice(("x.png", "x.jpg")), content


# --- servers --------------------------------------------------------------------------------------------------------


def server_case(rng: random.Random) -> Case:
    sound, _, _ = _sound_files(rng)
    manners = rng.choice((0.0, 0.1, 0.5, 1.0))
    behaviour = random.Random(rng.randrange(2**31))

    def answer(request: Request) -> Parts:
        content = sound.get(request.path.partition("?")[0].removeprefix("/"))
        if behaviour.random() < manners:
            return behaviour.choice(RUDE)(behaviour, content or b"x", request)
        if content is None:
            return iter([head("404 Not Found", Content_Length=0)])
        return honest(content, request)

    target = rng.choice(("{url}", "{url}/", "{url}/model.safetensors", "{url}/model.safetensors?x=1"))
    return Case(
        kind="server",
        note=f"{manners:.0%} of the answers are rude",
        files={},
        arguments=("inspect", target, "--format", "json"),
        is_sound=manners == 0.0,
        same_as=sound,
        server=answer,
    )


def _another_range(rng: random.Random, content: bytes, request: Request) -> Parts:
    start, stop = request.start or 0, request.stop or len(content)
    shift = rng.choice((-1, 1, 4))
    body = content[max(start + shift, 0) : stop + shift]
    said = f"bytes {start + shift}-{stop + shift - 1}/{len(content) + rng.choice((0, 0, 5))}"
    yield head("206 Partial Content", Content_Range=said, Content_Length=len(body)) + body


def _status(rng: random.Random, content: bytes, request: Request) -> Parts:
    status = rng.choice((200, 201, 204, 206, 301, 302, 304, 400, 401, 403, 404, 416, 429, 500, 503, 999))
    body = rng.choice((b"", content, b"<html>"))
    extra = {"Location": rng.choice((request.path, "http://[", "file:///etc/passwd", "/else"))} if status < 400 else {}
    yield head(f"{status} x", Content_Length=rng.choice((len(body), 0, 10**18, -1)), **extra) + body


def _compressed(rng: random.Random, content: bytes, request: Request) -> Parts:
    start, stop = request.start or 0, request.stop or len(content)
    body = zlib.compress(content[start:stop]) if rng.random() < 0.5 else content[start:stop]
    said = f"bytes {start}-{stop - 1}/{len(content)}"
    yield (
        head("206 x", Content_Encoding=rng.choice(("gzip", "br", "x")), Content_Range=said, Content_Length=len(body))
        + body
    )


def _other_length(rng: random.Random, content: bytes, request: Request) -> Parts:
    start, stop = request.start or 0, request.stop or len(content)
    body = rng.choice((b"", content[start : stop - 1], content[start:stop] + b"x", bytes(2**20)))
    said = f"bytes {start}-{stop - 1}/{len(content)}"
    more = {} if rng.random() < 0.5 else {"Content_Length": len(body)}
    yield head("206 x", Content_Range=said, **more) + body


def _slow(rng: random.Random, content: bytes, request: Request) -> Parts:
    text = b"".join(part for part in honest(content, request) if isinstance(part, bytes))
    for place in range(0, len(text), 7):
        yield text[place : place + 7]
        yield rng.choice((0.05, 0.1, 5.0))


def _noise(rng: random.Random, content: bytes, request: Request) -> Parts:
    yield rng.choice(
        (b"", b"\r\n\r\n", some_bytes(rng, 200), b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n")
    )


def _liar(rng: random.Random, content: bytes, request: Request) -> Parts:
    """Says another size than the file has, everywhere alike."""
    size = rng.choice((0, 7, len(content) - 1, len(content) + 100, 2**40))
    yield from honest(content[:size] + bytes(min(max(size - len(content), 0), 1000)), request)


RUDE: tuple[Callable[[random.Random, bytes, Request], Parts], ...] = (
    *(_another_range, _status, _compressed, _other_length, _slow, _noise, _liar),
)

# --- command lines --------------------------------------------------------------------------------------------------

PLACES = (
    *("{folder}/out", "{folder}/out.csv", "{folder}/missing/out", "{folder}", "/dev/null", "/dev/full", "", "/", "."),
    *(
        "{folder}/" + "n" * 300,
        "{folder}/" + "é" * 200,
        "{folder}/a\0b",
        "/proc/nothing/x",
        "{folder}/model.safetensors/x",
    ),
)
WORDS = (
    *("", "0", "1", "2", "-1", "1.5", "nan", "inf", str(2**31), str(2**63), str(2**64), "9" * 400, "auto", "float64"),
    *("cpu", "cuda:99", "bert", "llama", "xx", "a" * 300, "é", "\ud800", "0-1", "5-1", "0,0", "1-", "all", "stream"),
    *("cosine", "a,b", "keep", "orthogonal", "general", "interval:1,0", "scale:nan", "no_skip", "gfsa:1", "--", "-h"),
    *("{folder}", "{folder}/model.safetensors"),
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "inspect": ("--dtype", "--n-heads", "--n-kv", "--model-type", "--csv", "--full", "--heads", "--json", "--no-such"),
    "edit": (
        "--output",
        "--sharpen",
        "--smooth",
        "--scale-h",
        "--layers",
        "--stack",
        "--basis",
        "--n-heads",
        "--flip-norm-signs",
    ),
    "report": ("--output", "--save", "--max-samples", "--seed", "--device", "--data"),
    "compare": ("--output", "--seed", "--max-tokens"),
    "measure": ("--metrics", "--at", "--prefix-tokens", "--seed", "--device", "--csv", "--max-tokens", "--batch-size"),
    "predict": ("--what-if", "--dtype", "--seed", "--solve", "--csv"),
    "list": ("--format", "--no-such"),
    "train": ("--set", "--variant", "--fraction", "--seed", "--output"),
}
SWITCHES = {"--heads", "--print-config", "--sharpen", "--smooth", "--flip-norm-signs", "--no-such"}
FILES = {"--output", "--card", "--config"}


def option_case(rng: random.Random, text_model: str) -> Case:
    files, _, _ = _sound_files(rng)
    command = rng.choice((*OPTIONS, "inspect", "edit"))
    words: list[str] = [command]
    if command in ("measure", "predict"):
        words += [text_model, "--max-samples", "2"]
    elif command == "train":
        words += [rng.choice(("no-such-recipe", "{folder}/config.json", "{folder}", "x.toml", *WORDS[20:24]))]
    elif command != "list":
        odd = ("{folder}/config.json", *WORDS[18:24], *PLACES)
        sound = ("{folder}", "{folder}/model.safetensors")
        words += [rng.choice(odd if rng.random() < 0.25 else sound) for _ in range(2 if command == "compare" else 1)]
    for _ in range(rng.randrange(4)):
        option = rng.choice(OPTIONS[command])
        words.append(option)
        if option not in SWITCHES:
            words.append(rng.choice(PLACES if option in FILES else WORDS))
    if command == "edit" and "--output" not in words:
        words += ["--output", rng.choice(PLACES)]
    if command in ("report", "compare") and "--output" not in words:
        words += ["--output", "{folder}/out.html"]
    if rng.random() < 0.03:
        words = [rng.choice((*WORDS, *NAMES)) for _ in range(rng.randrange(4))]
    return Case(kind="options", note=" ".join(words)[:120], files=files, arguments=tuple(words))
