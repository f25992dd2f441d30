"""Draws that every generator uses: values that no field expects, and bytes with a few of them changed."""

import json
import math
import random
from typing import Any

NESTED: Any = 1
for _ in range(50):
    NESTED = {"model_type": "bert", "text_config": NESTED}

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1.5, -0.0, 1e308, math.nan, math.inf, -math.inf),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(
        "",
        " ",
        "x",
        "0",
        "NaN",
        "\0",
        "\ud800",
        "\U0001f600",
        "é" * 300,
        "a" * 300,
        "../../etc/passwd",
        "%s%n{0}",
        "<b>&",
    ),
    *([], [0], [1, 2, 3], [[]], {}, {"a": 1}, {"model_type": "bert"}, NESTED),
)
NAMES = (
    *("", ".", "w", "a" * 300, "é" * 300, "\U0001f600", "w\0w", "layers.9999999999.x", "layers.00.x", "..", "a/b"),
    *("__metadata__", "model.layers.0", "blk.0.attn_v.weight", "x.qweight", "parametrizations.weight.original0"),
)


def some_bytes(rng: random.Random, count: int) -> bytes:
    return rng.randbytes(count)


def damaged(rng: random.Random, content: bytes, where: slice = slice(None)) -> bytes:
    """The bytes with a few of those in a range flipped, removed, repeated, or cut off."""
    data = bytearray(content)
    low, high, _ = where.indices(len(data))
    if high <= low:
        return bytes(data)
    match rng.randrange(6):
        case 0 | 1:
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
        case 2:
            place = rng.randrange(low, high)
            data[place : place + rng.choice((1, 4, 8))] = some_bytes(rng, rng.choice((1, 4, 8)))
        case 3:
            del data[rng.randrange(low, high) :]
        case 4:
            place = rng.randrange(low, high)
            del data[place : place + rng.randrange(1, 9)]
        case _:
            data[rng.randrange(low, high) : 0] = some_bytes(rng, rng.randrange(1, 9))
    return bytes(data)


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside nested lists and objects."""
    found = [here] if here else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += paths_of(child, (*here, key))
    return found


def changed(rng: random.Random, value: Any) -> tuple[Any, tuple[Any, ...]]:
    """A copy of nested JSON with one place replaced, removed or renamed; and which place that was."""
    copy = json.loads(json.dumps(value))
    places = paths_of(copy)
    if not places:
        return rng.choice(HOSTILE), ()
    place = rng.choice(places)
    holder = copy
    for key in place[:-1]:
        holder = holder[key]
    action = rng.randrange(8)
    if action == 0:
        del holder[place[-1]]
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice(NAMES)] = holder.pop(place[-1])
    else:
        holder[place[-1]] = rng.choice(HOSTILE)
    return copy, place


def json_text(rng: random.Random, value: Any) -> bytes:
    """JSON, sometimes damaged as text."""
    text = json.dumps(value).encode()
    match rng.randrange(12):
        case 0:
            return damaged(rng, text)
        case 1:
            return rng.choice(
                (b"", b"null", b"[", b"[" * 100_000, b'{"a":' * 5000, b"\xff\xfe", b"NaN", b'"', b"9" * 5000)
            )
    return text
