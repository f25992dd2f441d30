"""Progress counts layers of sequences, with the total as soon as it is known."""

import torch

import oversmooth as osm

LAYERS = 3


def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def told(batches, **options):
    heard = []
    osm.measure(encoder(), batches, progress=lambda done, total: heard.append((done, total)), **options)
    return heard


def test_a_single_sequence_moves_on_while_it_runs():
    heard = told([torch.randn(1, 4, 16)])
    assert heard[0] == (0, LAYERS)
    assert heard[-1] == (LAYERS, LAYERS)
    assert {done for done, _ in heard} == {0, 1, 2, 3}


def test_the_total_is_known_with_the_last_batch_or_from_the_limit():
    batches = [torch.randn(2, 4, 16) for _ in range(3)]
    heard = told(iter(batches))
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert heard[0] == (0, 0)
    assert heard[-1] == (6 * LAYERS, 6 * LAYERS)
    limited = told(iter(batches), max_samples=3)
    assert limited[0] == (0, 3 * LAYERS)
    assert limited[-1] == (3 * LAYERS, 3 * LAYERS)
