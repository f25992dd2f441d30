"""`accumulate`: one evaluation of every eigenbasis for all the passes of an optimizer step."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.control.eigenbasis import Basis, Eigenbasis, SharedFrame, require_conditioned, versions_of


class accumulate:  # noqa: N801 - read as a verb: `with osm.accumulate(model)`
    """For several backward passes per optimizer step: inside, constrained layers evaluate their eigenbasis once.

    At the end, the gradients that have added up go through that evaluation once. Weights are the same as outside; of
    several passes, gradients are the same up to rounding. Take the optimizer's step after it; what changes weights inside
    is noticed, and they are evaluated anew. Not for DDP, which wants every gradient within its own backward pass.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> _ = osm.sharpen(model)
    >>> with osm.accumulate(model):
    ...     for batch in torch.randn(8, 2, 5, 32):
    ...         model(batch).square().mean().backward()
    >>> model.layers[0].self_attn.out_proj.parametrizations.weight[0].shared_eigenbasis.basis.tangent.grad.norm() > 0
    tensor(True)
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._groups: list[_Group] = []

    def __enter__(self) -> None:
        groups: dict[object, list[Eigenbasis]] = {}
        for each in dict.fromkeys(part for part in self._model.modules() if isinstance(part, Eigenbasis)):
            groups.setdefault(_form(each.basis), []).append(each)
        self._groups = [_Group.evaluated(alike) for alike in groups.values()]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            for each in group.alike:
                each.forget()
        if kind is None:
            for group in groups:
                group.backward()


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers whose bases are evaluated as one batch, and what came out."""

    alike: list[Eigenbasis]
    frames: tuple[Float[Tensor, "layer d_model channel"], Float[Tensor, "layer channel d_model"]]
    leaves: tuple[list[Tensor], list[Tensor]]

    @classmethod
    def evaluated(cls, alike: list[Eigenbasis]) -> "_Group":
        with torch.autocast(alike[0].psi.device.type, enabled=False), torch.enable_grad():
            frames = _frames([each.basis for each in alike])
        columns, rows = ([each.detach().requires_grad_(frame.requires_grad) for each in frame] for frame in frames)
        for each, own_columns, own_rows in zip(alike, columns, rows, strict=True):
            each.shared = SharedFrame(own_columns, own_rows, versions_of(each.basis))
        return cls(alike, frames, (columns, rows))

    def backward(self) -> None:
        """From the gradients that have added up to those of the parameters."""
        reached = [
            (frame, torch.stack([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]))
            for frame, leaves in zip(self.frames, self.leaves, strict=True)
            if any(leaf.grad is not None for leaf in leaves)
        ]
        if reached:
            torch.autograd.backward([frame for frame, _ in reached], [gradient for _, gradient in reached])


def _form(basis: Basis) -> object:
    """What bases that can be evaluated as one batch have in common."""
    named = [*basis.named_parameters(), *basis.named_buffers()]
    range_ = getattr(basis, "half_range", None)
    return type(basis), range_, *((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in named)


def _frames(
    bases: list[Basis],
) -> tuple[Float[Tensor, "layer d_model channel"], Float[Tensor, "layer channel d_model"]]:
    """V and D of several layers of one form, in one batch."""
    states = [{**dict(basis.named_parameters()), **dict(basis.named_buffers())} for basis in bases]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    columns, rows = torch.vmap(lambda state: torch.func.functional_call(bases[0], state, ()))(stacked)
    if bases[0].can_degenerate:
        require_conditioned(columns, rows)
    return columns, rows
