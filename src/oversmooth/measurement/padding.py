"""Which tokens of a batch are padding, where no input of a known name says so.

The caller says it (`mask=`), or an input of shape (batch, token) with two values does. Such an input marks padding if
changing a token that it marks changes no other token, although it would if nothing were marked. Its name and polarity do not
matter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from oversmooth.data.batches import Batch, Inputs, sequences_in
from oversmooth.data.options import Mask
from oversmooth.errors import WrongBatch

States = Mapping[str, Sequence[Tensor]]
"""Features at the beginning and at the end of every stack."""
Run = Callable[[Mapping[str, Any]], States]
ROWS = 4
"""Sequences on which an input is tried."""
TRIES = 3
"""Batches with both values on which it is tried before it counts as something else."""
UNCHANGED = 1e-4
"""Largest change of a token, relative to the largest feature, that counts as none."""


@dataclass
class Padding:
    """What is known about padding so far; `marked` is called with every batch."""

    model: nn.Module
    given: Mask | None
    rules: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By stack, the input that marks its padding and the value that does."""
    tried: dict[str, int] = field(default_factory=dict)
    _batch: int = 0

    def marked(self, batch: Batch, inputs: Mapping[str, Any], run: Run) -> Inputs:
        """The prepared batch with what is known of its padding; `run` gives the features of other inputs."""
        found = Inputs(inputs)
        self._batch += 1
        if self.given is not None:
            found.given = _given(self.given, batch, inputs, self._batch - 1)
            return found
        if not hasattr(self.model, "main_input_name"):  # what transformers' masks are called is known
            for name in _candidates(inputs):
                if self.tried.get(name, 0) < TRIES and not any(rule[0] == name for rule in self.rules.values()):
                    self.tried[name] = self.tried.get(name, 0) + 1
                    self.rules |= {
                        label: rule for label, rule in _proved(inputs, name, run).items() if label not in self.rules
                    }
        for label, (name, value) in self.rules.items():
            if isinstance(inputs.get(name), Tensor):
                found.keep[label] = (name, _flat(inputs[name]) != value)
        return found

    def notes(self) -> list[str]:
        return [
            f"Padding{f' of {label}' if label else ''} is where the input {name!r} is {value:g}: those tokens were left out, "
            "because the model keeps them from all others."
            for label, (name, value) in self.rules.items()
        ]

    def warnings(self) -> list[str]:
        used = {name for name, _ in self.rules.values()}
        return [
            f"The input {name!r} has two values, but was not recognised as a padding mask: nothing showed that it hides the "
            "tokens it marks from all others. All tokens were counted; if some are padding, pass mask=."
            for name in self.tried
            if name not in used and name not in KNOWN
        ]


KNOWN = ("attention_mask", "decoder_attention_mask", "src_key_padding_mask")
"""Names that are used as masks without a proof."""


def _given(mask: Mask, batch: Batch, inputs: Mapping[str, Any], number: int) -> Bool[Tensor, "batch token"]:
    """Which tokens count, as the caller says."""
    if callable(mask) and not isinstance(mask, Tensor):
        found: Any = mask(batch)
    elif isinstance(mask, Tensor):
        found = mask
    else:
        found = mask[number] if number < len(mask) else None
    if found is None:
        raise WrongBatch("a mask for every batch", f"{number} masks and more batches", "Give one mask per batch.")
    keep = torch.as_tensor(found)
    rows = sequences_in(inputs)
    if keep.ndim != 2 or len(keep) < rows:
        expected = f"a mask of shape (batch, token) with {rows} rows, true where a token counts"
        raise WrongBatch(
            expected, f"shape {tuple(keep.shape)}", "Give one row per sequence, or a function of the batch."
        )
    return keep[:rows].bool()


def _flat(mask: Tensor) -> Tensor:
    """(batch, 1, 1, token) as (batch, token)."""
    return mask.reshape(len(mask), -1)


def _candidates(inputs: Mapping[str, Any]) -> Iterator[str]:
    """Names of inputs of shape (batch, token) that have two values."""
    for name, value in inputs.items():
        is_tokens = isinstance(value, Tensor) and value.ndim >= 2 and len(value) * value.shape[-1] == value.numel()
        if name and is_tokens and value.numel() and len(value.unique()) == 2:
            yield name


def _proved(inputs: Mapping[str, Any], name: str, run: Run) -> dict[str, tuple[str, float]]:
    """The stacks whose padding an input marks, with the value that does."""
    mask = _flat(inputs[name])
    low, high = (float(value) for value in mask.unique())
    usable = ((mask == low).any(1) & (mask == high).any(1)).nonzero()[:ROWS, 0]
    rows = sequences_in(inputs)
    if not len(usable):
        return {}
    if all(len(value) == rows for value in inputs.values() if isinstance(value, Tensor) and value.ndim):
        inputs = {
            key: value[usable] if isinstance(value, Tensor) and value.ndim else value for key, value in inputs.items()
        }
    found: dict[str, tuple[str, float]] = {}
    for carrier, tokens in inputs.items():
        is_tokens = isinstance(tokens, Tensor) and tokens.dtype != torch.bool
        if carrier == name or not is_tokens or tokens.shape[:2] != _flat(inputs[name]).shape:
            continue
        try:
            hidden = [_hidden(inputs, name, carrier, value, other, run) for value, other in ((low, high), (high, low))]
        except WrongBatch:
            continue  # it does not run on other tokens
        for value, labels in zip((low, high), hidden, strict=True):
            # Where both values keep tokens apart, they mark segments.
            found |= {label: (name, value) for label in labels if not all(label in others for others in hidden)}
    return found


def _hidden(inputs: Mapping[str, Any], name: str, carrier: str, value: float, other: float, run: Run) -> frozenset[str]:
    """The stacks in which no token sees those that are marked by a value, and would if they were not."""
    marked = _flat(inputs[name]) == value
    first = marked & (marked.cumsum(1) == 1)
    unmarked = {**inputs, name: torch.full_like(inputs[name], other)}
    before, alone = run(inputs), run(_changed(inputs, carrier, first))
    together, open_before = run(_changed(inputs, carrier, marked)), run(unmarked)
    open_alone = run(_changed(unmarked, carrier, first))
    return frozenset(
        label
        for label, ends in before.items()
        if ends[-1].shape[:2] == ends[0].shape[:2] == marked.shape
        and bool(_moved(open_before[label][0], open_alone[label][0])[first].any())  # its own tokens, no memory
        and _is_hidden(
            marked,
            first,
            moved=_moved(ends[-1], alone[label][-1]),
            moved_together=_moved(ends[-1], together[label][-1]),
            moved_when_open=_moved(open_before[label][-1], open_alone[label][-1]),
        )
    )


def _is_hidden(
    marked: Bool[Tensor, "batch token"],
    first: Bool[Tensor, "batch token"],
    *,
    moved: Bool[Tensor, "batch token"],
    moved_together: Bool[Tensor, "batch token"],
    moved_when_open: Bool[Tensor, "batch token"],
) -> bool:
    """Whether marking the first of these tokens hides it from others, and marking all hides all of them."""
    if bool((moved_together & ~marked).any()):
        return False
    return bool((moved_when_open & ~moved & ~first).any()) and not bool((moved & ~first).any())


def _moved(h: Tensor, changed: Tensor) -> Bool[Tensor, "batch token"]:
    difference = (h - changed).abs().amax(-1)
    return ~(difference <= UNCHANGED * h.abs().max())  # NaN counts as moved


def _changed(inputs: Mapping[str, Any], name: str, where: Bool[Tensor, "batch token"]) -> dict[str, Any]:
    """The inputs with other tokens in some positions."""
    tokens = inputs[name].clone()
    chosen = where.to(tokens.device)
    if tokens.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(tokens[chosen].shape, generator=generator).to(tokens)
        tokens[chosen] = tokens[chosen] + 3 * tokens.std() * noise
    else:
        known = tokens.unique()
        places = torch.searchsorted(known, tokens[chosen].contiguous())
        tokens[chosen] = known[(places + max(1, len(known) // 2)) % len(known)]
    return {**inputs, name: tokens}
