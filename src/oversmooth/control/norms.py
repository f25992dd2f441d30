"""What control does to the norms of attention: hooks that follow the token scale, and weights that stay positive."""

from collections.abc import Container

from torch import nn

from oversmooth.control.eigenbasis import Eigenbasis
from oversmooth.control.parametrizations import PositiveNorm, ours, put_on
from oversmooth.control.selection import Chosen
from oversmooth.control.token_scale import TokenScale
from oversmooth.errors import CannotControl
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.declaration import norm_offset
from oversmooth.models.stores.module import ModuleStore

SIGNED_NORMS = ("attn_norm", "attn_branch_norm")
"""The norms whose weights are multiplied into the map of attention, so that their signs matter."""


def flipped_norm(roles: Container[str]) -> str:
    """The norm whose sign is flipped: the first there is, since flipping both would change nothing."""
    return next(role for role in SIGNED_NORMS if role in roles)


def require_followed_norms(plan: list[tuple[Chosen, AttentionWeights]]) -> None:
    """Raises where no norm divides what attention reads, or where another one divides what it writes."""
    for each, weights in plan:
        advice = 'Leave out scale="measured": the plain interval is the one that acts.'
        if "attn_norm" not in each.block.norms or weights.residual not in ("pre", "parallel", "sandwich"):
            raise CannotControl('scale="measured"', each.words, "no norm stands before its attention", advice)
        if "attn_branch_norm" in each.block.norms:
            reason = "a norm on its branch undoes any scale of the eigenvalues"
            raise CannotControl('scale="measured"', each.words, reason, 'Leave out scale="measured".')


def follow_scale(
    each: Chosen,
    weights: AttentionWeights,
    eigenbasis: Eigenbasis,
    store: ModuleStore,
    *,
    is_measured: bool,
    is_kept: bool,
) -> None:
    """Hooks the eigenbasis of one layer to the norm before its attention, in place of one that was hooked before."""
    if "attn_norm" not in each.block.norms:
        return
    norm = store.norm(each.block.norms["attn_norm"])
    unfollow(norm)
    if is_measured:
        gain = 1.0 if weights.gain is None else max(1.0, weights.gain.detach().abs().max().item())
        eigenbasis.scale = TokenScale(each.stack.arch.norm, gain, keeps_eigenvalues=is_kept)
        norm.register_forward_pre_hook(eigenbasis.scale.watch)


def unfollow(module: nn.Module) -> None:
    """Takes our hooks off one module."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), TokenScale):
            del module._forward_pre_hooks[key]


def keep_norms_positive(each: Chosen, store: ModuleStore) -> int:
    """Makes the attention's own norms positive; how many of their weights change sign."""
    changed = 0
    for role in SIGNED_NORMS:
        if role not in each.block.norms or not each.block.norms[role].weight:
            continue
        name = each.block.norms[role].weight
        owner, tensor = store.owner(name), name.rpartition(".")[2]
        if ours(owner, tensor):
            continue
        weight = getattr(owner, tensor)
        offset = norm_offset(each.stack.arch.norm)
        changed += int((weight.detach().float() + offset < 0).sum())
        put_on(owner, tensor, PositiveNorm(weight, offset))
    return changed
