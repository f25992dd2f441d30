"""Eigenvalues of the value map of an attention layer, each in the smallest matrix that has them.

`H = W_V W_O` in the row convention of the paper is the transpose of `W_O W_V` here; the eigenvalues are the same. With
K value channels (`n_kv * d_head`) and width d, the nonzero eigenvalues of the d x d map are those of the K x K matrix
`W_V W_O`, and those of one head those of a `d_head x d_head` matrix. Wide layers go a Krylov route that finds the
extremes only. Everything is computed in float64, or in float32 where asked; never in half precision.
"""

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights
from oversmooth.results import HeadSpectrum, Missing, Spectrum
from oversmooth.spectra.conditioning import conditioning
from oversmooth.spectra.krylov import Extremes, extremes
from oversmooth.spectra.value_map import HEADS_AT_ONCE, ValueMap

DENSE_UP_TO = 2048
"""Largest matrix whose eigenvalues are all computed unless asked: about ten seconds in float64 on one core."""
DENSE_WITHOUT_ASKING = 256
"""Up to this size, all eigenvalues cost no more than the extremes."""


def spectrum(value_map: ValueMap, *, full: bool = False, only_extremes: bool = False) -> Spectrum:
    """Spectrum of a map: every eigenvalue where its core is small or `full` is asked, otherwise certified extremes.

    `only_extremes` counts a core as small up to `DENSE_WITHOUT_ASKING` only.
    """
    is_small = value_map.core_size <= (DENSE_WITHOUT_ASKING if only_extremes else DENSE_UP_TO)
    return _dense_spectrum(value_map) if full or is_small else _krylov_spectrum(value_map)


def _dense_spectrum(value_map: ValueMap) -> Spectrum:
    core = value_map.core
    values = torch.linalg.eigvals(core)
    values = values[values.real.argsort()]
    everything = torch.cat([values, values.new_zeros(1)]) if value_map.has_forced_zeros else values
    dominating = complex(everything[(1 + everything).abs().argmax()])
    condition, is_defective, missing = conditioning(value_map, values, dominating)
    return Spectrum(
        size=value_map.size,
        rho_dc=abs(1 + dominating),
        dominating=(dominating.real, abs(dominating.imag)),
        spectral_radius=values.abs().max().item(),
        min_real=everything.real.min().item(),
        max_real=everything.real.max().item(),
        negative_share=_negative(values, core).sum().item() / value_map.size,
        route="dense",
        residual=None,
        condition=condition,
        is_defective=is_defective,
        eigenvalues=tuple(zip(values.real.tolist(), values.imag.tolist(), strict=True)),
        missing=(Missing(field="residual", reason="every eigenvalue was computed by a direct method"), *missing),
    )


def _krylov_spectrum(value_map: ValueMap) -> Spectrum:
    """Extremes from one Krylov space of the core; every eigenvalue where that does not find them.

    A core of float32 whose residuals are too large (one that is far from normal) is tried again in float64.
    """
    found = _extremes(value_map)
    if found is None and value_map.left.dtype == torch.float32:
        value_map = value_map.in_float64()
        found = _extremes(value_map)
    if found is None:
        return _dense_spectrum(value_map)
    values = (*found.values, *((0j,) if value_map.has_forced_zeros else ()))
    dominating = max(values, key=lambda value: abs(1 + value))
    why = "only the extremes were computed (Krylov route); ask for the full spectrum to have it"
    return Spectrum(
        size=value_map.size,
        rho_dc=abs(1 + dominating),
        dominating=(dominating.real, abs(dominating.imag)),
        spectral_radius=max(abs(value) for value in values),
        min_real=min(value.real for value in values),
        max_real=max(value.real for value in values),
        negative_share=None,
        route="krylov",
        residual=found.residual,
        condition=None,
        is_defective=None,
        eigenvalues=None,
        missing=tuple(
            Missing(field=name, reason=why) for name in ("negative_share", "condition", "is_defective", "eigenvalues")
        ),
    )


def _extremes(value_map: ValueMap) -> Extremes | None:
    # Formed where that costs less than a few hundred products with its factors, each of which reads both.
    is_formed = value_map.core_size <= DENSE_UP_TO
    like = value_map.left
    # A generator of its own: the result depends on no global seed, and no structure of the weights is orthogonal to it.
    start = torch.randn(value_map.core_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)
    # Residuals are those of the factors: they show what rounding did to the core as well.
    product = value_map.core.__matmul__ if is_formed else value_map.core_product
    return extremes(product, start, check=value_map.core_product)


def head_cores(weights: AttentionWeights, dtype: torch.dtype) -> Float[Tensor, "head core core"]:
    """Per head the `d_head x d_head` matrix `W_V^h W_O^h`, which has the nonzero eigenvalues of the head's own map.

    Where heads are wider than the model, the map itself: it is the smaller one then.
    """
    if weights.latent is not None and weights.d_head <= weights.d_model:
        return _head_cores_from_latent(weights, weights.latent.w.to(dtype))
    group = weights.n_heads // weights.n_kv
    down = None if weights.latent is None else weights.latent.w.to(dtype)
    cores = []
    for kv, w_v in enumerate(weights.w_v):  # one at a time: all heads in float64 would be the largest thing in memory
        w_v = w_v.to(dtype) if down is None else w_v.to(dtype) @ down
        w_o = weights.w_o[:, kv * group : (kv + 1) * group].to(dtype)
        if weights.d_head <= weights.d_model:
            cores.append((w_v @ w_o.flatten(1)).unflatten(1, (group, weights.d_head)).transpose(0, 1))
        else:
            cores.append(w_o.transpose(0, 1) @ w_v)
    return torch.cat(cores)


def _head_cores_from_latent(
    weights: AttentionWeights, down: Float[Tensor, "latent d_model"]
) -> Float[Tensor, "head d_head d_head"]:
    """`W_U^h (W_D W_O^h)`: what a head writes is brought into the latent first, which is the narrow end."""
    w_v = weights.w_v.repeat_interleave(weights.n_heads // weights.n_kv, 0)
    cores = []
    for output, up in zip(weights.w_o.split(HEADS_AT_ONCE, 1), w_v.split(HEADS_AT_ONCE), strict=True):
        read = (down @ output.flatten(1).to(down.dtype)).unflatten(1, output.shape[1:])
        cores.append(up.to(down.dtype) @ read.transpose(0, 1))
    return torch.cat(cores)


def head_spectra(weights: AttentionWeights, dtype: torch.dtype) -> tuple[HeadSpectrum, ...]:
    """The eigenvalues of every head's own map."""
    cores = head_cores(weights, dtype)
    values = torch.linalg.eigvals(cores)
    values = values.gather(1, values.real.argsort(1))
    negative_share = _negative(values, cores).double().mean(1).tolist()
    radius, rho = values.abs().amax(1).tolist(), (1 + values).abs().amax(1)
    if weights.d_head < weights.d_model:  # the head's map has eigenvalues of exactly zero as well
        rho = rho.clamp(min=1.0)
    real, imaginary, rho = values.real.tolist(), values.imag.tolist(), rho.tolist()
    return tuple(
        HeadSpectrum(
            head=head,
            kv_head=head * weights.n_kv // weights.n_heads,
            rho_dc=rho[head],
            spectral_radius=radius[head],
            min_real=real[head][0],
            max_real=real[head][-1],
            negative_share=negative_share[head],
            eigenvalues=tuple(zip(real[head], imaginary[head], strict=True)),
        )
        for head in range(weights.n_heads)
    )


def _negative(values: Complex[Tensor, "... core"], core: Float[Tensor, "... core core"]) -> Bool[Tensor, "... core"]:
    """Which eigenvalues have a negative real part, beyond the rounding error of an eigenvalue that is zero."""
    rounding = core.shape[-1] * torch.finfo(core.dtype).eps * torch.linalg.matrix_norm(core)
    return values.real < -rounding[..., None]
