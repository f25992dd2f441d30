"""`oversmooth edit`: an ordinary checkpoint in, an ordinary checkpoint out, and nothing half done."""

import json
import shutil

import pytest
import torch

import oversmooth as osm
from oversmooth.control.edit import edit
from oversmooth.errors import CannotControl, HeadsUnknown, MissingValue, NotReadBack, NotWritable, UserCodeFailed
from oversmooth.models.open import open_source
from tests.command_line import oversmooth
from tests.contract.test_control import assert_inside, outputs, wide_t5
from tests.contract.tiny_models import tiny_model
from tests.real_models import minilm
from tests.unit.models.stores.test_gguf import CASES, Quantisation, exported

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def saved(case: str, folder, **options):
    """A tiny model as transformers saves it, with files beside the weights as models have them."""
    model, inputs = tiny_model(case)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"stale")
    return model, inputs


def tensors_of(folder) -> dict[str, torch.Tensor]:
    store = open_source(folder).store
    return {name: store.read(name) for name in store.names}


@pytest.fixture
def bert(tmp_path):
    (tmp_path / "bert").mkdir()
    return tmp_path / "bert", *saved("bert", tmp_path / "bert")


def test_chosen_layers_are_sharpened_and_everything_else_is_untouched(bert, tmp_path):
    folder, _, _ = bert
    done = oversmooth("edit", folder, "--sharpen", "--layers", "1-2", "--output", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "eigenvalues of H in [-1, 0], orthogonal basis, in 2 layers" in done.stdout
    assert "-1.00..0.00" in done.stdout
    assert "Written to" in done.stdout
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {
        f"encoder.layer.{layer}.attention.{part}"
        for layer in (1, 2)
        for part in ("self.value.weight", "output.dense.weight", "output.dense.bias")
    }
    for file in ("config.json", "tokenizer.json", "1_Pooling/config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    assert not (tmp_path / "out" / "onnx").exists()  # it would be the old model
    assert {path.name for path in tmp_path.iterdir()} == {"bert", "out"}
    inspected = osm.inspect(tmp_path / "out")
    assert inspected.layers[0].plain == osm.inspect(folder).layers[0].plain
    assert all(layer.plain.max_real < 1e-5 for layer in inspected.layers[1:])


@pytest.mark.parametrize("basis", ["orthogonal", "general"])
def test_the_edited_checkpoint_is_what_constrain_and_bake_give(bert, tmp_path, basis):
    from transformers import AutoModel

    folder, model, inputs = bert
    edit(folder, tmp_path / "out", interval=(0.0, 1.0), basis=basis)
    osm.smooth(model, basis=basis)
    osm.bake(model)
    loaded = AutoModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(outputs(loaded, inputs)[0], outputs(model, inputs)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", ["gpt2", "gpt_neox", "falcon-grouped", "phi3", "llama", "vit", "t5", "albert", "clip", "gemma2", "jamba"]
)
def test_every_way_to_store_weights_is_edited_in_place(case, tmp_path):
    (tmp_path / "in").mkdir()
    _, inputs = saved(case, tmp_path / "in")
    result = edit(tmp_path / "in", tmp_path / "out", interval=(-1.0, 0.0))
    inspected = osm.inspect(tmp_path / "out")
    assert_inside(inspected, -1.0, 0.0)
    for layer, found in zip(result.layers, inspected.layers, strict=True):
        assert (layer.stack, layer.layer) == (found.stack, found.layer)
        torch.testing.assert_close(layer.after.eigenvalues, found.plain.eigenvalues, rtol=0, atol=1e-6)
    checked = osm.verify(tmp_path / "out", inputs=inputs)  # loaded by transformers
    assert checked.passed


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["sharded", "bin", "sharded bin"])
def test_shards_pickles_and_half_precision(form, dtype, tmp_path):
    from transformers import AutoModel

    folder = tmp_path / "in"
    folder.mkdir()
    model, _ = saved("llama", folder, dtype=dtype, max_shard_size="20KB" if form == "sharded" else "1GB")
    if "bin" in form:
        (folder / "model.safetensors").unlink()
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        names = sorted(state)
        cut = len(names) // 2 if "sharded" in form else len(names)
        shards = [names[:cut], names[cut:]] if cut < len(names) else [names]
        files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)] if len(shards) > 1 else ["pytorch_model.bin"]
        for file, part in zip(files, shards, strict=True):
            torch.save({name: state[name] for name in part}, folder / file)
        if len(shards) > 1:
            where = {name: file for file, part in zip(files, shards, strict=True) for name in part}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    result = edit(folder, tmp_path / "out", interval=(-1.0, 0.0))
    assert not list((tmp_path / "out").glob("*.bin*"))
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == ("sharded" in form)
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: tensor.dtype for n, tensor in before.items()}
    assert max(layer.after.max_real for layer in result.layers) < TOLERANCE[dtype]
    _, facts = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not facts["missing_keys"]


def test_a_single_file_is_edited_with_the_config_beside_it(bert, tmp_path):
    folder, _, _ = bert
    oversmooth("edit", folder / "model.safetensors", "--smooth", "--output", tmp_path / "out")
    assert_inside(osm.inspect(tmp_path / "out"), 0.0, 1.0)


@pytest.mark.parametrize("case", ["bert", "llama", "gemma2", "olmo2"])
def test_norm_signs_are_flipped_also_where_one_is_added(case, tmp_path):
    (tmp_path / "in").mkdir()
    saved(case, tmp_path / "in")
    result = edit(tmp_path / "in", tmp_path / "out", flip_norm_signs=True, layers="0")
    role = "attn_branch_norm" if case == "olmo2" else "attn_norm"
    facts = []
    for folder in ("in", "out"):
        layers = osm.inspect(tmp_path / folder).layers
        facts.append([(norm.smallest, norm.largest) for layer in layers for norm in layer.norms if norm.role == role])
    assert facts[1][0] == pytest.approx((-facts[0][0][1], -facts[0][0][0]), abs=1e-5)
    assert facts[1][1:] == facts[0][1:]
    assert result.layers[0].norm_signs_changed == 32
    assert result.layers[0].moved == 0


def test_h_is_scaled_and_nothing_else(bert, tmp_path):
    folder, _, _ = bert
    done = oversmooth("edit", folder, "--scale-h", "-0.5", "--output", tmp_path / "out", "--format", "json")
    result = osm.Control.from_dict(json.loads(done.stdout))
    assert result.change == "H times -0.5"
    for layer in result.layers:
        before, after = (torch.tensor(s.eigenvalues, dtype=torch.float64) for s in (layer.before, layer.after))
        wanted = torch.complex(*(-0.5 * before).T).abs().sort().values
        torch.testing.assert_close(torch.complex(*after.T.contiguous()).abs().sort().values, wanted, rtol=0, atol=1e-5)
        assert layer.moved == pytest.approx(1.5, abs=1e-4)
        assert layer.constant_moved < 1e-5


def test_an_interval_and_flipped_norms_can_be_combined(bert, tmp_path):
    folder, _, _ = bert
    done = oversmooth("edit", folder, "--interval", "-0.5", "0.5", "--flip-norm-signs", "--output", tmp_path / "out")
    assert "[-0.5, 0.5]" in done.stdout
    assert "signs of the norm" in done.stdout
    assert_inside(osm.inspect(tmp_path / "out"), -0.5, 0.5)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "interval, scale_h or flip_norm_signs must be given"),
        (("--sharpen", "--smooth"), "Give only one of --sharpen, --smooth, --interval"),
        (("--sharpen", "--scale-h", "2"), "Give only one of interval, scale_h"),
        (("--interval", "1", "0"), "the smaller one first"),
        (("--interval", "-1", "inf"), "two finite numbers"),
        (("--scale-h", "nan"), "scale_h must be a finite number; got nan"),
        (("--sharpen", "--layers", "9"), "Unknown layer 9. Known: 0, 1, 2"),
        (("--sharpen", "--layers", "a-b"), "numbers and ranges such as 6-11,14"),
        (("--sharpen", "--stack", "decoder"), "Unknown stack 'decoder'"),
        (("--sharpen", "--basis", "diagonal"), "Known: orthogonal, general"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(bert, tmp_path, arguments, words):
    done = oversmooth("edit", bert[0], *arguments, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert words in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bert"}


def test_a_folder_that_holds_something_is_never_overwritten(bert, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    done = oversmooth("edit", bert[0], "--sharpen", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "not empty, and nothing is overwritten" in done.stderr
    (tmp_path / "out" / "mine.txt").unlink()
    assert (
        oversmooth("edit", bert[0], "--sharpen", "--output", tmp_path / "out").returncode == 0
    )  # an empty one is fine
    edit(bert[0], tmp_path / "a" / "b", interval=(-1.0, 0.0))  # folders above it are made
    assert (tmp_path / "a" / "b" / "config.json").is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match="file' is a file"):
        edit(bert[0], tmp_path / "file" / "below", interval=(-1.0, 0.0))
    with pytest.raises(NotWritable, match="it is a file"):
        edit(bert[0], tmp_path / "file", interval=(-1.0, 0.0))


@pytest.mark.parametrize(("error", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (RuntimeError, UserCodeFailed)])
def test_an_interrupted_edit_leaves_nothing_behind(bert, tmp_path, error, seen):
    def interrupt(done: int, total: int) -> None:
        raise error

    with pytest.raises(seen):
        edit(bert[0], tmp_path / "out", interval=(-1.0, 0.0), progress=interrupt)
    assert {path.name for path in tmp_path.iterdir()} == {"bert"}


def test_a_folder_inside_the_checkpoint_may_be_the_destination(bert):
    folder, _, _ = bert
    edit(folder, folder / "sharp", interval=(-1.0, 0.0))
    assert sorted(path.name for path in (folder / "sharp").iterdir()) == [
        "1_Pooling",
        "README.md",
        "config.json",
        "model.safetensors",
        "oversmooth.json",
        "tokenizer.json",
    ]


def test_numbers_that_are_not_finite_are_never_written(tmp_path):
    (tmp_path / "in").mkdir()
    model, _ = saved("llama", tmp_path / "in", dtype=torch.float16)
    with pytest.raises(CannotControl, match="layer 0: the new weights are too large for float16"):
        edit(tmp_path / "in", tmp_path / "out", scale_h=1e9)
    with torch.no_grad():
        model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(CannotControl, match="layer 2: it holds NaN or infinity"):
        edit(tmp_path / "in", tmp_path / "out", scale_h=0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_the_real_model_is_sharpened_and_loaded_by_transformers(tmp_path):
    from transformers import AutoModel, AutoTokenizer

    folder = minilm()
    done = oversmooth("edit", folder, "--sharpen", "--layers", "3-5", "--output", tmp_path / "sharp")
    assert (done.returncode, done.stderr) == (0, "")
    assert "in 3 layers" in done.stdout
    inspected = json.loads(oversmooth("inspect", tmp_path / "sharp", "--format", "json").stdout)
    for layer in inspected["layers"]:
        assert (layer["plain"]["max_real"] < 1e-5) == (layer["layer"] >= 3)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "sharp")(["a cat sat on the mat"], return_tensors="pt")
    model, facts = AutoModel.from_pretrained(tmp_path / "sharp", output_loading_info=True)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    with torch.no_grad():
        found = model.eval()(**tokens, output_hidden_states=True).hidden_states
        expected = AutoModel.from_pretrained(folder).eval()(**tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found[3], expected[3], rtol=0, atol=0)  # what runs before the edited layers is as it was
    assert not torch.allclose(found[4], expected[4], atol=1e-2)


def test_a_read_only_checkpoint_can_be_edited(bert, tmp_path):
    folder, _, _ = bert
    (folder / "model.safetensors").chmod(0o444)
    edit(folder, tmp_path / "out", interval=(-1.0, 0.0))
    assert_inside(osm.inspect(tmp_path / "out"), -1.0, 0.0)


def test_what_cannot_be_edited_says_why(bert, tmp_path):
    with pytest.raises(CannotControl, match="not a folder or file on this machine"):
        edit("nobody/nothing", tmp_path / "out", interval=(-1.0, 0.0))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CannotControl, match="packed blocks"):
        edit(tmp_path / "x.gguf", tmp_path / "out", interval=(-1.0, 0.0))
    wide_t5().save_pretrained(tmp_path / "wide")
    with pytest.raises(CannotControl, match="value directions"):
        edit(tmp_path / "wide", tmp_path / "out", interval=(-1.0, 0.0))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(bert[0] / "model.safetensors", bare)
    with pytest.raises(HeadsUnknown, match="each head owns a part"):
        edit(bare, tmp_path / "out", interval=(-1.0, 0.0), model_type="bert")
    edit(bare, tmp_path / "out", interval=(-1.0, 0.0), model_type="bert", n_heads=4)
    with pytest.raises(MissingValue, match="interval, scale_h or flip_norm_signs must be given"):
        edit(bert[0], tmp_path / "other")


def test_a_folder_that_holds_a_gguf_file_is_refused_as_the_file_is(tmp_path):
    case, kind = CASES["llama"], Quantisation.F32
    (tmp_path / "model").mkdir()
    exported(case, kind, tmp_path / "model" / "x.gguf")
    with pytest.raises(CannotControl, match="packed blocks"):
        edit(tmp_path / "model", tmp_path / "out", interval=(-1.0, 0.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


# --- what is written says so, and is read back ---------------------------------------------------------------------------


def test_an_edited_checkpoint_says_what_was_done_to_which_weights(bert, tmp_path):
    import hashlib

    from safetensors import safe_open

    folder, _, _ = bert
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# A model\n\n```\nnever closed")
    oversmooth("edit", folder, "--sharpen", "--layers", "1-2", "--output", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "oversmooth.json").read_text())
    assert (said["verb"], said["done"]) == ("edit", "eigenvalues of H in [-1, 0], orthogonal basis, in 2 layers")
    original = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert said["source"] == {"name": "bert", "sha256": {"model.safetensors": original}}
    assert said["versions"]["oversmooth"]
    assert [layer["layer"] for layer in said["layers"]] == [1, 2]
    assert said["read_back"]["largest_difference"] <= 1e-5
    readme = (tmp_path / "out" / "README.md").read_text()
    assert readme.startswith(
        "---\nlicense: mit\n---\n\n# A model\n\n```\nnever closed\n\n```\n\n## Changed with oversmooth\n"
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "oversmooth": said["done"]}


def test_names_of_folders_are_words_and_no_markdown(tmp_path):
    folder = tmp_path / "[x](http:evil) <b>"
    folder.mkdir()
    saved("bert", folder)
    edit(folder, tmp_path / "out", scale_h=0.5)
    assert r"from \[x\]\(http\:evil\) \<b\> by `edit`" in (tmp_path / "out" / "README.md").read_text()


def test_another_model_than_the_one_that_was_meant_is_not_written(bert, tmp_path, monkeypatch):
    from oversmooth.control.edit import EditableCopy

    monkeypatch.setattr(EditableCopy, "overwrite", swapped_layers(EditableCopy.overwrite))
    with pytest.raises(NotReadBack, match=r"(?s)gives outputs that differ.*from those of the changed model"):
        edit(bert[0], tmp_path / "out", scale_h=-3.0, layers="0")
    assert {path.name for path in tmp_path.iterdir()} == {"bert"}


def swapped_layers(overwrite):
    """Writes layer 0 as asked, and its bias somewhere else too: what is read of layer 0 is right."""

    def write(self, tensors):
        overwrite(self, tensors)
        overwrite(self, {name.replace("layer.0", "layer.2"): tensor for name, tensor in tensors.items()})

    return write


def test_the_other_process_never_imports_this_package(bert, tmp_path):
    import subprocess
    import sys

    from oversmooth.models import plain_load

    place = tmp_path / "request"
    place.mkdir()
    request = {
        "folder": str(bert[0]),
        "library": "transformers",
        "trusts_own_code": False,
        "threads": 1,
        "judging": None,
        "offload": None,
        "memory": 0,
    }
    (place / plain_load.REQUEST).write_text(json.dumps(request))
    torch.save({"inputs": [bert[2]], "questions": []}, place / plain_load.INPUTS)
    words = [sys.executable, "-I", plain_load.__file__]
    done = subprocess.run(words, input=json.dumps(str(place)) + "\n", capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
    found = torch.load(place / plain_load.ANSWER, weights_only=True)
    assert found["imported"] is False
    assert found["gaps"] == {"missing": [], "unexpected": [], "mismatched": []}
    with torch.no_grad():
        torch.testing.assert_close(found["outputs"][0][0], outputs(bert[1], bert[2])[0], rtol=1e-5, atol=1e-5)


def test_what_plain_libraries_cannot_build_says_what_was_not_checked(bert, tmp_path):
    folder, _, _ = bert
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoModel": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Own"], "auto_map": code}))
    (folder / "modeling_own.py").write_text("raise RuntimeError('this code was run')\n")
    result = edit(folder, tmp_path / "known", scale_h=0.5)  # a known type: its code is not needed, and not run
    assert (result.read_back.inputs, result.read_back.not_checked) == (2, "")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "model.safetensors", bare)
    result = edit(bare, tmp_path / "unknown", scale_h=0.5, model_type="bert", n_heads=4)
    assert (result.read_back.inputs, result.read_back.largest_difference) == (0, None)
    assert "no config.json" in result.read_back.not_checked
    assert "Not checked: there is no config.json" in result.read_back.words


def test_links_out_of_the_folder_and_to_nowhere_are_not_copied_and_named(bert, tmp_path):
    folder, _, _ = bert
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "far").mkdir()
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "nowhere.txt").symlink_to("missing.txt")
    (folder / "linked").symlink_to(tmp_path / "far")
    (folder / "again.json").symlink_to("tokenizer.json")
    done = oversmooth("edit", folder, "--scale-h", "0.5", "--output", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("linked", "notes.txt", "nowhere.txt"):
        assert name in done.stdout
        assert not (tmp_path / "out" / name).exists()
    assert (tmp_path / "out" / "again.json").read_text() == "{}"
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CannotControl, match=r"config\.json is a link that leads out"):
        edit(folder, tmp_path / "other", scale_h=0.5)
    assert not (tmp_path / "other").exists()


def test_blobs_of_the_hub_cache_are_copied(bert, tmp_path):
    folder, _, _ = bert
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "model.safetensors", "tokenizer.json")):
        shutil.copy(folder / name, blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    result = edit(snapshot, tmp_path / "out", scale_h=0.5)
    assert result.left_out == ()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("verb", ["edit", "prune"])
def test_a_model_above_memory_is_read_back_block_by_block_and_says_so(verb, tmp_path, monkeypatch):
    from oversmooth.control import readback

    (tmp_path / "in").mkdir()
    saved("llama", tmp_path / "in", dtype=torch.bfloat16)
    monkeypatch.setattr(readback, "must_offload", lambda source, dtype: True)
    monkeypatch.setattr(readback, "free_memory", lambda: 20_000)
    if verb == "edit":
        result = edit(tmp_path / "in", tmp_path / "out", scale_h=-2.0)
    else:
        few = [{"input_ids": torch.arange(3, 15)[None] + shift} for shift in range(4)]
        result = osm.prune(tmp_path / "in", tmp_path / "out", few, blocks="1")
    assert result.read_back.block_by_block
    assert result.read_back.largest_difference <= 1e-5
    assert "read block by block" in result.read_back.words
