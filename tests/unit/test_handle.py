"""A model opened once: the same answers, one load, nothing stale, and the user's module as it was."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.analysis import output_drift
from oversmooth.errors import Conflict, NotSupported
from oversmooth.handle import ModelHandle
from oversmooth.models import live
from oversmooth.models import open as opening
from oversmooth.models.open import LoadOptions, open_model
from tests.contract.tiny_models import tiny_model

FUNCTIONS = {
    "inspect": lambda target, data: osm.inspect(target),
    "verify": lambda target, data: osm.verify(target),
    "measure": osm.measure,
    "predict": lambda target, data: osm.predict(target, data, solve=1),
    "analyze": lambda target, data: osm.analyze(target, data, solve=1),
    "gate": lambda target, data: osm.gate(target, data, rules={"max_cosine": 0.5}),
    "task_loss": osm.task_loss,
    "ablate": lambda target, data: osm.ablate(target, data, parts=("attention",)),
    "edit_curve": lambda target, data: osm.edit_curve(target, data, interval=(-1.0, 0.0), strengths=(1.0,)),
}
"""Functions of a target and batches."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A causal model on disk with its batches."""
    folder = tmp_path_factory.mktemp("gpt2")
    model, batch = with_head()
    model.save_pretrained(folder)
    return folder, [batch]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_opens_its_target_once(name, checkpoint, monkeypatch):
    opened, open_path = [], opening._open_path
    monkeypatch.setattr(opening, "_open_path", lambda target, *more: opened.append(target) or open_path(target, *more))
    folder, batches = checkpoint
    FUNCTIONS[name](str(folder), batches)
    assert opened == [str(folder)]


def with_head():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16)).eval()
    return model, {"input_ids": torch.randint(0, 40, (3, 8))}


@pytest.fixture
def loads(monkeypatch):
    """The tasks of the heads that were loaded so far; `None` for a model without one."""
    found = []
    plain, headed = live.load_model, live.load_with_head

    def counted(source, verb, **options):
        found.append(None)
        return plain(source, verb, **options)

    def counted_with_head(source, verb, *, task, **options):
        found.append(task)
        return headed(source, verb, task=task, **options)

    monkeypatch.setattr(live, "load_model", counted)
    monkeypatch.setattr(live, "load_with_head", counted_with_head)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_the_same_of_a_handle_as_of_its_target(name, checkpoint):
    folder, batches = checkpoint
    alone = FUNCTIONS[name](folder, batches).to_dict()
    model = osm.open(folder)
    assert FUNCTIONS[name](model, batches).to_dict() == alone
    assert FUNCTIONS[name](model, batches).to_dict() == alone  # from what the first call left there


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_the_same_of_a_handle_on_a_live_module(name):
    model, batch = with_head()
    handle = osm.open(model)
    assert FUNCTIONS[name](handle, [batch]).to_dict() == FUNCTIONS[name](model, [batch]).to_dict()


def test_functions_of_a_target_are_methods(checkpoint):
    folder, batches = checkpoint
    model = osm.open(folder)
    assert model.measure(batches, metrics="cosine") == osm.measure(folder, batches, metrics="cosine")
    assert {name for name in FUNCTIONS if not hasattr(ModelHandle, name)} == set()
    assert ModelHandle.measure_lengths is osm.measure_lengths
    assert ModelHandle.discover is osm.discover


def test_analyze_loads_a_model_once(checkpoint, loads):
    osm.analyze(checkpoint[0], checkpoint[1], solve=1)
    assert loads == [None]


def test_several_questions_to_a_handle_load_one_module_per_head(checkpoint, loads):
    folder, batches = checkpoint
    with osm.open(folder) as model:
        assert loads == []  # nothing is loaded before it is run
        model.inspect()
        assert loads == []
        model.measure(batches)
        model.predict(batches, solve=1)
        model.verify()
        assert loads == [None]
        model.task_loss(batches)
        model.ablate(batches, parts=("attention",), theory=False)
        assert loads == [None, "causal-lm"]


def test_the_tokenizer_is_loaded_once(monkeypatch):
    from oversmooth.data import load

    found, opened = load.find_tokenizer, []
    monkeypatch.setattr(load, "find_tokenizer", lambda *args, **given: opened.append(1) or found(*args, **given))
    with osm.open(osm.example_model()) as model:
        first, second = (model.measure(max_samples=2, metrics="cosine") for _ in range(2))
    assert first == second == osm.measure(osm.example_model(), max_samples=2, metrics="cosine")
    assert len(opened) == 2  # by the handle, and by the function without one


def test_closing_frees_the_modules_and_what_is_asked_afterwards_is_loaded_again(checkpoint, loads):
    folder, batches = checkpoint
    model = osm.open(folder)
    before = model.measure(batches)
    model.task_loss(batches)
    held = [weakref.ref(model.module()), weakref.ref(model.module("causal-lm"))]
    model.close()
    gc.collect()
    assert [one() for one in held] == [None, None]
    assert model.measure(batches) == before
    assert loads == [None, "causal-lm", None]


def test_closing_leaves_a_module_of_the_users_own():
    model, batch = with_head()
    with osm.open(model) as handle:
        handle.measure([batch])
    assert handle.module() is model
    assert handle.measure([batch]) == osm.measure(model, [batch])


def test_a_handle_is_opened_once_and_takes_no_options(checkpoint):
    folder, batches = checkpoint
    model = osm.open(folder)
    assert open_model(model) is model
    assert osm.open(model) is model
    assert open_model(model, base=None, trust_remote_code=False) is model  # no options
    for ask in (osm.open, osm.verify, lambda target, **options: osm.measure(target, batches, **options)):
        with pytest.raises(Conflict, match="device, a model that is opened already"):
            ask(model, device="cpu")
    with pytest.raises(Conflict, match="n_heads"):
        osm.inspect(model, n_heads=2)


def test_options_of_opening_hold_for_every_question(checkpoint):
    folder, batches = checkpoint
    model = osm.open(folder, dtype="bfloat16", device="cpu")
    assert model.measure(batches).provenance.compute_dtype.startswith("model bfloat16")
    assert model.task_loss(batches).provenance.compute_dtype == "model bfloat16"
    assert model.load == LoadOptions(dtype="bfloat16", device="cpu")


def test_a_revision_belongs_to_the_hub(checkpoint):
    with pytest.raises(NotSupported, match="only repositories of the hub have revisions"):
        osm.open(checkpoint[0], revision="main")
    with pytest.raises(NotSupported, match=r"for a GPT2LMHeadModel.*only repositories of the hub"):
        osm.open(with_head()[0], revision="main")


@pytest.mark.parametrize("how", ["data", "in place", "parameter", "load_state_dict"])
def test_an_edit_of_weights_between_two_questions_is_seen_in_the_hash_and_in_the_numbers(how):
    model, batch = with_head()
    handle = osm.open(model)
    before, inspected = handle.measure([batch]), handle.inspect()
    attention = model.transformer.h[1].attn
    changed = attention.c_attn.weight.detach() * -1
    if how == "data":
        version, place = attention.c_attn.weight._version, attention.c_attn.weight.data_ptr()
        attention.c_attn.weight.data.mul_(-1)
        assert (attention.c_attn.weight._version, attention.c_attn.weight.data_ptr()) == (version, place)
    elif how == "in place":
        with torch.no_grad():
            attention.c_attn.weight.mul_(-1)
    elif how == "parameter":
        attention.c_attn.weight = nn.Parameter(changed)
    else:
        attention.c_attn.load_state_dict({**attention.c_attn.state_dict(), "weight": changed})
    after = handle.measure([batch])
    assert after == osm.measure(model, [batch])
    assert after.provenance.weights_sha256 != before.provenance.weights_sha256
    assert after.values != before.values
    assert handle.inspect().layers[1] != inspected.layers[1]


def test_swapped_rows_are_seen_although_their_sum_is_the_same():
    model, batch = with_head()
    handle = osm.open(model)
    before = handle.measure([batch]).provenance.weights_sha256
    weight = model.transformer.h[0].attn.c_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]
    assert handle.measure([batch]).provenance.weights_sha256 != before


def test_an_unchanged_model_is_not_hashed_again(monkeypatch):
    from oversmooth.models.stores.store import ReadLog

    model, batch = with_head()
    handle = osm.open(model)
    first = handle.measure([batch])
    monkeypatch.setattr(ReadLog, "read", lambda *_: pytest.fail("hashed again"))
    assert handle.measure([batch]) == first


def test_layers_that_were_replaced_are_found():
    model, batch = tiny_model("bert")
    handle = osm.open(model)
    assert len(handle.inspect().layers) == len(handle.measure([batch]).curve("cosine")) - 1
    model.encoder.layer = model.encoder.layer[:1]
    model.config.num_hidden_layers = 1
    assert len(handle.inspect().layers) == 1
    assert handle.measure([batch]) == osm.measure(model, [batch])


def test_a_constrained_module_is_read_anew():
    model, batch = tiny_model("bert")
    handle = osm.open(model)
    handle.measure([batch])
    osm.sharpen(model)
    assert handle.inspect().layers[0].plain.max_real <= 1e-5
    assert handle.measure([batch]) == osm.measure(model, [batch])
    osm.bake(model)
    assert handle.measure([batch]) == osm.measure(model, [batch])


def test_two_handles_on_one_module_say_the_same():
    model, batch = with_head()
    one, other = osm.open(model), osm.open(model)
    assert one.measure([batch]) == other.measure([batch])
    assert one.alone is other.alone
    one.close()
    assert other.predict([batch], solve=1) == osm.predict(model, [batch], solve=1)


def in_threads(*calls):
    """What each call gives when all begin at the same time."""
    found, ready = {}, threading.Barrier(len(calls))

    def run(number, call):
        ready.wait()
        try:
            found[number] = call()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(calls))]


def test_a_handle_in_several_threads_gives_what_each_would_have_given_alone(checkpoint, loads):
    folder, batches = checkpoint
    longer = [{"input_ids": torch.randint(0, 40, (4, 12))}]
    expected = [osm.measure(folder, batches), osm.predict(folder, batches, solve=1), osm.measure(folder, longer)]
    loads.clear()
    model = osm.open(folder)
    calls = (
        lambda: model.measure(batches),
        lambda: model.predict(batches, solve=1),
        lambda: model.measure(longer),
    )
    assert in_threads(*calls, *calls) == expected + expected
    assert loads == [None]


def test_two_handles_on_one_module_in_two_threads_do_not_see_each_others_passes():
    model, batch = with_head()
    model.train()
    longer = {"input_ids": torch.randint(0, 40, (4, 12))}
    expected = [osm.measure(model, [batch]), osm.measure(model, [longer])]
    one, other = osm.open(model), osm.open(model)
    for _ in range(3):
        assert in_threads(lambda: one.measure([batch]), lambda: other.measure([longer])) == expected
    assert all(part.training for part in model.modules())


def test_a_module_of_the_users_own_stays_as_it_was():
    model, batch = with_head()
    model.train()
    model.transformer.h[0].eval()
    seen = []
    model.transformer.h[1].register_forward_hook(lambda *_: seen.append(1))
    modes = [part.training for part in model.modules()]
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    numbers = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with osm.open(model, device="cpu") as handle:
        for name in FUNCTIONS:
            FUNCTIONS[name](handle, [batch])
    assert [part.training for part in model.modules()] == modes
    assert [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()] == hooks
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
    assert seen
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, numbers[name], rtol=0, atol=0)


def test_a_declaration_given_to_the_handle_holds_where_the_model_runs():
    model, batch = with_head()
    arch = osm.discover(model, batch).archs
    handle = osm.open(model, arch=arch)
    assert handle.measure([batch]).provenance.families == osm.measure(model, [batch], arch=arch).provenance.families
    assert handle.inspect().provenance.families == (arch[0].name,)
    assert handle.ablate([batch], parts=("block",)).provenance.families == (arch[0].name,)


def test_a_handle_is_edited_pruned_and_compared_like_its_folder(checkpoint, tmp_path, loads):
    folder, batches = checkpoint
    model = osm.open(folder)
    model.edit(tmp_path / "edited", scale_h=0.5)
    assert loads == []
    pruned = model.prune(tmp_path / "pruned", batches, blocks="1")
    assert loads == ["causal-lm"]
    assert pruned.before == model.task_loss(batches).found
    edited = osm.open(tmp_path / "edited")
    assert output_drift(model, edited, batches) == output_drift(folder, tmp_path / "edited", batches)
    assert edited.inspect().layers[0].plain.rho_dc != model.inspect().layers[0].plain.rho_dc


def test_similarities_of_an_embedding_model_are_compared_with_those_of_a_handle(tmp_path):
    for seed, name in enumerate(("one", "two")):
        model, batch = tiny_model("bert", seed)
        model.save_pretrained(tmp_path / name)
    batch = {name: value.repeat(3, 1) for name, value in batch.items()}
    one, two = osm.open(tmp_path / "one"), osm.open(tmp_path / "two")
    plain = osm.task_loss(tmp_path / "two", [batch], task="similarity", original=tmp_path / "one")
    assert two.task_loss([batch], task="similarity", original=one) == plain


def test_the_module_to_discover_may_be_a_handle():
    model, batch = with_head()
    assert osm.open(model).discover(batch).archs == osm.discover(model, batch).archs
