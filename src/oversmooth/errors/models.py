"""Errors about models: finding one, understanding its layout, running it."""

from collections.abc import Sequence
from dataclasses import dataclass

from oversmooth.errors.base import OversmoothError, close_to, some_of


@dataclass(eq=False)
class TargetNotFound(OversmoothError):
    target: str
    tried: Sequence[str]
    advice: str = ""
    """What the last place that was tried advises, such as to log in."""

    @property
    def problem(self) -> str:
        return f"Nothing was found at {self.target!r}. Tried: {'; '.join(self.tried)}."

    @property
    def next_step(self) -> str:
        kinds = "A target is a model folder, a .safetensors, .bin, .pt or .gguf file, a URL, a hub id or a timm name."
        return f"{self.advice} {kinds}".lstrip()


@dataclass(eq=False)
class NoModelInFolder(OversmoothError):
    folder: str
    found: Sequence[str]
    nested: Sequence[str]

    @property
    def problem(self) -> str:
        cut = ", ..." if len(self.found) > 8 else ""
        listing = ", ".join(self.found[:8]) + cut if self.found else "nothing"
        expected = "weights (model.safetensors, its index, pytorch_model.bin or one .gguf)"
        return f"Expected {expected} in {self.folder!r}; found {listing}."

    @property
    def next_step(self) -> str:
        if self.nested:
            return f"Models inside subfolders: {', '.join(self.nested)}. Point at one of them."
        return "Point at the folder or the file that holds the weights."


@dataclass(eq=False)
class AmbiguousFolder(OversmoothError):
    folder: str
    candidates: Sequence[str]

    @property
    def problem(self) -> str:
        return f"{self.folder!r} holds more than one model: {', '.join(self.candidates)}."

    @property
    def next_step(self) -> str:
        example = f"{self.folder.rstrip('/')}/{self.candidates[0]}"
        return f"Point at one file, for example: oversmooth inspect {example}"


@dataclass(eq=False)
class UnknownArchitecture(OversmoothError):
    model_type: str
    known: Sequence[str]

    @property
    def problem(self) -> str:
        near = close_to(self.model_type, self.known)
        return f"No architecture is declared for model_type {self.model_type!r}.{near}"

    @property
    def next_step(self) -> str:
        return (
            f"Declared: {', '.join(sorted(self.known))}.\n"
            "If it has the same layout as one of these, name that with --model-type; "
            "to add it: docs/guides/add-an-architecture.md."
        )


@dataclass(eq=False)
class UnidentifiedWeights(OversmoothError):
    where: str
    candidates: Sequence[str]
    example: Sequence[str]

    @property
    def problem(self) -> str:
        if self.candidates:
            found = f"its tensor names fit {', '.join(self.candidates)}, which differ in mathematics"
        else:
            found = f"its tensor names fit no declared family (for example {', '.join(self.example)})"
        return f"{self.where} has no config.json that names a model_type, and {found}."

    @property
    def next_step(self) -> str:
        return "Name the family with --model-type (list: oversmooth architectures)."


@dataclass(eq=False)
class NotDiscovered(OversmoothError):
    """A model whose value path was to be found by running it, and was not found or not proved."""

    model: str
    found: str
    advice: str

    @property
    def problem(self) -> str:
        return f"The value path of {self.model} was to be found by running it, but {self.found}."

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class RefusedArchitecture(OversmoothError):
    model: str
    reason: str
    kind: str = "declared"
    """What stands in the way, in one word: gate, norm, sink, latent, ...; `declared` where a table says so."""

    @property
    def problem(self) -> str:
        return f"{self.model} has no linear value path, so H = W_V W_O does not exist for it: {self.reason}."

    @property
    def next_step(self) -> str:
        return "The theory does not apply to its attention; no number is shown rather than a wrong one."


@dataclass(eq=False)
class ForgottenBake(OversmoothError):
    """A checkpoint of a constrained model, written by a version that saved no ordinary weights beside its eigenbasis."""

    target: str
    tensor: str

    @property
    def problem(self) -> str:
        return (
            f"{self.target} was saved from a sharpened, smoothed or constrained model before `osm.bake`: it holds "
            f"{self.tensor} and no value and output weights, which transformers and timm would fill with random numbers."
        )

    @property
    def next_step(self) -> str:
        return (
            "Build the model, call `osm.sharpen`, `osm.smooth` or `osm.constrain` with the options it was trained with, "
            "load this state dict into it, then save it again."
        )


@dataclass(eq=False)
class OtherModel(OversmoothError):
    """Two measurements that cannot be compared with each other."""

    what: str
    before: object
    after: object

    @property
    def problem(self) -> str:
        return (
            f"The saved analysis is of another model or of other data: {self.what} was {self.before}, is {self.after}."
        )

    @property
    def next_step(self) -> str:
        return "Compare analyses of one architecture on the same data, with the same options."


@dataclass(eq=False)
class ConfigMismatch(OversmoothError):
    what: str
    config_says: object
    tensors_say: object
    where: str

    @property
    def problem(self) -> str:
        return (
            f"The config and the tensors disagree about {self.what}: the config says {self.config_says}, {self.where} "
            f"says {self.tensors_say}."
        )

    @property
    def next_step(self) -> str:
        return "Check that config.json belongs to these weights."


@dataclass(eq=False)
class BadConfig(OversmoothError):
    """A field of a config that no model can have."""

    key: str
    expected: str
    found: str

    @property
    def problem(self) -> str:
        return f"The field {self.key!r} of the config must be {self.expected}; got {self.found}."

    @property
    def next_step(self) -> str:
        return "Use the config.json that came with these weights."


@dataclass(eq=False)
class AdapterMismatch(OversmoothError):
    """The declaration of a family does not fit this very model."""

    family: str
    expected: str
    found: str

    @property
    def problem(self) -> str:
        return (
            f"The declaration of {self.family!r} does not fit this model: expected {self.expected}, found {self.found}."
        )

    @property
    def next_step(self) -> str:
        return "If the model is a variant of that family, please report it with its config.json."


@dataclass(eq=False)
class HeadsUnknown(OversmoothError):
    where: str
    reason: str

    @property
    def problem(self) -> str:
        return f"{self.where} does not say how many attention heads it has, and {self.reason}."

    @property
    def next_step(self) -> str:
        return "Give them with --n-heads (and --n-kv)."


@dataclass(eq=False)
class IncompleteWeights(OversmoothError):
    """A checkpoint without some of the weights that its model needs; libraries would fill them with random numbers."""

    target: str
    missing: Sequence[str]
    mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """Name, shape in the file, shape in the model."""
    unused: Sequence[str] = ()
    """Names in the file that the model does not have."""

    @property
    def problem(self) -> str:
        found = [f"{len(self.missing)} missing ({some_of(self.missing)})"] if self.missing else []
        if self.mismatched:
            shapes = [f"{name}: {file} in the file, {model} in the model" for name, file, model in self.mismatched]
            found.append(f"{len(self.mismatched)} of another shape ({some_of(shapes)})")
        left = f" Names in the file that the model does not have: {some_of(self.unused)}." if self.unused else ""
        return f"{self.target!r} does not hold every weight that its model needs: {' and '.join(found)}.{left}"

    @property
    def next_step(self) -> str:
        return (
            "They would be filled with random numbers, so nothing is run. "
            "Check that config.json belongs to these weights."
        )


@dataclass(eq=False)
class NotLive(OversmoothError):
    target: str
    verb: str
    reason: str

    @property
    def problem(self) -> str:
        return f"`{self.verb}` has to run the model, and {self.target!r} cannot be run: {self.reason}."

    @property
    def next_step(self) -> str:
        return f"Its weights can still be read: oversmooth inspect {self.target}"
