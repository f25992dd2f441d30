"""Running a model of a declared family shows what its declaration says."""

import random

import pytest
import torch

from oversmooth.models.canonical import assemble
from oversmooth.models.declaration import sizes_of
from oversmooth.models.discovery.watch import discover_module, own_stack
from oversmooth.models.open import open_source
from oversmooth.models.stores.module import tensors_of
from oversmooth.models.verify import discover
from tests.contract.tiny_models import ALL, marked, tiny_model

QUICK = random.Random(0).sample(sorted(ALL), 8)
"""A seeded sample for every run of the tests; all cases run with `make test-slow`."""
EACH = marked(ALL, QUICK)


@pytest.mark.parametrize("case", EACH)
def test_discovery_finds_what_is_declared(case: str) -> None:
    model, inputs = tiny_model(case)
    found = discover_module(model, inputs, target=case)
    assert found.largest_error < 1e-5
    source = open_source(model)
    declared = {
        source.store.read(block.output.weight).data_ptr(): (stack, position)
        for stack in source.stacks()
        for position, block in enumerate(stack.names.blocks)
        if case != "gemma3-multimodal" or stack.label == "text"  # images are not among its inputs
    }
    tensors = {name: getattr(owner, attribute).detach() for name, (owner, attribute) in tensors_of(model).items()}
    for arch in found.archs:
        names = own_stack(arch, tensors.keys())
        for block in names.blocks:
            stack, position = declared.pop(tensors[block.output.weight].data_ptr())
            expected = stack.weights(position, source.store.read)
            weights = assemble(arch, sizes_of({}, arch), block, tensors.__getitem__, arch.branch_gain)
            for part in ("w_v", "w_o", "b_v", "b_o", "gain"):
                assert (getattr(weights, part) is None) == (getattr(expected, part) is None), part
                if getattr(weights, part) is not None:
                    torch.testing.assert_close(getattr(weights, part), getattr(expected, part), msg=part)
            assert weights.norms.keys() == expected.norms.keys()
            for role, norm in weights.norms.items():
                assert norm.kind == expected.norms[role].kind
                torch.testing.assert_close(norm.weight, expected.norms[role].weight)
            if weights.norms:  # bare attention modules have no form
                assert arch.residual == stack.arch.residual
            assert arch.token_axis == stack.arch.token_axis
            assert arch.is_causal == stack.arch.is_causal
            assert arch.is_hybrid == stack.arch.is_hybrid
        assert names.final_norm == stack.names.final_norm
    assert not declared


def test_discovery_of_a_bert_takes_at_most_five_forward_passes() -> None:
    model, _ = tiny_model("bert")
    passes: list[object] = []
    handle = model.register_forward_hook(lambda *call: passes.append(call))
    found = discover(model)
    handle.remove()
    assert found.largest_error < 1e-5
    assert 2 <= len(passes) <= 5
