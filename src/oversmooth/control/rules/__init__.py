"""The published interventions by name; each is one class, beside those that change the same thing."""

from oversmooth.control.rules.attention import GFSA, AttnScale, Centered, TempScale
from oversmooth.control.rules.blocks import (
    BranchScale,
    ContraNorm,
    FeatScale,
    LayerNormScaling,
    LayerScale,
    ResidualScaling,
)
from oversmooth.control.rules.rule import FirstValues, LayerFacts, Rule
from oversmooth.control.rules.values import Differential, Exclusive, Gate, NeuTRENO, UsesFirstValues, ValueResidual
from oversmooth.environment import plugins

__all__ = [
    "GFSA",
    "RULES",
    "AttnScale",
    "BranchScale",
    "Centered",
    "ContraNorm",
    "Differential",
    "Exclusive",
    "FeatScale",
    "FirstValues",
    "Gate",
    "LayerFacts",
    "LayerNormScaling",
    "LayerScale",
    "NeuTRENO",
    "ResidualScaling",
    "Rule",
    "TempScale",
    "UsesFirstValues",
    "ValueResidual",
    "all_rules",
]

RULES: dict[str, type[Rule]] = {
    "attnscale": AttnScale,
    "featscale": FeatScale,
    "neutreno": NeuTRENO,
    "contranorm": ContraNorm,
    "gfsa": GFSA,
    "centered": Centered,
    "layerscale": LayerScale,
    "residual_scaling": ResidualScaling,
    "value_residual": ValueResidual,
    "layernorm_scaling": LayerNormScaling,
    "tempscale": TempScale,
    "exclusive": Exclusive,
    "differential": Differential,
    "gate": Gate,
}


def all_rules() -> dict[str, type[Rule]]:
    """The table with what plugins add."""
    return plugins.fill(RULES, "interventions", _accepted)


def _accepted(name: str, value: object) -> type[Rule]:
    if not (isinstance(value, type) and issubclass(value, Rule)):
        raise plugins.expected(name, value, "a class derived from oversmooth.control.rules.Rule")
    return value
