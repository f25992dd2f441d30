"""Where a result comes from, collected while it is made."""

import platform
from collections.abc import Sequence
from functools import cache
from importlib import metadata

from oversmooth.models.source import Source, Stack
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import Provenance

PACKAGES = ("oversmooth", "torch", "numpy", "scipy", "safetensors", "transformers", "timm", "gguf")


@cache  # a search through every installed package, for facts that do not change
def versions() -> tuple[tuple[str, str], ...]:
    """Versions of Python and of the packages whose code can change a number."""
    found = [("python", platform.python_version())]
    for package in PACKAGES:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(sorted(found))


def provenance_of(
    source: Source, stacks: Sequence[Stack], log: ReadLog, *, compute_dtype: str, seed: int | None = None
) -> Provenance:
    return Provenance(
        target=source.target,
        source=source.kind,
        model_type=source.model_type,
        families=tuple(stack.arch.name for stack in stacks),
        files=source.store.files(),
        weights_sha256=log.sha256,
        bytes_read=log.bytes_read,
        weight_dtypes=tuple(sorted(log.dtypes)),
        compute_dtype=compute_dtype,
        versions=versions(),
        seed=seed,
    )
