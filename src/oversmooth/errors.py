"""Everything that a user can do wrong, as exceptions that build their own message from facts.

Each message has three parts: what was expected, what was found, and what to do next. The command line prints the
message and exits with code 2; nothing else in the package prints an error or calls `exit`.
"""

import difflib
from collections.abc import Iterable, Sequence


class OversmoothError(Exception):
    """Base of every error that is the input's fault, not ours."""


def _close_to(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=3)
    return f" Close: {', '.join(near)}." if near else ""


def _some(names: Sequence[str], shown: int = 6) -> str:
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


class OutOfRange(OversmoothError):
    def __init__(self, name: str, value: object, expected: str):
        super().__init__(f"{name} must be {expected}; got {value!r}.")


class MissingDependency(OversmoothError):
    def __init__(self, package: str, extra: str, needed_for: str):
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed.\n"
            f"Install it with: pip install 'oversmooth[{extra}]'"
        )


# --- finding the model ----------------------------------------------------------------------------------------------


class TargetNotFound(OversmoothError):
    def __init__(self, target: str, tried: Sequence[str]):
        super().__init__(
            f"Nothing was found at {target!r}. Tried: {'; '.join(tried)}.\n"
            "A target is a model folder, a .safetensors, .bin, .pt or .gguf file, a URL, a hub id or a timm name."
        )


class NoModelInFolder(OversmoothError):
    def __init__(self, folder: str, found: Sequence[str], nested: Sequence[str]):
        listing = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing"
        hint = "Point at the folder or the file that holds the weights."
        if nested:
            hint = f"Models inside subfolders: {', '.join(nested)}. Point at one of them."
        super().__init__(
            f"Expected weights (model.safetensors, its index, pytorch_model.bin or one .gguf) in {folder!r}; "
            f"found {listing}.\n{hint}"
        )


class AmbiguousFolder(OversmoothError):
    def __init__(self, folder: str, candidates: Sequence[str]):
        super().__init__(
            f"{folder!r} holds more than one candidate model: {', '.join(candidates)}.\n"
            "Point at one file, for example: "
            f"oversmooth inspect {folder.rstrip('/')}/{candidates[0]}"
        )


class BrokenFile(OversmoothError):
    """A file that is truncated, corrupt, or contradicts itself."""

    def __init__(self, file: str, expected: str, found: str, advice: str = "Download or copy the file again."):
        super().__init__(f"{file} cannot be read: expected {expected}, found {found}.\n{advice}")


class NotWritable(OversmoothError):
    def __init__(
        self, file: str, reason: str, advice: str = "Give a file name in an existing folder that you may write to."
    ):
        super().__init__(f"{file} cannot be written: {reason}.\n{advice}")


class RunFailed(OversmoothError):
    def __init__(self, command: str, last_words: Sequence[str]):
        said = " ".join(last_words)
        super().__init__(
            f"A run was expected to finish; it ended with {said!r}.\nRun it by itself to see all of it:\n{command}"
        )


class UnsafePickle(OversmoothError):
    def __init__(self, file: str, reason: str):
        super().__init__(
            f"{file} is a pickle that needs more than tensors to load ({reason}); loading it would run code from "
            "the file, so it was refused and nothing was executed.\n"
            "Convert it to safetensors in an environment where you trust the file, then inspect that."
        )


class PackedWeights(OversmoothError):
    def __init__(self, where: str, packing: str):
        super().__init__(
            f"{where} stores packed or quantised weights ({packing}), which cannot be read exactly, so no spectrum "
            "is computed.\nUse the original float checkpoint, or a GGUF export (its blocks are dequantised exactly)."
        )


class RemoteUnavailable(OversmoothError):
    def __init__(
        self, url: str, reason: str, advice: str = "Check the address and the connection, or use a local copy."
    ):
        super().__init__(f"{url} could not be read: {reason}.\n{advice}")


# --- understanding the model ----------------------------------------------------------------------------------------


class UnknownArchitecture(OversmoothError):
    def __init__(self, model_type: str, known: Sequence[str]):
        super().__init__(
            f"No architecture is declared for model_type {model_type!r}.{_close_to(model_type, known)}\n"
            f"Declared: {', '.join(sorted(known))}.\n"
            "If it has the layout of one of these, say so with --model-type; to add it: docs/guides/add-an-architecture.md."
        )


class UnidentifiedWeights(OversmoothError):
    def __init__(self, where: str, candidates: Sequence[str], example: Sequence[str]):
        if candidates:
            found = f"its tensor names fit {', '.join(candidates)}, which differ in mathematics"
        else:
            found = f"its tensor names fit no declared family (for example {', '.join(example)})"
        super().__init__(
            f"{where} has no config.json that names a model_type, and {found}.\n"
            "Say which family it is with --model-type (list: oversmooth architectures)."
        )


class RefusedArchitecture(OversmoothError):
    def __init__(self, model: str, reason: str):
        super().__init__(
            f"{model} has no linear value path, so H = W_V W_O does not exist for it: {reason}.\n"
            "The theory does not apply to its attention; no number is shown rather than a wrong one."
        )


class ConfigMismatch(OversmoothError):
    def __init__(self, what: str, config_says: object, tensors_say: object, where: str):
        super().__init__(
            f"The config and the tensors disagree about {what}: the config says {config_says}, {where} says "
            f"{tensors_say}.\nCheck that config.json belongs to these weights."
        )


class AdapterMismatch(OversmoothError):
    """The declaration of a family does not fit this very model."""

    def __init__(self, family: str, expected: str, found: str):
        super().__init__(
            f"The declaration of {family!r} does not fit this model: expected {expected}, found {found}.\n"
            "If the model is a variant of that family, please report it with its config.json."
        )


class HeadsUnknown(OversmoothError):
    def __init__(self, where: str, reason: str):
        super().__init__(
            f"{where} does not say how many attention heads it has, and {reason}.\n"
            "Give them with --n-heads (and --n-kv)."
        )


class IncompleteWeights(OversmoothError):
    """A checkpoint without some of the weights that its model needs; libraries would fill them with random numbers."""

    def __init__(
        self,
        target: str,
        missing: Sequence[str],
        mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
        unused: Sequence[str] = (),
    ):
        found = [f"{len(missing)} missing ({_some(missing)})"] if missing else []
        if mismatched:
            shapes = [f"{name}: {file} in the file, {model} in the model" for name, file, model in mismatched]
            found.append(f"{len(mismatched)} of another shape ({_some(shapes)})")
        left = f" Names in the file that the model does not have: {_some(unused)}." if unused else ""
        super().__init__(
            f"{target!r} does not hold every weight that its model needs: {' and '.join(found)}.{left}\n"
            "They would be filled with random numbers, so nothing is run. Check that config.json belongs to these weights."
        )


class NotLive(OversmoothError):
    def __init__(self, target: str, verb: str, reason: str):
        super().__init__(
            f"`{verb}` has to run the model, and {target!r} cannot be run: {reason}.\n"
            f"Its weights can still be read: oversmooth inspect {target}"
        )


class UnknownName(OversmoothError):
    def __init__(self, kind: str, name: str, known: Sequence[str]):
        super().__init__(f"Unknown {kind} {name!r}.{_close_to(name, known)} Known: {', '.join(known)}.")


# --- running the model ----------------------------------------------------------------------------------------------


class NoData(OversmoothError):
    def __init__(self, description: str, skipped: int):
        why = f"{skipped} sequences were skipped because fewer than two tokens remained" if skipped else "it is empty"
        super().__init__(
            f"There is nothing to measure in {description}: {why}.\n"
            "Smoothing compares tokens of one sequence: give texts of at least two tokens, or images."
        )


class UnreadableData(OversmoothError):
    def __init__(self, data: str, expected: str, found: str):
        super().__init__(f"The data {data!r} cannot be used: expected {expected}, found {found}.")


class WrongBatch(OversmoothError):
    """Model and data do not fit each other."""

    def __init__(self, expected: str, found: str, advice: str):
        super().__init__(f"The data do not fit the model: expected {expected}, found {found}.\n{advice}".rstrip())


class NoAttentionMaps(OversmoothError):
    """Attention that cannot be seen, or whose rows do not sum to one."""

    def __init__(self, layer: str, found: str, advice: str):
        super().__init__(
            f"The theory needs the attention probabilities of {layer}, each row summing to one; found {found}.\n"
            f"{advice}"
        )


# --- changing the model ---------------------------------------------------------------------------------------------


class TooManyValueDirections(OversmoothError):
    def __init__(self, n_kv: int, d_head: int, d_model: int):
        super().__init__(
            f"{n_kv} value heads of size {d_head} make {n_kv * d_head} directions of values, more than the width "
            f"{d_model}: heads cannot own separate parts of one eigenbasis, so no exact form of H = V diag(lambda) V^-1 "
            "exists for this layer.\n"
            "Leave it out with layers=..., or change its attention instead, for example osm.apply(model, 'attnscale')."
        )


class IllConditioned(OversmoothError):
    def __init__(self, bound: float, limit: float):
        super().__init__(
            f"A general eigenbasis has become ill-conditioned: norm(V) norm(V^-1) is {bound:.3g}, above {limit:g}, where "
            "the inverse loses its digits.\n"
            "Keep it bounded with max_condition=100, use basis='orthogonal', or lower the learning rate of V."
        )


class CannotControl(OversmoothError):
    """An intervention that has no exact form for this model."""

    def __init__(self, intervention: str, where: str, reason: str, alternative: str):
        super().__init__(f"{intervention} cannot be applied to {where}: {reason}.\n{alternative}")


# --- training -------------------------------------------------------------------------------------------------------


class BadRecipe(OversmoothError):
    def __init__(self, recipe: str, key: str, expected: str, found: str):
        super().__init__(
            f"The recipe {recipe} cannot be used: {key} must be {expected}; got {found}.\n"
            "Correct it in the file, or with --set KEY=VALUE."
        )


class CannotResume(OversmoothError):
    def __init__(self, folder: str, reason: str, advice: str):
        super().__init__(f"The run in {folder!r} cannot be resumed: {reason}.\n{advice}")


class TrainingStopped(OversmoothError):
    """Something outside of the model ended a run; what was saved before is whole."""

    def __init__(self, step: int, reason: str, saved: int | None):
        kept = "No checkpoint was saved yet" if saved is None else f"The checkpoint of step {saved} is whole"
        super().__init__(
            f"Training stopped after step {step}: {reason.rstrip('.')}.\n"
            f"{kept}; run the same command with --resume once that is mended."
        )


class UnusableEncoder(OversmoothError):
    def __init__(self, checkpoint: str, expected: str, found: str):
        super().__init__(
            f"{checkpoint!r} cannot be fine-tuned: expected {expected}, found {found}.\n"
            "Give the folder or hub id of a text encoder (BERT and its kin) with its tokenizer."
        )
