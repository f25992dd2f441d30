"""Where a result comes from, collected while it is made."""

from collections.abc import Sequence

from oversmooth.environment.versions import versions
from oversmooth.models.source import Source, Stack
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import Provenance


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
        hybrids=tuple(_share(stack) for stack in stacks if len(stack.names.blocks) != stack.names.blocks_in_model),
        discovery_error=max((stack.arch.proof for stack in stacks if stack.arch.proof is not None), default=None),
    )


def _share(stack: Stack) -> str:
    name = f"{stack.label}: " if stack.label else ""
    return f"{name}{len(stack.names.blocks)} of {stack.names.blocks_in_model} blocks"
