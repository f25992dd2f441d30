"""Declarations against hand-written sets of names, hand-written configs and naive layouts."""

import dataclasses
import re

import pytest
import torch

from oversmooth.errors import AdapterMismatch, BadConfig, ConfigMismatch, HeadsUnknown
from oversmooth.models.canonical import AttentionWeights, assemble, value_rows
from oversmooth.models.declaration import Arch, Paths, StackSizes, When, sizes_of
from oversmooth.models.families import FALCON, LLAMA, OPT
from oversmooth.models.identify import TensorNames, resolve

SEPARATE = Arch(
    name="separate",
    model_types=("separate",),
    paths=Paths(
        block="layers.{i}",
        v="attn.v|self.value",
        o="attn.o|self.out",
        attn_norm="norm",
        ffn_norm="norm2",
        final_norm="norm_f",
        attn_gain="scale.gamma|ls1",
    ),
)
FUSED = dataclasses.replace(SEPARATE, name="fused", paths=Paths(block="h.{i}", qkv="attn.qkv", o="attn.o"))


def names_of(*blocks, prefix="", parts=("attn.v", "attn.o", "norm"), bias=False):
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{prefix}layers.{i}.{part}.{kind}" for i in blocks for part in parts for kind in kinds}


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.", "bert.encoder.", "base_model.model.model."])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_the_prefix_is_found_and_blocks_are_in_order(prefix, count):
    names = names_of(*range(count), prefix=prefix) | {"lm_head.weight", "embeddings.weight"}
    (stack,) = resolve(SEPARATE, names)
    assert stack.prefix == prefix
    assert [block.index for block in stack.blocks] == list(range(count))
    assert [block.path for block in stack.blocks] == [f"{prefix}layers.{i}" for i in range(count)]
    assert stack.blocks_in_model == count


def test_a_block_knows_every_tensor_that_is_read_and_no_other():
    names = names_of(0, prefix="model.", bias=True) | {
        "model.layers.0.norm2.weight",
        "model.layers.0.ls1",
        "model.layers.0.attn.q.weight",
        "model.layers.0.mlp.weight",
        "model.norm_f.weight",
    }
    (stack,) = resolve(SEPARATE, names)
    (block,) = stack.blocks
    assert set(block) == names - {"model.layers.0.attn.q.weight", "model.layers.0.mlp.weight", "model.norm_f.weight"}
    assert block.value == TensorNames("model.layers.0.attn.v.weight", "model.layers.0.attn.v.bias")
    assert block.norms["ffn_norm"] == TensorNames("model.layers.0.norm2.weight", None)
    assert (block.gain, block.is_fused) == ("model.layers.0.ls1", False)
    assert stack.final_norm == TensorNames("model.norm_f.weight", None)


def test_alternates_are_tried_in_the_order_of_the_declaration():
    (first,) = resolve(SEPARATE, names_of(0))[0].blocks
    (second,) = resolve(SEPARATE, names_of(0, parts=("self.value", "self.out")))[0].blocks
    both = names_of(0) | names_of(0, parts=("self.value", "self.out"))
    (preferred,) = resolve(SEPARATE, both)[0].blocks
    assert first.value.weight == "layers.0.attn.v.weight"
    assert second.value.weight == "layers.0.self.value.weight"
    assert second.norms == {}
    assert (preferred.value, preferred.output) == (first.value, first.output)


def test_an_alternate_of_the_block_is_tried_where_the_first_is_absent():
    arch = dataclasses.replace(SEPARATE, paths=dataclasses.replace(SEPARATE.paths, block="encoder.{i}|layers.{i}"))
    (stack,) = resolve(arch, names_of(0, 1))
    assert [block.path for block in stack.blocks] == ["layers.0", "layers.1"]


def test_a_star_stands_for_weight_and_bias_inside_the_name():
    arch = dataclasses.replace(FUSED, paths=Paths(block="h.{i}", qkv="attn.in_proj_*", o="attn.o"))
    names = {"h.0.attn.in_proj_weight", "h.0.attn.in_proj_bias", "h.0.attn.o.weight"}
    (block,) = resolve(arch, names)[0].blocks
    assert block.value == TensorNames("h.0.attn.in_proj_weight", "h.0.attn.in_proj_bias")
    assert block.is_fused


def test_every_prefix_is_a_stack_of_its_own():
    names = names_of(0, 1, prefix="text_model.") | names_of(0, 1, 2, prefix="vision_model.")
    stacks = {stack.prefix: stack.blocks_in_model for stack in resolve(SEPARATE, names)}
    assert stacks == {"text_model.": 2, "vision_model.": 3}


@pytest.mark.parametrize("names", [set(), {"lm_head.weight"}, {"layers.0.attn.v.weight"}, {"xlayers.0.attn.o.weight"}])
def test_names_without_the_family_have_no_stacks(names):
    assert resolve(SEPARATE, names) == ()


def test_an_output_projection_without_values_is_refused_with_the_name_of_what_is_missing():
    with pytest.raises(
        AdapterMismatch, match=r"such as layers\.0\.attn\.v\.weight, found none in layers\.0, layers\.1"
    ):
        resolve(SEPARATE, names_of(0, 1, parts=("attn.o",)))


@pytest.mark.parametrize(
    ("names", "count", "absent"),
    [
        (names_of(0, 1, 3), 4, "none in blocks 2 "),
        (names_of(2, 3), 4, "none in blocks 0, 1 "),
        (names_of(0, 1) | {"layers.2.mlp.weight"}, 3, "none in blocks 2 "),
    ],
    ids=["in the middle", "at the front", "at the end"],
)
def test_a_gap_in_the_blocks_is_refused(names, count, absent):
    with pytest.raises(AdapterMismatch) as raised:
        resolve(SEPARATE, names)
    for piece in ("'separate'", f"attention weights in all {count} blocks", absent, "a missing shard"):
        assert piece in str(raised.value)


def test_a_gap_is_what_a_hybrid_consists_of():
    hybrid = dataclasses.replace(SEPARATE, is_hybrid=True)
    names = names_of(1, 3) | {"layers.4.mixer.weight", *names_of(0, parts=("attn.o",))}
    (stack,) = resolve(hybrid, names)
    assert [block.index for block in stack.blocks] == [1, 3]
    assert stack.blocks_in_model == 5


# --- sizes ----------------------------------------------------------------------------------------------------------

SPELLINGS = [
    (
        {"hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 2},
        StackSizes(d_model=8, n_heads=4, n_layers=2),
    ),
    ({"n_embd": 8, "n_head": 4, "n_layer": 2}, StackSizes(d_model=8, n_heads=4, n_layers=2)),
    ({"dim": 8, "n_heads": 4, "n_layers": 2}, StackSizes(d_model=8, n_heads=4, n_layers=2)),
    (
        {"d_model": 8, "num_heads": 4, "num_layers": 2, "d_kv": 3},
        StackSizes(d_model=8, n_heads=4, n_layers=2, d_head=3),
    ),
    ({"embed_dim": 8, "num_heads": 4, "depth": 2}, StackSizes(d_model=8, n_heads=4, n_layers=2)),
    (
        {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 5},
        StackSizes(d_model=8, n_heads=4, n_kv=2, d_head=5),
    ),
    ({"n_head_kv": 2}, StackSizes(n_kv=2)),
    ({"num_kv_heads": 2}, StackSizes(n_kv=2)),
    ({"head_dim": None, "hidden_size": 8}, StackSizes(d_model=8)),
    ({}, StackSizes()),
]


@pytest.mark.parametrize(("config", "sizes"), SPELLINGS)
def test_sizes_are_found_under_every_spelling(config, sizes):
    assert sizes_of(config, SEPARATE) == sizes


def test_the_keys_of_the_stack_itself_come_first():
    config = {"d_model": 8, "num_hidden_layers": 9, "encoder_layers": 2, "decoder_layers": 3}
    config |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "num_attention_heads": 8}
    encoder, decoder = (dataclasses.replace(SEPARATE, stack=stack) for stack in ("encoder", "decoder"))
    assert sizes_of(config, encoder) == StackSizes(d_model=8, n_heads=4, n_layers=2)
    assert sizes_of(config, decoder) == StackSizes(d_model=8, n_heads=2, n_layers=3)
    assert sizes_of({"num_layers": 6, "num_decoder_layers": 5}, decoder) == StackSizes(n_layers=5)
    assert sizes_of({"num_layers": 6}, decoder) == StackSizes(n_layers=6)


def test_the_declaration_can_overrule_the_number_of_value_heads():
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert sizes_of(config, dataclasses.replace(SEPARATE, n_kv="heads")) == StackSizes(n_heads=4)
    assert sizes_of(config, dataclasses.replace(SEPARATE, n_kv=1)) == StackSizes(n_heads=4, n_kv=1)


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", [8]])
def test_a_size_that_is_no_positive_whole_number_is_refused(value):
    with pytest.raises(BadConfig) as raised:
        sizes_of({"hidden_size": value}, SEPARATE)
    for piece in ("hidden_size", repr(value), "a whole number from 1"):
        assert piece in str(raised.value)


# --- facts that depend on the config --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "n_kv", "fused", "residual"),
    [
        ({}, 1, "stacked", "parallel"),
        ({"multi_query": True, "parallel_attn": True}, 1, "stacked", "parallel"),
        ({"multi_query": False}, "heads", "grouped", "parallel"),
        ({"new_decoder_architecture": True, "multi_query": False}, "config", "grouped", "parallel"),
        ({"parallel_attn": False}, 1, "stacked", "pre"),
    ],
)
def test_falcon_has_the_layout_its_config_says(config, n_kv, fused, residual):
    arch = FALCON.for_config(config)
    assert (arch.n_kv, arch.fused, arch.residual) == (n_kv, fused, residual)
    assert (arch.paths, arch.when) == (FALCON.paths, ())


def test_opt_norms_after_the_sum_only_where_its_config_says_so():
    assert [OPT.for_config(config).residual for config in ({}, {"do_layer_norm_before": True})] == ["pre", "pre"]
    assert OPT.for_config({"do_layer_norm_before": False}).residual == "post"


def test_a_condition_can_change_a_path_and_leave_the_others():
    arch = dataclasses.replace(
        SEPARATE, when=(When(key="qk", value=True, change={"paths": {"v": "attn.w"}, "is_causal": True}),)
    )
    changed = arch.for_config({"qk": True})
    assert changed.paths == dataclasses.replace(SEPARATE.paths, v="attn.w")
    assert changed.is_causal
    assert arch.for_config({"qk": False}) == SEPARATE


# --- layouts --------------------------------------------------------------------------------------------------------

HEADS = [(1, 1, 1), (2, 2, 1), (2, 1, 3), (4, 4, 2), (6, 2, 3), (6, 3, 1), (8, 1, 2)]


def fused_rows(fused, n_heads, n_kv, d_head):
    """Rows of a fused weight in the order in which they are stored, each as (what, head, channel)."""
    if fused == "stacked":
        order = [("q", h) for h in range(n_heads)] + [("k", g) for g in range(n_kv)] + [("v", g) for g in range(n_kv)]
    else:
        queries = n_heads // n_kv
        order = []
        for group in range(n_kv):
            order += [("q", group * queries + i) for i in range(queries)] + [("k", group), ("v", group)]
    return [(what, head, channel) for what, head in order for channel in range(d_head)]


@pytest.mark.parametrize("fused", ["stacked", "grouped"])
@pytest.mark.parametrize(("n_heads", "n_kv", "d_head"), HEADS)
def test_value_rows_are_those_of_a_naive_listing(fused, n_heads, n_kv, d_head):
    stored = fused_rows(fused, n_heads, n_kv, d_head)
    expected = [stored.index(("v", group, channel)) for group in range(n_kv) for channel in range(d_head)]
    torch.testing.assert_close(value_rows(fused, n_heads, n_kv, d_head), torch.tensor(expected))


def test_the_two_fused_layouts_differ_unless_there_is_one_value_head():
    assert value_rows("stacked", 4, 1, 3).tolist() == value_rows("grouped", 4, 1, 3).tolist()
    assert value_rows("stacked", 4, 2, 3).tolist() != value_rows("grouped", 4, 2, 3).tolist()


# --- canonical form -------------------------------------------------------------------------------------------------


def numbers(*shape, start=0.0):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + start


def tensors_of(d_model, n_heads, n_kv, d_head):
    return {
        "layers.0.attn.v.weight": numbers(n_kv * d_head, d_model),
        "layers.0.attn.v.bias": numbers(n_kv * d_head, start=0.5),
        "layers.0.attn.o.weight": numbers(d_model, n_heads * d_head, start=0.25),
        "layers.0.norm.weight": numbers(d_model, start=3.0),
    }


def assembled(arch, sizes, tensors, **options):
    (stack,) = resolve(arch, tensors.keys())
    return assemble(arch, sizes, stack.blocks[0], tensors.__getitem__, **options)


@pytest.mark.parametrize(("n_heads", "n_kv", "d_head"), HEADS)
@pytest.mark.parametrize("stored", ["out_in", "in_out"])
def test_separate_weights_are_cut_into_heads(n_heads, n_kv, d_head, stored):
    tensors = tensors_of(5, n_heads, n_kv, d_head)
    if stored == "in_out":
        tensors = {name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    sizes = StackSizes(d_model=5, n_heads=n_heads, n_kv=n_kv, d_head=d_head)
    found = assembled(dataclasses.replace(SEPARATE, stored=stored), sizes, tensors)
    assert (found.d_model, found.n_heads, found.n_kv, found.d_head) == (5, n_heads, n_kv, d_head)
    plain = tensors_of(5, n_heads, n_kv, d_head)
    for group in range(n_kv):
        for channel in range(d_head):
            row = group * d_head + channel
            torch.testing.assert_close(found.w_v[group, channel], plain["layers.0.attn.v.weight"][row])
            torch.testing.assert_close(found.b_v[group, channel], plain["layers.0.attn.v.bias"][row])
    for head in range(n_heads):
        columns = plain["layers.0.attn.o.weight"][:, head * d_head : (head + 1) * d_head]
        torch.testing.assert_close(found.w_o[:, head], columns)
    assert found.value_rows is None


@pytest.mark.parametrize("fused", ["stacked", "grouped"])
@pytest.mark.parametrize(("n_heads", "n_kv", "d_head"), HEADS)
def test_fused_values_are_the_rows_that_writing_back_reaches(fused, n_heads, n_kv, d_head):
    listing = fused_rows(fused, n_heads, n_kv, d_head)
    weight = torch.zeros(len(listing), 5)
    for row, (what, head, channel) in enumerate(listing):
        weight[row] = 100 * (head * d_head + channel) + torch.arange(5) if what == "v" else -1.0
    tensors = {"h.0.attn.qkv.weight": weight, "h.0.attn.o.weight": numbers(5, n_heads * d_head)}
    found = assembled(dataclasses.replace(FUSED, fused=fused), StackSizes(n_heads=n_heads, n_kv=n_kv), tensors)
    expected = 100 * torch.arange(n_kv * d_head)[:, None] + torch.arange(5)
    torch.testing.assert_close(found.w_v.flatten(0, 1), expected.float())
    torch.testing.assert_close(weight[found.value_rows], found.w_v.flatten(0, 1))


def test_an_offset_norm_weight_is_added_to_one_in_full_precision():
    tensors = tensors_of(4, 1, 1, 2) | {"layers.0.norm.weight": torch.full((4,), 2.0**-9, dtype=torch.bfloat16)}
    found = assembled(dataclasses.replace(SEPARATE, norm="rms+1"), StackSizes(n_heads=1), tensors)
    torch.testing.assert_close(found.norms["attn_norm"].weight, torch.full((4,), 1 + 2.0**-9), rtol=0, atol=0)
    assert found.norms["attn_norm"].kind == "rms"


@pytest.mark.parametrize(("stored_gain", "expected"), [(None, 0.5), (3.0, 1.5)])
def test_a_gain_of_the_config_multiplies_the_stored_one(stored_gain, expected):
    tensors = tensors_of(4, 1, 1, 2)
    if stored_gain is not None:
        tensors["layers.0.ls1"] = torch.full((4,), stored_gain)
    found = assembled(SEPARATE, StackSizes(n_heads=1), tensors, branch_gain=0.5)
    torch.testing.assert_close(found.gain, torch.full((4,), expected), check_dtype=False)
    assert assembled(SEPARATE, StackSizes(n_heads=1), tensors_of(4, 1, 1, 2)).gain is None


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        (StackSizes(d_model=7, n_heads=2), ("the width", "7", "4", "layers.0.attn.o.weight")),
        (StackSizes(n_heads=4), ("the heads", "4 heads", "6 columns")),
        (StackSizes(n_heads=2, d_head=2), ("the heads", "2 heads of size 2", "6 columns")),
        (StackSizes(n_heads=6, n_kv=4), ("the value heads", "4 for 6 heads", "a divisor")),
        (StackSizes(n_heads=2, n_kv=1), ("the value heads", "1 value heads of size 3 at width 4", "shape (6, 4)")),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(sizes, pieces):
    with pytest.raises(ConfigMismatch) as raised:
        assembled(SEPARATE, sizes, tensors_of(4, 2, 2, 3))
    for piece in pieces:
        assert piece in str(raised.value)


def test_a_fused_weight_with_other_rows_than_the_config_says_is_refused():
    tensors = {"h.0.attn.qkv.weight": numbers(12, 4), "h.0.attn.o.weight": numbers(4, 6)}
    with pytest.raises(ConfigMismatch, match=re.escape("2 heads and 2 value heads of size 3, so 18 rows")):
        assembled(FUSED, StackSizes(n_heads=2), tensors)


def test_an_output_weight_that_is_no_matrix_is_refused():
    tensors = tensors_of(4, 2, 2, 3) | {"layers.0.attn.o.weight": numbers(4)}
    with pytest.raises(AdapterMismatch, match=r"a matrix.*shape \(4,\)"):
        assembled(SEPARATE, StackSizes(n_heads=2), tensors)


def test_without_a_config_the_layer_is_one_wide_head_with_the_same_map():
    tensors = tensors_of(4, 2, 2, 3)
    known, unknown = assembled(SEPARATE, StackSizes(n_heads=2), tensors), assembled(SEPARATE, StackSizes(), tensors)
    assert (known.heads_known, unknown.heads_known) == (True, False)
    assert (unknown.n_heads, unknown.n_kv, unknown.d_head) == (1, 1, 6)
    torch.testing.assert_close(
        unknown.w_o.flatten(1) @ unknown.w_v.flatten(0, 1), known.w_o.flatten(1) @ known.w_v.flatten(0, 1)
    )


@pytest.mark.parametrize(
    ("arch", "tensors"),
    [
        (SEPARATE, tensors_of(4, 4, 2, 3)),
        (FUSED, {"h.0.attn.qkv.weight": numbers(12, 4), "h.0.attn.o.weight": numbers(4, 6)}),
        (
            dataclasses.replace(FUSED, fused="grouped"),
            {"h.0.attn.qkv.weight": numbers(18, 4), "h.0.attn.o.weight": numbers(4, 6)},
        ),
    ],
    ids=["shared values", "fused and shared", "grouped"],
)
def test_where_the_layout_needs_the_heads_they_are_asked_for(arch, tensors):
    with pytest.raises(HeadsUnknown, match=r"--n-heads"):
        assembled(arch, StackSizes(), tensors)


def test_only_the_tensors_of_the_block_are_read():
    tensors = tensors_of(4, 2, 2, 3)
    wanted = set(tensors)
    tensors["layers.0.attn.q.weight"] = numbers(1)
    seen = []
    (stack,) = resolve(SEPARATE, tensors.keys())
    assemble(SEPARATE, StackSizes(n_heads=2), stack.blocks[0], lambda name: seen.append(name) or tensors[name])
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_heads", "n_kv", "d_head"), HEADS)
def test_shared_output_weights_are_summed_over_the_heads_of_a_group(n_heads, n_kv, d_head, dtype):
    generator = torch.Generator().manual_seed(0)
    w_o = torch.randn(5, n_heads, d_head, generator=generator).to(dtype)
    weights = AttentionWeights(w_v=torch.zeros(n_kv, d_head, 5, dtype=dtype), w_o=w_o)
    expected = torch.zeros(5, n_kv, d_head, dtype=torch.float64)
    for head in range(n_heads):
        expected[:, head // (n_heads // n_kv)] += w_o[:, head].double()
    torch.testing.assert_close(weights.w_o_shared.double(), expected, rtol=1e-6, atol=1e-6)


def test_llama_names_are_found_in_a_checkpoint_as_it_is_published():
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(3):
        names |= {f"model.layers.{i}.self_attn.{part}_proj.weight" for part in "qkvo"}
        names |= {f"model.layers.{i}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names |= {f"model.layers.{i}.{part}_layernorm.weight" for part in ("input", "post_attention")}
    (stack,) = resolve(LLAMA.for_config({}), names)
    assert (stack.prefix, stack.blocks_in_model) == ("model.", 3)
    assert stack.blocks[2].value.weight == "model.layers.2.self_attn.v_proj.weight"
    assert stack.blocks[2].norms["attn_norm"].weight == "model.layers.2.input_layernorm.weight"
