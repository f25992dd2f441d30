"""Things of several parts: packed weights, recipes, surveys, adapters beside their base, pruned models read back."""

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from tests.fuzz.cases import Case
from tests.fuzz.draws import HOSTILE, changed, damaged, json_text
from tests.unit.models.stores import checkpoints as made

INSPECT = ("inspect", "{folder}", "--format", "json")


def _files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- packed weights -------------------------------------------------------------------------------------------------

PACKINGS = {
    "gptq": lambda: made.gptq(4, 16, act_order=True),
    "awq": lambda: made.awq(16),
    "float8": lambda: made.float8([16, 16]),
    "bnb4": lambda: made.bitsandbytes_4bit("nf4", double=True),
    "bnb8": made.bitsandbytes_8bit,
    "compressed": lambda: made.compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
}


@functools.cache
def _packed(kind: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder), PACKINGS[kind]())
        return _files_of(Path(folder))


def quantised_case(rng: random.Random) -> Case:
    kind = rng.choice(list(PACKINGS))
    files, note = dict(_packed(kind)), ""
    match rng.randrange(4):
        case 0:
            config = json.loads(files["config.json"])
            config["quantization_config"], place = changed(rng, config["quantization_config"])
            files["config.json"], note = json_text(rng, config), f"{kind}: {place} changed"
        case 1 | 2:
            tensors = load(files["model.safetensors"])
            name = rng.choice([name for name in tensors if "self_attn" in name])
            note = f"{kind}: {name} {_misshape(rng, tensors, name)}"
            files["model.safetensors"] = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return Case(kind="quantised", note=note, files=files, arguments=INSPECT, is_sound=not note)


def _misshape(rng: random.Random, tensors: dict[str, Tensor], name: str) -> str:
    found = tensors.pop(name)
    action = rng.randrange(7)
    if action < 6 and found.ndim:
        tensors[name] = (
            found[:-1], found[:0], found[None], found.flatten()[0], found.float(), found.float() > 0
        )[action].clone()  # fmt: skip
    return f"action {action}"


# --- recipes --------------------------------------------------------------------------------------------------------


def recipe_case(rng: random.Random) -> Case:
    """A damaged recipe, or a setting of one, up to the point where data would be read."""
    from oversmooth.recipes.recipe import shipped_recipes

    text = shipped_recipes()[rng.choice(("digits", "images", "mini-bert"))].read_bytes()
    odd = rng.choice(("[" * 5000, "{a=" * 3000, "9" * 5000, "nan", "-1", "1e999", "[[1]]", "true", "'x'", str(2**64)))
    lines = text.splitlines()
    numbered = [place for place, line in enumerate(lines) if b"=" in line.partition(b"#")[0]]
    words = ["train", "{folder}/x.toml", "--output", "{folder}/run", "--data", "{folder}/nothing"]
    match rng.randrange(3):
        case 0:
            text = damaged(rng, text)
        case 1:
            place = rng.choice(numbered)
            lines[place] = lines[place].partition(b"=")[0] + b"= " + odd.encode()
            text = b"\n".join(lines)
        case _:
            key = rng.choice(("model.depth", "model.width", "training.batch", "model", "a.b.c", "." * 300, "data.mean"))
            words += ["--set", f"{key}={odd}"]
    return Case(kind="recipe", note=" ".join(words[6:])[:60], files={"x.toml": text}, arguments=tuple(words))


# --- surveys --------------------------------------------------------------------------------------------------------


@functools.cache
def _surveyed() -> dict[str, bytes]:
    """A survey of two parts, with the list of its targets, which are not there: nothing is read again by chance."""
    from oversmooth.surveys.rows import NAMES
    from oversmooth.surveys.table import SurveyTable
    from oversmooth.surveys.worker import Options

    folder = Path(tempfile.mkdtemp())
    try:
        table = SurveyTable.at(folder / "table", Options())
        for target in ("no/one.safetensors", "no/two.safetensors"):
            row: dict[str, Any] = dict.fromkeys(NAMES) | {"target": target, "status": "refused", "error": "x"}
            table.add([("model", row), ("layer", row)])
        (folder / "list.txt").write_text("no/one.safetensors\nno/two.safetensors")
        return _files_of(folder)
    finally:
        shutil.rmtree(folder)


def survey_case(rng: random.Random) -> Case:
    files, note = dict(_surveyed()), ""
    if rng.random() < 0.9:
        name = rng.choice([name for name in files if name.startswith("table/")])
        match rng.randrange(4):
            case 0:
                del files[name]
            case 1 if name.endswith(".json"):
                files[name] = json_text(rng, changed(rng, json.loads(files[name]))[0])
            case 2:
                files[name.replace("part-0000", "part-0100")] = files[name]
            case _:
                files[name] = damaged(rng, files[name])
        note = f"{name} changed"
    resume = ("survey", "{folder}/list.txt", "--output", "{folder}/table", "--format", "json")
    words = rng.choice((resume, resume, ("report", "{folder}/table", "-o", "{folder}/atlas.html")))
    return Case(kind="survey", note=note, files=files, arguments=words, is_sound=not note, table="table")


# --- adapters -------------------------------------------------------------------------------------------------------


@functools.cache
def _adapted() -> dict[str, bytes]:
    from peft import LoraConfig, get_peft_model

    with tempfile.TemporaryDirectory() as folder:
        model = made.tiny_llama()
        model.save_pretrained(Path(folder) / "base")
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["v_proj", "o_proj"], init_lora_weights=False))
        model.save_pretrained(str(Path(folder) / "adapter"))
        return _files_of(Path(folder))


def adapter_case(rng: random.Random) -> Case:
    files, note = dict(_adapted()), ""
    config, tensors = json.loads(files["adapter/adapter_config.json"]), load(files["adapter/adapter_model.safetensors"])
    name = rng.choice(list(tensors))
    match rng.randrange(6):
        case 0:
            config, place = changed(rng, config)
            note = f"{place} changed"
        case 1:
            key = rng.choice(("r", "lora_alpha", "use_dora", "use_rslora", "target_modules", "layers_to_transform"))
            config[key], note = rng.choice((0, 2, True, ["v_proj"], [5], *HOSTILE[:8])), f"{key} changed"
        case 2:
            del tensors[name]
            note = f"{name} gone"
        case 3:
            tensors[name.replace("layers.0", "layers.5").replace("v_proj", "q_proj")] = tensors.pop(name)
            note = f"{name} renamed"
        case 4:
            tensors[name], note = tensors[name][:-1].contiguous(), f"{name} cut"
    files["adapter/adapter_config.json"] = json.dumps(config).encode()
    files["adapter/adapter_model.safetensors"] = save(tensors)
    words = ("inspect", "{folder}/adapter", "--base", "{folder}/base", "--format", "json")
    return Case(kind="adapter", note=note, files=files, arguments=words, is_sound=not note, merged=True)


# --- pruned models --------------------------------------------------------------------------------------------------


@functools.cache
def _prunable(case: str) -> dict[str, bytes]:
    from tests.contract.tiny_models import tiny_model

    with tempfile.TemporaryDirectory() as folder:
        tiny_model(case)[0].save_pretrained(Path(folder) / "model")
        lines = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [2, 4, 6, 8, 1, 3], [9, 7, 5, 3, 1, 2]]
        (Path(folder) / "ids.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return _files_of(Path(folder))


SWITCHES = (
    *("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "layer_types", "max_window_layers", "use_cache"),
    *("mlp_only_layers", "num_hidden_layers", "n_layer", "tie_word_embeddings"),
)


def prune_case(rng: random.Random) -> Case:
    files = dict(_prunable(rng.choice(("gpt2", "bert", "llama"))))
    note = ""
    if rng.random() < 0.7:
        key = rng.choice(SWITCHES)
        config = json.loads(files["model/config.json"])
        config[key] = rng.choice((True, False, 0, 1, [0], [1], [], "x", None))
        files["model/config.json"], note = json.dumps(config).encode(), f"{key}={config[key]}"
    words = ("prune", "{folder}/model", "--blocks", rng.choice(("0", "1")), "--output", "{folder}/pruned")
    words += ("--ids", "{folder}/ids.jsonl")
    return Case(kind="prune", note=note, files=files, arguments=words, pruned="pruned", is_sound=not note)


def fails_to_load(folder: Path) -> str:
    """What transformers says of a folder that we wrote; empty where it loads it, whole."""
    from transformers import AutoModel

    try:
        model, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # whatever it raises is what is looked for
        return f"written, and transformers refuses it: {type(error).__name__}: {str(error)[:200]}"
    missing = sorted(report["missing_keys"])
    del model
    return f"written, and transformers fills {missing[0]} with random numbers" if missing else ""


def peft_merged(folder: Path) -> dict[str, Tensor]:
    """The tensors of base and adapter as the peft library merges them."""
    from peft import PeftModel
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder / "base", dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(model, str(folder / "adapter")).merge_and_unload()
    return {name: tensor.detach() for name, tensor in merged.state_dict().items()}
