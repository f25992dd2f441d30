"""The chain identity on every type of transformers that can be built small, as `make families` found them.

`benchmarks/families.py` writes the table; here every type in it that was discovered is built again and measured. A type that
is read in part, or whose stream cannot be followed, is listed with what is said of it: nothing is wrong in silence.
"""

import importlib.resources
import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, islice

import pytest
import torch
from torch import Tensor, nn

import oversmooth as osm
from oversmooth.errors import NotDiscovered, OversmoothError, RefusedArchitecture, WrongBatch
from oversmooth.models.discovery.watch import TRIES, discovered, known_inputs, towers_of
from oversmooth.models.inputs import examples
from oversmooth.models.stores.module import describe
from oversmooth.results import StreamCheck
from tests.small_skeletons import small_skeletons

TABLE = json.loads((importlib.resources.files("oversmooth") / "models/families_table.json").read_text())
DISCOVERED = [name for name, row in TABLE["rows"]["transformers"].items() if row["state"] == "discovered"]
BEHIND = "the stream of encoder goes on behind the last block, in encoder.lateral_convs.0.conv"
"""Detectors mix what their encoder gives with maps of other sizes."""
APART = "67% of the parameters that run are in no part (layer_norm1.0, ffns.0.lin1"
"""Norms and feed-forwards stand in lists of their own."""
PARTIAL = {
    "d_fine": BEHIND,
    "dab-detr": "14% of the parameters that run are in no part (encoder.query_scale",
    "deimv2": BEHIND,
    "eomt": "32% of the parameters that run are in no part (layernorm, class_predictor",
    "eomt_dinov3": "42% of the parameters that run are in no part (layernorm, class_predictor",
    "flaubert": APART,
    "florence_vision": "the stream of blocks.0 goes on behind the last block, in blocks.0.0.spatial_block.ffn.fc1",
    "idefics": "20% of the parameters that run are in no part (gated_cross_attn_layers",
    "longcat_flash": "what the last block of layers.0 gives was not seen",
    "mimi": "the stream of encoder goes on behind the last block, in decoder.upsample",
    "nemotron_h": "what the last block gives was not seen",
    "nemotron_h_omni": "what the last block gives was not seen",
    "pp_doclayout_v2": BEHIND,
    "pp_doclayout_v3": BEHIND,
    "pp_doclayout_v4": BEHIND,
    "rt_detr": BEHIND,
    "rt_detr_v2": BEHIND,
    "step3p5_vision": "the stream goes on behind the last block, in downsampler1",
    "step3p7": "the stream goes on behind the last block, in downsampler1",
    "superglue": "what the last block gives was not seen",
    "vitdet": "the stream goes on behind the last block, in what the model returns",
    "xlm": APART,
}
"""Types that are read in part, and what is left out."""
POOLED = r"features of block \d.* are of other tokens"
"""Tokens are pooled, merged or set aside between the blocks, or inside of one."""
SECOND_NORM = "expected the output of .* to follow from the output of the norm behind the feed-forward"
"""Between attention and feed-forward a post-norm block has cross-attention that was not recognised as such."""
BEFORE = "expected the sum behind attention in .* to follow from the input of"
"""Something acts on the stream before the attention that is read: cross-attention, a feed-forward, attention over time."""
REFUSED = {
    "decision_transformer": r"expected an attention mask of shape \(1, 36\)",  # one mask for three tokens of each step
    "deformable_detr": SECOND_NORM,
    "fastspeech2_conformer": BEFORE,
    "fastspeech2_conformer_with_hifigan": BEFORE,
    "granite_speech5_ctc": POOLED,
    "granite_speech5_encoder": POOLED,
    "higgs_audio_v2": POOLED,
    "hrm_text": "the model says: list index out of range",  # its own cache, which is too short
    "informer": POOLED,
    "lxmert": POOLED,
    "mask2former": BEFORE,
    "maskformer": SECOND_NORM,
    "minicpm_ocr_vision": POOLED,
    "minicpmv4_6_vision": POOLED,
    "minicpmv4_7_vision": POOLED,
    # every block of its decoder is one sub-block: between two with attention stand several, of recurrences and of experts
    "nemo_speechlm": "expected the sum behind the feed-forward in language_model.layers.5 to follow from",
    "pegasus_x": POOLED,
    "pop2piano": "`use_cache` can only be set to `True`",  # its encoder, on its own default config
    "time_series_transformer": "integer modulo by zero",  # its default config has no lags
    "timesformer": BEFORE,
    "videomt": "expected the input of layers.0 to follow from .* layers.1",  # frame after frame through the last blocks
    "vilt": r"expected an attention mask of shape \(1, 29\)",  # one mask for words, one for pictures
    "xclip": "expected the sum behind the feed-forward in encoder.layers.0 to follow from",  # a message between frames
    "xclip_vision_model": "expected the sum behind the feed-forward in encoder.layers.0 to follow from",
}
"""Types whose weights are read and whose features are not measured, and why."""


def built(model_type: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """The first small model of a type that runs, and its inputs; none where only its towers run."""
    for build in small_skeletons(model_type):
        try:
            model = build()
            discovered(model, describe(model))
        except Exception:
            continue
        return model, known_inputs(model) or {}
    pytest.fail(f"no small model of {model_type} runs any more: make families")


def measured(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[StreamCheck]:
    """The stream of a model on the inputs it was discovered with; of its towers where nothing made up fits the whole."""
    refused: WrongBatch | None = None
    for batch in chain([inputs] if inputs else [], islice(examples(model, describe(model), 0), TRIES)):
        try:
            stream = osm.measure(model, [dict(batch)]).stream
        except WrongBatch as error:
            refused = refused or error
        else:
            assert stream is not None
            return [stream]
    found: dict[str, list[StreamCheck]] = {}
    for path, tower in towers_of(model):
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        with suppress(NotDiscovered, RefusedArchitecture, WrongBatch):
            discovered(tower, describe(tower))
            found[path] = measured(tower, known_inputs(tower) or {})
    if not found:
        assert refused is not None, "a model without inputs has no towers either"
        raise refused
    return [stream for streams in found.values() for stream in streams]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DISCOVERED)
def test_the_stream_of_every_type_is_followed_or_the_reading_says_what_it_leaves_out(model_type: str) -> None:
    torch.manual_seed(0)
    model, inputs = built(model_type)
    if model_type in REFUSED:
        with pytest.raises(OversmoothError, match=REFUSED[model_type]):
            measured(model, inputs)
        return
    streams = measured(model, inputs)
    assert [pair for stream in streams for pair in stream.broken] == []
    partial = "; ".join(stream.partial for stream in streams if stream.partial)
    assert PARTIAL.get(model_type, "") in partial
    assert bool(partial) == (model_type in PARTIAL)


def test_every_type_that_is_listed_is_in_the_table() -> None:
    assert {*PARTIAL, *REFUSED} <= set(DISCOVERED)
