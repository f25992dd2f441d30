"""Live modules: what they are, and their tensors at the values they have now."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

import oversmooth as osm
from oversmooth.errors import BrokenFile, PackedWeights, RefusedArchitecture
from oversmooth.models.open import open_source
from oversmooth.models.stores.module import ModuleStore, bare_attention, describe
from oversmooth.models.stores.store import ReadLog
from tests.contract.tiny_models import AttentionStack, tiny_model


class Wrapper(nn.Module):
    """A user's own module around a model."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def timm_model(architecture, **options):
    import timm

    return timm.create_model(architecture, **options)


def radii(result):
    return [layer.plain.rho_dc for layer in result.layers]


def test_a_model_inside_wrappers_is_what_it_is_alone():
    model, _ = tiny_model("bert")
    wrapped = Wrapper(module=Wrapper(encoder=model), head=nn.Linear(32, 2))
    assert osm.inspect(wrapped).layers == osm.inspect(model).layers
    assert osm.inspect(wrapped).provenance.model_type == "bert"


def test_a_model_inside_a_sequence_of_modules_is_what_it_is_alone():
    model, _ = tiny_model("mpnet")
    sentence_model = nn.Sequential(Wrapper(auto_model=model), nn.Identity())
    assert osm.inspect(sentence_model).layers == osm.inspect(model).layers


def test_two_towers_are_two_stacks_each_with_its_own_sizes():
    text, _ = tiny_model("bert")
    image, _ = tiny_model("vit")
    result = osm.inspect(Wrapper(text=text, image=image))
    assert [(facts.name, facts.family) for facts in result.stacks] == [("text", "bert"), ("image", "vit")]
    assert radii(result) == radii(osm.inspect(text)) + radii(osm.inspect(image))


def test_two_towers_of_one_family_do_not_share_their_configs():
    first, _ = tiny_model("bert")
    second, _ = tiny_model("bert", seed=1)
    second.config.num_attention_heads = 2
    result = osm.inspect(Wrapper(a=first, ba=second))
    assert [(facts.name, facts.n_heads) for facts in result.stacks] == [("a", 4), ("ba", 2)]
    assert radii(result) == radii(osm.inspect(first)) + radii(osm.inspect(second))


def test_a_parametrized_weight_is_read_at_its_current_value():
    model, _ = tiny_model("bert")
    value = model.encoder.layer[1].attention.self.value
    expected = 2 * value.weight.detach()
    parametrize.register_parametrization(value, "weight", Doubled())
    name = "encoder.layer.1.attention.self.value.weight"
    store = ModuleStore(model)
    assert name in store.names
    assert not any("parametrizations" in known for known in store.names)
    torch.testing.assert_close(store.read(name), expected)
    with torch.no_grad():
        value.parametrizations.weight.original.mul_(3)
    torch.testing.assert_close(store.read(name), 3 * expected)


def test_the_inspection_of_a_parametrized_model_sees_the_parametrization():
    model, _ = tiny_model("gpt_neox")
    plain = radii(osm.inspect(model))
    spectral_norm(model.layers[0].attention.dense)
    model.eval()
    constrained = radii(osm.inspect(model))
    assert constrained[0] != pytest.approx(plain[0], rel=1e-3)
    assert constrained[1:] == plain[1:]


def test_reading_gives_no_gradient_and_changes_nothing():
    model, _ = tiny_model("bert")
    store = ModuleStore(model)
    name = "encoder.layer.0.attention.self.value.weight"
    assert not store.read(name).requires_grad
    assert store.owner(name) is model.encoder.layer[0].attention.self.value
    assert store.files() == ()


def test_shared_parameters_are_found_under_every_name():
    layer = nn.TransformerEncoderLayer(32, 4, 48)
    store = ModuleStore(nn.ModuleList([layer, layer]))
    assert {"0.norm1.weight", "1.norm1.weight"} <= set(store.names)
    assert store.owner("1.norm1.weight") is layer.norm1


def test_bare_bare_attention_are_declared_under_their_own_names():
    stack = AttentionStack()
    (arch,) = bare_attention(stack)
    assert arch.paths.block == "mixers.m0,mixers.m1,mixers.m2"
    assert (arch.n_heads, arch.d_head, arch.token_axis) == (4, 8, 1)


def test_attention_of_two_sizes_is_two_stacks():
    found = bare_attention(nn.ModuleList([nn.MultiheadAttention(32, 4), nn.MultiheadAttention(64, 8)]))
    assert [arch.stack for arch in found] == ["width 32, 4 heads", "width 64, 8 heads"]
    model = nn.ModuleList([nn.MultiheadAttention(32, 4), nn.MultiheadAttention(64, 8)])
    result = osm.inspect(model)  # it has no forward pass, so nothing else is known of it
    assert [layer.stack for layer in result.layers] == ["width 32, 4 heads", "width 64, 8 heads"]
    assert result.missing[0].field == "everything around nn.MultiheadAttention"


@pytest.mark.parametrize("sizes", [{}, {"kdim": 16, "vdim": 32}], ids=["one-weight", "separate-weights"])
def test_attention_with_one_weight_or_several_gives_the_product_of_its_matrices(sizes):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, **sizes)
    value = attention.v_proj_weight if sizes else attention.in_proj_weight[64:]
    product = attention.out_proj.weight.double() @ value.double()
    expected = (1 + torch.linalg.eigvals(product)).abs().max().item()
    assert radii(osm.inspect(attention)) == pytest.approx([expected])


def test_cross_attention_of_a_decoder_layer_is_left_out():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48), 2)
    assert bare_attention(decoder)[0].paths.block == "layers.0.self_attn,layers.1.self_attn"


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_that_appends_a_token_is_refused(option):
    with pytest.raises(RefusedArchitecture, match="rows over inputs do not sum to one"):
        osm.inspect(nn.MultiheadAttention(32, 4, **{option: True}))


@pytest.mark.parametrize(
    "architecture", ["vit_relpos_small_patch16_224", "vit_small_plus_patch16_dinov3", "swin_tiny_patch4_window7_224"]
)
def test_timm_models_with_attention_of_another_kind_are_known_by_their_class(architecture):
    with torch.device("meta"):
        model = timm_model(architecture)
    assert describe(model) == {"class": type(model).__name__}


@pytest.mark.parametrize("block", ["ResPostBlock", "ParallelScalingBlock", "ParallelThingsBlock"])
def test_timm_blocks_of_another_form_are_found_by_running_them(block):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    blocks = importlib.import_module(type(timm_model("vit_tiny_patch16_224", **sizes)).__module__)
    model = timm_model("vit_tiny_patch16_224", block_fn=getattr(blocks, block), **sizes)
    assert osm.inspect(model).provenance.discovery_error < 1e-5


def test_a_module_without_attention_is_refused():
    with pytest.raises(RefusedArchitecture, match=r"Sequential .* no softmax attention was seen"):
        osm.inspect(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_a_module_without_values_is_refused():
    with torch.device("meta"):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48), 1, enable_nested_tensor=False)
    with pytest.raises(BrokenFile, match=r"a tensor on the meta device\.\nLoad it first"):
        osm.inspect(encoder)


def test_integer_weights_are_refused_by_name():
    model, _ = tiny_model("bert")
    value = model.encoder.layer[0].attention.self.value
    value.weight = nn.Parameter(torch.ones(32, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(PackedWeights, match=r"attention\.self\.value\.weight' has dtype torch\.int8"):
        osm.inspect(model)


def test_the_log_of_reading_tells_weights_apart():
    def log(model):
        source = open_source(model)
        reading = ReadLog(source.store)
        for name in sorted(source.store.names):
            reading.read(name)
        return reading

    first, same, other = (log(tiny_model("gpt2", seed)[0]) for seed in (0, 0, 1))
    assert first.sha256 == same.sha256 != other.sha256
    assert first.bytes_read == sum(parameter.nbytes for parameter in tiny_model("gpt2")[0].parameters())
    assert first.dtypes == {"float32"}
