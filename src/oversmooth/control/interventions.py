"""The published interventions: one class each, with its formula. This table is the only registration.

Most are linear in attention, so that one formula serves the probabilities A of a what-if and what fused attention
returns, `O = A V`, on a live model. `uniform` is the same with J in place of A: J itself, or the mean of the values that a
token may see. J goes row by row with its own length: over the prefix in causal rows, over the window in sliding ones.

`A` softmax attention, `J` looks at all visible tokens equally (row by row: over the prefix in causal rows, never at padding),
`V` values, `O = A V`, `LC Y = J Y`, `HC Y = Y - LC Y`. Whether a rule is the identity where it starts is part of it. With
dropout inside fused attention, A stands for what dropout left of it.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.control.attention_calls import AttentionProduct, LayerFacts, Rule, Visible, require_whole_sequences
from oversmooth.environment import plugins
from oversmooth.errors import BadValue, CannotControl

# --- the published interventions as formulas, each written once ---

Attention = Float[Tensor, "head token token"]


def attnscale(mixed: Tensor, uniform: Tensor, w: Tensor) -> Tensor:
    """AttnScale, `J + (1 + w)(A - J)`: what differs from uniform attention is amplified; eigenvalues 1 and `(1 + w) l`."""
    return torch.addcmul(mixed - w * uniform, w, mixed)  # fewer passes over the output than A + w (A - J)


def centered(mixed: Tensor, uniform: Tensor) -> Tensor:
    """Centered attention, `A - J`: what all tokens share is not passed on; eigenvalues 0 and `l`."""
    return mixed - uniform


def gfsa(
    zeroth: Tensor, once: Tensor, twice: Tensor, w0: Tensor, w1: Tensor, w_k: Tensor, order: int | float
) -> Tensor:
    """GFSA, `w0 I + w1 A + wK (A + (K - 1)(A^2 - A))`, from I, A and A^2: the same polynomial of every eigenvalue."""
    return w0 * zeroth + w1 * once + w_k * (once + (order - 1) * (twice - once))


def featscale(y: Tensor, common: Tensor, t1: Tensor, t2: Tensor) -> Tensor:
    """FeatScale, `(1 + t1) LC Y + (1 + t2) HC Y`, with `LC Y = J Y` the `common` part and `HC Y = Y - LC Y`."""
    return torch.addcmul(y + (t1 - t2) * common, t2, y)


def tempered(attention: Tensor, temperature: int | float) -> Tensor:
    """TempScale, `softmax(scores / t)`, from `A = softmax(scores)`: powers `A^(1/t)`, their rows divided by their sums."""
    powers = (attention / attention.detach().amax(-1, keepdim=True)) ** (1 / temperature)  # the largest is one
    return powers / powers.sum(-1, keepdim=True)


def differential(mixed: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """Differential pairing, `A_1 - s A_2`: what both heads look at is taken off; rows sum to `1 - s`."""
    return mixed - share * partner


def partners(x: Tensor, axis: int) -> Tensor:
    """For each head the other one of its pair: heads 0 and 1, 2 and 3, ..."""
    return x.unflatten(axis, (-1, 2)).flip(axis + 1).flatten(axis, axis + 1)


def gate(mixed: Tensor, opening: Tensor | float) -> Tensor:
    """Gate after attention, `g A`; one number g multiplies every eigenvalue, the first one too."""
    return opening * mixed


def layernorm_scaling(normed: Tensor, number: int | float) -> Tensor:
    """LayerNorm scaling, `norm(x) / sqrt(l)` in block l, counted from one."""
    return normed / math.sqrt(number)


def uniform_attention(attention: Attention) -> Attention:
    """J: every token looks equally at all tokens that it may see.

    What a mask forbids is zero in every head, and masks of sequences depend on the distance of two tokens alone (causal,
    sliding windows): a distance at which some head looks somewhere is allowed. So a probability that underflowed is not
    taken for a mask.
    """
    tokens = attention.shape[-1]
    steps = torch.arange(tokens, device=attention.device)
    distance = steps[:, None] - steps + tokens - 1
    is_seen = torch.zeros(2 * tokens - 1, dtype=torch.bool, device=attention.device)
    is_seen[distance[(attention != 0).any(0)]] = True
    looks = is_seen[distance].to(attention.dtype)
    return (looks / looks.sum(-1, keepdim=True).clamp(min=1)).expand_as(attention)


def per_head(parameter: Float[Tensor, " head"], like: Tensor) -> Float[Tensor, "head 1 1"]:
    return parameter.to(like.dtype)[:, None, None]


# --- rules that change attention itself ---


class AttnScale(Rule):
    """`A' = J + (1 + w)(A - J)` with w per head, 0 at the start: what differs from uniform attention is amplified."""

    title = "AttnScale"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.weight = nn.Parameter(torch.zeros(facts.heads.n_heads))

    def product(self, product: AttentionProduct) -> Tensor:
        output = product.output
        return attnscale(output, product.visible.mean(product.values), per_head(self.weight, output))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return attnscale(attention, visible.matrix(attention), per_head(self.weight, attention))


class Centered(Rule):
    """`A' = A - J`: rows sum to zero, and what all tokens share is not passed on."""

    title = "Centered attention"

    def product(self, product: AttentionProduct) -> Tensor:
        return centered(product.output, product.visible.mean(product.values))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return centered(attention, visible.matrix(attention))


class GFSA(Rule):
    """`A' = w0 I + w1 A + wK (A + (K - 1)(A^2 - A))` with w0 = 0, w1 = 1 and wK = 0 per head at the start."""

    title = "GFSA"
    options = ("order",)

    def __init__(self, facts: LayerFacts, order: int = 4):
        super().__init__(facts)
        if order < 2:
            raise BadValue("order", order, "a whole number of at least 2")
        self.order = order
        self.identity = nn.Parameter(torch.zeros(facts.heads.n_heads))
        self.first = nn.Parameter(torch.ones(facts.heads.n_heads))
        self.high = nn.Parameter(torch.zeros(facts.heads.n_heads))

    def product(self, product: AttentionProduct) -> Tensor:
        return self._filter(product.own_values(self.title), product.output, product.again(product.output))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        require_whole_sequences(self.title, visible)
        eye = torch.eye(visible.keys, dtype=attention.dtype, device=attention.device)
        return self._filter(eye, attention, attention @ attention)

    def _filter(self, zeroth: Tensor, once: Tensor, twice: Tensor) -> Tensor:
        w0, w1, high = (per_head(weight, once) for weight in (self.identity, self.first, self.high))
        return gfsa(zeroth, once, twice, w0, w1, high, self.order)


class TempScale(Rule):
    """`A' = softmax(scores / t)` with `t <= 1`, fixed: attention looks at fewer tokens; the identity at t = 1.

    Several temperatures are several calls of `apply`, each for its layers.
    """

    title = "TempScale"
    options = ("temperature",)

    def __init__(self, facts: LayerFacts, temperature: float = 0.8):
        super().__init__(facts)
        if not 0 < temperature <= 1:
            raise BadValue("temperature", temperature, "greater than 0 and at most 1")
        self._temperature = temperature

    @property
    def temperature(self) -> float:
        return self._temperature

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return tempered(attention, self._temperature)


# --- rules about what a block makes of attention: its output, the residual sum ---


class KeepsAttentionInput(Rule):
    """Remembers what this layer's attention has just seen, for a step that comes after it."""

    passing = ("visible",)

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.visible: Visible | None = None

    def seen(self, visible: Visible) -> None:
        self.visible = visible

    def just_seen(self) -> Visible:
        visible: Visible = self.taken("visible")
        require_whole_sequences(self.title, visible)
        return visible.of_tokens()


class FeatScale(KeepsAttentionInput):
    """`Y' = (1 + t1) LC Y + (1 + t2) HC Y` after the projection, t1 and t2 per channel, 0 at the start."""

    title = "FeatScale"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.low, self.high = (nn.Parameter(torch.zeros(facts.heads.d_model)) for _ in range(2))

    def projected(self, y: Tensor) -> Tensor:
        return featscale(y, self.just_seen().mean(y[:, None])[:, 0], self.low.to(y.dtype), self.high.to(y.dtype))


class ContraNorm(KeepsAttentionInput):
    """`X' = (1 + s) X - s softmax(Xn Xn^T) X`, Xn of unit rows, on the residual sum; the identity at s = 0."""

    title = "ContraNorm"
    options = ("scale",)

    def __init__(self, facts: LayerFacts, scale: float = 0.1):
        super().__init__(facts)
        self.scale = scale

    def summed(self, x: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch token d_model"]:
        seen, rows = self.just_seen(), F.normalize(x, dim=-1)[:, None]
        nearby = F.scaled_dot_product_attention(
            rows, rows, x[:, None], attn_mask=seen.mask, is_causal=seen.is_causal, scale=1.0
        )
        return (1 + self.scale) * x - self.scale * nearby[:, 0]


# --- residual branches ----------------------------------------------------------------------------------------------


class BranchScale(Rule):
    """`X + g f(X)` on each residual branch; in a parallel block both are added at once, so there it is one branch."""

    def gain(self, branch: str) -> Tensor | float:
        raise AssertionError("each rule says by what it scales")

    def scaled(self, branch: str, y: Tensor) -> Tensor:
        gain = self.gain(branch)
        return y * (gain.to(y.dtype) if isinstance(gain, Tensor) else gain)


class LayerScale(BranchScale):
    """`X + g f(X)` with g per channel, 1e-5 at the start; the identity at `init=1`."""

    title = "LayerScale"
    options = ("init",)

    def __init__(self, facts: LayerFacts, init: float = 1e-5):
        super().__init__(facts)
        self.attn, self.ffn = (nn.Parameter(torch.full((facts.heads.d_model,), init)) for _ in range(2))

    def gain(self, branch: str) -> Tensor:
        return self.ffn if branch == "ffn" else self.attn


class ResidualScaling(BranchScale):
    """`X + f(X) / sqrt(L)` with L the number of layers; never the identity."""

    title = "Residual scaling"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.factor = 1 / math.sqrt(facts.depth)

    def gain(self, branch: str) -> float:
        return self.factor


class LayerNormScaling(Rule):
    """`norm(x) / sqrt(l)` for the norms before the branches of block l, counted from one; the identity in the first.

    Meant for training from a plain initialisation, not from one that is scaled with depth already.
    """

    title = "LayerNorm scaling"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.number = facts.number

    def normed(self, x: Tensor) -> Tensor:
        return layernorm_scaling(x, self.number)


# --- rules about values, and about what attention made of them, head by head ---

NEUTRENO_STRENGTH = {"text": 0.4, "audio": 0.4, "image": 0.6}


class UsesFirstValues(Rule):
    """Gives the first layer's values to those behind it. The first layer itself is unchanged."""

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.first, self.is_first = facts.first, facts.is_first

    @classmethod
    def refusal(cls, facts: LayerFacts) -> str | None:
        own, first = facts.heads, facts.first_heads or facts.heads
        if (own.n_kv, own.d_head) == (first.n_kv, first.d_head):
            return None
        sizes = [f"{heads.n_kv} heads of width {heads.d_head}" for heads in (own, first)]
        return f"its values have {sizes[0]}, and those of the first layer {sizes[1]}"

    def remembered(self, v: Tensor) -> Tensor:
        """The first layer's values, in place of which nothing stale may stand."""
        found = self.first.v
        if found is None or found.shape != v.shape:
            reason, advice = "the first layer of its stack has not run on this input", "Run all layers in order."
            raise CannotControl(self.title, "this forward pass", reason, advice)
        if torch.is_grad_enabled() and v.requires_grad and not found.requires_grad:
            reason = "the values of the first layer have lost their gradient (reentrant checkpointing)"
            raise CannotControl(self.title, "this forward pass", reason, "Checkpoint with use_reentrant=False.")
        return found.to(v.device)  # layers of a large model are on several


class ValueResidual(UsesFirstValues):
    """`V_l <- a V_l + b V_1` behind the first layer, a and b learned; they start at `1 - first` and `first`.

    Half each is for training from scratch; at `first=0` it is the identity, which is where pretrained models begin.
    """

    title = "Value residual"
    options = ("first",)

    def __init__(self, facts: LayerFacts, first: float = 0.5):
        super().__init__(facts)
        if not self.is_first:
            self.own_weight = nn.Parameter(torch.tensor(1.0 - first))
            self.first_weight = nn.Parameter(torch.tensor(float(first)))

    def values(self, v: Tensor) -> Tensor:
        if self.is_first:
            self.first.v = v
            return v
        return self.own_weight.to(v) * v + self.first_weight.to(v) * self.remembered(v)


class OwnValues(Rule):
    """Remembers each token's own values, for when they have been mixed."""

    passing = ("own",)

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.own: Tensor | None = None

    def values(self, v: Tensor) -> Tensor:
        self.own = v
        return v

    def own_of(self, o: Float[Tensor, "batch token head d_head"]) -> Float[Tensor, "batch token kv d_head"]:
        """The value of each token that attention has mixed into `o`."""
        own: Tensor = self.taken("own")
        if own.shape[:2] != o.shape[:2]:
            reason = f"values are {tuple(own.shape)} and outputs {tuple(o.shape)}"
            raise CannotControl(self.title, "this forward pass", reason, "Run whole sequences with use_cache=False.")
        return own

    @staticmethod
    def per_head(v: Tensor, o: Tensor) -> Tensor:
        """Values once for every query head that reads them."""
        return v.repeat_interleave(o.shape[2] // v.shape[2], 2)


class NeuTRENO(UsesFirstValues, OwnValues):
    """`O = A V + c (V_0 - V)` in every layer behind the first, before the output projection; the identity at c = 0."""

    title = "NeuTRENO"
    options = ("strength",)

    def __init__(self, facts: LayerFacts, strength: float | None = None):
        super().__init__(facts)
        self.strength = NEUTRENO_STRENGTH[facts.kind] if strength is None else strength

    def values(self, v: Tensor) -> Tensor:
        if self.is_first:
            self.first.v = v
            return v
        return super().values(v)

    def mixed(self, o: Tensor) -> Tensor:
        if self.is_first:
            return o
        own = self.own_of(o)
        return o + self.per_head(self.strength * (self.remembered(own) - own), o)


class Exclusive(OwnValues):
    """`z = y - (y . v) v / |v|^2` for every token and head, v its own value: only what others say is passed on.

    Exclusive self-attention, arXiv 2603.09078, of which we have read the abstract. Without parameters, never the identity.
    """

    title = "Exclusive self-attention"

    def mixed(self, o: Tensor) -> Tensor:
        own = self.per_head(self.own_of(o), o)
        direction = F.normalize(own, dim=-1, eps=torch.finfo(own.dtype).tiny)  # a zero v takes nothing off
        return o - (o * direction).sum(-1, keepdim=True) * direction


class Differential(Rule):
    """`A_1' = A_1 - s A_2` for each head of a pair that reads one value head, and the other way round.

    `s = sigmoid(l)`, l per head, -10 at the start, so that rows sum to `1 - s`. After the Differential Transformer V2,
    in which the second head has no output of its own; an ordinary model has one, and l of -infinity leaves it as it is.
    """

    title = "Differential pairing"
    options = ("start",)

    def __init__(self, facts: LayerFacts, start: float = -10.0):
        super().__init__(facts)
        self.weight = nn.Parameter(torch.full((facts.heads.n_heads,), float(start)))

    @classmethod
    def refusal(cls, facts: LayerFacts) -> str | None:
        group = facts.heads.n_heads // facts.heads.n_kv
        return None if group % 2 == 0 else f"its value heads are read by {group} heads each, which do not go in pairs"

    def mixed(self, o: Tensor) -> Tensor:
        share = self.weight.sigmoid().to(o.dtype)[:, None]
        return differential(o, partners(o, 2), share)


class Gate(Rule):
    """`O_h' = sigmoid(W_g x + b_g)_h O_h` for every token x and head h, W_g = 0 and b_g = 10 at the start: gain one.

    Gated attention as in arXiv 2505.06708, one gate per head.
    """

    title = "Gate after attention"
    options = ("bias",)
    passing = ("opening",)

    def __init__(self, facts: LayerFacts, bias: float = 10.0):
        super().__init__(facts)
        self.weight = nn.Parameter(torch.zeros(facts.heads.n_heads, facts.heads.d_model))
        self.bias = nn.Parameter(torch.full((facts.heads.n_heads,), float(bias)))
        self.opening: Tensor | None = None

    def read(self, x: Tensor) -> None:
        self.opening = nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).sigmoid()

    def mixed(self, o: Tensor) -> Tensor:
        return gate(o, self.taken("opening")[..., None])


# --- the published interventions by name; each is one class, beside those that change the same thing ---

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
        raise plugins.expected(name, value, "a class derived from oversmooth.control.interventions.Rule")
    return value
