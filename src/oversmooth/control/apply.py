"""`apply`, `unapply`, and the hooks that bring a rule to a block.

Their parameters are registered with the attention module that they change, so that optimizers, devices, state dicts and
copies see them. A family or an implementation of attention in which a rule has no exact place is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from oversmooth.control.attention_calls import FirstValues, Interception, LayerFacts, Rule
from oversmooth.control.eigenbasis import Heads, full_precision
from oversmooth.control.interventions import BranchScale, ContraNorm, LayerNormScaling, UsesFirstValues, all_rules
from oversmooth.control.selection import RULE_PREFIX, Chosen, Layers, choose, without_exact_place
from oversmooth.errors import CannotControl, UnknownName, user_code
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.open import open_to_change
from oversmooth.models.source import Stack, provenance_of
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import Applied

# --- brings a rule to the places of one block, with hooks and nothing else ---

NORMS_BEFORE = ("attn_norm", "cross_norm", "ffn_norm")
"""The norms that a branch reads through, where the residual sum is not normalised itself."""


class RuleHooks:
    """Brings a rule to the places of one block. Its hooks are bound methods, so that copies of a model have their own."""

    def __init__(self, name: str, rule: Rule, each: Chosen, weights: AttentionWeights, store: ModuleStore):
        self.name, self.rule, self.words = name, rule, each.words
        self.heads, self.rows = Heads.of(weights), weights.value_rows
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
        rule, reason = self.rule, ""
        if hasattr(self.attention, f"{RULE_PREFIX}{self.name}"):
            raise CannotControl(self.name, self.words, "it is already applied", "Remove it first with osm.unapply.")
        if self._overrides(*without_exact_place(weights)):
            reason = f"{weights.beyond_plain}, so that it has no exact place"
        elif isinstance(rule, UsesFirstValues | LayerNormScaling) and stack.arch.shared_layers:
            reason = "one set of weights runs at several depths, so that one of them cannot be told from the others"
        elif isinstance(rule, LayerNormScaling) and not self._norms_before():
            reason = "no norm stands before a branch of it"
        elif isinstance(rule, BranchScale) and "cross_norm" in self.norms:
            reason = "the branch of its cross-attention has no declared place"
        elif isinstance(rule, ContraNorm) and self.block is None:
            reason = "a bare attention module has no residual sum of its own"
        if reason:
            advice = f"Choose other layers, or another stack; osm.apply(model, {self.name!r}, stack=...)."
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
            calls = f"{interception.calls} calls of fused attention or softmax, not one"
            reason = f"its {type(module).__name__} makes {calls}"
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


# --- `apply` and `unapply`: published interventions by name ---


def apply(
    model: nn.Module, name: str, *, layers: Layers = None, stack: str | None = None, **options: int | float
) -> Applied:
    """Puts a published intervention onto a live model, in place: attnscale, featscale, neutreno, contranorm, gfsa, ...

    Options by name: neutreno `strength` (0.6 for images, 0.4 otherwise), contranorm `scale` (0.1), gfsa `order` (4),
    layerscale `init` (1e-5), value_residual `first` (0.5), tempscale `temperature` (0.8), differential `start` (-10), gate
    `bias` (10). `layers` and `stack` as in `constrain`. Fused attention stays fused; attnscale, featscale, gfsa,
    differential and gate leave outputs as they are until they are trained. Attention dropout is applied before the
    intervention.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> osm.apply(model, "attnscale").parameters
    12
    """
    rules = all_rules()
    if name not in rules:
        raise UnknownName("intervention", name, tuple(rules))
    kind = rules[name]
    if unknown := sorted(set(options) - set(kind.options)):
        raise UnknownName(f"option of {name}", unknown[0], kind.options)
    source, store = open_to_change(model)
    log = ReadLog(store)
    stacks = source.stacks()
    chosen = choose(stacks, layers, stack)
    first = {id(each.stack): FirstValues() for each in chosen}
    if issubclass(kind, UsesFirstValues):  # the first layer only remembers
        missing = [each.stack for each in chosen if Chosen(each.stack, 0) not in chosen]
        chosen += [Chosen(each, 0) for each in {id(stack): stack for stack in missing}.values()]
    carriers = []
    for each in chosen:
        weights = each.stack.weights(each.position, log.read)
        facts = LayerFacts(
            heads=Heads.of(weights),
            kind=each.stack.arch.kind,
            depth=sum(len(passes) for passes in each.stack.passes),
            number=each.block.index + 1,
            is_first=each.position == 0,
            first=first[id(each.stack)],
            first_heads=Heads.of(each.stack.weights(0, log.read)) if issubclass(kind, UsesFirstValues) else None,
        )
        rule = _made(name, kind, facts, options, each.words)
        to = full_precision(weights.w_v.new_empty(0))
        carriers.append(RuleHooks(name, rule.to(to), each, weights, store))
    distinct = {id(carrier.attention): carrier for carrier in carriers}.values()  # one module at several depths has one
    for carrier in distinct:
        carrier.attach()
    return Applied(
        provenance=provenance_of(source, stacks, log, compute_dtype="float32"),
        name=name,
        layers=tuple((each.stack.label, each.block.index) for each in chosen),
        parameters=sum(parameter.numel() for carrier in distinct for parameter in carrier.rule.parameters()),
    )


def _made(name: str, kind: type[Rule], facts: LayerFacts, options: Mapping[str, int | float], words: str) -> Rule:
    """The rule for one layer; raises where it means nothing there, and names a plugin's that fails."""
    with user_code(f"The intervention {name!r}", kind):
        reason = kind.refusal(facts)
        if reason is None:
            return kind(facts, **options)
    raise CannotControl(name, words, reason, "Choose other layers, or another intervention.")


def unapply(model: nn.Module, name: str | None = None) -> nn.Module:
    """Takes an intervention off again (all of them without a name), in place; returns the model."""
    if name is not None and name not in (rules := all_rules()):
        raise UnknownName("intervention", name, tuple(rules))
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                carrier = getattr(hook, "__self__", None)
                if isinstance(carrier, RuleHooks) and name in (None, carrier.name):
                    _forget_hook(module, key)
        for child in [child for child in module._modules if child.startswith(RULE_PREFIX)]:
            if name in (None, child.removeprefix(RULE_PREFIX)):
                delattr(module, child)
    return model


def _forget_hook(module: nn.Module, key: int) -> None:
    for hooks in (
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
    ):
        hooks.pop(key, None)
