"""Every mistake a user can make, as exceptions that build their message from fields.

Each message has three parts: what was expected, what was found, and what to do next. The command line prints the
message and exits with code 2; nothing else in the package prints an error or calls `exit`.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, dataclass_transform

# --- the base of every error that a user can cause, and the words of errors that are not ours ---

LONGEST_FIELD = 500
"""Letters of a field that a message shows."""
LONGEST_PART = 1200
"""Letters of what was found, and of the advice; lists of what is known may need as many."""


@dataclass_transform(eq_default=False)
class OversmoothError(Exception):
    """Base of every error that is the input's fault, not ours.

    Each kind is a dataclass: its fields are facts, and its text is made from them in one place. Code that handles an
    error reads the fields; nobody searches the text. However large a field is, the text shows a few lines of it.
    """

    says: ClassVar[str] = ""
    """What was expected and what was found, with the fields in braces."""
    advises: ClassVar[str] = ""
    """What to do next; the field `advice` where a kind has one, empty where the problem says it."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        dataclass(eq=False)(cls)

    def describe(self) -> str:
        """The problem; a kind whose words depend on its fields writes its own."""
        return self.says.format(**vars(self))

    def advise(self) -> str:
        """The next step; a kind whose advice depends on its fields writes its own."""
        return self.advises.format(**vars(self)) or str(vars(self).get("advice", ""))

    @property
    def problem(self) -> str:
        """What was expected and what was found, on one line."""
        return shortened(self._with_short_fields().describe(), LONGEST_PART)

    @property
    def next_step(self) -> str:
        """What to do about it; empty where the problem says it."""
        return shortened(self._with_short_fields().advise(), LONGEST_PART)

    def _with_short_fields(self) -> "OversmoothError":
        brief = type(self).__new__(type(self))
        brief.__dict__.update({name: shown(value) for name, value in vars(self).items()})
        return brief

    def __str__(self) -> str:
        return f"{self.problem}\n{self.next_step}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its fields, so that an error of a worker process arrives whole."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


UNSAFE_ADVICE = ("weights_only", "safe_globals", "trust the", "trusted source")
"""In sentences of torch that advise to run the code in a file."""


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


def reason_of(error: Exception) -> str:
    """What the operating system says, without the path, which our own message names; of other errors the first line."""
    return getattr(error, "strerror", None) or first_line(error)


def close_to(word: str, known: Iterable[str]) -> str:
    """A sentence with known names that are spelled nearly like the word; empty where there is none."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f" Close: {', '.join(near)}." if near else ""


def some_of(names: Sequence[str], shown: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


# --- errors about changing a model ---


class IllConditioned(OversmoothError):
    bound: float
    limit: float
    says = (
        "A general eigenbasis has become ill-conditioned: norm(V) norm(V^-1) is {bound:.3g}, above "
        "{limit:g}, where the inverse loses its digits."
    )
    advises = "Keep it bounded with max_condition=100, use basis='orthogonal', or lower the learning rate of V."


class CannotControl(OversmoothError):
    """An intervention that has no exact form for this model."""

    intervention: str
    where: str
    reason: str
    alternative: str
    says = "{intervention} cannot be applied to {where}: {reason}."
    advises = "{alternative}"


class NotReadBack(OversmoothError):
    """A checkpoint that the plain library would read as another model than the one that was meant."""

    verb: str
    out: str
    found: str
    settings: tuple[str, ...] = ()
    """Names in its config that may be why."""
    says = "{verb} wrote nothing to {out}: loaded by the plain library, the new checkpoint {found}."

    def advise(self) -> str:
        if self.settings:
            return f"Its config has settings that depend on the number of a block: {', '.join(self.settings)}."
        return "Please report this with the config.json of the model."


# --- errors about files: reading, writing, downloading ---


class BrokenFile(OversmoothError):
    """A file that is truncated, corrupt, or contradicts itself."""

    file: str
    expected: str
    found: str
    advice: str = "Download or copy the file again."
    says = "{file} cannot be read: expected {expected}, found {found}."


class NotWritable(OversmoothError):
    file: str
    reason: str
    advice: str = "Give a file name in an existing, writable folder."
    says = "{file} cannot be written: {reason}."


class UnsafePickle(OversmoothError):
    file: str
    reason: str
    says = (
        "{file} is a pickle that needs more than tensors to load ({reason}); loading it would run code "
        "from the file, so it was refused and nothing was executed."
    )
    advises = "Convert it to safetensors in an environment where you trust the file, then use that."


class PackedWeights(OversmoothError):
    where: str
    packing: str
    says = (
        "{where} stores packed or quantised weights ({packing}), which cannot be read exactly, so no "
        "spectrum is computed."
    )
    advises = "Use the original float checkpoint, or a GGUF export (its blocks are dequantised exactly)."


class RemoteUnavailable(OversmoothError):
    url: str
    reason: str
    advice: str = "Check the address and the connection, or use a local copy."
    may_pass: bool = False
    """Whether the same request may succeed later: the network or the server failed, not what was asked for."""
    says = "{url} could not be read: {reason}."


# --- errors about models: finding one, understanding its layout, running it ---


class TargetNotFound(OversmoothError):
    target: str
    tried: Sequence[str]
    advice: str = ""
    """What the last place that was tried advises, such as to log in."""

    def describe(self) -> str:
        return f"Nothing was found at {self.target!r}. Tried: {'; '.join(self.tried)}."

    def advise(self) -> str:
        kinds = "A target is a model folder, a .safetensors, .bin, .pt or .gguf file, a URL, a hub id or a timm name."
        return f"{self.advice} {kinds}".lstrip()


class NoModelInFolder(OversmoothError):
    folder: str
    found: Sequence[str]
    nested: Sequence[str]

    def describe(self) -> str:
        cut = ", ..." if len(self.found) > 8 else ""
        listing = ", ".join(self.found[:8]) + cut if self.found else "nothing"
        expected = "weights (model.safetensors, its index, pytorch_model.bin or one .gguf)"
        return f"Expected {expected} in {self.folder!r}; found {listing}."

    def advise(self) -> str:
        if self.nested:
            return f"Models inside subfolders: {', '.join(self.nested)}. Point at one of them."
        return "Point at the folder or the file that holds the weights."


class AmbiguousFolder(OversmoothError):
    folder: str
    candidates: Sequence[str]

    def describe(self) -> str:
        return f"{self.folder!r} holds more than one model: {', '.join(self.candidates)}."

    def advise(self) -> str:
        example = f"{self.folder.rstrip('/')}/{self.candidates[0]}"
        return f"Point at one file, for example: oversmooth inspect {example}"


class UnknownArchitecture(OversmoothError):
    model_type: str
    known: Sequence[str]

    def describe(self) -> str:
        near = close_to(self.model_type, self.known)
        return f"No architecture is declared for model_type {self.model_type!r}.{near}"

    def advise(self) -> str:
        return (
            f"Declared: {', '.join(sorted(self.known))}.\n"
            "If it has the same layout as one of these, name that with --model-type; "
            "to add it: docs/guides/add-an-architecture.md."
        )


class UnidentifiedWeights(OversmoothError):
    where: str
    candidates: Sequence[str]
    example: Sequence[str]

    def describe(self) -> str:
        if self.candidates:
            found = f"its tensor names fit {', '.join(self.candidates)}, which differ in mathematics"
        else:
            found = f"its tensor names fit no declared family (for example {', '.join(self.example)})"
        return f"{self.where} has no config.json that names a model_type, and {found}."

    def advise(self) -> str:
        family = "Name the family with --model-type (list: oversmooth list architectures)."
        if self.candidates:
            return family
        return (
            "If the model is a class of your own, build it in Python, then: found = osm.discover(model, inputs); "
            f"osm.inspect({self.where!r}, arch=found). If its layout is that of a declared family: {family}"
        )


class NotDiscovered(OversmoothError):
    """A model whose value path could not be found, or not be proved, by running it."""

    model: str
    found: str
    advice: str
    says = "Could not discover the value path of {model}: {found}."


class RefusedArchitecture(OversmoothError):
    model: str
    reason: str
    kind: str = "declared"
    """What stands in the way, in one word: gate, norm, sink, latent, ...; `declared` where a table says so."""
    says = "{model} has no linear value path, so H = W_V W_O does not exist for it: {reason}."
    advises = "The theory does not apply to its attention; no number is shown rather than a wrong one."


class ForgottenBake(OversmoothError):
    """A checkpoint of a constrained model, written by a version that saved no ordinary weights beside its eigenbasis."""

    target: str
    tensor: str
    says = (
        "{target} was saved from a sharpened, smoothed or constrained model before `osm.bake`: it holds "
        "{tensor} and no value and output weights, which transformers and timm would fill with random numbers."
    )
    advises = (
        "Build the model, call `osm.sharpen`, `osm.smooth` or `osm.constrain` with the options it was trained with, "
        "load this state dict into it, then save it again."
    )


class OtherModel(OversmoothError):
    """Two measurements that cannot be compared with each other."""

    what: str
    before: object
    after: object
    says = "The saved analysis is of another model or of other data: {what} was {before}, is {after}."
    advises = "Compare analyses of one architecture on the same data, with the same options."


class ConfigMismatch(OversmoothError):
    what: str
    config_says: object
    tensors_say: object
    where: str
    says = (
        "The config and the tensors disagree about {what}: the config says {config_says}, {where} says {tensors_say}."
    )
    advises = "Check that config.json belongs to these weights."


class BadConfig(OversmoothError):
    """A field of a config that no model can have."""

    key: str
    expected: str
    found: str
    says = "The field {key!r} of the config must be {expected}; got {found}."
    advises = "Use the config.json that came with these weights."


class AdapterMismatch(OversmoothError):
    """The declaration of a family does not fit this very model."""

    family: str
    expected: str
    found: str
    says = "The declaration of {family!r} does not fit this model: expected {expected}, found {found}."
    advises = "If the model is a variant of that family, please report it with its config.json."


class HeadsUnknown(OversmoothError):
    where: str
    reason: str
    says = "{where} does not say how many attention heads it has, and {reason}."
    advises = "Give them with --n-heads (and --n-kv)."


class IncompleteWeights(OversmoothError):
    """A checkpoint without some of the weights that its model needs; libraries would fill them with random numbers."""

    target: str
    missing: Sequence[str]
    mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """Name, shape in the file, shape in the model."""
    unused: Sequence[str] = ()
    """Names in the file that the model does not have."""

    def describe(self) -> str:
        found = [f"{len(self.missing)} missing ({some_of(self.missing)})"] if self.missing else []
        if self.mismatched:
            shapes = [f"{name}: {file} in the file, {model} in the model" for name, file, model in self.mismatched]
            found.append(f"{len(self.mismatched)} of another shape ({some_of(shapes)})")
        left = f" Names in the file that the model does not have: {some_of(self.unused)}." if self.unused else ""
        return f"{self.target!r} does not hold every weight that its model needs: {' and '.join(found)}.{left}"

    advises = (
        "They would be filled with random numbers, so nothing is run. Check that config.json belongs to these weights."
    )


class NotLive(OversmoothError):
    target: str
    verb: str
    reason: str
    advice: str = ""
    says = "`{verb}` has to run the model, and {target!r} cannot be run: {reason}."

    def advise(self) -> str:
        return self.advice or f"Its weights can still be read: oversmooth inspect {self.target}"


# --- errors about data, and about running a model on them ---

RUN_ERRORS = (
    *(RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, NotImplementedError),
    *(AssertionError, ArithmeticError, NameError, LookupError, ImportError),
)
"""What a model may raise of inputs that are not for it."""


class NoData(OversmoothError):
    description: str
    skipped: int

    def describe(self) -> str:
        why = "it is empty"
        if self.skipped:
            why = f"{self.skipped} sequences were skipped because fewer than two tokens remained"
        return f"There is nothing to measure in {self.description}: {why}."

    advises = "Smoothing compares tokens of one sequence: give texts of at least two tokens, or images."


class UnreadableData(OversmoothError):
    data: str
    expected: str
    found: str
    says = "The data {data!r} cannot be used: expected {expected}, found {found}."


class WrongBatch(OversmoothError):
    """Model and data do not fit each other."""

    expected: str
    found: str
    advice: str
    says = "The data do not fit the model: expected {expected}, found {found}."


class OtherStream(OversmoothError):
    """What the hooks would report is not the residual stream of the model."""

    model: str
    first: str
    second: str
    says = (
        "The residual stream of {model} could not be followed: expected {second} to follow from "
        "{first}, found something else that no module explains."
    )
    advises = "Put what acts between the two into an nn.Module of its own, or pass arch= with paths that fit."


class TokensChanged(OversmoothError):
    """Tokens are added or dropped between the blocks of one stack, or inside one of them."""

    where: str
    before: int
    after: int
    says = (
        "The features of {where} are of other tokens than those that the first block reads: expected "
        "{before} tokens, found {after}."
    )
    advises = "Measure the blocks before and behind it separately, each as a model of its own."


class PartialReading(OversmoothError):
    """A judgement was asked for of features that are not all that the model does."""

    model: str
    what: str
    says = "{model} cannot be judged: {what}."
    advises = "Run osm.discover(model, inputs) to see what was found, and pass arch= with the parts that are missing."


class UnknownTokens(OversmoothError):
    """Text that the model's tokenizer was not made for: what the model sees is mostly its unknown token."""

    unknown: int
    tokens: int
    allowed: float
    examples: Sequence[str] = ()

    def describe(self) -> str:
        share = self.unknown / self.tokens
        shown = f" For example: {', '.join(map(repr, self.examples))}." if self.examples else ""
        return (
            f"The model's tokenizer does not know {self.unknown} of {self.tokens} tokens ({share:.0%}; at most "
            f"{self.allowed:.0%} are allowed): what happens to them says nothing about real inputs.{shown}"
        )

    advises = (
        "Give data of the kind that the model was trained on (--data), another tokenizer (--tokenizer), token ids "
        "(--ids FILE), or batches of your own; --allow-unknown continues regardless."
    )


class UserCodeFailed(OversmoothError):
    """Code that the user or a plugin handed over raised an error, or did what it must not do."""

    what: str
    found: str
    says = "{what} {found}."
    advises = "It is not part of oversmooth: correct it, or leave it out."


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


class NoAttentionMaps(OversmoothError):
    """Attention that cannot be seen, or whose rows do not sum to one."""

    layer: str
    found: str
    advice: str
    says = "The theory needs the attention probabilities of {layer}, each row summing to one; found {found}."


# --- errors about training: recipes, runs, encoders to fine-tune ---


class BadRecipe(OversmoothError):
    """A recipe with a mistake in it; `mistake` is that of one key, or of several that do not fit each other."""

    recipe: str
    mistake: OversmoothError
    says = "The recipe {recipe} cannot be used: {mistake.problem}"
    advises = "Fix it in the file, or override it with --set KEY=VALUE."


class CannotResume(OversmoothError):
    folder: str
    reason: str
    advice: str
    says = "The run in {folder!r} cannot be resumed: {reason}."


class FolderInUse(OversmoothError):
    """Two runs in one folder would overwrite each other's files."""

    folder: str
    holder: str
    says = "{folder!r} is in use: a run there is held by {holder}."
    advises = "Wait for it, stop it, or give another folder."


class TrainingStopped(OversmoothError):
    """Something outside of the model ended a run; what was saved before is whole."""

    step: int
    reason: str
    saved: int | None

    def describe(self) -> str:
        return f"Training stopped after step {self.step}: {self.reason.rstrip('.')}."

    def advise(self) -> str:
        if self.saved is None:
            return "No checkpoint was saved yet; run the same command with --resume after fixing that."
        return f"The checkpoint of step {self.saved} is complete; run the same command with --resume after fixing that."


class RunFailed(OversmoothError):
    """A training run in a process of its own that did not finish."""

    command: str
    last_words: str
    says = "A training run did not finish; its last line was {last_words!r}."
    advises = "Run it alone to see all of its output:\n{command}"


# --- errors about what was typed: a value, a name, a combination of options ---


class BadValue(OversmoothError):
    """A value outside of what is allowed."""

    name: str
    value: object
    expected: str
    advice: str = ""
    says = "{name} must be {expected}; got {value!r}."


class MissingValue(OversmoothError):
    """A value without which there is nothing to do."""

    name: str
    advice: str = ""
    says = "{name} must be given."


class UnknownName(OversmoothError):
    """A word that is not in a list."""

    kind: str
    name: object
    known: Sequence[str]

    def describe(self) -> str:
        known = ", ".join(self.known) or "none"
        return f"Unknown {self.kind} {self.name!r}.{close_to(str(self.name), self.known)} Known: {known}."


class Conflict(OversmoothError):
    """Options of which only one can be given."""

    options: Sequence[str]

    def describe(self) -> str:
        return f"Give only one of {', '.join(self.options)}."


class NotSupported(OversmoothError):
    """Something that is understood but does not exist in this combination."""

    what: str
    where: str
    reason: str = ""
    advice: str = ""

    def describe(self) -> str:
        return f"{self.what} is not supported {self.where}{f': {self.reason}' if self.reason else ''}."


class DeviceUnavailable(OversmoothError):
    device: str
    reason: str

    def describe(self) -> str:
        return f"The device {self.device!r} cannot be used: {self.reason.rstrip('.')}."

    advises = "Give a device that torch has on this machine, such as cpu, cuda, cuda:1 or mps."


class ClusterUnavailable(OversmoothError):
    cluster: str
    reason: str

    def describe(self) -> str:
        return f"{self.cluster} cannot be used: {self.reason.rstrip('.')}."

    advises = "Check --address, try again on a less busy machine, or use --engine process, which needs no cluster."


class MissingDependency(OversmoothError):
    package: str
    extra: str
    needed_for: str
    says = "{needed_for} needs the package {package!r}, which is not installed."
    advises = "Install it with: pip install 'oversmooth[{extra}]'"
