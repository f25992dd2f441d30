"""Errors about files: reading, writing, downloading."""

from dataclasses import dataclass

from oversmooth.errors.base import OversmoothError


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
