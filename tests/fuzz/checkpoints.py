"""Checkpoints: safetensors, pickles of torch and GGUF files, sound or damaged in ways that each format knows."""

import io
import json
import pickle
import random
import struct
import warnings
import zipfile
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import save
from torch import Tensor

from tests.fuzz.cases import Case
from tests.fuzz.draws import HOSTILE, NAMES, damaged, json_text, some_bytes
from tests.fuzz.tiny_checkpoints import FAMILIES, GGUF_FAMILIES, Tiny, tiny_checkpoint

# --- safetensors ----------------------------------------------------------------------------------------------------


def safetensors_case(rng: random.Random) -> Case:
    tiny = tiny_checkpoint(rng, rng.choice(FAMILIES))
    content, note = _damaged_safetensors(rng, tiny)
    files = {"model.safetensors": content, "config.json": json.dumps(tiny.config).encode()}
    if rng.random() < 0.15:
        index = {"weight_map": dict.fromkeys(tiny.tensors, "one.safetensors")}
        if note and rng.random() < 0.5:
            index["weight_map"][rng.choice([*tiny.tensors, *NAMES])] = rng.choice([*HOSTILE, *NAMES])
        files = {"one.safetensors": content, "config.json": files["config.json"]}
        files["model.safetensors.index.json"] = json_text(rng, index) if note else json.dumps(index).encode()
    reference = next(name for name in files if name.endswith(".safetensors"))
    arguments = ("inspect", "{folder}", "--format", "json")
    return Case(kind="safetensors", note=note, files=files, arguments=arguments, is_sound=not note, reference=reference)


def _damaged_safetensors(rng: random.Random, tiny: Tiny) -> tuple[bytes, str]:
    tensors = {name: tensor.contiguous() for name, tensor in tiny.tensors.items()}
    if rng.random() < 0.2:
        tensors[rng.choice(NAMES[3:])] = torch.ones(rng.choice(((), (0,), (2, 3))))
        note = "a tensor more"
    else:
        note = ""
    try:
        content = save(tensors)
    except Exception:  # a name that the format's own writer refuses
        content, note = save(tiny.tensors), ""
    length = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    match rng.randrange(12):
        case 0:
            return content, note
        case 1:
            return damaged(rng, content, slice(0, 8)), "length damaged"
        case 2 | 3:
            return damaged(rng, content, slice(8, 8 + length)), "header damaged"
        case 4:
            return damaged(rng, content), "damaged"
        case 5:
            return content + some_bytes(rng, rng.randrange(1, 40)), "bytes more"
        case 6:
            name, entry = json.dumps(rng.choice(list(header))), json.dumps(rng.choice(list(header.values())))
            return _framed(f"{json.dumps(header)[:-1]}, {name}: {entry}}}".encode(), body), "twice"
    for _ in range(rng.choice((1, 1, 2))):
        _change_entry(rng, header, len(body))
    return _framed(json.dumps(header).encode(), body), "entries changed"


def _framed(text: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + body


def _change_entry(rng: random.Random, header: dict[str, Any], size: int) -> None:
    name = rng.choice(list(header))
    entry = header[name]
    if not isinstance(entry, dict):
        header[name] = rng.choice(HOSTILE)
        return
    offsets = entry.get("data_offsets")
    start, stop = offsets if isinstance(offsets, list) and len(offsets) == 2 else (0, 0)  # it may be hostile already
    match rng.randrange(8):
        case 0:
            entry["data_offsets"] = [start + rng.choice((-4, 4, 8)), stop]
        case 1:
            shift = rng.choice((-size, -8, -4, 4, 8, size, 2**40, 2**63))
            entry["data_offsets"] = [start + shift, stop + shift]
        case 2:
            other = header[rng.choice(list(header))]
            entry["data_offsets"] = other.get("data_offsets", [0, 0]) if isinstance(other, dict) else []
        case 3:
            shape = entry.get("shape")
            turned = shape[::-1] if isinstance(shape, list) else []
            entry["shape"] = rng.choice(([], [0], [2**40, 2**40], [1], [8, 8], turned, *HOSTILE))
        case 4:
            entry["dtype"] = rng.choice(
                ("F32", "F16", "BF16", "F64", "I8", "U8", "F4", "F8_E4M3", "C64", "F3", *HOSTILE)
            )
        case 5:
            entry[rng.choice(("dtype", "shape", "data_offsets", "more"))] = rng.choice(HOSTILE)
        case 6:
            header[rng.choice(NAMES)] = header.pop(name)
        case _:
            header[name] = rng.choice(HOSTILE)


# --- pickles --------------------------------------------------------------------------------------------------------

OPCODES = [bytes([code]) for code in range(256)]


def _odd_tensors() -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "expanded": torch.ones(1).expand(2**20, 2**20),
            "repeated": torch.arange(4.0).expand(8, 4),
            "meta": torch.empty(8, 8, device="meta"),
            "sparse": torch.eye(8).to_sparse(),
            "csr": torch.eye(8).to_sparse_csr(),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "quantised": torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8),
            "strided": torch.randn(8, 16)[:, ::2],
            "complex": torch.ones(8, 8, dtype=torch.complex64),
            "whole": torch.ones(8, 8, dtype=torch.int64),
            "none": torch.empty(0, 8),
        }


def pickle_case(rng: random.Random) -> Case:
    tiny = tiny_checkpoint(rng, rng.choice(FAMILIES))
    state: dict[Any, Any] = dict(tiny.tensors)
    note = ""
    if rng.random() < 0.3:
        odd = rng.choice(list(_odd_tensors().items()))
        state[rng.choice(list(state))] = odd[1]
        note = f"{odd[0]} tensor"
    if rng.random() < 0.2:
        beside = {rng.choice((1, "epoch", None)): rng.choice((1, "x", [1]))}
        state = {rng.choice(("state_dict", "model", "else")): state, **beside}
        note = note or "wrapped"
    buffer = io.BytesIO()
    is_zip = rng.random() < 0.75
    torch.save(state, buffer, _use_new_zipfile_serialization=is_zip)
    content = buffer.getvalue()
    match rng.randrange(8):
        case 0 | 1:
            pass
        case 2:
            content, note = damaged(rng, content), "damaged"
        case 3 | 4 if is_zip:
            content, note = _rezipped(rng, content), "archive changed"
        case 5:
            content, note = _raw_pickle(rng), "a raw pickle"
        case _:
            place = content.find(b"PROTO") if not is_zip else content.find(b"data.pkl")
            content, note = damaged(rng, content, slice(max(place, 0), max(place, 0) + 400)), "pickle damaged"
    files = {"pytorch_model.bin": content, "config.json": json.dumps(tiny.config).encode()}
    arguments = ("inspect", "{folder}", "--format", "json")
    return Case(
        kind="pickle", note=note, files=files, arguments=arguments, is_sound=not note, reference="pytorch_model.bin"
    )


def _rezipped(rng: random.Random, content: bytes) -> bytes:
    """The archive written again: compressed, or with a record of another length, another name or other bytes."""
    action = rng.randrange(6)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        entries = old.infolist()
        chosen = rng.choice(entries).filename
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if action == 0 else zipfile.ZIP_STORED) as new:
            for entry in entries:
                data, name = old.read(entry), entry.filename
                if name == chosen and action == 1:
                    data = data[: rng.randrange(len(data) + 1)]
                if name == chosen and action == 2:
                    data += some_bytes(rng, rng.randrange(1, 100))
                if name == chosen and action == 3:
                    name = name.replace("data", "dada")
                if name.endswith("data.pkl") and action == 4:
                    data = damaged(rng, data)
                if name.endswith("data.pkl") and action == 5:
                    data = _raw_pickle(rng)
                new.writestr(name, data)
    return out.getvalue()


def _raw_pickle(rng: random.Random) -> bytes:
    """Bytes that begin as a pickle: random opcodes, code that must not run, or counts that nothing could hold."""
    huge = b"\x8a\x06" + rng.choice((2**31, 2**40)).to_bytes(6, "little")
    match rng.randrange(5):
        case 0:
            return b"\x80\x02" + b"".join(rng.choice(OPCODES) for _ in range(rng.randrange(1, 60))) + b"."
        case 1:
            return b"\x80\x02cbuiltins\nbytearray\n" + huge + b"\x85R."
        case 2:
            return b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
        case 3:
            return b"\x80\x02" + b"]" * rng.randrange(1, 5000) + b"."
        case _:
            return pickle.dumps(rng.choice((None, 3, [1], {"a": [1]}, {1: 2}, "x")), protocol=rng.choice((0, 2, 4)))


# --- GGUF -----------------------------------------------------------------------------------------------------------

KINDS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F32", "F16", "BF16")]


def gguf_case(rng: random.Random) -> Case:
    arch = rng.choice(GGUF_FAMILIES)
    tiny = tiny_checkpoint(rng, arch)
    note = "" if rng.random() < 0.12 else "header changed"
    content = _gguf_bytes(rng, arch.name, tiny, is_sound=not note)
    if note and rng.random() < 0.4:
        content, note = damaged(rng, content, slice(0, rng.choice((24, 400, len(content))))), "damaged"
    arguments = ("inspect", "{folder}/x.gguf", "--format", "json")
    return Case(
        kind="gguf", note=note, files={"x.gguf": content}, arguments=arguments, is_sound=not note, reference="x.gguf"
    )


def _text(word: str | bytes) -> bytes:
    raw = word if isinstance(word, bytes) else word.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _gguf_bytes(rng: random.Random, architecture: str, tiny: Tiny, *, is_sound: bool) -> bytes:
    def lie(value: int, *lies: int) -> int:
        return value if is_sound or rng.random() < 0.93 else rng.choice((0, 1, value + 1, 2**31, 2**40, 2**63, *lies))

    config = tiny.config
    values = [
        ("general.architecture", 8, _text(architecture)),
        (f"{architecture}.block_count", 4, struct.pack("<I", lie(config["num_hidden_layers"]) % 2**32)),
        (f"{architecture}.embedding_length", 4, struct.pack("<I", lie(config["hidden_size"]) % 2**32)),
        (f"{architecture}.attention.head_count", 4, struct.pack("<I", lie(config["num_attention_heads"]) % 2**32)),
        (f"{architecture}.attention.head_count_kv", 4, struct.pack("<I", lie(config["num_key_value_heads"]) % 2**32)),
        ("words", 9, struct.pack("<IQ", 8, lie(2)) + _text("a") + _text("b")),
        ("numbers", 9, struct.pack("<IQ", lie(6, 8, 9, 77) % 2**32, lie(2)) + struct.pack("<ff", 1.0, 2.0)),
    ]
    if tiny.arch.residual_gain:
        scale = 0.5 if is_sound else rng.choice((0.5, float("nan"), float("inf")))
        values.append((f"{architecture}.residual_scale", 6, struct.pack("<f", scale)))
    if not is_sound and rng.random() < 0.3:
        values.append(rng.choice((rng.choice(values), (rng.choice(NAMES), rng.randrange(15), some_bytes(rng, 8)))))
    infos, data, offset = b"", b"", 0
    for name, tensor in tiny.tensors.items():
        kind = rng.choice(KINDS) if tensor.ndim == 2 else KINDS[0]
        raw = quantize(np.ascontiguousarray(tensor.float().numpy()), kind).tobytes()
        shape = [lie(size, 2**32) for size in reversed(tensor.shape)]
        name = name if is_sound or rng.random() < 0.97 else rng.choice(NAMES)
        place = lie(offset, offset - 32, offset + 32, offset + 1) % 2**64
        number = lie(int(kind), 8, 12, 77) % 2**32
        infos += _text(name) + struct.pack(f"<I{len(shape)}QIQ", lie(len(shape), 5) % 2**32, *shape, number, place)
        data += raw + bytes(-len(raw) % 32)
        offset = len(data)
    head = struct.pack("<IQQ", lie(3, 2, 4) % 2**32, lie(len(tiny.tensors)), lie(len(values)))
    content = (
        b"GGUF" + head + b"".join(_text(key) + struct.pack("<I", kind) + value for key, kind, value in values) + infos
    )
    return content + bytes(-len(content) % 32) + data
