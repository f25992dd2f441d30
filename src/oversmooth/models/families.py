"""The declared families, one `Arch` each; model types that are refused, with reasons; the coverage table.

Identity comes from `model_type`, never from names: LLaMA, Gemma and OLMo 2 share names and differ in mathematics.
To add a family, write one `Arch` here and one tiny config in `tests/contract/tiny_models.py`; the contract tests do
the rest (docs/guides/add-an-architecture.md).

Running a model shows all of this too, and the tests hold both equal. A declaration is worth its lines where nothing can be
built: names in GGUF files, bare files whose tensors have to identify the family, and checkpoints read without transformers.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from oversmooth.models.declaration import Arch, Paths, When

# --- the table of architectures: one declaration per family ---


def _paths(block: str, *, norms: tuple[str, ...], **more: str) -> Paths:
    """Paths with the norms of attention and of the feed-forward, and the one behind the last block, if there are any."""
    return Paths(block=block, **dict(zip(("attn_norm", "ffn_norm", "final_norm"), norms, strict=False)), **more)


# --- text, bidirectional --------------------------------------------------------------------------------------------

BERT = Arch(
    name="bert",
    model_types=("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text"),
    residual="post",
    gguf=("bert",),
    paths=_paths(
        "encoder.layer.{i}",
        v="attention.self.value",
        o="attention.output.dense",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    ),
    when=(When(key="is_decoder", value=True, change={"is_causal": True}),),
)
DISTILBERT = Arch(
    name="distilbert",
    model_types=("distilbert",),
    residual="post",
    paths=_paths(
        "transformer.layer.{i}",
        v="attention.v_lin",
        o="attention.out_lin",
        norms=("sa_layer_norm", "output_layer_norm"),
    ),
)
ALBERT = Arch(
    name="albert",
    model_types=("albert",),
    residual="post",
    shared_layers=True,
    paths=_paths(
        "encoder.albert_layer_groups.{i}.albert_layers.0",
        v="attention.value",
        o="attention.dense",
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
    ),
)
MPNET = Arch(
    name="mpnet",
    model_types=("mpnet",),
    residual="post",
    paths=_paths(
        "encoder.layer.{i}",
        v="attention.attn.v",
        o="attention.attn.o",
        norms=("attention.LayerNorm", "output.LayerNorm"),
    ),
)
DEBERTA_V2 = Arch(
    name="deberta-v2",
    model_types=("deberta-v2",),
    residual="post",
    paths=_paths(
        "encoder.layer.{i}",
        v="attention.self.value_proj",
        o="attention.output.dense",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    ),
)
MODERNBERT = Arch(
    name="modernbert",
    model_types=("modernbert",),
    # The first block has no norm of attention: the embedding is normed already.
    paths=_paths("layers.{i}", qkv="attn.Wqkv", o="attn.Wo", norms=("attn_norm", "mlp_norm", "final_norm")),
)
CRAMMED_BERT = Arch(
    name="crammed-bert",
    model_types=("crammed-bert",),
    paths=_paths(
        "layers.{i}", qkv="attention.qkv", o="attention.output", norms=("attention_norm", "ffn_norm", "final_norm")
    ),
)

# --- text, causal ---------------------------------------------------------------------------------------------------

GPT2 = Arch(
    name="gpt2",
    model_types=("gpt2",),
    is_causal=True,
    stored="in_out",
    gguf=("gpt2",),
    paths=_paths("h.{i}", qkv="attn.c_attn", o="attn.c_proj", norms=("ln_1", "ln_2", "ln_f")),
)
GPT_BIGCODE = Arch(
    name="gpt_bigcode",
    model_types=("gpt_bigcode",),
    is_causal=True,
    n_kv=1,
    gguf=("starcoder",),
    paths=_paths("h.{i}", qkv="attn.c_attn", o="attn.c_proj", norms=("ln_1", "ln_2", "ln_f")),
    when=(When(key="multi_query", value=False, change={"n_kv": "heads", "fused": "grouped"}),),
)
GPT_NEO = Arch(
    name="gpt_neo",
    model_types=("gpt_neo",),
    is_causal=True,
    paths=_paths("h.{i}", v="attn.attention.v_proj", o="attn.attention.out_proj", norms=("ln_1", "ln_2", "ln_f")),
)
GPT_NEOX = Arch(
    name="gpt_neox",
    model_types=("gpt_neox",),
    is_causal=True,
    residual="parallel",
    fused="grouped",
    gguf=("gptneox",),
    paths=_paths(
        "layers.{i}",
        qkv="attention.query_key_value",
        o="attention.dense",
        norms=("input_layernorm", "post_attention_layernorm", "final_layer_norm"),
    ),
    when=(When(key="use_parallel_residual", value=False, change={"residual": "pre"}),),
)
GPTJ = Arch(
    name="gptj",
    model_types=("gptj",),
    is_causal=True,
    residual="parallel",
    gguf=("gptj",),
    paths=Paths(block="h.{i}", v="attn.v_proj", o="attn.out_proj", attn_norm="ln_1", final_norm="ln_f"),
)
OPT = Arch(
    name="opt",
    model_types=("opt",),
    is_causal=True,
    paths=_paths(
        "decoder.layers.{i}",
        v="self_attn.v_proj",
        o="self_attn.out_proj",
        norms=("self_attn_layer_norm", "final_layer_norm", "decoder.final_layer_norm"),
    ),
    when=(When(key="do_layer_norm_before", value=False, change={"residual": "post"}),),
)
BLOOM = Arch(
    name="bloom",
    model_types=("bloom",),
    is_causal=True,
    fused="grouped",
    gguf=("bloom",),
    paths=_paths(
        "h.{i}",
        qkv="self_attention.query_key_value",
        o="self_attention.dense",
        norms=("input_layernorm", "post_attention_layernorm", "ln_f"),
    ),
)
FALCON = Arch(
    name="falcon",
    model_types=("falcon",),
    is_causal=True,
    residual="parallel",
    n_kv=1,  # multi-query, the default: all queries, one key, one value
    gguf=("falcon",),
    paths=_paths(
        "h.{i}",
        qkv="self_attention.query_key_value",
        o="self_attention.dense",
        norms=("input_layernorm|ln_attn", "post_attention_layernorm|ln_mlp", "ln_f"),
    ),
    when=(
        When(key="multi_query", value=False, change={"n_kv": "heads", "fused": "grouped"}),
        When(key="new_decoder_architecture", value=True, change={"n_kv": "config", "fused": "grouped"}),
        When(key="parallel_attn", value=False, change={"residual": "pre"}),
    ),
)
_LLAMA_PATHS = _paths(
    "layers.{i}",
    v="self_attn.v_proj",
    qkv="self_attn.qkv_proj",
    o="self_attn.o_proj",
    norms=("input_layernorm", "post_attention_layernorm", "norm"),
)
LLAMA = Arch(
    name="llama",
    model_types=("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "smollm3"),
    is_causal=True,
    norm="rms",
    gguf=("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "smollm3"),
    paths=_LLAMA_PATHS,
)
STABLELM = Arch(
    name="stablelm",
    model_types=("stablelm", "starcoder2"),
    is_causal=True,
    gguf=("stablelm", "starcoder2"),
    paths=_LLAMA_PATHS,
    when=(When(key="use_parallel_residual", value=True, change={"residual": "parallel"}),),
)
GRANITE = Arch(
    name="granite",
    model_types=("granite", "granitemoe"),
    is_causal=True,
    norm="rms",
    residual_gain="residual_multiplier",
    gguf=("granite", "granitemoe"),
    paths=_LLAMA_PATHS,
)
GRANITE_HYBRID = replace(
    GRANITE, name="granite_hybrid", model_types=("granitemoehybrid",), is_hybrid=True, gguf=("granitehybrid",)
)
GEMMA = Arch(name="gemma", model_types=("gemma",), is_causal=True, norm="rms+1", gguf=("gemma",), paths=_LLAMA_PATHS)
GEMMA2 = Arch(
    name="gemma2",
    model_types=("gemma2", "gemma3_text"),
    is_causal=True,
    norm="rms+1",
    residual="sandwich",
    gguf=("gemma2", "gemma3"),
    paths=replace(
        _LLAMA_PATHS,
        attn_branch_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        ffn_branch_norm="post_feedforward_layernorm",
    ),
)
OLMO2 = Arch(
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    is_causal=True,
    norm="rms",
    residual="sandwich",
    gguf=("olmo2",),
    paths=replace(
        _LLAMA_PATHS,
        attn_norm="",
        attn_branch_norm="post_attention_layernorm",
        ffn_norm="",
        ffn_branch_norm="post_feedforward_layernorm",
    ),
)
COHERE = Arch(
    name="cohere",
    model_types=("cohere", "cohere2"),
    is_causal=True,
    residual="parallel",
    gguf=("command-r", "cohere2"),
    paths=replace(_LLAMA_PATHS, ffn_norm=""),
)
PHI = Arch(
    name="phi",
    model_types=("phi",),
    is_causal=True,
    residual="parallel",
    gguf=("phi2",),
    paths=replace(_LLAMA_PATHS, o="self_attn.dense", ffn_norm="", final_norm="final_layernorm"),
)
JAMBA = Arch(
    name="jamba",
    model_types=("jamba",),
    is_causal=True,
    norm="rms",
    is_hybrid=True,
    paths=replace(_LLAMA_PATHS, ffn_norm="pre_ff_layernorm", final_norm="final_layernorm"),
)

LATENT = Arch(
    name="latent",
    model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "mistral4", "youtu", "kimi_k2"),
    is_causal=True,
    norm="rms",
    fused="key_value",
    n_kv="heads",
    d_head="shape",
    needs_config=True,
    gguf=("deepseek2",),
    paths=replace(
        _LLAMA_PATHS,
        v="",
        qkv="self_attn.kv_b_proj",
        latent="self_attn.kv_a_proj_with_mqa",
        latent_norm="self_attn.kv_a_layernorm",
    ),
)
GPT_OSS = Arch(
    name="gpt_oss",
    model_types=("gpt_oss",),
    is_causal=True,
    norm="rms",
    gains=("sink",),
    needs_config=True,
    gguf=("gpt-oss",),
    paths=_LLAMA_PATHS,
)
QWEN3_NEXT = Arch(
    name="qwen3_next",
    model_types=("qwen3_next", "qwen3_5_text"),
    is_causal=True,
    norm="rms+1",
    is_hybrid=True,
    gains=("gate",),
    needs_config=True,
    gguf=("qwen3next",),
    paths=_LLAMA_PATHS,
)

# --- encoder and decoder --------------------------------------------------------------------------------------------

T5_ENCODER = Arch(
    name="t5.encoder",
    model_types=("t5", "mt5", "umt5"),
    stack="encoder",
    norm="rms",
    paths=_paths(
        "encoder.block.{i}",
        v="layer.0.SelfAttention.v",
        o="layer.0.SelfAttention.o",
        norms=("layer.0.layer_norm", "layer.1.layer_norm", "encoder.final_layer_norm"),
    ),
)
T5_DECODER = replace(
    T5_ENCODER,
    name="t5.decoder",
    stack="decoder",
    is_causal=True,
    paths=replace(
        T5_ENCODER.paths,
        block="decoder.block.{i}",
        cross_norm="layer.1.layer_norm",
        ffn_norm="layer.2.layer_norm",
        final_norm="decoder.final_layer_norm",
    ),
)
WHISPER_ENCODER = Arch(
    name="whisper.encoder",
    model_types=("whisper",),
    kind="audio",
    stack="encoder",
    paths=_paths(
        "encoder.layers.{i}",
        v="self_attn.v_proj",
        o="self_attn.out_proj",
        norms=("self_attn_layer_norm", "final_layer_norm", "encoder.layer_norm"),
    ),
)
WHISPER_DECODER = replace(
    WHISPER_ENCODER,
    name="whisper.decoder",
    stack="decoder",
    is_causal=True,
    paths=replace(
        WHISPER_ENCODER.paths,
        block="decoder.layers.{i}",
        cross_norm="encoder_attn_layer_norm",
        final_norm="decoder.layer_norm",
    ),
)
BART_ENCODER = replace(
    WHISPER_ENCODER,
    name="bart.encoder",
    model_types=("bart", "marian"),
    kind="text",
    residual="post",
    paths=replace(WHISPER_ENCODER.paths, final_norm=""),
)
BART_DECODER = replace(
    WHISPER_DECODER,
    name="bart.decoder",
    model_types=("bart", "marian"),
    kind="text",
    residual="post",
    paths=replace(WHISPER_DECODER.paths, final_norm=""),
)

# --- images and audio -----------------------------------------------------------------------------------------------

VIT = Arch(
    name="vit",
    model_types=("vit", "vit_mae"),
    kind="image",
    prefix_tokens=1,
    paths=_paths(
        "layers.{i}|encoder.layer.{i}",
        v="attention.v_proj|attention.attention.value",
        o="attention.o_proj|attention.output.dense",
        norms=("layernorm_before", "layernorm_after", "layernorm"),
    ),
)
DEIT = replace(VIT, name="deit", model_types=("deit",), prefix_tokens=2)
BEIT = replace(
    VIT,
    name="beit",
    model_types=("beit", "data2vec-vision"),
    paths=replace(VIT.paths, attn_gain="lambda_1", final_norm=""),
)
DINOV2 = replace(
    VIT,
    name="dinov2",
    model_types=("dinov2", "dinov2_with_registers"),
    prefix_tokens_key="num_register_tokens",
    paths=replace(
        VIT.paths,
        block="encoder.layer.{i}|layers.{i}",
        attn_norm="norm1",
        ffn_norm="norm2",
        attn_gain="layer_scale1.lambda1",
    ),
)
CLIP_TEXT = Arch(
    name="clip.text",
    model_types=("clip_text_model",),
    stack="text",
    is_causal=True,
    paths=_paths(
        "text_model.encoder.layers.{i}|encoder.layers.{i}",
        v="self_attn.v_proj",
        o="self_attn.out_proj",
        norms=("layer_norm1", "layer_norm2", "text_model.final_layer_norm|final_layer_norm"),
    ),
)
CLIP_VISION = replace(
    CLIP_TEXT,
    name="clip.vision",
    model_types=("clip_vision_model",),
    kind="image",
    stack="vision",
    is_causal=False,
    prefix_tokens=1,
    # Its last norm acts on the pooled token only.
    paths=replace(CLIP_TEXT.paths, block="vision_model.encoder.layers.{i}|encoder.layers.{i}", final_norm=""),
)
SIGLIP_TEXT = replace(CLIP_TEXT, name="siglip.text", model_types=("siglip_text_model",), is_causal=False)
SIGLIP_VISION = replace(
    CLIP_VISION,
    name="siglip.vision",
    model_types=("siglip_vision_model",),
    prefix_tokens=0,
    paths=replace(CLIP_VISION.paths, final_norm="vision_model.post_layernorm|post_layernorm"),
)
WAV2VEC2 = Arch(
    name="wav2vec2",
    model_types=("wav2vec2", "hubert"),
    kind="audio",
    residual="post",
    paths=_paths(
        "encoder.layers.{i}", v="attention.v_proj", o="attention.out_proj", norms=("layer_norm", "final_layer_norm")
    ),
    when=(
        When(
            key="do_stable_layer_norm",
            value=True,
            change={"residual": "pre", "paths": {"final_norm": "encoder.layer_norm"}},
        ),
    ),
)
TIMM_VIT = Arch(
    name="timm_vit",
    model_types=("timm_vit",),
    gain_is_optional=True,
    kind="image",
    prefix_tokens_key="num_prefix_tokens",
    paths=_paths(
        "blocks.{i}",
        qkv="attn.qkv",
        o="attn.proj",
        attn_gain="ls1.gamma",
        norms=("norm1", "norm2", "norm"),
    ),
)

# --- torch's own modules --------------------------------------------------------------------------------------------

TORCH_ENCODER = Arch(
    name="torch_encoder",
    model_types=("torch_encoder",),
    residual="post",
    paths=_paths("layers.{i}|{i}", qkv="self_attn.in_proj_*", o="self_attn.out_proj", norms=("norm1", "norm2", "norm")),
    when=(
        When(key="norm_first", value=True, change={"residual": "pre"}),
        When(key="batch_first", value=False, change={"token_axis": 0}),
    ),
)

ARCHITECTURES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        *(BERT, DISTILBERT, ALBERT, MPNET, DEBERTA_V2, MODERNBERT, CRAMMED_BERT),
        *(GPT2, GPT_BIGCODE, GPT_NEO, GPT_NEOX, GPTJ, OPT, BLOOM, FALCON, LLAMA, STABLELM, GRANITE, GRANITE_HYBRID),
        *(GEMMA, GEMMA2, OLMO2, COHERE, PHI, JAMBA, LATENT, GPT_OSS, QWEN3_NEXT),
        *(T5_ENCODER, T5_DECODER, WHISPER_ENCODER, WHISPER_DECODER, BART_ENCODER, BART_DECODER),
        *(VIT, DEIT, BEIT, DINOV2, CLIP_TEXT, CLIP_VISION, SIGLIP_TEXT, SIGLIP_VISION, WAV2VEC2),
        *(TIMM_VIT, TORCH_ENCODER),
    )
}

# --- what has no linear value path ----------------------------------------------------------------------------------

_LINEAR = "linear or recurrent attention: there is no softmax whose rows sum to one"
_NEEDS_CONFIG = "no config says that it is of such a family: keep the right config.json beside the weights"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv7", "xlstm"), _LINEAR),
    "nystromformer": "approximate attention: the rows of its attention matrix do not sum to one",
    "fnet": "there is no attention: tokens are mixed by a fixed Fourier transform",
    "longformer": "global tokens have value weights of their own, so one layer has two value paths",
    "reformer": "hashed attention with shared queries and keys over chunks",
}

UNSAID_NAMES: Mapping[str, str] = {
    "kv_a_layernorm": f"its values are made from a latent, and {_NEEDS_CONFIG}",
    "kv_a_proj_with_mqa": f"its values are made from a latent, and {_NEEDS_CONFIG}",
    "self_attn.sinks": f"its attention has sinks, and {_NEEDS_CONFIG}",
    "self_attn.g_proj": f"its attention is gated, and {_NEEDS_CONFIG}",
    "attn.inner_attn_ln": f"a norm stands between the values and the output projection, and {_NEEDS_CONFIG}",
    "attn.norm.weight": f"a norm stands between the values and the output projection, and {_NEEDS_CONFIG}",
}
"""Tensors that say more than a plain family, or one found by bare names, would use: only a config can mean them."""

REFUSED_NAMES: Mapping[str, str] = {
    "self_attn.bias_k": "a learned token is appended to keys and values, so rows over inputs do not sum to one",
    "albert_layers.1.": "groups of several different shared layers, of which no public model exists",
}


# --- which models are covered: the table that `make families` writes ---

STATES = {
    "declared": "declared by hand, and found and proved by running",
    "discovered": "found and proved by running",
    "refused": "refused, for a reason of mathematics",
    "no attention": "has no softmax self-attention",
    "part": "a config without a model of its own: a part of others",
    "not run": "could not be run with made-up inputs here",
    "not built": "could not be built small here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What is known about one model type."""

    library: str
    name: str
    state: str
    error: float | None
    """Of the equal-token identity, where it was proved."""
    kind: str
    """Why it is refused, in one word."""
    reason: str
    left_out: tuple[str, ...]


@cache
def coverage() -> tuple[Covered, ...]:
    """Every row of the table."""
    return tuple(
        Covered(
            library=library,
            name=name,
            state="declared" if row["state"] == "discovered" and row.get("declared", False) else row["state"],
            error=row.get("error"),
            kind=row.get("kind", ""),
            reason=row.get("reason", ""),
            left_out=tuple(row.get("left_out", ())),
        )
        for library, rows in _table()["rows"].items()
        for name, row in rows.items()
    )


def versions() -> Mapping[str, str]:
    """Versions of the libraries that the table was made with."""
    found: Mapping[str, str] = _table()["versions"]
    return found


def counted(library: str) -> Counter[str]:
    """How many model types of a library are in each state."""
    return Counter(row.state for row in coverage() if row.library == library)


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("oversmooth.models").joinpath("families_table.json").read_text())
    return found
