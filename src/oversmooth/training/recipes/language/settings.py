"""The sections of a language recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oversmooth.errors import NotDivisible, OddNumber
from oversmooth.training.recipes.schema import Count, Recipe, Section, Share, Text

Positive = Annotated[float, Field(gt=0)]


class Data(Section):
    """Where the text comes from when `--data` does not say it, and how it becomes sequences."""

    source: Text
    """`python-docs` (the documentation inside the running Python), a file, a folder, or an id on the hub."""
    vocab_size: Annotated[int, Field(ge=64, le=65536)] = 32768
    length: Annotated[int, Field(ge=8)] = 128
    trash_cutoff: Annotated[float, Field(ge=0)] = 0.25
    """Documents with more tokens per character are dropped; 0 keeps all."""
    order: Literal["sentence-length", "as-read"] = "sentence-length"
    english_keyboard: bool = True
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Share of documents that are never trained on and that every run is judged on."""
    tuning_sequences: Annotated[int, Field(ge=0)] = 0
    """So many training sequences, the last that were read, are left out of training and judged instead of those documents:
    for choices, such as that of a learning rate."""
    max_documents: Annotated[int, Field(ge=0)] = 0
    max_sequences: Annotated[int, Field(ge=0)] = 0
    tokenizer_documents: Annotated[int, Field(ge=0)] = 0
    """Limits; 0: all."""


class Model(Section):
    """A crammed BERT."""

    layers: Count
    width: Count
    heads: Count
    feed_forward: Count
    """Rows of the gated layer, both halves together."""
    dropout: Share = 0.0
    initial_deviation: Positive = 0.02
    norm_epsilon: Positive = 1e-12

    @model_validator(mode="after")
    def _sizes_divide(self) -> "Model":
        if self.width % self.heads:
            raise NotDivisible("model.width", self.width, "model.heads", self.heads)
        if self.feed_forward % 2:
            raise OddNumber("model.feed_forward", self.feed_forward, "its gate takes one half")
        return self


class Training(Section):
    """The budget, and everything that follows it."""

    budget_hours: Annotated[float, Field(ge=0)] = 0.0
    """Of wall clock; the run is then not repeatable. 0: the budget is `steps`."""
    steps: Count
    """Optimizer steps; with `budget_hours`, a limit that should never be reached."""
    batch: Count
    """Sequences of one optimizer step once the ramp is over, over all devices."""
    ramp: Share = 0.0
    """Share of the budget over which the batch grows linearly; 0: it has its size from the start."""
    ramp_quantum: Count = 1
    """The batch grows by so many sequences at a time."""
    peak_at: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of the budget at which the rate is highest."""
    start_share: Share = 0.25
    """The rate at the start, as a share of the highest."""
    mask: Annotated[float, Field(gt=0, lt=1)] = 0.25
    shuffle: bool = False
    """Another order in every epoch; otherwise that of the corpus, which may be a curriculum."""

    @model_validator(mode="after")
    def _quantum_divides(self) -> "Training":
        if self.ramp and self.batch % self.ramp_quantum:
            raise NotDivisible("training.batch", self.batch, "training.ramp_quantum", self.ramp_quantum)
        return self


class Watch(Section):
    """How often things are written, in optimizer steps."""

    log_every: Count = 50
    monitor_every: Count = 500
    evaluate_every: Count = 500
    save_every: Count = 500
    validation_sequences: Count = 1024
    probe_sequences: Count = 16
    """Held-out sequences on which smoothing is measured."""


class LanguageRecipe(Recipe):
    """A run of masked language modelling."""

    kind: Literal["language"]
    data: Data
    model: Model
    training: Training
    watch: Watch = Watch()

    def model_arguments(self, vocabulary: int) -> dict[str, Any]:
        """Keyword arguments of `CrammedBertConfig`."""
        return {
            "vocab_size": vocabulary,
            "hidden_size": self.model.width,
            "num_hidden_layers": self.model.layers,
            "num_attention_heads": self.model.heads,
            "intermediate_size": self.model.feed_forward,
            "max_position_embeddings": self.data.length,
            "layer_norm_eps": self.model.norm_epsilon,
            "initializer_range": self.model.initial_deviation,
            "hidden_dropout_prob": self.model.dropout,
        }
