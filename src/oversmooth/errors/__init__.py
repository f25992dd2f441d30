"""Everything that a user can do wrong, as exceptions that build their own message from fields.

Each message has three parts: what was expected, what was found, and what to do next. The command line prints the
message and exits with code 2; nothing else in the package prints an error or calls `exit`.
"""

from oversmooth.errors.base import OversmoothError, first_line, reason_of, some_of
from oversmooth.errors.control import CannotControl, IllConditioned, TooManyValueDirections
from oversmooth.errors.files import BrokenFile, NotWritable, PackedWeights, RemoteUnavailable, UnsafePickle
from oversmooth.errors.models import (
    AdapterMismatch,
    AmbiguousFolder,
    BadConfig,
    ConfigMismatch,
    HeadsUnknown,
    IncompleteWeights,
    NoModelInFolder,
    NotLive,
    RefusedArchitecture,
    TargetNotFound,
    UnidentifiedWeights,
    UnknownArchitecture,
)
from oversmooth.errors.running import NoAttentionMaps, NoData, UnreadableData, WrongBatch
from oversmooth.errors.training import BadRecipe, CannotResume, RunFailed, TrainingStopped, UnusableEncoder
from oversmooth.errors.values import (
    BadValue,
    Conflict,
    DeviceUnavailable,
    GivenTwice,
    MissingDependency,
    MissingValue,
    NameTaken,
    NotAGrid,
    NotDivisible,
    NothingChosen,
    NotSupported,
    OddNumber,
    TooFewTokens,
    UnknownName,
    WrongShape,
)

__all__ = [
    "AdapterMismatch",
    "AmbiguousFolder",
    "BadConfig",
    "BadRecipe",
    "BadValue",
    "BrokenFile",
    "CannotControl",
    "CannotResume",
    "ConfigMismatch",
    "Conflict",
    "DeviceUnavailable",
    "GivenTwice",
    "HeadsUnknown",
    "IllConditioned",
    "IncompleteWeights",
    "MissingDependency",
    "MissingValue",
    "NameTaken",
    "NoAttentionMaps",
    "NoData",
    "NoModelInFolder",
    "NotAGrid",
    "NotDivisible",
    "NotLive",
    "NotSupported",
    "NotWritable",
    "NothingChosen",
    "OddNumber",
    "OversmoothError",
    "PackedWeights",
    "RefusedArchitecture",
    "RemoteUnavailable",
    "RunFailed",
    "TargetNotFound",
    "TooFewTokens",
    "TooManyValueDirections",
    "TrainingStopped",
    "UnidentifiedWeights",
    "UnknownArchitecture",
    "UnknownName",
    "UnreadableData",
    "UnsafePickle",
    "UnusableEncoder",
    "WrongBatch",
    "WrongShape",
    "first_line",
    "reason_of",
    "some_of",
]
