"""One forward pass, written down: every operation, and for every number where it came from.

A dispatch mode sees each operation that PyTorch executes, whatever code asked for it. Three things are followed:

    nodes       which operation made a tensor, from which tensors, in which module
    codes       a shadow of a tensor that says, entry by entry, which row of which weight (or which channel of which
                attention) the entry is; operations that only move numbers are repeated on the shadow
    chances     tensors that are attention probabilities, from the softmax to the product with the values

Nothing about the model is assumed and nothing in it is changed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from oversmooth.models.discovery.graph import Node
from oversmooth.models.discovery.norms import NormCall, classify, fused_norm
from oversmooth.models.discovery.operations import (
    ALTERING,
    COPIES,
    FACTORIES,
    KEEPS_VALUES,
    MOVES,
    SOFTMAX,
)
from oversmooth.models.discovery.passages import Passage, follow_norm, follow_products, one_token
from oversmooth.models.discovery.products import Mixing, Product, mixing_of, product_of, reading_of
from oversmooth.models.discovery.weights import Parameter, Parameters

SHIFT = 2.0**32
"""A code is the number of its source times this, plus a position; float64 holds such numbers exactly."""
NOTHING = -1.0
LARGEST_SHADOW = 2**24
"""Entries of a copied parameter or of an empty buffer up to which it gets a shadow."""

Codes = Float[Tensor, "*shape"]


@dataclass(frozen=True, eq=False, slots=True)
class ModuleCall:
    """A module ran: what it received first and what it returned first."""

    path: str
    order: int
    received: Node | None
    returned: Node | None


@dataclass(frozen=True, slots=True)
class Chances:
    """Attention probabilities, and what was done to them after the softmax."""

    module: str
    altered: tuple[tuple[str, str], ...] = ()
    """Operation and module of every change that was not only a move, a cast, a mask or a dropout."""


class Trace(TorchDispatchMode):
    """Everything that happened while it was active."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self.parameters = Parameters(tensors)
        self.products: list[Product] = []
        self.mixings: list[Mixing] = []
        self.norms: list[NormCall] = []
        self.calls: list[ModuleCall] = []
        self.sources: list[Parameter | Product | Mixing] = []
        self.running: list[str] = []
        self._nodes = WeakTensorKeyDictionary()
        self._codes = WeakTensorKeyDictionary()
        self._chances = WeakTensorKeyDictionary()
        self._factors = WeakTensorKeyDictionary()
        self.passed: list[Passage] = []
        """What mixed heads went through on their way to a projection, in order."""
        self._parameter_sources: dict[str, int] = {}
        self._order = 0

    # --- what a tensor is ---

    def node(self, tensor: Tensor) -> Node:
        found = self._nodes.get(tensor)
        if found is None:
            parameter = self.parameters.of(tensor)
            found = Node("given", "", (), self._order, tuple(tensor.shape), parameter.name if parameter else "")
            self._nodes[tensor] = found
        assert isinstance(found, Node)
        return found

    def codes(self, tensor: Tensor) -> Codes | None:
        """The shadow of a tensor; `None` where its numbers come from no single row of a weight."""
        return self._codes.get(tensor)

    def chances(self, tensor: Tensor) -> Chances | None:
        return self._chances.get(tensor)

    def parameter_codes(self, tensor: Tensor) -> Codes | None:
        """Codes of a view of a parameter, or of a copy of one."""
        parameter = self.parameters.of(tensor)
        if parameter is not None:
            source = self._parameter_sources.setdefault(parameter.name, len(self.sources))
            if source == len(self.sources):
                self.sources.append(parameter)
            return source * SHIFT + self.parameters.positions(tensor, parameter).double()
        codes = self.codes(tensor)
        if codes is None or not codes.numel() or codes.max() < 0:
            return None
        # Something else may stand beside it, as zeros between two biases.
        return codes if isinstance(self.sources[int(codes.max() // SHIFT)], Parameter) else None

    def is_parameter(self, tensor: Tensor) -> bool:
        return self.parameters.of(tensor) is not None or self.parameter_codes(tensor) is not None

    def new_source(self, source: Product | Mixing) -> float:
        self.sources.append(source)
        return (len(self.sources) - 1) * SHIFT

    def set_codes(self, tensor: Tensor, codes: Codes) -> None:
        self._codes[tensor] = codes

    # --- what happens ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if made:
            self._order += 1
            self._record(func, func._schema.name.removeprefix("aten::"), args, kwargs, made)
        return output

    def _record(self, func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> None:
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        parents = tuple(self.node(tensor) for tensor in given if tensor.numel())
        if op == "cat" and len(parents) == 1:
            op = "alias"  # a first step of a cache: nothing and the new tokens
        module = self.running[-1] if self.running else ""
        nodes = []
        if op == "copy_" and len(parents) == 2:
            parents = parents[1:]
        for tensor in made:
            parameter = parents[0].parameter if op in MOVES and parents else ""
            node = Node(op, module, parents, self._order, tuple(tensor.shape), parameter, _number(op, args, kwargs))
            self._nodes[tensor] = node
            nodes.append(node)
            if func._schema.is_mutable and tensor._is_view() and tensor._base is not None:
                self._nodes[tensor._base] = node  # writing into a part changes the whole
        self._follow_codes(func, op, args, kwargs, made)
        follow_products(self, op, args, made[0], module)
        self._follow_chances(op, given, made, module)
        if op == "native_layer_norm":
            self.norms.append(fused_norm(self, args, nodes[0], module))
        elif (mixing := mixing_of(self, op, args, made[0], nodes[0])) is not None:
            self.mixings.append(mixing)
        elif (product := product_of(self, op, args, made[0], nodes[0])) is not None:
            reading_of(self, product)
            self.products.append(product)

    def _follow_codes(
        self, func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]
    ) -> None:
        if op in FACTORIES:
            if made[0].numel() <= LARGEST_SHADOW:
                self._codes[made[0]] = torch.full(made[0].shape, NOTHING, dtype=torch.float64)
            return
        if op in ("add", "add_"):
            if not self._follow_bias(args, made[0]):
                self._codes.pop(made[0], None)  # what is added in place
            return
        is_same = op in ("mul", "div") and _number(op, args, kwargs) == 1.0
        if is_same and (codes := self.codes(args[0])) is not None:
            self._codes[made[0]] = codes
        if op not in MOVES:
            if func._schema.is_mutable:
                self._codes.pop(made[0], None)
            return
        shadows = self._shadows(op, args)
        if not shadows:
            return

        def shadow(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            found = shadows.get(id(leaf))
            if found is not None and op == "as_strided":  # which counts entries of memory: lie there as the tensor does
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=torch.float64).copy_(found)
            return torch.full(leaf.shape, NOTHING, dtype=torch.float64) if found is None else found

        try:
            moved = _move(func, op, tree_map_only(Tensor, shadow, args), kwargs, made[0])
        except (RuntimeError, TypeError, NotImplementedError):
            return  # a move that has no meaning on the shadow's layout: the numbers count as changed
        for tensor, codes in zip(made, moved, strict=False):
            if codes.shape == tensor.shape:
                self._codes[tensor] = codes

    def factor(self, tensor: Tensor) -> float:
        """The number that a result of a product was multiplied by."""
        found: float = self._factors.get(tensor, 1.0)
        return found

    def set_factor(self, tensor: Tensor, factor: float) -> None:
        self._factors[tensor] = factor

    def _shadows(self, op: str, args: tuple[Any, ...]) -> dict[int, Codes]:
        """The shadows of an operation's arguments, by identity."""
        found: dict[int, Codes] = {}
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                codes = self.codes(leaf)
                if codes is None and op in COPIES and leaf.numel() <= LARGEST_SHADOW:
                    codes = self.parameter_codes(leaf)
                if codes is not None:
                    found[id(leaf)] = codes
        return found

    def _follow_bias(self, args: tuple[Any, ...], made: Tensor) -> bool:
        """A parameter added to the result of a product is a bias: the rows stay what they are."""
        if len(args) < 2 or not all(isinstance(arg, Tensor) for arg in args[:2]):
            return False
        for data, bias in (args[:2], args[1::-1]):
            codes = self.codes(data)
            if codes is None or not (self.is_parameter(bias) and bias.numel() <= LARGEST_SHADOW):
                continue
            bias_codes = self.parameter_codes(bias)
            if bias_codes is None or codes.shape != made.shape or bias.numel() < 2:
                return False
            source = self.sources[int(codes.flatten()[0] // SHIFT)] if codes.numel() and codes.min() >= 0 else None
            if isinstance(source, Product):
                source.add_bias(codes % SHIFT, bias_codes)
                self._codes[made] = codes
                return True
            return False
        return False

    def _follow_chances(self, op: str, given: list[Tensor], made: list[Tensor], module: str) -> None:
        if op in SOFTMAX or self._is_softmax_by_hand(op, given):
            self._chances[made[0]] = Chances(module)
            return
        known = [chances for tensor in given if (chances := self.chances(tensor)) is not None]
        is_unchanged = op in MOVES or op in KEEPS_VALUES or (op in ("mul", "div") and len(given) == 1)
        if not known or not (is_unchanged or self._alters(op, given, made[0])):
            return
        chances = known[0] if is_unchanged else Chances(known[0].module, (*known[0].altered, (op, module)))
        for tensor in made:
            self._chances[tensor] = chances

    def _is_softmax_by_hand(self, op: str, given: list[Tensor]) -> bool:
        """An exponential divided by something, or of a difference with a `logsumexp`."""
        nodes = [self.node(tensor).root for tensor in given[:2]]
        if op == "div" and nodes:
            return nodes[0].op == "exp"
        is_difference = op == "exp" and nodes[0].op in ("sub", "sub_")
        return is_difference and any(parent.root.op == "logsumexp" for parent in nodes[0].parents)

    def _alters(self, op: str, given: list[Tensor], made: Tensor) -> bool:
        """Whether an operation makes other attention out of attention: heads mixed by weights, maps combined."""
        if op in ("bmm", "mm", "addmm", "convolution"):
            return any(self.is_parameter(tensor) for tensor in given) and not self._sums_up(op, given)
        return op in ALTERING and all(tensor.numel() <= made.numel() for tensor in given)

    def _sums_up(self, op: str, given: list[Tensor]) -> bool:
        """Whether a product sums over what the softmax was taken over, as logits that choose among rows of a weight."""
        place, chances = next((place, one) for place, one in enumerate(given) if self.chances(one) is not None)
        axis = 1 if op == "convolution" else -1 if place < len(given) - 1 else -2
        with _paused(self):
            sums = chances.sum(axis)
            return bool(((sums - 1).abs() < 1e-3).all())

    # --- modules ---

    def enter(self, path: str) -> None:
        self.running.append(path)

    def leave(self, path: str, module: nn.Module, received: Any, returned: Any) -> None:
        while self.running and self.running.pop() != path:
            continue
        first_in, first_out = _first(received), _first(returned)
        with _paused(self):
            norm = None if first_in is None or first_out is None else classify(module, first_in, first_out)
        into = None if first_in is None else self.node(first_in)
        out = None if first_out is None else self.node(first_out)
        self._order += 1
        self.calls.append(ModuleCall(path, self._order, into, out))
        if norm is not None and into is not None and out is not None:
            with _paused(self):
                codes = one_token(self, first_in)
            found = NormCall(path, norm, into.root, out.root, into.shape, codes)
            while self.norms and _is_same(self.norms[-1], found):
                self.norms.pop()  # the same norm, seen as a function or as a part
            self.norms.append(found)
            with _paused(self):
                follow_norm(self, found, first_in, first_out)


def _move(func: Any, op: str, args: Any, kwargs: dict[str, Any], like: Tensor) -> list[Tensor]:
    """The move repeated on shadows, which may lie differently in memory."""
    if op in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return [args[0].reshape(like.shape)]
    if op in ("_to_copy", "clone", "contiguous"):
        return [args[0].clone()]
    if op == "where":  # the first argument is the mask
        args = sorted((arg for arg in args[1:] if isinstance(arg, Tensor)), key=lambda codes: -float(codes.max()))
    if op in KEEPS_VALUES:
        return [args[0].expand(like.shape)]
    if op == "constant_pad_nd":
        return [func(args[0], args[1], NOTHING)]
    if op == "im2col":  # it pads with zeros
        return [func(args[0] - NOTHING, *args[1:]) + NOTHING]
    moved = func(*args, **{name: value for name, value in kwargs.items() if name not in ("dtype", "device", "layout")})
    return [moved] if isinstance(moved, Tensor) else list(moved)


def _number(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The factor of a product with a number, or the `alpha` of a sum."""
    if op in ("add", "add_"):
        return float(kwargs.get("alpha", 1))
    numbers = [arg for arg in args if isinstance(arg, int | float)] if op in ("mul", "mul_", "div", "div_") else []
    return float(numbers[0]) if numbers else None


def _is_same(inner: NormCall, outer: NormCall) -> bool:
    """Whether a norm is what another one is made of."""
    is_inside = inner.path.startswith(f"{outer.path}.") and inner.read is outer.read
    return inner.made is outer.made or is_inside


def _first(value: Any) -> Tensor | None:
    """The first tensor of floats in what a module received or returned."""
    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


@contextmanager
def _paused(trace: Trace) -> Iterator[None]:
    """Operations of our own are not the model's."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextmanager
def traced(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[Trace]:
    """Writes down what the model does inside; its modules are watched too, and left as they were."""
    trace = Trace(tensors)
    handles = []
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for path, module in model.named_modules():

            def enter(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                trace.enter(path)

            def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                trace.leave(path, module, (args, kwargs), output)

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        with sdpa_kernel(SDPBackend.MATH), trace:
            yield trace
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
