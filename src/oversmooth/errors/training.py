"""Errors about training: recipes, runs, encoders to fine-tune."""

from dataclasses import dataclass

from oversmooth.errors.base import OversmoothError


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
