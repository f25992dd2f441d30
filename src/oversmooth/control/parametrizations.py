"""Value rows, output weights and norms as torch parametrizations.

The constraint is on a product of two weights, so two parametrizations read one `Eigenbasis`. It is a submodule of both,
which keeps it with the model on every device and in every copy; in a `state_dict` it appears once, under the value weight.

A `state_dict` also holds the ordinary weights under their own names, as `bake` would leave them: whatever saves the model
(`save_pretrained`, a checkpoint of the Trainer, `torch.save`), plain transformers reads it with the right outputs. Loading
into a constrained model reads the eigenbasis and passes over the ordinary weights, which follow from it.
"""

from collections.abc import Container, Iterable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from oversmooth.control.eigenbasis import Eigenbasis, TokenScale, full_precision
from oversmooth.control.selection import Chosen
from oversmooth.errors import CannotControl
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.declaration import norm_offset
from oversmooth.models.stores.module import ModuleStore

# --- parametrizations of a model's own tensors: value rows and output weight from a shared eigenbasis ---

Stored = Literal["out_in", "in_out"]
SMALLEST_NORM_WEIGHT = 1e-4
"""Where a positive norm weight starts that was zero: a zero could not be learned away from."""


class _Parametrization(nn.Module):
    """Remembers the dtype of the tensor that it stands for, and whether that was trained."""

    like: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        self.neighbours: tuple[str, ...] = ()
        self.was_trained = weight.requires_grad
        # An empty buffer follows the model through `.to(...)`, where a stored dtype would not.
        self.register_buffer("like", weight.detach().new_empty(0), persistent=False)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._save_ordinary_weight(destination, prefix)

    @torch.no_grad()
    def _save_ordinary_weight(self, destination: dict[str, Any], prefix: str) -> None:
        own = destination.get(f"{_list_of(prefix)}original")  # saved before us, by the list that holds us
        destination[_ordinary_name(prefix)] = self(*(() if own is None else (own,))).detach().contiguous()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        unexpected[:] = [name for name in unexpected if name != _ordinary_name(prefix)]


class ValueWeight(_Parametrization):
    """A (fused) weight whose value rows are `diag(lambda) V^T` of an eigenbasis; its other rows are free."""

    rows: Tensor | None
    order: Tensor | None

    def __init__(self, eigenbasis: Eigenbasis, weight: Tensor, stored: Stored, rows: Int[Tensor, " rows"] | None):
        super().__init__(weight)
        self.eigenbasis = eigenbasis
        self.axis = 0 if stored == "out_in" else 1
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("order", None, persistent=False)
        if rows is not None:
            count = weight.shape[self.axis]
            others = _others(rows, count)
            if not torch.equal(torch.cat([others, rows]), torch.arange(count)):  # values are not simply the last rows
                self.register_buffer("order", torch.cat([others, rows]).argsort(), persistent=False)

    def forward(self, *others: Tensor) -> Tensor:
        value = self.eigenbasis.value_weight().to(self.like.dtype)
        value = value if self.axis == 0 else value.T
        if not others:
            return value
        joined = torch.cat([others[0], value], self.axis)
        return joined if self.order is None else joined.index_select(self.axis, self.order.to(joined.device))

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[()]:
        """The rows that are not values; those that are live in the eigenbasis and are set there, not here."""
        if self.rows is None:
            return ()
        others = _others(self.rows, weight.shape[self.axis])
        return weight.index_select(self.axis, others.to(weight.device)).contiguous()

    def contains(self, weight: Tensor, tolerance: float = 1e-5) -> bool:
        """Whether the value rows of a weight are those that the eigenbasis gives."""
        rows = torch.arange(weight.shape[self.axis]) if self.rows is None else self.rows
        value = weight.index_select(self.axis, rows.to(weight.device))
        expected = self.eigenbasis.weights()[0]
        return bool(torch.allclose(full_precision(value if self.axis == 0 else value.T), expected, atol=tolerance))


class OutputWeight(_Parametrization):
    """A weight that is the `V^-T` of an eigenbasis (times eigenvalues, where heads share values)."""

    def __init__(self, eigenbasis: Eigenbasis, weight: Tensor, stored: Stored):
        super().__init__(weight)
        self.shared_eigenbasis = eigenbasis
        self.is_transposed = stored == "in_out"
        self.register_load_state_dict_post_hook(_forgive_what_the_value_weight_loads)

    def forward(self) -> Tensor:
        output = self.shared_eigenbasis.output_weight().to(self.like.dtype)
        return output.T if self.is_transposed else output

    def right_inverse(self, weight: Tensor) -> tuple[()]:
        """Nothing of its own: all of it lives in the eigenbasis."""
        return ()

    def contains(self, weight: Tensor, tolerance: float = 1e-5) -> bool:
        """Whether a weight is the one that the eigenbasis gives."""
        output = full_precision(weight.T if self.is_transposed else weight)
        return bool(torch.allclose(output, self.shared_eigenbasis.weights()[1], atol=tolerance))

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The ordinary weight only: the eigenbasis is saved once, by the value weight."""
        assert not args, "torch calls it with keywords"
        found = {} if destination is None else destination
        self._save_ordinary_weight(found, prefix)
        return found


def _list_of(prefix: str) -> str:
    """`x.parametrizations.weight.` of `x.parametrizations.weight.0.`."""
    return prefix[: prefix[:-1].rfind(".") + 1]


def _ordinary_name(prefix: str) -> str:
    """`x.weight` of `x.parametrizations.weight.0.`: what the tensor is called without us."""
    owner, _, tensor = _list_of(prefix)[:-1].rpartition("parametrizations.")
    return f"{owner}{tensor}"


def _forgive_what_the_value_weight_loads(module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if ".shared_eigenbasis." not in key]


def _others(rows: Int[Tensor, " rows"], count: int) -> Int[Tensor, " others"]:
    is_value = torch.zeros(count, dtype=torch.bool)
    is_value[rows.cpu()] = True
    return (~is_value).nonzero().flatten()


class PositiveNorm(_Parametrization):
    """Norm weights that are above zero: `softplus(r) - offset`, offset being 1 where a model stores weight minus one."""

    def __init__(self, weight: Tensor, offset: float):
        super().__init__(weight)
        self.offset = offset

    def forward(self, raw: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        return (nn.functional.softplus(full_precision(raw)) - self.offset).to(raw.dtype)

    def right_inverse(self, weight: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        """Starts at the absolute value: a negative weight is mirrored, a positive one is kept."""
        size = (full_precision(weight) + self.offset).abs().clamp(min=SMALLEST_NORM_WEIGHT)
        return (size + (-(-size).expm1()).log()).to(weight.dtype)  # the inverse of softplus, without overflow

    def contains(self, weight: Float[Tensor, " d_model"]) -> bool:
        return bool((full_precision(weight) + self.offset > 0).all())


# --- putting them on and taking them off ----------------------------------------------------------------------------


def ours(module: nn.Module, tensor: str) -> _Parametrization | None:
    """Our parametrization of a tensor, if it has one."""
    if not parametrize.is_parametrized(module, tensor):
        return None
    first = module.parametrizations[tensor][0]  # type: ignore[index]
    return first if isinstance(first, _Parametrization) else None


def parametrized(model: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """Every module and tensor name of the model that we parametrized."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            for tensor in list(module.parametrizations):  # type: ignore[arg-type]
                if ours(module, tensor):
                    yield module, tensor


def put_on(module: nn.Module, tensor: str, parametrization: _Parametrization) -> None:
    parametrization.neighbours = tuple(module._parameters)
    parametrize.register_parametrization(module, tensor, parametrization)


@torch.no_grad()
def take_off(module: nn.Module, tensor: str) -> None:
    """Leaves the current value as an ordinary parameter, in its old place among the others.

    Not `parametrize.remove_parametrizations`, which deletes the property from the class: copies of the module share that
    class, and baking a copy for a checkpoint would break the model in training.
    """
    parametrization = ours(module, tensor)
    assert parametrization is not None, "only our own parametrizations are taken off"
    value = getattr(module, tensor).detach().clone(memory_format=torch.contiguous_format)
    kind = type(module)
    del module.parametrizations[tensor]  # type: ignore[union-attr,operator]
    if len(module.parametrizations):  # type: ignore[arg-type]
        kept = {name: item for name, item in vars(kind).items() if name not in (tensor, "__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, kept)
    else:
        del module.parametrizations
        module.__class__ = kind.__bases__[0]
    parameters = {**module._parameters, tensor: nn.Parameter(value, requires_grad=parametrization.was_trained)}
    ordered = [name for name in parametrization.neighbours if name in parameters]
    module._parameters.clear()
    module._parameters.update({name: parameters.pop(name) for name in ordered} | parameters)


# --- what control does to the norms of attention: hooks that follow the token scale ---

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
