"""A smoke test for one extra, run by `release.py` with the interpreter of a clean environment: `python smoke.py hf`.

Uses nothing but what `pip install 'oversmooth[EXTRA]'` brings. Exits with an error where something does not work.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
CONFIG = {"model_type": "llama", "intermediate_size": 48, "vocab_size": 50, **SIZES}


def oversmooth(*words: object, code: int = 0) -> str:
    """What the installed command prints."""
    command = [str(Path(sys.executable).parent / "oversmooth"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def checkpoint(folder: Path) -> Path:
    """A tiny LLaMA as transformers would have saved it, written without transformers."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
    shapes |= {"self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32)}
    shapes |= {"mlp.down_proj": (32, 48), "input_layernorm": (32,), "post_attention_layernorm": (32,)}
    names = {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    names |= {"embed_tokens.weight": (50, 32), "norm.weight": (32,)}
    tensors = {name: torch.randn(shape) / 6 + (len(shape) == 1) for name, shape in names.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def base(folder: Path) -> None:
    """Without extras: weights are inspected, and what needs more says which extra to install."""
    for missing in ("transformers", "timm", "resvg_py", "lightning"):
        assert importlib.util.find_spec(missing) is None, f"{missing} is installed: this environment is not clean"
    said = oversmooth("measure", checkpoint(folder), code=2)
    assert "pip install 'oversmooth[hf]'" in said, said
    assert "oversmooth" in oversmooth("--help")


def hf(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaModel

    import oversmooth as osm

    model = LlamaModel(LlamaConfig(**CONFIG, bos_token_id=1, eos_token_id=2)).eval()
    found = osm.measure(model, [{"input_ids": torch.arange(20).reshape(2, 10)}], metrics="cosine")
    assert len(found.curve("cosine")) == 3
    assert osm.verify(checkpoint(folder)).passed


def timm(folder: Path) -> None:
    import oversmooth as osm

    library = importlib.import_module("timm")  # behind oversmooth, which lets it import a torchvision of another build
    assert len(osm.inspect(library.create_model("vit_tiny_patch16_224")).layers) == 12


def train(folder: Path) -> None:
    said = oversmooth("train", "digits", "--fraction", "0.05", "--set", "training.epochs=1", "--output", folder / "run")
    assert "run:" in said, said


def lightning(folder: Path) -> None:
    from oversmooth.lightning import SmoothingCallback

    assert SmoothingCallback(every=3).every == 3


def gguf(folder: Path) -> None:
    import numpy
    from gguf import GGUFWriter

    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    generator = numpy.random.default_rng(0)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", generator.normal(size=(32, 32)).astype(numpy.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", numpy.ones(32, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(json.loads(oversmooth("inspect", path, "--format", "json"))["layers"]) == 1


def report(folder: Path) -> None:
    oversmooth("report", checkpoint(folder), "-o", folder / "report.html", "--figures", folder / "figures")
    assert "</html>" in (folder / "report.html").read_text(encoding="utf-8")


def survey(folder: Path) -> None:
    import oversmooth as osm

    (folder / "models" / "one").mkdir(parents=True)
    checkpoint(folder / "models" / "one")
    for engine in ("serial", "ray"):
        oversmooth("survey", folder / "models", "--output", folder / engine, "--engine", engine)
        assert osm.read_survey(folder / engine, "model").status.tolist() == ["read"]
    oversmooth("report", folder / "serial", "-o", folder / "atlas.html")
    assert "</html>" in (folder / "atlas.html").read_text(encoding="utf-8")


CHECKS: dict[str, Callable[[Path], None]] = {
    "base": base,
    "hf": hf,
    "timm": timm,
    "train": train,
    "lightning": lightning,
    "gguf": gguf,
    "report": report,
    "survey": survey,
}
"""What each extra is for; the others (dev, docs, bench) are for those who work on the package, and only have to install."""


def main(extra: str) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        found = json.loads(oversmooth("inspect", checkpoint(folder / "model"), "--format", "json"))
        assert [layer["layer"] for layer in found["layers"]] == [0, 1], found
        CHECKS.get(extra, lambda folder: None)(folder)


if __name__ == "__main__":
    main(sys.argv[1])
