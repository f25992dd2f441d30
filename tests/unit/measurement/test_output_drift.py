"""The outputs of a model and its edit on the same inputs."""

import copy

import pytest
import torch

from oversmooth.analysis import compared, output_drift, similarity_of
from oversmooth.errors import WrongBatch


def encoder(width=16, layers=2):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


BATCH = [torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))]


def test_a_model_has_not_drifted_from_itself():
    found = output_drift(encoder(), encoder(), BATCH)
    assert (found.sequences, found.tokens) == (3, 15)
    assert found.relative_distance == pytest.approx(0, abs=1e-6)
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert found.similarity == found.other_similarity


def test_an_edit_drifts_by_what_its_own_outputs_say():
    model, edited = encoder(), copy.deepcopy(encoder())
    with torch.no_grad():
        edited.layers[1].self_attn.out_proj.weight.neg_()
        y, z = (each(BATCH[0]) for each in (model, edited))
    found = output_drift(model, edited, BATCH)
    assert found.relative_distance == pytest.approx(((z - y).norm() / y.norm()).item(), rel=1e-4)
    assert found.cosine == pytest.approx(torch.cosine_similarity(y, z, dim=-1).mean().item(), rel=1e-4)


def test_similarity_similarity_of_is_that_of_their_mean_tokens():
    states = [torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0]])]
    assert similarity_of(states) == pytest.approx(1 / 3)
    assert similarity_of(states[:1]) is None
    assert compared(states[:1], states[:1]).similarity is None


def test_models_of_other_widths_are_refused():
    with pytest.raises(WrongBatch, match="features of one shape"):
        compare_widths()


def compare_widths():
    class Narrow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reads, self.inside = torch.nn.Linear(16, 8), encoder(8)

        def forward(self, x):
            return self.inside(self.reads(x))

    output_drift(encoder(), Narrow(), BATCH)
