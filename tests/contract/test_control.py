"""`sharpen`, `smooth`, `constrain` and `bake` on every declared family, and everything that training does to a model."""

import copy
import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.control.parametrizations import parametrized
from oversmooth.errors import BadValue, CannotControl, ForgottenBake, NotSupported, UnknownName
from oversmooth.models.canonical import ValueChain
from oversmooth.models.live import call_model
from oversmooth.models.open import open_source
from tests.contract.tiny_models import EACH_FAMILY, TIMM, TINY, require_fit, tiny_model

VERBS = {"sharpen": (-1.0, 0.0, "orthogonal"), "smooth": (0.0, 1.0, "general")}
TOLERANCE = 1e-5


def tensors(output) -> list[torch.Tensor]:
    """Every float tensor of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def outputs(model: nn.Module, inputs) -> list[torch.Tensor]:
    torch.manual_seed(0)  # one of the families shuffles its tokens
    return tensors(call_model(model, inputs))


def loss_of(model: nn.Module, inputs) -> torch.Tensor:
    """A number that depends on every output, and not only on norms of normed features."""
    generator = torch.Generator().manual_seed(0)
    trained = [output for output in outputs(model, inputs) if output.requires_grad]
    return sum((output * torch.randn(output.shape, generator=generator).to(output)).sum() for output in trained)


def assert_inside(inspection, low: float, high: float) -> None:
    for layer in inspection.layers:
        assert low - TOLERANCE <= layer.plain.min_real <= layer.plain.max_real <= high + TOLERANCE
        assert max(abs(imaginary) for _, imaginary in layer.plain.eigenvalues) < TOLERANCE
        for head in layer.heads:
            assert low - TOLERANCE <= head.min_real <= head.max_real <= high + TOLERANCE


def saved_and_inspected(case: str, model: nn.Module, folder):
    """Inspection of the model as plain tools save it."""
    if case in TINY:
        model.save_pretrained(folder)
        return osm.inspect(folder)
    if case == "torch-attention-stack":
        return osm.inspect(model)  # its names are the user's own: no checkpoint says what it is
    from safetensors.torch import save_model

    save_model(model, str(folder / "model.safetensors"))
    return osm.inspect(folder, model_type="timm_vit" if case in TIMM else "torch_encoder", n_heads=4)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("case", EACH_FAMILY)  # none is refused; what would be is tested below
def test_eigenvalues_stay_in_the_interval_through_training_baking_and_saving(case, verb, tmp_path):
    model, inputs = tiny_model(case)
    names, classes = list(model.state_dict()), [type(part) for part in model.modules()]
    low, high, basis = VERBS[verb]
    result = getattr(osm, verb)(model, basis=basis)
    assert len(result.layers) == sum(len(stack.names.blocks) for stack in open_source(model).stacks())
    for layer in result.layers:
        assert low - TOLERANCE <= layer.after.min_real <= layer.after.max_real <= high + TOLERANCE
    require_fit(osm.verify(model, inputs=inputs, tolerance=2e-5))  # the model uses these very weights

    search = torch.optim.Adam(model.parameters(), 1e-2)
    loss_of(model, inputs).backward()
    moving = [p for n, p in model.named_parameters() if "eigenbasis" in n and "vision" not in n and p.grad is not None]
    assert moving
    assert all(torch.isfinite(parameter.grad).all() for parameter in moving)
    assert any(parameter.grad.abs().max() > 0 for parameter in moving)
    search.step()
    trained = osm.inspect(model)
    assert_inside(trained, low, high)

    with torch.no_grad():
        before = outputs(model, inputs)
        osm.bake(model)
        after = outputs(model, inputs)
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    assert [type(part) for part in model.modules()] == classes
    baked = saved_and_inspected(case, model, tmp_path)
    assert_inside(baked, low, high)
    for one, two in zip(trained.layers, baked.layers, strict=True):
        spectra = [sorted(real for real, _ in layer.plain.eigenvalues) for layer in (one, two)]
        assert spectra[1] == pytest.approx(spectra[0], abs=TOLERANCE)


# --- refusals leave the model as it was ------------------------------------------------------------------------------


def wide_t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(d_model=16, d_kv=8, num_heads=4, num_layers=2, d_ff=16, vocab_size=20))


def test_more_value_directions_than_the_width_are_refused_and_nothing_is_touched():
    model = wide_t5()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CannotControl, match="make 32 value directions, more than the width 16"):
        osm.sharpen(model)
    assert {name: torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()} == dict.fromkeys(
        before, True
    )


def test_a_parameter_shared_by_several_modules_is_refused():
    model, _ = tiny_model("bert")
    layers = model.encoder.layer
    layers[1].attention.self.value.weight = layers[0].attention.self.value.weight
    with pytest.raises(CannotControl, match="one parameter shared by several modules"):
        osm.sharpen(model)
    assert not list(parametrized(model))


def test_a_weight_that_something_else_parametrizes_is_refused():
    model, _ = tiny_model("bert")
    torch.nn.utils.parametrizations.weight_norm(model.encoder.layer[1].attention.self.value)
    with pytest.raises(CannotControl, match="already parametrized by something else"):
        osm.sharpen(model)
    assert not list(parametrized(model))


def test_weights_that_are_not_finite_are_refused():
    model, _ = tiny_model("bert")
    with torch.no_grad():
        model.encoder.layer[2].attention.output.dense.weight[0, 0] = float("nan")
    with pytest.raises(CannotControl, match="layer 2: its value or output weights hold NaN"):
        osm.sharpen(model)
    assert not list(parametrized(model))


def test_a_module_that_stands_at_several_depths_has_one_basis():
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, layer, layer])})
    result = osm.sharpen(model)
    assert len(result.layers) == 1
    assert sum("psi" in name for name, _ in model.named_parameters()) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"basis": "diagonal"}, UnknownName),
        ({"init": "zero"}, UnknownName),
        ({"layers": [7]}, UnknownName),
        ({"layers": "x"}, BadValue),
        ({"layers": []}, BadValue),
        ({"stack": "decoder"}, UnknownName),
        ({"max_condition": 10.0}, NotSupported),
        ({"low": 1.0, "high": 0.0}, BadValue),
    ],
)
def test_wrong_options_are_refused_before_anything_is_touched(options, error):
    model, _ = tiny_model("bert")
    with pytest.raises(error, match="interval" if "low" in options else next(iter(options)).rstrip("s")):
        osm.constrain(model, **options)
    assert not list(parametrized(model))


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "touched"),
    [(None, {0, 1, 2}), (1, {1}), (-1, {2}), ("1-2", {1, 2}), ("0,2", {0, 2}), (range(2), {0, 1}), (iter([2]), {2})],
)
def test_only_the_chosen_layers_change(layers, touched):
    model, _ = tiny_model("gpt2")
    before = [block.attn.c_proj.weight.clone() for block in model.h]
    result = osm.smooth(model, layers=layers)
    assert {layer.layer for layer in result.layers} == touched
    osm.bake(model)
    assert {i for i, block in enumerate(model.h) if not torch.equal(block.attn.c_proj.weight, before[i])} == touched


def test_one_stack_of_several_can_be_chosen():
    model, _ = tiny_model("t5")
    assert {layer.stack for layer in osm.sharpen(model, stack="encoder").layers} == {"encoder"}
    assert not any("decoder" in name and "psi" in name for name, _ in model.named_parameters())


def test_what_moved_is_reported_for_the_layer_and_every_head():
    model, _ = tiny_model("llama")
    before = osm.inspect(model)
    result = osm.sharpen(model)
    for layer, old in zip(result.layers, before.layers, strict=True):
        assert layer.before.eigenvalues == old.plain.eigenvalues
        assert [(head.head, head.kv_head) for head in layer.heads] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        assert all(0 < head.moved < 1.5 for head in layer.heads)
    assert osm.Control.from_dict(result.to_dict()) == result
    assert {row["layer"] for row in result.rows()} == {row["layer"] for row in result.head_rows()} == {0, 1, 2}
    assert "eigenvalues of H in [-1, 0]" in repr(result)


def test_a_fresh_start_is_repeatable_and_inside():
    first, second = (tiny_model("vit")[0] for _ in range(2))
    for model in (first, second):
        osm.constrain(model, low=-0.5, high=0.25, init="fresh", generator=torch.Generator().manual_seed(3))
    for one, two in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert_inside(osm.inspect(first), -0.5, 0.25)


def test_constraining_again_starts_from_the_constrained_weights():
    model, inputs = tiny_model("vit")
    osm.sharpen(model)
    with torch.no_grad():
        before = outputs(model, inputs)[0]
        again = osm.constrain(model, low=-2.0, high=0.0)
        torch.testing.assert_close(outputs(model, inputs)[0], before, rtol=1e-4, atol=1e-4)
    assert max(layer.moved for layer in again.layers) < 1e-5
    assert sum("psi" in name for name, _ in model.named_parameters()) == 3
    osm.smooth(model)
    assert_inside(osm.inspect(model), 0.0, 1.0)


@pytest.mark.parametrize("case", ["bert", "llama", "gemma2", "timm-vit", "torch-encoder-pre-norm"])
def test_positive_norms_start_at_the_absolute_value_stay_positive_and_are_baked(case):
    model, inputs = tiny_model(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name.lower() and "weight" in name:
                parameter[::3] = -2.5  # negative also where one is added
    result = osm.sharpen(model, positive_norms=True)
    assert all(layer.norm_signs_changed > 0 for layer in result.layers)
    search = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        search.zero_grad()
        loss_of(model, inputs).backward()
        search.step()
    osm.bake(model)
    for layer in osm.inspect(model).layers:
        assert all(norm.negative_share == 0 for norm in layer.norms if norm.role.startswith("attn"))


@pytest.mark.parametrize("case", ["gpt2", "timm-vit", "bert", "llama-with-biases", "torch-encoder"])
def test_what_value_biases_add_to_every_token_is_kept(case):
    model, _ = tiny_model(case)
    before = constants(model)
    result = osm.sharpen(model)
    for layer, old, new in zip(result.layers, before, constants(model), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
        assert layer.constant_moved < 1e-5


def test_without_an_output_bias_the_value_bias_keeps_what_it_can():
    model, _ = tiny_model("qwen2")  # grouped: where an eigenvalue is zero, no value bias reaches its direction
    before = constants(model)
    result = osm.sharpen(model)
    for layer, old, new in zip(result.layers, before, constants(model), strict=True):
        torch.testing.assert_close(layer.constant_moved, ((new - old).norm() / old.norm()).item(), rtol=1e-3, atol=1e-5)
        assert 0 < layer.constant_moved <= 1


def constants(model: nn.Module) -> list[torch.Tensor]:
    """`W_O b_V + b_O` of every layer."""
    source = open_source(model)
    (stack,) = source.stacks()
    found = []
    for position in range(len(stack.names.blocks)):
        chain = ValueChain(weights=stack.weights(position, source.store.read), dtype=torch.float64)
        values, _ = chain.values(torch.zeros(32, dtype=torch.float64))
        found.append(chain.projected(chain.repeated(values).flatten(-2)))
    return found


def test_frozen_weights_stay_frozen():
    model, _ = tiny_model("bert")
    model.requires_grad_(False)
    osm.sharpen(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    osm.bake(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("basis", ["orthogonal", "general"])
def test_half_precision_models_keep_their_dtype_and_a_precise_basis(basis):
    model, inputs = tiny_model("llama")
    model.bfloat16()
    result = osm.sharpen(model, basis=basis)
    assert {p.dtype for n, p in model.named_parameters() if "eigenbasis" in n} == {torch.float32}
    loss_of(model, inputs).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    osm.bake(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert max(layer.after.max_real for layer in result.layers) < TOLERANCE


# --- an ordinary model again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "vit", "albert"])
def test_transformers_loads_the_baked_checkpoint_without_a_trace_of_us(case, tmp_path):
    from transformers import AutoModel

    model, inputs = tiny_model(case)
    osm.sharpen(model)
    with torch.no_grad():
        expected = outputs(model, inputs)[0]
    osm.bake(model).save_pretrained(tmp_path)
    loaded, facts = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(outputs(loaded.eval(), inputs)[0], expected, rtol=1e-5, atol=1e-5)
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"oversmooth" not in written
    assert b"parametrizations" not in written


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "vit", "albert"])
def test_transformers_loads_a_constrained_model_that_nobody_baked_with_its_outputs(case, tmp_path):
    from transformers import AutoModel

    model, inputs = tiny_model(case)
    osm.sharpen(model, positive_norms=True)
    with torch.no_grad():
        expected = outputs(model, inputs)[0]
    model.save_pretrained(tmp_path)
    loaded, facts = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not facts["missing_keys"]
    with torch.no_grad():
        torch.testing.assert_close(outputs(loaded.eval(), inputs)[0], expected, rtol=1e-5, atol=1e-5)
    assert all(layer.plain.max_real < TOLERANCE for layer in osm.inspect(tmp_path).layers)
    with pytest.raises(CannotControl, match=r"(?s)holds the eigenbasis of a constrained model.*Load it as an ordinary"):
        osm.edit(tmp_path, tmp_path / "edited", scale_h=0.5)


def test_a_checkpoint_of_the_trainer_is_an_ordinary_model_and_resumes_the_constrained_one_exactly(tmp_path):
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

    def trainer(steps: int) -> Trainer:
        torch.manual_seed(0)
        model = BertForSequenceClassification(tiny_model("bert")[0].config)
        osm.sharpen(model)
        data = [{"input_ids": torch.arange(5) + k, "labels": k % 2} for k in range(8)]
        arguments = TrainingArguments(
            output_dir=tmp_path, max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to="none",
            use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, learning_rate=1e-2,
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=data)

    whole = trainer(4)
    whole.train()
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-4")
    ids = {"input_ids": torch.arange(6)[None]}
    with torch.no_grad():
        expected = whole.model.eval()(**ids).logits
        torch.testing.assert_close(loaded.eval()(**ids).logits, expected, rtol=1e-5, atol=1e-5)
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_checkpoint_without_the_ordinary_weights_says_what_to_do(tmp_path):
    from safetensors.torch import load_file, save_file

    model, _ = tiny_model("bert")
    osm.sharpen(model)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    owners = {name.split("parametrizations.")[0] for name in tensors if "eigenbasis" in name}
    old = {name: value for name, value in tensors.items() if name.removesuffix("weight") not in owners}
    assert len(old) < len(tensors)
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for verb in (osm.inspect, osm.measure, lambda folder: osm.edit(folder, tmp_path / "edited", scale_h=0.5)):
        with pytest.raises(ForgottenBake, match=r"(?s)before `osm.bake`.*eigenbasis.*random.*call `osm.sharpen`.*save"):
            verb(tmp_path)


def test_a_constrained_timm_model_saves_its_ordinary_weights_and_a_strict_load_tells_of_the_rest():
    model, inputs = tiny_model("timm-vit")
    other, _ = tiny_model("timm-vit", seed=1)
    osm.sharpen(model)
    with torch.no_grad():
        expected = call_model(model, inputs)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*eigenbasis"):
        other.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(call_model(other, inputs), expected, rtol=1e-5, atol=1e-5)


def test_timm_loads_the_baked_state_dict(tmp_path):
    model, inputs = tiny_model("timm-vit")
    other, _ = tiny_model("timm-vit", seed=1)
    osm.sharpen(model)
    with torch.no_grad():
        expected = call_model(model, inputs)
        other.load_state_dict(osm.bake(model).state_dict())
        torch.testing.assert_close(call_model(other, inputs), expected, rtol=1e-5, atol=1e-5)


def test_baking_a_copy_leaves_the_model_in_training_as_it_was():
    model, inputs = tiny_model("vit")
    osm.sharpen(model)
    with torch.no_grad():
        expected = outputs(model, inputs)[0]
    baked = osm.bake(copy.deepcopy(model))
    loss_of(model, inputs).backward()
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, inputs)[0], expected, rtol=0, atol=0)
        torch.testing.assert_close(outputs(baked, inputs)[0], expected, rtol=1e-5, atol=1e-5)


def test_baking_an_ordinary_model_does_nothing():
    model, _ = tiny_model("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert osm.bake(model) is model
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


# --- what training does ----------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("basis", ["orthogonal", "general"])


@BOTH
def test_state_dicts_are_saved_and_loaded(basis, tmp_path):
    model, inputs = tiny_model("gpt_neox")
    other, _ = tiny_model("gpt_neox", seed=5)
    for each in (model, other):
        osm.sharpen(each, basis=basis)
    loss_of(model, inputs).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with torch.no_grad():
        torch.testing.assert_close(outputs(other, inputs)[0], outputs(model, inputs)[0], rtol=0, atol=0)


@BOTH
def test_a_deep_copy_trains_on_its_own(basis):
    model, inputs = tiny_model("torch-encoder")
    osm.sharpen(model, basis=basis)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = call_model(model, inputs)
    loss_of(twin, inputs).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    with torch.no_grad():
        torch.testing.assert_close(call_model(model, inputs), before, rtol=0, atol=0)
        assert not torch.allclose(call_model(twin, inputs), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def gradients(model: nn.Module, inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, inputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@BOTH
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("case", ["llama", "timm-vit"])
def test_gradient_checkpointing_changes_no_gradient(case, use_reentrant, basis):
    model, inputs = tiny_model(case)
    osm.sharpen(model, basis=basis)
    model.train()
    expected = gradients(model, inputs)
    if case == "timm-vit":
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = gradients(model, inputs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_and_keeps_the_interval(dtype, basis):
    model, inputs = tiny_model("timm-vit")
    osm.sharpen(model, basis=basis)
    search = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        search.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, inputs)
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        search.step()
    assert_inside(osm.inspect(model), -1.0, 0.0)


COMPILED = """
import torch, oversmooth as osm
from oversmooth.models.live import call_model
from tests.contract.test_control import gradients, loss_of
from tests.contract.tiny_models import tiny_model

torch.set_num_threads(1)
model, inputs = tiny_model("timm-vit")
osm.sharpen(model, basis={basis!r})
expected_output, expected = call_model(model, inputs), gradients(model, inputs)
compiled = torch.compile(model, fullgraph=True)
torch.testing.assert_close(call_model(compiled, inputs), expected_output, rtol=1e-4, atol=1e-4)
model.zero_grad()
loss_of(compiled, inputs).backward()
for name, parameter in model.named_parameters():
    if name in expected:
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
@BOTH
def test_a_compiled_model_is_one_graph_with_the_same_outputs_and_gradients(basis):
    """In a process of its own: the shape checks of the tests are nothing that a compiler should look into."""
    subprocess.run([sys.executable, "-c", COMPILED.format(basis=basis)], check=True)


def _train_in_two_processes(rank: int, port: int, basis: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model, inputs = tiny_model("timm-vit")
    osm.constrain(model, low=-3.0, high=3.0, basis=basis)
    parallel = nn.parallel.DistributedDataParallel(model)
    search = torch.optim.SGD(parallel.parameters(), lr=0.05)
    for step in range(2):
        search.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        images = torch.randn(2, *inputs[""].shape[1:], generator=generator)
        parallel(images).square().mean().backward()
        search.step()
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@BOTH
def test_two_processes_train_one_model(basis, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_train_in_two_processes, (port, basis, str(tmp_path)), nprocs=2)
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=1e-6)
    alone, inputs = tiny_model("timm-vit")
    # Nothing is clipped here: which gradients lead out of the interval is decided before they are averaged.
    osm.constrain(alone, low=-3.0, high=3.0, basis=basis)
    search = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(2):
        search.zero_grad()
        images = [
            torch.randn(2, *inputs[""].shape[1:], generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in (0, 1)
        ]
        alone(torch.cat(images)).square().mean().backward()
        search.step()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-4, atol=1e-5)
