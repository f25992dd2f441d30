"""Models inside of what people put around them, with the libraries themselves: the same numbers, or a reason."""

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.errors import NotSupported
from oversmooth.models.wrappers import unwrapped

SIZES = {"gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4}, "llama": {"hidden_size": 32, "num_key_value_heads": 2}}
COMMON = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXTS = ["w005 w006 w007", "w008 w009 w010 w011"]
IDS = torch.randint(3, 256, (4, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request, tmp_path_factory):
    """A language model with random weights, and a tokenizer that knows every one of its tokens by its number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    if request.param == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**SIZES["gpt2"], **COMMON))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES["llama"], **LLAMA, **COMMON))
    words = Tokenizer(models.WordLevel({f"w{number:03}": number for number in range(256)}, unk_token="w000"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w000", bos_token="w001", eos_token="w002")
    place = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def cosines(target, data=IDS):
    return [point.mean for point in osm.measure(target, data).curve("cosine")]


def bridge(folder):
    """As `boot_transformers(name)` returns it."""
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    from transformers import AutoTokenizer

    return bridges.TransformerBridge.boot_transformers(folder, tokenizer=AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_what_distributes_or_compiles_a_model_is_taken_off(wrap):
    model = nn.TransformerEncoderLayer(8, 2)
    assert unwrapped(wrap(model)) is model
    assert unwrapped(nn.DataParallel(wrap(model))) is model


def test_a_bridge_of_transformer_lens_is_its_model(folder):
    held = bridge(folder)
    assert cosines(held) == pytest.approx(cosines(plain(folder)), abs=1e-6)
    assert osm.inspect(held).layers[1].plain.rho_dc == osm.inspect(folder).layers[1].plain.rho_dc
    assert osm.verify(held).passed


def test_a_bridge_shares_its_weights_with_the_model_inside(folder):
    held = bridge(folder)
    inside = unwrapped(held)
    own = {weight.data_ptr() for weight in held.original_model.parameters()}
    assert all(weight.data_ptr() in own for weight in inside.parameters())


def test_a_bridge_with_processed_weights_is_refused(folder):
    held = bridge(folder)
    held.enable_compatibility_mode()
    with pytest.raises(NotSupported, match="folded"):
        osm.measure(held, IDS)


def test_a_bridge_that_computes_something_else_than_its_weights_say_is_refused(folder):
    held = bridge(folder)
    held.original_model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(NotSupported, match="outputs differ"):
        osm.measure(held, IDS)


def test_a_bridge_is_not_edited_beside_itself(folder):
    held = bridge(folder)
    for change in (osm.sharpen, lambda model: osm.apply(model, "attnscale")):
        with pytest.raises(NotSupported, match="would not see the change"):
            change(held)
    assert cosines(held) == pytest.approx(cosines(plain(folder)), abs=1e-6)


def test_models_of_nnsight_are_what_they_are_around(folder):
    nnsight = pytest.importorskip("nnsight")
    from transformers import AutoTokenizer

    model, tokenizer = plain(folder), AutoTokenizer.from_pretrained(folder)
    assert cosines(nnsight.NNsight(model)) == cosines(model)
    held = nnsight.TransformersModel(model, tokenizer=tokenizer, task="text-generation")
    assert cosines(held, TEXTS) == cosines(folder, TEXTS)


def test_a_model_of_nnsight_without_weights_says_how_to_load_it(folder):
    nnsight = pytest.importorskip("nnsight")
    with pytest.raises(NotSupported, match="dispatch=True"):
        osm.measure(nnsight.TransformersModel(folder, task="text-generation"), IDS)
