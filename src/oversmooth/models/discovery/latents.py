"""Values that are made from a latent: the projection, and perhaps a norm, between the stream and the value projection."""

from dataclasses import dataclass

import torch
from torch import Tensor

from oversmooth.models.discovery.branches import read_by
from oversmooth.models.discovery.norms import NormCall
from oversmooth.models.discovery.products import Product
from oversmooth.models.discovery.trace import Trace
from oversmooth.models.discovery.weights import SHIFT


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Latent:
    """What the values read, instead of the stream."""

    product: Product
    first: int
    """The first row of its weight that belongs to the latent."""
    norm: NormCall | None
    bias: str
    factor: float
    """A number that multiplies the latent behind its norm."""


def latent_of(trace: Trace, value: Product) -> Latent | None:
    """The latent that a value projection reads; `None` where it reads something else."""
    read, factor = read_by(value)
    norm = next((call for call in reversed(trace.norms) if call.made is read), None)
    codes = value.token_codes if norm is None else norm.codes
    if codes is None or bool(codes.min() < 0):
        return None
    sources = (codes // SHIFT).unique().tolist()
    product = trace.sources[int(sources[0])]
    if len(sources) != 1 or not isinstance(product, Product) or product is value:
        return None
    rows = _rows(trace, product, (codes % SHIFT).long())
    if rows is None or not torch.equal(rows, rows[0] + torch.arange(len(rows))):
        return None
    return Latent(product=product, first=int(rows[0]), norm=norm, bias=_bias(trace, product), factor=factor)


def _rows(trace: Trace, product: Product, positions: Tensor) -> Tensor | None:
    parameter = trace.parameters.by_name[product.weight]
    if len(parameter.shape) != 2 or parameter.strides[1] != product.in_step:
        return None  # stored the other way round: no such latent is known
    return positions // parameter.strides[0]


def _bias(trace: Trace, product: Product) -> str:
    for _, codes in product.biases:
        source = trace.sources[int(codes.reshape(-1)[0] // SHIFT)]
        return getattr(source, "name", "")
    return ""
