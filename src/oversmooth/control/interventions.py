"""`apply` and `unapply`: published interventions by name, put onto a live model with hooks and nothing else.

Their parameters are registered with the attention module that they change, so that optimizers, devices, state dicts and
copies see them. A family or an implementation of attention in which a rule has no exact place is refused.
"""

from torch import nn

from oversmooth.control.carrier import Carrier
from oversmooth.control.eigenbasis import full_precision
from oversmooth.control.rules import FirstValues, LayerFacts, UsesFirstValues, all_rules
from oversmooth.control.selection import RULE_PREFIX, Chosen, Layers, choose, heads_of
from oversmooth.errors import CannotControl, UnknownName
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import Applied


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
    source = open_source(model)
    store, log = source.store, ReadLog(source.store)
    assert isinstance(store, ModuleStore), "an open module is read through a ModuleStore"
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
            heads=heads_of(weights),
            kind=each.stack.arch.kind,
            depth=sum(len(passes) for passes in each.stack.passes),
            number=each.block.index + 1,
            is_first=each.position == 0,
            first=first[id(each.stack)],
            first_heads=heads_of(each.stack.weights(0, log.read)) if issubclass(kind, UsesFirstValues) else None,
        )
        if (reason := kind.refusal(facts)) is not None:
            raise CannotControl(name, each.words, reason, "Choose other layers, or another intervention.")
        to = full_precision(weights.w_v.new_empty(0))
        carriers.append(Carrier(name, kind(facts, **options).to(to), each, weights, store))
    distinct = {id(carrier.attention): carrier for carrier in carriers}.values()  # one module at several depths has one
    for carrier in distinct:
        carrier.attach()
    return Applied(
        provenance=provenance_of(source, stacks, log, compute_dtype="float32"),
        name=name,
        layers=tuple((each.stack.label, each.block.index) for each in chosen),
        parameters=sum(parameter.numel() for carrier in distinct for parameter in carrier.rule.parameters()),
    )


def unapply(model: nn.Module, name: str | None = None) -> nn.Module:
    """Takes an intervention off again (all of them without a name), in place; returns the model."""
    if name is not None and name not in (rules := all_rules()):
        raise UnknownName("intervention", name, tuple(rules))
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                carrier = getattr(hook, "__self__", None)
                if isinstance(carrier, Carrier) and name in (None, carrier.name):
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
