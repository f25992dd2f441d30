"""Every mistake a user can make, as exceptions that build their message from fields.

Each message has three parts: what was expected, what was found, and what to do next. The command line prints the
message and exits with code 2; nothing else in the package prints an error or calls `exit`.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

# --- the base of every error that a user can cause, and the words of errors that are not ours ---

LONGEST_FIELD = 500
"""Letters of a field that a message shows."""
LONGEST_PART = 1200
"""Letters of what was found, and of the advice; lists of what is known may need as many."""


class OversmoothError(Exception):
    """Base of every error that is the input's fault, not ours.

    Each kind is a dataclass: its fields are facts, and its text is made from them in one place. Code that handles an
    error reads the fields; nobody searches the text. However large a field is, the text shows a few lines of it.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in ("problem", "next_step"):
            if isinstance(written := vars(cls).get(name), property):
                setattr(cls, name, _bounded(written))

    @property
    def problem(self) -> str:
        """What was expected and what was found, on one line."""
        raise NotImplementedError

    @property
    def next_step(self) -> str:
        """What to do about it; empty where the problem says it."""
        return ""

    def __str__(self) -> str:
        return f"{self.problem}\n{self.next_step}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its fields, so that an error of a worker process arrives whole."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


UNSAFE_ADVICE = ("weights_only", "safe_globals", "trust the", "trusted source")
"""In sentences of torch that advise to run the code in a file."""


def _bounded(written: property) -> property:
    """The same text, from fields of bounded length."""

    def text(self: OversmoothError) -> str:
        brief = type(self).__new__(type(self))
        brief.__dict__.update({name: shown(value) for name, value in vars(self).items()})
        assert written.fget is not None, "the text of an error is made by a function"
        return shortened(written.fget(brief), LONGEST_PART)

    return property(text, doc=written.__doc__)


class _Shown:
    """Stands for a value in a message, whether it is written as it is or as Python writes it."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __format__(self, how: str) -> str:
        return format(self.text, how)


def shown(value: Any) -> Any:
    """A value as messages show it: numbers and short words as they are, of anything large the beginning or the kind."""
    if value is None or isinstance(value, bool | float | OversmoothError):
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**LONGEST_FIELD else _Shown("a number of hundreds of digits")
    if isinstance(value, str):
        return shortened(value, LONGEST_FIELD)
    if type(value) in (list, tuple):
        return type(value)(shown(part) for part in value)
    if isinstance(value, Mapping):
        keys = ", ".join(shortened(repr(key), 60) for key, _ in zip(value, range(3), strict=False))
        is_small = len(value) <= 3 and len(repr(value)) <= LONGEST_FIELD
        return value if is_small else _Shown(f"a {type(value).__name__} of {len(value)} entries ({keys}, ...)")
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _Shown(f"a {type(value).__name__} of shape {shortened(str(tuple(value.shape)), 100)}")
    if hasattr(value, "named_modules"):
        return _Shown(f"a {type(value).__name__}")
    text = repr(value)
    return value if len(text) <= LONGEST_FIELD else _Shown(shortened(text, LONGEST_FIELD))


def shortened(text: str, longest: int) -> str:
    """The beginning and the end of a text that is too long."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end]} [... {len(text) - longest:,} characters ...] {text[-end:]}"


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its name where it says nothing."""
    return (_without_unsafe_advice(str(error)).splitlines() or [type(error).__name__])[0]


def whole_message(error: BaseException, longest: int = 400) -> str:
    """All that another library's error says, in one line of bounded length."""
    return " ".join(_without_unsafe_advice(str(error)).split())[:longest] or type(error).__name__


def _without_unsafe_advice(text: str) -> str:
    """The text as it is; without the sentences that advise to unpickle a file all the same, where there are any."""
    if not any(word in text for word in UNSAFE_ADVICE):
        return text.strip()
    sentences = re.split(r"(?<=[.!?])\s+|\n+", text)
    return " ".join(each for each in sentences if not any(word in each for word in UNSAFE_ADVICE)).strip()


def reason_of(error: OSError) -> str:
    """What the operating system says, without the path, which our own message names."""
    return error.strerror or first_line(error)


def close_to(word: str, known: Iterable[str]) -> str:
    """A sentence with known names that are spelled nearly like the word; empty where there is none."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f" Close: {', '.join(near)}." if near else ""


def some_of(names: Sequence[str], shown: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


# --- errors about changing a model ---


@dataclass(eq=False)
class TooManyValueDirections(OversmoothError):
    n_kv: int
    d_head: int
    d_model: int

    @property
    def problem(self) -> str:
        return (
            f"{self.n_kv} value heads of size {self.d_head} make {self.n_kv * self.d_head} directions of values, more "
            f"than the width {self.d_model}: heads cannot own separate parts of one eigenbasis, so no exact form of "
            "H = V diag(lambda) V^-1 exists for this layer."
        )

    @property
    def next_step(self) -> str:
        return (
            "Leave it out with layers=..., or change its attention instead, for example osm.apply(model, 'attnscale')."
        )


@dataclass(eq=False)
class IllConditioned(OversmoothError):
    bound: float
    limit: float

    @property
    def problem(self) -> str:
        return (
            f"A general eigenbasis has become ill-conditioned: norm(V) norm(V^-1) is {self.bound:.3g}, above "
            f"{self.limit:g}, where the inverse loses its digits."
        )

    @property
    def next_step(self) -> str:
        return "Keep it bounded with max_condition=100, use basis='orthogonal', or lower the learning rate of V."


@dataclass(eq=False)
class CannotControl(OversmoothError):
    """An intervention that has no exact form for this model."""

    intervention: str
    where: str
    reason: str
    alternative: str

    @property
    def problem(self) -> str:
        return f"{self.intervention} cannot be applied to {self.where}: {self.reason}."

    @property
    def next_step(self) -> str:
        return self.alternative


@dataclass(eq=False)
class NotReadBack(OversmoothError):
    """A checkpoint that the plain library would read as another model than the one that was meant."""

    verb: str
    out: str
    found: str
    settings: tuple[str, ...] = ()
    """Names in its config that may be why."""

    @property
    def problem(self) -> str:
        return f"{self.verb} wrote nothing to {self.out}: loaded by the plain library, the new checkpoint {self.found}."

    @property
    def next_step(self) -> str:
        if self.settings:
            return f"Its config has settings that depend on the number of a block: {', '.join(self.settings)}."
        return "Please report this with the config.json of the model."


# --- errors about files: reading, writing, downloading ---


@dataclass(eq=False)
class BrokenFile(OversmoothError):
    """A file that is truncated, corrupt, or contradicts itself."""

    file: str
    expected: str
    found: str
    advice: str = "Download or copy the file again."

    @property
    def problem(self) -> str:
        return f"{self.file} cannot be read: expected {self.expected}, found {self.found}."

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class NotWritable(OversmoothError):
    file: str
    reason: str
    advice: str = "Give a file name in an existing, writable folder."

    @property
    def problem(self) -> str:
        return f"{self.file} cannot be written: {self.reason}."

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class UnsafePickle(OversmoothError):
    file: str
    reason: str

    @property
    def problem(self) -> str:
        return (
            f"{self.file} is a pickle that needs more than tensors to load ({self.reason}); loading it would run code "
            "from the file, so it was refused and nothing was executed."
        )

    @property
    def next_step(self) -> str:
        return "Convert it to safetensors in an environment where you trust the file, then use that."


@dataclass(eq=False)
class PackedWeights(OversmoothError):
    where: str
    packing: str

    @property
    def problem(self) -> str:
        return (
            f"{self.where} stores packed or quantised weights ({self.packing}), which cannot be read exactly, so no "
            "spectrum is computed."
        )

    @property
    def next_step(self) -> str:
        return "Use the original float checkpoint, or a GGUF export (its blocks are dequantised exactly)."


@dataclass(eq=False)
class RemoteUnavailable(OversmoothError):
    url: str
    reason: str
    advice: str = "Check the address and the connection, or use a local copy."
    may_pass: bool = False
    """Whether the same request may succeed later: the network or the server failed, not what was asked for."""

    @property
    def problem(self) -> str:
        return f"{self.url} could not be read: {self.reason}."

    @property
    def next_step(self) -> str:
        return self.advice


# --- errors about models: finding one, understanding its layout, running it ---


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
        family = "Name the family with --model-type (list: oversmooth list architectures)."
        if self.candidates:
            return family
        return (
            "If the model is a class of your own, build it in Python, then: found = osm.discover(model, inputs); "
            f"osm.inspect({self.where!r}, arch=found). If its layout is that of a declared family: {family}"
        )


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
    advice: str = ""

    @property
    def problem(self) -> str:
        return f"`{self.verb}` has to run the model, and {self.target!r} cannot be run: {self.reason}."

    @property
    def next_step(self) -> str:
        return self.advice or f"Its weights can still be read: oversmooth inspect {self.target}"


# --- errors about data, and about running a model on them ---

RUN_ERRORS = (
    *(RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, NotImplementedError),
    *(AssertionError, ArithmeticError, NameError, LookupError, ImportError),
)
"""What a model may raise of inputs that are not for it."""


@dataclass(eq=False)
class NoData(OversmoothError):
    description: str
    skipped: int

    @property
    def problem(self) -> str:
        why = "it is empty"
        if self.skipped:
            why = f"{self.skipped} sequences were skipped because fewer than two tokens remained"
        return f"There is nothing to measure in {self.description}: {why}."

    @property
    def next_step(self) -> str:
        return "Smoothing compares tokens of one sequence: give texts of at least two tokens, or images."


@dataclass(eq=False)
class UnreadableData(OversmoothError):
    data: str
    expected: str
    found: str

    @property
    def problem(self) -> str:
        return f"The data {self.data!r} cannot be used: expected {self.expected}, found {self.found}."


@dataclass(eq=False)
class WrongBatch(OversmoothError):
    """Model and data do not fit each other."""

    expected: str
    found: str
    advice: str

    @property
    def problem(self) -> str:
        return f"The data do not fit the model: expected {self.expected}, found {self.found}."

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class OtherStream(OversmoothError):
    """What the hooks would report is not the residual stream of the model."""

    model: str
    first: str
    second: str

    @property
    def problem(self) -> str:
        return (
            f"The residual stream of {self.model} could not be followed: expected {self.second} to follow from "
            f"{self.first}, found something else that no module explains."
        )

    @property
    def next_step(self) -> str:
        return "Put what acts between the two into an nn.Module of its own, or pass arch= with paths that fit."


@dataclass(eq=False)
class TokensChanged(OversmoothError):
    """Tokens are added or dropped between the blocks of one stack, or inside one of them."""

    where: str
    before: int
    after: int

    @property
    def problem(self) -> str:
        return (
            f"The features of {self.where} are of other tokens than those that the first block reads: expected "
            f"{self.before} tokens, found {self.after}."
        )

    @property
    def next_step(self) -> str:
        return "Measure the blocks before and behind it separately, each as a model of its own."


@dataclass(eq=False)
class PartialReading(OversmoothError):
    """A judgement was asked for of features that are not all that the model does."""

    model: str
    what: str

    @property
    def problem(self) -> str:
        return f"{self.model} cannot be judged: {self.what}."

    @property
    def next_step(self) -> str:
        return "Run osm.discover(model, inputs) to see what was found, and pass arch= with the parts that are missing."


@dataclass(eq=False)
class UnknownTokens(OversmoothError):
    """Text that the model's tokenizer was not made for: what the model sees is mostly its unknown token."""

    unknown: int
    tokens: int
    allowed: float
    examples: Sequence[str] = ()

    @property
    def problem(self) -> str:
        share = self.unknown / self.tokens
        shown = f" For example: {', '.join(map(repr, self.examples))}." if self.examples else ""
        return (
            f"The model's tokenizer does not know {self.unknown} of {self.tokens} tokens ({share:.0%}; at most "
            f"{self.allowed:.0%} are allowed): what happens to them says nothing about real inputs.{shown}"
        )

    @property
    def next_step(self) -> str:
        return (
            "Give data of the kind that the model was trained on (--data), another tokenizer (--tokenizer), token ids "
            "(--ids FILE), or batches of your own; --allow-unknown continues regardless."
        )


@dataclass(eq=False)
class UnknownPreprocessing(OversmoothError):
    """Photographs for a model of which nothing says how it was given photographs in training."""

    model: str

    @property
    def problem(self) -> str:
        return (
            f"Nothing says which mean and standard deviation of pixels {self.model} was trained with, and with wrong ones "
            "it would answer something else."
        )

    @property
    def next_step(self) -> str:
        return "Say them: --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 (those of ImageNet), or 0.5 and 0.5."


@dataclass(eq=False)
class UserCodeFailed(OversmoothError):
    """Code that the user or a plugin handed over raised an error, or did what it must not do."""

    what: str
    found: str

    @property
    def problem(self) -> str:
        return f"{self.what} {self.found}."

    @property
    def next_step(self) -> str:
        return "It is not part of oversmooth: correct it, or leave it out."


@contextmanager
def user_code(what: str, code: object) -> Iterator[None]:
    """Inside, code runs that may not be ours: what a stranger's raises becomes an error that names it."""
    try:
        yield
    except OversmoothError:
        raise
    except Exception as error:  # whatever a stranger's code does
        if is_ours(code):
            raise
        raise UserCodeFailed(what, f"raises {type(error).__name__}: {whole_message(error).rstrip('.')}") from error


def is_ours(code: object) -> bool:
    """Whether a function or class is part of this package."""
    return str(getattr(code, "__module__", "")).partition(".")[0] == "oversmooth"


@dataclass(eq=False)
class NoAttentionMaps(OversmoothError):
    """Attention that cannot be seen, or whose rows do not sum to one."""

    layer: str
    found: str
    advice: str

    @property
    def problem(self) -> str:
        return (
            f"The theory needs the attention probabilities of {self.layer}, each row summing to one; "
            f"found {self.found}."
        )

    @property
    def next_step(self) -> str:
        return self.advice


# --- errors about training: recipes, runs, encoders to fine-tune ---


@dataclass(eq=False)
class BadRecipe(OversmoothError):
    """A recipe with a mistake in it; `mistake` is that of one key, or of several that do not fit each other."""

    recipe: str
    mistake: OversmoothError

    @property
    def problem(self) -> str:
        return f"The recipe {self.recipe} cannot be used: {self.mistake.problem}"

    @property
    def next_step(self) -> str:
        return "Fix it in the file, or override it with --set KEY=VALUE."


@dataclass(eq=False)
class CannotResume(OversmoothError):
    folder: str
    reason: str
    advice: str

    @property
    def problem(self) -> str:
        return f"The run in {self.folder!r} cannot be resumed: {self.reason}."

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class FolderInUse(OversmoothError):
    """Two runs in one folder would overwrite each other's files."""

    folder: str
    holder: str

    @property
    def problem(self) -> str:
        return f"{self.folder!r} is in use: a run there is held by {self.holder}."

    @property
    def next_step(self) -> str:
        return "Wait for it, stop it, or give another folder."


@dataclass(eq=False)
class TrainingStopped(OversmoothError):
    """Something outside of the model ended a run; what was saved before is whole."""

    step: int
    reason: str
    saved: int | None

    @property
    def problem(self) -> str:
        return f"Training stopped after step {self.step}: {self.reason.rstrip('.')}."

    @property
    def next_step(self) -> str:
        if self.saved is None:
            return "No checkpoint was saved yet; run the same command with --resume after fixing that."
        return f"The checkpoint of step {self.saved} is complete; run the same command with --resume after fixing that."


@dataclass(eq=False)
class RunFailed(OversmoothError):
    """A training run in a process of its own that did not finish."""

    command: str
    last_words: str

    @property
    def problem(self) -> str:
        return f"A training run did not finish; its last line was {self.last_words!r}."

    @property
    def next_step(self) -> str:
        return f"Run it alone to see all of its output:\n{self.command}"


@dataclass(eq=False)
class UnusableEncoder(OversmoothError):
    checkpoint: str
    expected: str
    found: str

    @property
    def problem(self) -> str:
        return f"{self.checkpoint!r} cannot be fine-tuned: expected {self.expected}, found {self.found}."

    @property
    def next_step(self) -> str:
        return "Give the folder or hub id of a text encoder (BERT or similar) with its tokenizer."


# --- errors about what was typed: a value, a name, a combination of options ---


@dataclass(eq=False)
class BadValue(OversmoothError):
    """A value outside of what is allowed."""

    name: str
    value: object
    expected: str

    @property
    def problem(self) -> str:
        return f"{self.name} must be {self.expected}; got {self.value!r}."


@dataclass(eq=False)
class MissingValue(OversmoothError):
    """A value without which there is nothing to do."""

    name: str

    @property
    def problem(self) -> str:
        return f"{self.name} must be given."


@dataclass(eq=False)
class UnknownName(OversmoothError):
    """A word that is not in a list."""

    kind: str
    name: object
    known: Sequence[str]

    @property
    def problem(self) -> str:
        known = ", ".join(self.known) or "none"
        return f"Unknown {self.kind} {self.name!r}.{close_to(str(self.name), self.known)} Known: {known}."


@dataclass(eq=False)
class Conflict(OversmoothError):
    """Options of which only one can be given."""

    options: Sequence[str]

    @property
    def problem(self) -> str:
        return f"Give only one of {', '.join(self.options)}."


@dataclass(eq=False)
class NothingChosen(OversmoothError):
    """Options of which one has to be given."""

    options: Sequence[str]

    @property
    def problem(self) -> str:
        return f"Give one of {', '.join(self.options)}."


@dataclass(eq=False)
class GivenTwice(OversmoothError):
    """A list in which every entry must be different."""

    what: str
    value: object

    @property
    def problem(self) -> str:
        return f"{self.what} {self.value!r} is given more than once."


@dataclass(eq=False)
class NameTaken(OversmoothError):
    """A name of the user's own that already means something here."""

    what: str
    name: str

    @property
    def problem(self) -> str:
        return f"There is already a built-in {self.what} called {self.name!r}."

    @property
    def next_step(self) -> str:
        return "Choose another name."


@dataclass(eq=False)
class NotDivisible(OversmoothError):
    """Two sizes that do not go into each other."""

    name: str
    value: int
    divisor_name: str
    divisor: int

    @property
    def problem(self) -> str:
        return f"{self.name} ({self.value}) must be divisible by {self.divisor_name} ({self.divisor})."


@dataclass(eq=False)
class OddNumber(OversmoothError):
    """A size that is split in two."""

    name: str
    value: int
    reason: str

    @property
    def problem(self) -> str:
        return f"{self.name} ({self.value}) must be even: {self.reason}."


@dataclass(eq=False)
class NotSupported(OversmoothError):
    """Something that is understood but does not exist in this combination."""

    what: str
    where: str
    reason: str = ""
    advice: str = ""

    @property
    def problem(self) -> str:
        return f"{self.what} is not supported {self.where}" + (f": {self.reason}." if self.reason else ".")

    @property
    def next_step(self) -> str:
        return self.advice


@dataclass(eq=False)
class DeviceUnavailable(OversmoothError):
    device: str
    reason: str

    @property
    def problem(self) -> str:
        return f"The device {self.device!r} cannot be used: {self.reason.rstrip('.')}."

    @property
    def next_step(self) -> str:
        return "Give a device that torch has on this machine, such as cpu, cuda, cuda:1 or mps."


@dataclass(eq=False)
class ClusterUnavailable(OversmoothError):
    cluster: str
    reason: str

    @property
    def problem(self) -> str:
        return f"{self.cluster} cannot be used: {self.reason.rstrip('.')}."

    @property
    def next_step(self) -> str:
        return "Check --address, try again on a less busy machine, or use --engine process, which needs no cluster."


@dataclass(eq=False)
class WrongShape(OversmoothError):
    what: str
    expected: str
    found: tuple[int, ...]

    @property
    def problem(self) -> str:
        return f"The shape of {self.what} must be {self.expected}; got {self.found}."


@dataclass(eq=False)
class TooFewTokens(OversmoothError):
    """Smoothing compares tokens, and there are not two."""

    sequence: int
    kept: int

    @property
    def problem(self) -> str:
        return (
            f"Sequence {self.sequence} keeps {self.kept} token(s); at least 2 are needed, because tokens are compared."
        )

    @property
    def next_step(self) -> str:
        return "Leave such sequences out, as `measurable(keep)` does."


@dataclass(eq=False)
class NotAGrid(OversmoothError):
    """Tokens that do not form a square image."""

    kept: int
    metric: str

    @property
    def problem(self) -> str:
        return f"{self.metric} needs a square number of tokens, a grid of patches; got {self.kept}."

    @property
    def next_step(self) -> str:
        return "Measure square images, with prefix tokens dropped."


@dataclass(eq=False)
class MissingDependency(OversmoothError):
    package: str
    extra: str
    needed_for: str

    @property
    def problem(self) -> str:
        return f"{self.needed_for} needs the package {self.package!r}, which is not installed."

    @property
    def next_step(self) -> str:
        return f"Install it with: pip install 'oversmooth[{self.extra}]'"
