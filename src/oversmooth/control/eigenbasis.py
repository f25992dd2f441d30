"""The form H = V diag(lambda) V^-1 with eigenvalues in an interval, and the token scale it may follow.

Before attention a pre-norm layer divides token i by its scale s_i, so that a channel of the eigenbasis form evolves as
`y' = (I + l A D^-1) y`, `D = diag(s)`. For `l` in `[-min s, 0)` it sharpens whatever A is (docs/theory.md, section 7);
where s is small, the plain interval [-1, 0] reaches far beyond that. Here the interval is multiplied by `s_low`: a low
quantile of the token scales of a batch over the largest weight of the norm, averaged over the batches of training. It is
a buffer, so that a checkpoint holds it. In eval mode, and where a block is computed again for its gradients, it stays.

In the row convention of the theory `W_V = V diag(lambda)` and `W_O = V^-1`, with heads taking slices of the columns of V;
in the canonical form here `w_v = diag(lambda) V^T` and `w_o = V^-T`. In the basis `Y = X V` all heads decouple, so the
guarantee of one head holds for every head and any attention. Where several query heads read one value head (grouped
queries), `w_v = V^T` and `w_o^h = D_g^T diag(lambda^h)`, D being the dual of V (`D V = I`), with `lambda^h = l share^h`
and shares that are positive and sum to one over the heads of a group: `l` is the eigenvalue and lies in the interval.
With fewer channels than the width, directions outside the columns of V are untouched: their eigenvalue is zero.

Three bases. `OrthogonalBasis`: V of orthonormal columns, H symmetric. `GeneralBasis`: V learned freely, its inverse by LU.
`BoundedBasis`: V learned as `Q diag(s) P^T`, whose condition number cannot pass a bound.

A note on the route for orthonormal V. The Cayley transform of a skew matrix is exact, differentiable and never fails:
`I - S + B^T B` has a symmetric part of at least the identity, so its inverse exists and is well conditioned whatever the
optimizer did. For k columns it needs one k x k inverse, and its backward pass two products. Matrix exponentials take
50 times as long, Householder QR as long on a CPU and longer on a GPU, and the gradient of QR breaks down where columns
become dependent. V starts at `base` with `tangent = 0`, where the gradient of `tangent` is the Riemannian gradient.
Weight decay pulls V back to where it started; leave `tangent` out of it if that is not wanted.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.errors import BadValue, CannotControl, IllConditioned
from oversmooth.models.canonical import AttentionWeights, epsilon_of, token_scales
from oversmooth.models.declaration import NormKind, norm_offset

# --- eigenvalues of the map that acts: the token scale of a pre-norm layer ---

QUANTILE = 0.02
"""Share of tokens whose scale may lie below the one that is followed."""
MOMENTUM = 0.05
"""Weight of the newest batch: the mean reaches back over about twenty."""
SCALES = ("plain", "measured")


class TokenScale(nn.Module):
    """`s_low`, one before it is measured; the first batch of training sets it and every later one moves it a little."""

    low: Tensor
    unit: Tensor
    seen: Tensor

    def __init__(self, kind: NormKind, largest_gain: float, keeps_eigenvalues: bool):
        super().__init__()
        self.kind, self.largest_gain, self.keeps_eigenvalues = kind, largest_gain, keeps_eigenvalues
        self.register_buffer("low", torch.ones(()))
        self.register_buffer("unit", torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def interval(self, low: float, high: float) -> tuple[float, float]:
        """The interval that holds the eigenvalues now."""
        factor = self.low.item()
        return low * factor, high * factor

    def relative(self, psi: Float[Tensor, " channel"]) -> Float[Tensor, " channel"]:
        """psi in units of the interval; from given weights it starts as an eigenvalue, which the first batch divides."""
        return psi / self.unit.to(psi).clone()

    def absolute(self, relative: Float[Tensor, " channel"]) -> Float[Tensor, " channel"]:
        return relative * self.low.to(relative).clone()  # a clone: the buffer moves on before gradients are taken

    @torch.no_grad()
    def watch(self, norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """The hook before the norm."""
        if not norm.training or _is_computed_again():
            return
        found = self._measured(norm, arguments[0]).to(self.low)
        is_first = self.seen == 0
        if self.keeps_eigenvalues:
            self.unit.copy_(torch.where(is_first, found, self.unit))
        self.low.copy_(torch.where(is_first, found, self.low + MOMENTUM * (found - self.low)))
        self.seen += 1

    def _measured(self, norm: nn.Module, x: Float[Tensor, "*token d_model"]) -> Float[Tensor, ""]:
        scales = token_scales(x.detach(), self.kind, epsilon_of(norm)).flatten()
        quantile = scales.kthvalue(1 + int(QUANTILE * (scales.numel() - 1))).values
        weight = getattr(norm, "weight", None)
        if weight is None:
            return quantile / self.largest_gain
        largest = (weight.detach().float() + norm_offset(self.kind)).abs().max()
        return quantile / (largest * self.largest_gain)


def _is_computed_again() -> bool:
    """Whether this pass runs inside a backward pass, as gradient checkpointing does: it must repeat the first one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


# --- `H = V diag(lambda) V^-1` with every eigenvalue in an interval ---

CONDITION_LIMIT = {torch.float32: 1e6, torch.float64: 1e12}
"""Largest `norm(V) norm(V^-1)`, an upper bound of the condition number: beyond it the inverse keeps about one digit."""
SMALLEST_SHARE = 1e-4
"""What a head keeps of an eigenvalue that another head of its group owned: a share of zero could not be learned back."""


class _Clip(torch.autograd.Function):
    """`clip(x, low, high)` whose gradient vanishes only where a step along it would lead further out."""

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        x, ctx.low, ctx.high = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        leads_out = ((x > ctx.high) & (gradient < 0)) | ((x < ctx.low) & (gradient > 0))
        return gradient.masked_fill(leads_out, 0), None, None


def returning_clip(x: Float[Tensor, " channel"], low: float, high: float) -> Float[Tensor, " channel"]:
    """`clip(x, low, high)`; outside, the gradient passes where descent leads back in and is zero where it leads out.

    A plain clip would kill the gradient for good, a plain straight-through estimate would let x run away while the loss
    wants more than the interval allows. This one does what projected gradient descent does at the boundary: x leaves by
    at most one step and returns as soon as the loss asks for it.
    """
    clipped = _Clip.apply(x, low, high)
    assert isinstance(clipped, Tensor)
    return clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How the value channels of one layer are cut into heads."""

    d_model: int
    n_heads: int
    n_kv: int
    d_head: int

    @classmethod
    def of(cls, weights: AttentionWeights) -> "Heads":
        return cls(d_model=weights.d_model, n_heads=weights.n_heads, n_kv=weights.n_kv, d_head=weights.d_head)

    def require_one_basis(self) -> None:
        """Raises where there are more value directions than heads could own parts of."""
        if self.channels > self.d_model:
            reason = (
                f"{self.n_kv} value heads of size {self.d_head} make {self.channels} value directions, more than the "
                f"width {self.d_model}, so heads cannot own separate parts of one eigenbasis"
            )
            advice = "Leave it out with layers=..., or change its attention: osm.apply(model, 'attnscale')."
            raise CannotControl("The exact form H = V diag(lambda) V^-1", "this layer", reason, advice)

    @property
    def channels(self) -> int:
        return self.n_kv * self.d_head

    @property
    def per_group(self) -> int:
        """Query heads that read one value head."""
        return self.n_heads // self.n_kv


def full_precision(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better: nothing here is factorised in half precision."""
    return tensor if tensor.dtype in CONDITION_LIMIT else tensor.float()


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy without history."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


# --- bases ----------------------------------------------------------------------------------------------------------


class Basis(nn.Module):
    """The columns of V and their dual rows D, with `D V = I`. `forward` makes them anew."""

    can_degenerate = False
    """Whether training can make the columns nearly dependent."""

    def frame(self) -> tuple[Float[Tensor, "d_model channel"], Float[Tensor, "channel d_model"]]:
        """V and D; raises `IllConditioned` before the inverse loses its digits."""
        columns, rows = self()
        if self.can_degenerate and not torch.compiler.is_compiling():
            require_conditioned(columns, rows)
        return columns, rows


def require_conditioned(columns: Float[Tensor, "*layer d_model channel"], rows: Tensor) -> None:
    """Of several layers at once, with one look at the device."""
    bound = (columns.detach().norm(dim=(-2, -1)) * rows.detach().norm(dim=(-2, -1))).max().item()
    limit = CONDITION_LIMIT[columns.dtype]
    if not bound <= limit:  # NaN too
        raise IllConditioned(bound, limit)


class OrthogonalBasis(Basis):
    """Columns that are orthonormal, whatever the parameters are; they start as given."""

    base: Tensor

    def __init__(self, start: Float[Tensor, "d_model channel"]):
        super().__init__()
        self.register_buffer("base", _plain(start))
        self.tangent = nn.Parameter(torch.zeros_like(self.base))

    def columns(self) -> Float[Tensor, "d_model channel"]:
        """`Cayley(A) base` with A the skew matrix of `tangent`, through one channel x channel inverse."""
        base, tangent = full_precision(self.base), full_precision(self.tangent)
        along = base.T @ tangent
        skew = (along - along.T) / 4
        eye = torch.eye(base.shape[1], dtype=base.dtype, device=base.device)
        if base.shape[0] == base.shape[1]:
            return base @ (2 * torch.linalg.inv_ex(eye - skew).inverse - eye)
        away = (tangent - base @ along) / 2
        inverse = torch.linalg.inv_ex(eye - skew + away.T @ away).inverse
        return base @ (2 * inverse - eye) + 2 * (away @ inverse)

    def forward(self) -> tuple[Tensor, Tensor]:
        columns = self.columns()
        return columns, columns.T


class GeneralBasis(Basis):
    """Columns learned freely; the dual is their inverse, or `(Y^T V)^-1 Y^T` where there are fewer than the width."""

    can_degenerate = True

    def __init__(self, start: Float[Tensor, "d_model channel"], dual: Float[Tensor, "d_model channel"] | None = None):
        super().__init__()
        self.columns = nn.Parameter(_plain(start))
        is_square = start.shape[0] == start.shape[1]
        self.dual = None if is_square else nn.Parameter(_plain(start if dual is None else dual))

    def forward(self) -> tuple[Tensor, Tensor]:
        columns = full_precision(self.columns)
        if self.dual is None:
            return columns, torch.linalg.inv_ex(columns).inverse
        dual = full_precision(self.dual)
        return columns, torch.linalg.inv_ex(dual.T @ columns).inverse @ dual.T


class BoundedBasis(Basis):
    """Columns `Q diag(s) P^T` with orthonormal Q and P, whose condition number `max s / min s` is at most the bound."""

    def __init__(self, start: Float[Tensor, "d_model channel"], max_condition: float):
        super().__init__()
        if not 1 < max_condition < math.inf:
            raise BadValue("max_condition", max_condition, "a number above 1")
        self.half_range = math.log(max_condition) / 2
        left, sizes, right = torch.linalg.svd(full_precision(start.detach()), full_matrices=False)
        logs = sizes.clamp(min=torch.finfo(sizes.dtype).tiny).log()
        centred = (logs - (logs.max() + logs.min()) / 2) / self.half_range
        self.left, self.right = OrthogonalBasis(left), OrthogonalBasis(right.T)
        self.spread = nn.Parameter(centred.clamp(-0.999, 0.999).atanh())

    def forward(self) -> tuple[Tensor, Tensor]:
        sizes = (self.half_range * full_precision(self.spread).tanh()).exp()
        left, right = self.left.columns(), self.right.columns()
        return (left * sizes) @ right.T, (right / sizes) @ left.T


def random_columns(
    heads: Heads, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "d_model channel"]:
    """Orthonormal columns without preference for any direction (Haar), on the CPU."""
    normal = torch.randn(heads.d_model, heads.channels, generator=generator, dtype=dtype)
    q, r = torch.linalg.qr(normal)
    return q * r.diagonal().sign()


@dataclass(frozen=True, slots=True)
class SharedFrame:
    """V and D of one layer as leaves of the graph, in which the gradients of every pass add up."""

    columns: Tensor
    rows: Tensor
    versions: tuple[int, ...]

    def is_stale(self, basis: Basis) -> bool:
        return not torch.compiler.is_compiling() and self.versions != versions_of(basis)


def versions_of(basis: Basis) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in (*basis.parameters(), *basis.buffers()))


# --- the module that owns them --------------------------------------------------------------------------------------


class Eigenbasis(nn.Module):
    """Value and output weights of one layer whose map H has every eigenvalue in [low, high], head by head."""

    def __init__(
        self,
        heads: Heads,
        basis: Basis,
        psi: Float[Tensor, " channel"],
        low: float,
        high: float,
        shares: Float[Tensor, "kv group d_head"] | None = None,
        scale: TokenScale | None = None,
    ):
        super().__init__()
        heads.require_one_basis()
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise BadValue("The interval", (low, high), "two finite numbers, the smaller one first")
        self.heads, self.low, self.high = heads, float(low), float(high)
        self.basis = basis
        self.psi = nn.Parameter(psi.detach().clone())
        self.share_logits: nn.Parameter | None = None
        if heads.per_group > 1:
            even = psi.new_full((heads.n_kv, heads.per_group, heads.d_head), 1 / heads.per_group)
            given = even if shares is None else shares.to(psi).clamp(min=SMALLEST_SHARE)
            self.share_logits = nn.Parameter(given.log())
        self.scale = scale
        """Where it is given, the interval is that of the map that acts in a pre-norm layer: a multiple of [low, high]."""
        self._kept: tuple[object, Tensor] | None = None
        self.shared: SharedFrame | None = None

    def eigenvalues(self) -> Float[Tensor, " channel"]:
        """`clip(psi, low, high)`, times the followed scale where there is one, in the order (value head, channel)."""
        psi = full_precision(self.psi)
        if self.scale is None:
            return returning_clip(psi, self.low, self.high)
        return self.scale.absolute(returning_clip(self.scale.relative(psi), self.low, self.high))

    def interval(self) -> tuple[float, float]:
        """Where the eigenvalues lie now."""
        return (self.low, self.high) if self.scale is None else self.scale.interval(self.low, self.high)

    def weights(self) -> tuple[Float[Tensor, "channel d_model"], Float[Tensor, "d_model inner"]]:
        """Canonical value and output weights, evaluated now, in float32 or better even under autocast."""
        with torch.autocast(self.psi.device.type, enabled=False):
            columns, rows = self._frame()
            values = self.eigenvalues()
            if self.share_logits is None:
                return values[:, None] * columns.T, rows.T
            shares = full_precision(self.share_logits).softmax(1)
            per_head = values.view(self.heads.n_kv, 1, self.heads.d_head) * shares
            output = rows.T.reshape(-1, self.heads.n_kv, 1, self.heads.d_head) * per_head
            return columns.T, output.flatten(1)

    def _frame(self) -> tuple[Tensor, Tensor]:
        shared = self.shared
        return self.basis.frame() if shared is None or shared.is_stale(self.basis) else (shared.columns, shared.rows)

    # The two weights are read one after the other in every forward pass. The value weight evaluates both and keeps the
    # output weight for the one read that follows: once per pass, and nothing outlives it, so that gradients may be
    # accumulated, blocks recomputed (checkpointing) and parameters changed in between without stale results.

    def value_weight(self) -> Float[Tensor, "channel d_model"]:
        value, output = self.weights()
        self._kept = None if torch.compiler.is_compiling() else (self._state(), output)
        return value

    def output_weight(self) -> Float[Tensor, "d_model inner"]:
        if torch.compiler.is_compiling():  # common subexpressions are found by the compiler
            return self.weights()[1]
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] == self._state() else self.weights()[1]

    def _state(self) -> object:
        if any(parameter.is_inference() for parameter in self.parameters()):
            return object()  # these have no versions: never equal
        versions = tuple((id(tensor), tensor._version) for tensor in (*self.parameters(), *self.buffers()))
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), versions

    def forget(self) -> None:
        """Nothing is kept or shared any more."""
        self._kept = self.shared = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_kept": None,
            "shared": None,
        }  # what is kept belongs to one pass, and graphs cannot be copied

    def contains(
        self, w_v: Float[Tensor, "channel d_model"], w_o: Float[Tensor, "d_model inner"], tolerance: float = 1e-4
    ) -> bool:
        """Whether a pair of weights is of this form: heads decouple, and every eigenvalue lies in the interval."""
        heads = self.heads
        cores = w_v.double() @ w_o.double()  # (value head, channel) x (head, channel)
        cores = cores.reshape(heads.n_kv, heads.d_head, heads.n_kv, heads.per_group, heads.d_head)
        own = cores.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=2)  # (group, kv, d_head)
        strays = (cores.square().sum() - own.square().sum()).clamp(min=0).sqrt()
        eigenvalues = own.sum(0)
        low, high = self.interval()
        inside = (eigenvalues >= low - tolerance).all() & (eigenvalues <= high + tolerance).all()
        same_sign = ((own >= -tolerance).all(0) | (own <= tolerance).all(0)).all()
        return bool(inside & same_sign & (strays <= tolerance * (1 + own.norm())))


# --- one evaluation for all the passes of an optimizer step ---


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
