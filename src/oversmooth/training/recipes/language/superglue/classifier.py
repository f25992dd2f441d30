"""Any text encoder with a small head: the mean over tokens, and over the words that a task points at."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from oversmooth.errors import UnusableEncoder, first_line
from oversmooth.models.live import load_model, register_own_models
from oversmooth.models.opening import open_source

DROPOUT = 0.1


class Classifier(nn.Module):
    """`classifier(dropout(tanh(dense([mean over tokens; mean over span 1; ...]))))`.

    With choices, inputs have one more axis, `(example, choice, token)`, and each choice gets one number.
    """

    def __init__(self, encoder: nn.Module, *, outputs: int, spans: int):
        super().__init__()
        self.encoder, self.spans = encoder, spans
        width = int(encoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.dense = nn.Linear((1 + spans) * width, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(width, outputs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        span_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        lead = input_ids.shape[:-1]
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids.flatten(0, -2)}
        mask = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).flatten(0, -2)
        h = self.encoder(input_ids=input_ids.flatten(0, -2), attention_mask=mask, **more).last_hidden_state
        whole = _mean(h, mask)
        # Nothing is marked where only the encoder is looked at, as by an analysis.
        marked = (
            [whole] * self.spans if span_mask is None else [_mean(h, s) for s in span_mask.flatten(0, -3).unbind(1)]
        )
        features = self.dropout(torch.tanh(self.dense(torch.cat([whole, *marked], -1))))
        logits = self.classifier(features)
        if len(lead) == 2:
            logits = logits.view(lead)
        found = {"logits": logits}
        return found if labels is None else {"loss": F.cross_entropy(logits.float(), labels), **found}


def _mean(h: Tensor, keep: Tensor) -> Tensor:
    """Mean over the kept tokens; zero where none is kept."""
    weights = keep.to(h.dtype)[..., None]
    return (h * weights).sum(1) / weights.sum(1).clamp(min=1)


def load_encoder(checkpoint: str) -> Any:
    """A text encoder from a folder or the hub, trainable, with the dropout of fine-tuning."""
    source = open_source(checkpoint)
    encoder: Any = load_model(source, "finetune")
    config = encoder.config if hasattr(encoder, "config") else None
    if config is None or getattr(encoder, "main_input_name", "") != "input_ids" or config.is_encoder_decoder:
        raise UnusableEncoder(checkpoint, "text into one vector per token", f"a {type(encoder).__name__}")
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = DROPOUT
    if hasattr(config, "hidden_dropout_prob"):
        config.hidden_dropout_prob = DROPOUT
    pooler = getattr(encoder, "pooler", None)
    if isinstance(pooler, nn.Module):
        pooler.requires_grad_(False)  # not on the way to the loss, which distributed training would wait for
    return encoder


def load_tokenizer(checkpoint: str) -> Any:
    """The tokenizer beside the encoder; it has to know where in the text its tokens are."""
    register_own_models()
    from transformers import AutoTokenizer

    place = open_source(checkpoint).place or checkpoint
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=Path(place).is_dir())
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and tokenizers' own
        raise UnusableEncoder(checkpoint, "a tokenizer beside the weights", first_line(error)) from error
    if not tokenizer.is_fast:
        raise UnusableEncoder(checkpoint, "a tokenizer that knows places in the text (tokenizer.json)", "a slow one")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked out, so that any token will do
    return tokenizer


def save_classifier(tokenizer: Any, model: nn.Module, folder: Path) -> None:
    """The encoder as an ordinary checkpoint with its tokenizer, and the head beside it as `head.safetensors`."""
    from safetensors.torch import save_file
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    assert isinstance(model, Classifier)
    model.encoder.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    head = {name: value for name, value in model.state_dict().items() if not name.startswith("encoder.")}
    save_file(head, folder / "head.safetensors", metadata={"format": "pt"})
