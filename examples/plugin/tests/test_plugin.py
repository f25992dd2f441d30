"""What the plugins of this package do, once it is installed."""

import torch
from oversmooth_example.family import tiny_ringformer
from oversmooth_example.metric import farthest_pair

import oversmooth as osm

FEATURES = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))


def test_the_family_is_found_by_its_model_type_and_fits_its_model():
    model = tiny_ringformer()
    found = osm.verify(model)
    assert found.passed
    assert osm.inspect(model).provenance.families == ("ringformer",)


def test_the_metric_is_the_smallest_cosine_and_known_by_its_name():
    h = torch.tensor([[[1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [float("nan"), 0.0]]])
    keep = torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(farthest_pair(h, keep), torch.zeros(1))
    found = osm.measure(tiny_ringformer(), [FEATURES], metrics=["cosine", "farthest_pair"])
    lower = [point.mean for point in found.curve("farthest_pair")]
    assert all(a < b.mean for a, b in zip(lower, found.curve("cosine"), strict=True))
    assert osm.gate(tiny_ringformer(), [FEATURES], rules={"min_farthest_pair": -1.0}).passed


def test_the_intervention_starts_as_the_identity_and_at_one_takes_attention_away():
    model = tiny_ringformer()
    with torch.no_grad():
        before = model(FEATURES)
        osm.apply(model, "dampen")
        torch.testing.assert_close(model(FEATURES), before)
        osm.unapply(model)
        osm.apply(model, "dampen", start=1.0)
        x = FEATURES
        for ring in model.rings:
            x = x + ring.merge.bias
            x = x + ring.think(ring.rest(x))
        torch.testing.assert_close(model(FEATURES), model.end(x))


def test_the_section_stands_in_the_report(tmp_path):
    osm.analyze(tiny_ringformer(), [FEATURES]).save_html(tmp_path / "report.html")
    assert "The flattest layer" in (tmp_path / "report.html").read_text(encoding="utf-8")
