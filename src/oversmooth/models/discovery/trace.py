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

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from oversmooth.models.discovery.operations import (
    MOVES,
    SHIFT,
    AttentionTimesValues,
    Node,
    NormCall,
    Parameter,
    Parameters,
    Projection,
    classify,
    follow_chances,
    fused_norm,
    mixing_of,
    number_of,
    paused,
    plain_operations,
    product_of,
)
from oversmooth.models.discovery.row_provenance import (
    HeadTransform,
    RowProvenance,
    follow_codes,
    follow_norm,
    follow_products,
    one_token,
    reading_of,
)
from oversmooth.models.hooks.places import features_in, hooked

KERNELS = ("attention", "attn", "fmha")
"""Parts of the names of operations that are a whole attention."""


@dataclass(frozen=True, eq=False, slots=True)
class ModuleCall:
    """A module ran, and what it received first."""

    path: str
    received: Node | None


class Trace(TorchDispatchMode):
    """Everything that happened while it was active."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self.parameters = Parameters(tensors)
        self.products: list[Projection] = []
        self.mixings: list[AttentionTimesValues] = []
        self.norms: list[NormCall] = []
        self.calls: list[ModuleCall] = []
        self.sources: list[Parameter | Projection | AttentionTimesValues] = []
        self.running: list[str] = []
        self.kernels: dict[str, str] = {}
        """Fused attention operations, whose probabilities are not visible, and the module of the first."""
        self._nodes = WeakTensorKeyDictionary()
        self.codes = WeakTensorKeyDictionary()
        """The shadow of each tensor whose numbers come from single rows of a weight."""
        self.chances = WeakTensorKeyDictionary()
        """The `AttentionProbabilities` that a tensor holds."""
        self.factors = WeakTensorKeyDictionary()
        """The number that a result of a product was multiplied by, where that is not 1."""
        self.passed: list[HeadTransform] = []
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

    def norm_that_made(self, node: Node) -> NormCall | None:
        """The norm whose output a tensor is; the outermost of several."""
        return next((call for call in reversed(self.norms) if call.made is node), None)

    def norm_behind(self, node: Node) -> NormCall | None:
        """The first norm that reads a tensor after it was made."""
        return next((call for call in self.norms if call.read is node and call.made.order > node.order), None)

    def parameter_codes(self, tensor: Tensor) -> RowProvenance | None:
        """Codes of a view of a parameter, or of a copy of one."""
        parameter = self.parameters.of(tensor)
        if parameter is not None:
            source = self._parameter_sources.setdefault(parameter.name, len(self.sources))
            if source == len(self.sources):
                self.sources.append(parameter)
            return source * SHIFT + self.parameters.positions(tensor, parameter).double()
        codes = self.codes.get(tensor)
        if codes is None or not codes.numel() or codes.max() < 0:
            return None
        # The tensor may hold other entries too, such as zeros between two biases.
        return codes if isinstance(self.sources[int(codes.max() // SHIFT)], Parameter) else None

    def is_parameter(self, tensor: Tensor) -> bool:
        return self.parameters.of(tensor) is not None or self.parameter_codes(tensor) is not None

    def new_source(self, source: Projection | AttentionTimesValues) -> float:
        self.sources.append(source)
        return (len(self.sources) - 1) * SHIFT

    # --- what happens ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        made = features_in(output)
        if made:
            self._order += 1
            self._record(func, func._schema.name.removeprefix("aten::"), args, kwargs, made)
        return output

    def _record(self, func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> None:
        given = features_in(args)
        parents = tuple(self.node(tensor) for tensor in given if tensor.numel())
        module = self.running[-1] if self.running else ""
        if op == "cat" and len(parents) == 1:
            op = "alias"  # a first step of a cache: nothing and the new tokens
        if op == "copy_" and len(parents) == 2:
            parents = parents[1:]  # what was there before is overwritten
        if any(word in op for word in KERNELS):
            self.kernels.setdefault(op, module)
        nodes = []
        for tensor in made:
            parameter = parents[0].parameter if op in MOVES and parents else ""
            node = Node(op, module, parents, self._order, tuple(tensor.shape), parameter, number_of(op, args, kwargs))
            self._nodes[tensor] = node
            nodes.append(node)
            if func._schema.is_mutable and tensor._is_view() and tensor._base is not None:
                self._nodes[tensor._base] = node  # writing into a part changes the whole
        follow_codes(self, func, op, args, kwargs, made)
        follow_products(self, op, args, made[0], module)
        follow_chances(self, op, given, made, module)
        if op == "native_layer_norm":
            self.norms.append(fused_norm(self, args, nodes[0], module))
        elif (mixing := mixing_of(self, op, args, made[0], nodes[0])) is not None:
            self.mixings.append(mixing)
        elif (product := product_of(self, op, args, made[0], nodes[0])) is not None:
            reading_of(self, product)
            self.products.append(product)

    def leave(self, path: str, module: nn.Module, received: Any, returned: Any) -> None:
        """A module has run; it may be a norm."""
        while self.running and self.running.pop() != path:
            continue
        first_in, first_out = (next(iter(features_in(value)), None) for value in (received, returned))
        into = None if first_in is None else self.node(first_in)
        self._order += 1
        self.calls.append(ModuleCall(path, into))
        if first_in is None or first_out is None or into is None:
            return
        with paused():
            if (facts := classify(module, first_in, first_out)) is None:
                return
            out, codes = self.node(first_out).root, one_token(self, first_in)
            found = NormCall(path, facts, into.root, out, into.shape, codes)
            while self.norms and _is_same(self.norms[-1], found):
                self.norms.pop()  # the same norm, seen as a function or as a part
            self.norms.append(found)
            follow_norm(self, found, first_in, first_out)


SCORES = 2**27
"""Scores of one attention that are computed at most: half a GiB in float32, of which plain operations need several."""


def _require_few_scores(query: Tensor, key: Tensor) -> None:
    """Inputs of thousands of tokens, as large as a config allows, would fill the memory; smaller ones show the same."""
    count = query.shape[:-1].numel() * key.shape[-2]
    if count > SCORES:
        tokens = max(query.shape[-2], key.shape[-2])
        raise RuntimeError(f"attention between {tokens:,} tokens has {count:,} scores; give fewer tokens")


class _PlainKernel(TorchFunctionMode):
    """Attention in plain operations, whatever kernel the model itself chooses around the call."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        _require_few_scores(*args[:2], **{name: h for name, h in (kwargs or {}).items() if name in ("query", "key")})
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **(kwargs or {}))


def _is_same(inner: NormCall, outer: NormCall) -> bool:
    """Whether a norm is what another one is made of."""
    is_inside = inner.path.startswith(f"{outer.path}.") and inner.read is outer.read
    return inner.made is outer.made or is_inside


@contextmanager
def traced(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[Trace]:
    """Writes down what the model does inside; its modules are watched too, and left as they were."""
    trace = Trace(tensors)

    def watched(path: str, module: nn.Module) -> Iterator[Any]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            trace.leave(path, module, (args, kwargs), output)

        yield module.register_forward_pre_hook(lambda module, args: trace.running.append(path), prepend=True)
        yield module.register_forward_hook(leave, with_kwargs=True)

    hooks = (handle for path, module in model.named_modules() for handle in watched(path, module))
    with plain_operations(), hooked(hooks), sdpa_kernel(SDPBackend.MATH), _PlainKernel(), trace:
        yield trace
