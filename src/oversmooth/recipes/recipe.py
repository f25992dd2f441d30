"""`Recipe`, read from TOML; `Job`, what a recipe becomes; learning rate schedules.

A kind (`recipes/vision`, `recipes/language`) derives its own model from `Recipe` and adds sections. Keys are words; a
recipe that has a key too many, a value out of range or a word that is not allowed is refused with that key.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from oversmooth.data.batches import Batch
from oversmooth.environment.files import DEEPEST, read_text_file, toml_tables
from oversmooth.errors import BadRecipe, BadValue, BrokenFile, MissingValue, OversmoothError, UnknownName

SHIPPED = Path(__file__).parent
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Depth = Annotated[int, Field(ge=1, le=1000)]
"""Layers; the deepest Transformer that was ever trained has a thousand."""
Width = Annotated[int, Field(ge=1, le=65_536)]
LARGEST_BLOCKS = 10_000_000_000
"""Parameters of all blocks; beyond it, a typing error is likelier than a machine for it."""
Text = Annotated[str, Field(min_length=1)]


class RecipeSection(BaseModel):
    """A table of a recipe: frozen, and without keys that nobody reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Optimizer(RecipeSection):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    betas: tuple[Share, Share] = (0.9, 0.999)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Largest norm of all gradients together; 0 does not clip."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of transformers' `TrainingArguments`."""
        return {
            "optim": "adamw_torch",
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "adam_beta1": self.betas[0],
            "adam_beta2": self.betas[1],
            "adam_epsilon": self.epsilon,
            "max_grad_norm": self.clip_norm,
        }


class Hardware(RecipeSection):
    """What does not change the result beyond rounding."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that prepare data, for each training process."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Examples that fit on one device at once; the rest of the batch is accumulated. 0: the whole share at once."""


def require_possible(depth: int, width: int, feed_forward: int | float) -> None:
    """Raises where a model of these sizes would never be built; four matrices of attention, two of the feed-forward."""
    parameters = depth * width * (4 * width + 2 * feed_forward)
    if parameters > LARGEST_BLOCKS:
        raise BadValue("The parameters of the model's blocks", f"{parameters:.3g}", f"at most {LARGEST_BLOCKS:.0e}")


class VariantOptions(RecipeSection):
    """How `--variant sharpen` and `smooth` are applied."""

    basis: Literal["orthogonal", "general"] = "orthogonal"
    positive_norms: bool = False


class Recipe(RecipeSection):
    """What recipes of every kind have."""

    kind: str
    budget: Text
    """What a run costs, in words."""
    expected: Text
    """The result to expect, and where that is known from."""
    optimizer: Optimizer
    hardware: Hardware = Hardware()
    variant: VariantOptions = VariantOptions()


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def shipped_recipes() -> dict[str, Path]:
    """Names of the recipes that come with the package, and their files."""
    return {path.stem: path for path in sorted(SHIPPED.rglob("*.toml"))}


def read_recipe(name: str) -> dict[str, Any]:
    """The tables of a shipped recipe, or of a file of the user's own."""
    path = Path(name)
    known = shipped_recipes()
    if path.suffix != ".toml" and name not in known:
        raise UnknownName("recipe", name, [*known, "or a file that ends in .toml"])
    path = known.get(name, path)
    return toml_tables(read_text_file(path, "a recipe in TOML"), str(path), "a recipe in TOML")


def overridden(tables: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The tables with every `section.key=value` put in; values are written as in TOML, words without quotes."""
    changed: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise BadValue("--set", setting, "section.key=value, such as training.epochs=10")
        *sections, last = key.strip().split(".")
        if len(sections) > DEEPEST:
            raise BadValue("--set", f"{setting[:80]}...", "section.key=value, such as training.epochs=10")
        table = changed
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise BadValue("--set", setting, f"section.key=value, and {section!r} is a key, not a section")
        table[last] = _value(text.strip(), f"--set {key.strip()}")
    return changed


def _value(text: str, where: str) -> Any:
    """A value as TOML writes it; what is none is a word, except where it is too deep or too long for anybody to mean it."""
    try:
        return toml_tables(f"value = {text}", where, "a value")["value"]
    except BrokenFile as error:
        if isinstance(error.__cause__, TOMLDecodeError):
            return text
        raise BadValue(where, f"{text[:40]}...", f"a value that can be read: {error.found}") from error


def parsed(model: type[AnyRecipe], tables: Mapping[str, Any], where: str) -> AnyRecipe:
    """The recipe, or the first thing that is wrong with it: the key, the value and what is allowed."""
    try:
        return model.model_validate(dict(tables))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UnknownName(f"key of the recipe {where}", key, _keys(model)) from error
        if first["type"] == "missing":
            raise BadRecipe(where, MissingValue(key)) from error
        expected = str(first["msg"]).removeprefix("Input should be ")
        raise BadRecipe(where, BadValue(key, first["input"], expected)) from error
    except OversmoothError as mistake:  # from our own validators: keys that do not fit each other
        raise BadRecipe(where, mistake) from mistake


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a recipe, with its sections."""
    found = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found += _keys(inner, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]  # type: ignore[arg-type]
    return found


# --- what the runner is given: everything about one training run, and nothing about where it is written ---

Numbers = dict[str, float]
Evaluate = Callable[[Dataset[Any], str], Numbers]
"""Called with a dataset and a word that its numbers start with; returns the job's metrics on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """How often things happen, in optimizer steps."""

    log: int
    monitor: int
    evaluate: int
    save: int
    keep_checkpoints: int = 2


class EpochSampler(Sampler[Any]):
    """Examples in the order of one epoch; the runner sets `epoch` before each, so a resumed run sees the same order."""

    epoch: int = 0


@runtime_checkable
class SavedState(Protocol):
    """Something that goes on where it was when a run is resumed."""

    def save(self, folder: Path) -> None:
        """Into the folder of a checkpoint."""

    def load(self, folder: Path) -> None:
        """From the folder of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: how the model is built, what it learns from, how it is judged and saved."""

    recipe: Recipe
    build: Callable[[], nn.Module]
    """A fresh model; called after seeding."""
    train: Dataset[Any]
    evaluate: Dataset[Any] | None
    collate: Callable[[list[Any]], dict[str, Any]]
    """Examples to the keyword arguments of the model, and `labels`; called in the workers."""
    collate_evaluation: Callable[[list[Any]], dict[str, Any]]
    steps: int
    batch: int
    """Examples of one optimizer step, over all processes and accumulated parts."""
    learning_rate: Callable[[int, int], float]
    """The rate of a step, from its number and the number of all steps."""
    rhythm: Intervals
    probe: Sequence[Batch]
    """Batches on which smoothing is measured during training and at the end."""
    save: Callable[[nn.Module, Path], None]
    """Writes a model with ordinary weights into a folder, in the format of its own library."""
    saved_part: str = ""
    """Path of the submodule that `save` writes as a checkpoint; empty where it is the whole model."""
    sampler: EpochSampler | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    """Mean loss from outputs and labels; without it the model returns its own."""
    metrics: Callable[[Any], Numbers] | None = None
    """Numbers from transformers' `EvalPrediction`."""
    decays: Callable[[str, nn.Parameter], bool] = lambda name, parameter: parameter.ndim > 1
    """Whether weight decay acts on a parameter."""
    ema_decay: float | None = None
    """Also keep an exponential moving average of the weights."""
    final: Callable[[Evaluate], Numbers] | None = None
    """More numbers about the trained model, such as accuracy on other data."""
    preview: Callable[[Path], None] | None = None
    """Writes something to look at before training into the folder of the run."""
    callbacks: Sequence[Any] = ()
    """More callbacks of transformers."""
    state: SavedState | None = None
    """Saved and loaded with every checkpoint."""
    trainer_base: Callable[[], type] | None = None
    """A subclass of transformers' Trainer to build on, where a kind has to change its steps."""
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More `TrainingArguments`; they win over those of the runner."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest should say about the data: sources, sizes and hashes of splits."""


# --- learning rates as functions of the step ---


def warm_cosine(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    cosine_steps: int,
    start: float = 0.0,
    minimum: float = 0.0,
    warmup_first: bool,
) -> float:
    """Linear from `start` to `peak`, then half a cosine to `minimum`.

    `warmup_first`: the whole cosine follows the warm-up; otherwise the warm-up covers its beginning, as in timm and DeiT,
    and the rate joins the cosine where it is by then.
    """
    if step < warmup_steps:
        return start + (peak - start) * step / warmup_steps
    done = (step - warmup_steps if warmup_first else step) / max(1, cosine_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
