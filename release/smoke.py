"""A smoke test for one extra, run by `release.py` with the interpreter of a clean environment: `python smoke.py hf`.

Uses nothing but what `pip install 'oversmooth[EXTRA]'` brings (`hf+report`: both, as README installs it), and README, whose
first blocks are run. `python smoke.py hf shipped` also requires that the default model is the one that comes with the
package, `minilm` that it is the hub's. Exits with an error where something does not work.
"""

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
CONFIG = {"model_type": "llama", "intermediate_size": 48, "vocab_size": 50, **SIZES}


README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    """README's blocks of a kind, in order."""
    return [found["body"] for found in BLOCK.finditer(README.read_text(encoding="utf-8")) if found["kind"] == kind]


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


def default_model(extra: str, expected: str) -> None:
    """The verb that needs no extra, without a target; the shipped model is never taken without a word."""
    said = " ".join(oversmooth("inspect").split())
    is_shipped = "This is the example model of this package" in said
    if expected == "shipped" or importlib.util.find_spec("huggingface_hub") is None:
        assert is_shipped, said
    elif expected == "minilm":
        assert "bert, 6 layers" in said, said
        assert not is_shipped, said


def readme_python(code: str, extras: list[str]) -> None:
    """A block of README, statement by statement; what needs another extra has to say which."""
    from oversmooth.errors import MissingDependency

    names: dict[str, object] = {}
    for statement in ast.parse(code).body:
        try:
            exec(compile(ast.Module([statement], []), str(README), "exec"), names)
        except MissingDependency as error:
            if error.extra in extras:
                raise
            print(f"{ast.unparse(statement)}: {error}")


def readme(folder: Path) -> None:
    """All first blocks as README has them: Quick start in Python and in the shell, then Change it."""
    quick_start, change_it, *_ = blocks("python")
    os.chdir(folder)
    readme_python(quick_start, ["hf", "report"])
    assert "</html>" in Path("report.html").read_text(encoding="utf-8")
    readme_python("import oversmooth as osm\n" + change_it, ["hf", "report"])
    assert Path("sharp", "config.json").is_file()
    text_model(Path("path/to/model"))
    Path("before").symlink_to("path/to/model")
    text_model(Path("after"), seed=1)
    Path("texts.txt").write_text("Ice is lighter than water.\n\nWater is older than the sun.\n" * 4)
    verbs = next(block for block in blocks("bash") if block.startswith("oversmooth "))
    for line in verbs.splitlines():
        name, *words = line.partition("#")[0].split()
        assert name == "oversmooth", line
        print(line, oversmooth(*words), sep="\n")


def text_model(folder: Path, seed: int = 0) -> None:
    """A tiny BERT with a tokenizer, for the lines of README that name files."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    words = ["[UNK]", "[PAD]", "Ice", "is", "lighter", "than", "water", "Water", "older", "the", "sun", "."]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    BertModel(BertConfig(**sizes, vocab_size=len(words))).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)


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
    "hf+report": readme,
    "hf": hf,
    "timm": timm,
    "train": train,
    "lightning": lightning,
    "gguf": gguf,
    "report": report,
    "survey": survey,
}
"""What each extra is for; the others (dev, docs, bench) are for those who work on the package, and only have to install."""


def main(extra: str, expected: str = "any") -> None:
    default_model(extra, expected)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        found = json.loads(oversmooth("inspect", checkpoint(folder / "model"), "--format", "json"))
        assert [layer["layer"] for layer in found["layers"]] == [0, 1], found
        CHECKS.get(extra, lambda folder: None)(folder)
        if extra != "hf+report":  # as far as this extra goes; there it has just run
            os.chdir(folder)
            readme_python(blocks("python")[0], [extra])


if __name__ == "__main__":
    main(*sys.argv[1:])
