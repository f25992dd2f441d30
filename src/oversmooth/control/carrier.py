"""Brings a rule to the places of one block, with hooks and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from oversmooth.control.attention_calls import Interception
from oversmooth.control.rules import BranchScale, ContraNorm, LayerNormScaling, Rule, UsesFirstValues
from oversmooth.control.selection import RULE_PREFIX, Chosen, heads_of, without_exact_place
from oversmooth.errors import CannotControl
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

NORMS_BEFORE = ("attn_norm", "cross_norm", "ffn_norm")
"""The norms that a branch reads through, where the residual sum is not normalised itself."""


class Carrier:
    """Brings a rule to the places of one block. Its hooks are bound methods, so that copies of a model have their own."""

    def __init__(self, name: str, rule: Rule, each: Chosen, weights: AttentionWeights, store: ModuleStore):
        self.name, self.rule, self.words = name, rule, each.words
        self.heads, self.rows = heads_of(weights), weights.value_rows
        self.residual, self.token_axis = each.stack.arch.residual, each.stack.arch.token_axis
        self.value, self.output = store.owner(each.block.value.weight), store.owner(each.block.output.weight)
        self.is_torch = isinstance(self.value, nn.MultiheadAttention)
        path = each.block.value.weight.rpartition(".")[0].rpartition(".")[0]
        self.attention = self.value if self.is_torch else store.module(path)
        self.norms = {role: store.norm(names) for role, names in each.block.norms.items()}
        self.block = store.module(each.block.path) if self.norms else None
        self.running: list[Interception] = []
        self.stream: Tensor | None = None
        self._refuse(each.stack, weights)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "running": [], "stream": None}

    def _refuse(self, stack: Stack, weights: AttentionWeights) -> None:
        """Raises where the rule has no exact place; nothing has been touched yet."""
        advice = f"Choose other layers, or another stack; osm.apply(model, {self.name!r}, stack=...)."
        if hasattr(self.attention, f"{RULE_PREFIX}{self.name}"):
            raise CannotControl(self.name, self.words, "it is already applied", "Remove it first with osm.unapply.")
        if self._overrides(*without_exact_place(weights)):
            raise CannotControl(self.name, self.words, f"{weights.beyond_plain}, so that it has no exact place", advice)
        if isinstance(self.rule, UsesFirstValues | LayerNormScaling) and stack.arch.shared_layers:
            reason = "one set of weights runs at several depths, so that one of them cannot be told from the others"
            raise CannotControl(self.name, self.words, reason, advice)
        if isinstance(self.rule, LayerNormScaling) and not self._norms_before():
            reason = "no norm stands before a branch of it"
            raise CannotControl(self.name, self.words, reason, advice)
        if isinstance(self.rule, BranchScale) and "cross_norm" in self.norms:
            reason = "the branch of its cross-attention has no declared place"
            raise CannotControl(self.name, self.words, reason, advice)
        if isinstance(self.rule, ContraNorm) and self.block is None:
            reason = "a bare attention module has no residual sum of its own"
            raise CannotControl(self.name, self.words, reason, advice)

    def attach(self) -> None:
        """Registers the rule with the attention module, and hooks for the steps that it overrides."""
        self.attention.add_module(f"{RULE_PREFIX}{self.name}", self.rule)
        if self.is_torch or self._overrides("product", "probabilities", "seen"):
            self.attention.register_forward_pre_hook(self.enter)
            self.attention.register_forward_hook(self.leave, always_call=True)
        if not self.is_torch and self._overrides("read"):
            self.value.register_forward_pre_hook(self.on_read)
        if not self.is_torch and self._overrides("values"):
            self.value.register_forward_hook(self.on_values)
        if not self.is_torch and self._overrides("mixed"):
            self.output.register_forward_pre_hook(self.on_mixed)
        if not self.is_torch and self._overrides("projected"):
            self.output.register_forward_hook(self.on_projected)
        if isinstance(self.rule, ContraNorm):
            self._attach_sum()
        elif isinstance(self.rule, BranchScale):
            self._attach_branches()
        elif isinstance(self.rule, LayerNormScaling):
            for norm in self._norms_before():
                norm.register_forward_hook(self.after_norm)

    def _overrides(self, *steps: str) -> bool:
        return any(getattr(type(self.rule), step) is not getattr(Rule, step) for step in steps)

    # --- attention ---

    def enter(self, module: nn.Module, args: object) -> None:
        interception = Interception(self.rule)
        interception.__enter__()
        self.running.append(interception)

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        if not self.running:
            return
        interception = self.running.pop()
        interception.__exit__(None, None, None)
        if interception.calls != 1 and output is not None:  # None: an error is on its way already
            reason = (
                f"its {type(module).__name__} makes {interception.calls} calls of fused attention or softmax, not one"
            )
            advice = "Load the model with attn_implementation='sdpa' or 'eager'."
            raise CannotControl(self.name, self.words, reason, advice)

    def on_read(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._require_sequences(args[0])
        self.rule.read(args[0])

    def on_values(self, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        self._require_sequences(output)
        rows = None if self.rows is None else self.rows.to(output.device)
        v = output if rows is None else output.index_select(-1, rows)
        changed = self.rule.values(v.unflatten(-1, (self.heads.n_kv, self.heads.d_head))).flatten(-2)
        return changed if rows is None else output.index_copy(-1, rows, changed.to(output.dtype))

    def on_mixed(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._require_sequences(args[0])
        o = args[0].unflatten(-1, (self.heads.n_heads, self.heads.d_head))
        return self.rule.mixed(o).flatten(-2), *args[1:]

    def on_projected(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        self._require_sequences(output)
        return self.rule.projected(output)

    def _require_sequences(self, x: Tensor) -> None:
        if x.ndim != 3:
            reason = f"its tokens come as shape {tuple(x.shape)}, not as (batch, token, channel)"
            raise CannotControl(self.name, self.words, reason, "Use an attention that keeps sequences apart ('sdpa').")

    # --- norms before branches ---

    def _norms_before(self) -> list[nn.Module]:
        """Each once: in a parallel block one norm may serve both branches."""
        if self.residual == "post":
            return []
        found = [self.norms[role] for role in NORMS_BEFORE if role in self.norms]
        return list({id(norm): norm for norm in found}.values())

    def after_norm(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        assert isinstance(self.rule, LayerNormScaling), "only this one changes norms"
        return self.rule.normed(output)

    # --- the residual sum ---

    def _attach_sum(self) -> None:
        assert self.block is not None, "bare attention was refused"
        if self.residual == "post":
            self.norms["attn_norm"].register_forward_pre_hook(self.before_norm)
        else:
            self.block.register_forward_hook(self.after_block)

    def before_norm(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._summed(args[0]), *args[1:]

    def after_block(self, module: nn.Module, args: object, output: Any) -> Any:
        return _with_features(output, self._summed(_features(output)))

    def _summed(self, x: Tensor) -> Tensor:
        assert isinstance(self.rule, ContraNorm), "only this one changes the sum"
        batch_first = x.transpose(0, 1) if self.token_axis == 0 else x
        self._require_sequences(batch_first)
        with self._paused():
            changed = self.rule.summed(batch_first)
        return changed.transpose(0, 1) if self.token_axis == 0 else changed

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Some attention modules contain the norm after the sum: what we call there is not theirs."""
        for interception in self.running:
            interception.is_paused = True
        try:
            yield
        finally:
            for interception in self.running:
                interception.is_paused = False

    # --- branches ---

    def _attach_branches(self) -> None:
        """In a block with one branch after the other the first is scaled where it is made, the second where it is added."""
        if self.residual == "sandwich":
            self.norms["attn_branch_norm"].register_forward_hook(self.scale_attention)
            self.norms["ffn_branch_norm"].register_forward_hook(self.scale_feed_forward)
        elif self.residual == "parallel":
            assert self.block is not None, "a parallel block has norms"
            self.block.register_forward_pre_hook(self.enter_block, with_kwargs=True)
            self.block.register_forward_hook(self.add_scaled_attention)
        else:
            where = self.attention if self.is_torch else self.output
            where.register_forward_hook(self.scale_attention)
            if self.block is not None and self.residual == "post":
                self.norms["attn_norm"].register_forward_hook(self.remember_output)
                self.norms["ffn_norm"].register_forward_pre_hook(self.scale_sum)
            elif self.block is not None:
                self.norms["ffn_norm"].register_forward_pre_hook(self.remember_input)
                self.block.register_forward_hook(self.add_scaled_feed_forward)

    def scale_attention(self, module: nn.Module, args: object, output: Any) -> Any:
        return _with_features(output, self._scaled("attn", _features(output)))

    def scale_feed_forward(self, module: nn.Module, args: object, output: Any) -> Any:
        return _with_features(output, self._scaled("ffn", _features(output)))

    def enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stream = args[0] if args else kwargs["hidden_states"]

    def remember_output(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.stream = output

    def remember_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.stream = args[0]

    def scale_sum(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._added("ffn", args[0]), *args[1:]

    def add_scaled_attention(self, module: nn.Module, args: object, output: Any) -> Any:
        return _with_features(output, self._added("attn", _features(output)))

    def add_scaled_feed_forward(self, module: nn.Module, args: object, output: Any) -> Any:
        return _with_features(output, self._added("ffn", _features(output)))

    def _added(self, branch: str, total: Tensor) -> Tensor:
        """`x + g f` from `x + f`."""
        stream, self.stream = self.stream, None
        assert stream is not None, "the stream is seen before the branch is added to it"
        stream = stream.reshape(total.shape)
        return stream + self._scaled(branch, total - stream)

    def _scaled(self, branch: str, y: Tensor) -> Tensor:
        assert isinstance(self.rule, BranchScale), "only these scale branches"
        return self.rule.scaled(branch, y)


def _features(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _with_features(output: Any, h: Tensor) -> Any:
    return (h, *output[1:]) if isinstance(output, tuple) else h
