"""The crammed BERT (Geiping & Goldstein 2023) as an ordinary transformers model: `config.json`, Auto classes, safetensors.

    embedding + scaled sinusoids -> norm -> 16 x [ x + attention(norm(x)); x + gated GELU(norm(x)) ] -> norm -> tied decoder

This file imports nothing of this package: `save_pretrained` copies it beside the weights, so that plain transformers
opens the checkpoint with `trust_remote_code=True`; where this package is installed, `register` makes that unnecessary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IGNORED = -100
"""Label of tokens that are not predicted."""


class CrammedBertConfig(PretrainedConfig):
    """Sizes of the published model; `intermediate_size` counts both halves of the gate: 3072 in, 1536 out."""

    model_type = "crammed-bert"

    def __init__(
        self,
        vocab_size: int = 32768,
        hidden_size: int = 768,
        num_hidden_layers: int = 16,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        max_position_embeddings: int = 128,
        layer_norm_eps: float = 1e-12,
        norm_bias: bool = False,
        initializer_range: float = 0.02,
        hidden_dropout_prob: float = 0.0,
        classifier_dropout: float = 0.1,
        classifier_size: int = 1024,
        pad_token_id: int | None = 0,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.norm_bias = norm_bias
        self.initializer_range = initializer_range
        self.hidden_dropout_prob = hidden_dropout_prob
        self.classifier_dropout = classifier_dropout
        self.classifier_size = classifier_size
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs)


def _norm(config: CrammedBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.norm_bias)


def sinusoids(positions: int, width: int) -> Tensor:
    """`sin(p / 10000^(2k/width))` in even columns and the cosine in odd ones, one row per position."""
    p = torch.arange(positions, dtype=torch.float32)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    table = torch.empty(positions, width)
    table[:, 0::2] = torch.sin(p * frequency)
    table[:, 1::2] = torch.cos(p * frequency)[:, : width // 2]
    return table


class ScaledSinusoids(nn.Module):
    """Sinusoids times one trained number, which starts at `1 / sqrt(width)`."""

    table: Tensor

    def __init__(self, config: CrammedBertConfig):
        super().__init__()
        self.width, self.positions = config.hidden_size, config.max_position_embeddings
        self.scale = nn.Parameter(torch.tensor([self.width**-0.5]))
        self.register_buffer("table", sinusoids(self.positions, self.width), persistent=False)

    def forward(self, length: int) -> Tensor:
        return self.scale * self.table[:length]


class CrammedBertEmbeddings(nn.Module):
    def __init__(self, config: CrammedBertConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.positions = ScaledSinusoids(config)
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        return self.dropout(self.norm(words + self.positions(words.shape[1])))


def _eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * kwargs["scaling"]
    attention = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (F.dropout(attention, kwargs.get("dropout", 0.0)) @ value).transpose(1, 2), attention


class CrammedBertAttention(nn.Module):
    is_causal = False

    def __init__(self, config: CrammedBertConfig):
        super().__init__()
        self.config = config
        self.d_head = config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        batch, token, _ = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(batch, token, 3, -1, self.d_head).permute(2, 0, 3, 1, 4)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _eager_attention
        )
        dropout = self.config.hidden_dropout_prob if self.training else 0.0
        mixed, attention = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.d_head**-0.5)
        return self.output(mixed.reshape(batch, token, -1)), attention


class CrammedBertFeedForward(nn.Module):
    """`W_out (GELU(a) * b)` where `(a, b) = W_in x`."""

    def __init__(self, config: CrammedBertConfig):
        super().__init__()
        self.dense_in = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.dense_out = nn.Linear(config.intermediate_size // 2, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        a, b = self.dense_in(hidden_states).chunk(2, -1)
        return self.dense_out(F.gelu(a) * b)


class CrammedBertLayer(nn.Module):
    def __init__(self, config: CrammedBertConfig):
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = CrammedBertAttention(config)
        self.ffn_norm = _norm(config)
        self.ffn = CrammedBertFeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        branch, attention = self.attention(self.attention_norm(hidden_states), attention_mask)
        hidden_states = hidden_states + self.dropout(branch)
        return hidden_states + self.dropout(self.ffn(self.ffn_norm(hidden_states))), attention


class CrammedBertPreTrainedModel(PreTrainedModel):
    config_class = CrammedBertConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules = ("CrammedBertLayer", "CrammedBertEmbeddings")

    def _init_weights(self, module: nn.Module) -> None:
        """Normal with standard deviation 0.02, norms at one; transformers builds on the meta device, so also tables."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ScaledSinusoids):
            nn.init.constant_(module.scale, module.width**-0.5)
            with torch.no_grad():
                module.table.copy_(sinusoids(module.positions, module.width))


class CrammedBertModel(CrammedBertPreTrainedModel):
    def __init__(self, config: CrammedBertConfig):
        super().__init__(config)
        self.embeddings = CrammedBertEmbeddings(config)
        self.layers = nn.ModuleList(CrammedBertLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = _norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput | tuple[Any, ...]:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give input_ids or inputs_embeds, and not both.")
        hidden_states = self.embeddings(input_ids, inputs_embeds)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_attention = self.config.output_attentions if output_attentions is None else output_attentions
        states, attentions = [hidden_states], []
        for layer in self.layers:
            hidden_states, attention = layer(hidden_states, mask)
            states += [hidden_states] if wants_states else []
            attentions += [attention] if wants_attention else []
        output = BaseModelOutput(
            last_hidden_state=self.final_norm(hidden_states),
            hidden_states=tuple(states) if wants_states else None,
            attentions=tuple(attentions) if wants_attention else None,
        )
        return output if return_dict is not False else output.to_tuple()


class CrammedBertForMaskedLM(CrammedBertPreTrainedModel):
    """Decodes only what is asked for: with `labels`, `logits` has one row per labelled token, in reading order."""

    _tied_weights_keys = {"decoder.weight": "encoder.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: CrammedBertConfig):
        super().__init__(config)
        self.encoder = CrammedBertModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """The loss is the mean over labelled tokens, or their sum over `num_items_in_batch` where a Trainer counts."""
        encoded = self.encoder(input_ids, attention_mask, **kwargs)
        features, loss = encoded.last_hidden_state, None
        if labels is None:
            logits = self.decoder(features)
        else:
            asked = labels.flatten() != IGNORED
            logits = self.decoder(features.flatten(0, 1)[asked])
            total = F.cross_entropy(logits.float(), labels.flatten()[asked], reduction="sum")
            count = asked.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = total / (count.to(total.device) if isinstance(count, Tensor) else count)
        output = MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )
        return output if return_dict is not False else output.to_tuple()


class CrammedBertForSequenceClassification(CrammedBertPreTrainedModel):
    """Mean over tokens, a tanh layer, dropout and a linear classifier, as the published fine-tuning has it."""

    def __init__(self, config: CrammedBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = CrammedBertModel(config)
        self.pooler = nn.Linear(config.hidden_size, config.classifier_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.classifier_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        encoded = self.encoder(input_ids, attention_mask, **kwargs)
        features = encoded.last_hidden_state
        counts = torch.ones(features.shape[:2], device=features.device) if attention_mask is None else attention_mask
        weights = counts.to(features.dtype)[..., None]
        mean = (features * weights).sum(1) / weights.sum(1).clamp(min=1)
        logits = self.classifier(self.dropout(torch.tanh(self.pooler(mean))))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels.flatten())
        output = SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )
        return output if return_dict is not False else output.to_tuple()


def register() -> None:
    """Makes transformers' Auto classes know this model type; calling it again changes nothing."""
    AutoConfig.register(CrammedBertConfig.model_type, CrammedBertConfig, exist_ok=True)
    CrammedBertConfig.register_for_auto_class()
    for auto, model in (
        (AutoModel, CrammedBertModel),
        (AutoModelForMaskedLM, CrammedBertForMaskedLM),
        (AutoModelForSequenceClassification, CrammedBertForSequenceClassification),
    ):
        auto.register(CrammedBertConfig, model, exist_ok=True)
        model.register_for_auto_class(auto.__name__)
