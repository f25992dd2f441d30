"""What an output projection reads: channels of attention over values, as the codes of its input say."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oversmooth.models.discovery.products import Mixing, Product, Reading
from oversmooth.models.discovery.weights import SHIFT

if TYPE_CHECKING:
    from oversmooth.models.discovery.trace import Trace


def reading_of(trace: "Trace", product: Product) -> None:
    """Fills in what a projection reads, where all of it is attention over known values."""
    codes, product.codes_read = product.codes_read, None
    if codes is None or not codes.numel():
        return
    codes = codes.reshape(-1, codes.shape[-1])
    if bool((codes == codes[:1]).all()):
        product.token_codes = codes[0].clone()
    sources = torch.div(codes, SHIFT, rounding_mode="floor").long()
    whole = (codes >= 0).all(1) & (sources == sources[:, :1]).all(1)
    if not bool(whole.any()):
        product.reading = _doubled(trace, codes, sources)
        return
    found: list[tuple[Mixing, Tensor, Tensor]] = []
    for number in sources[whole, 0].unique().tolist():
        mixing = trace.sources[number]
        if not isinstance(mixing, Mixing) or mixing.value_codes is None:
            return
        positions = (codes[whole & (sources[:, 0] == number)] % SHIFT).long()
        channel = positions % mixing.channels
        values = mixing.value_codes[positions // mixing.channels, channel]
        if bool((channel != channel[0]).any()) or bool((values != values[0]).any()):
            return
        found.append((mixing, values[0], channel[0]))
    if found and all(torch.equal(values, found[0][1]) for _, values, _ in found):
        product.reading = Reading(tuple(mixing for mixing, _, _ in found), found[0][1], found[0][2])


def _doubled(trace: "Trace", codes: Float[Tensor, "token in"], sources: Int[Tensor, "token in"]) -> Reading | None:
    """Heads made of two halves, which the same attention mixes in two products: one half behind the other."""
    numbers = list(dict.fromkeys(sources[0].tolist()))
    mixings = [trace.sources[number] for number in numbers if number >= 0]
    known = [mixing for mixing in mixings if isinstance(mixing, Mixing) and mixing.value_codes is not None]
    sizes = {(mixing.queries, mixing.keys, mixing.channels) for mixing in known}
    if len(known) != 2 or len(numbers) != 2 or len(sizes) != 1:
        return None
    width = known[0].channels
    channels, values = torch.empty_like(sources), torch.empty_like(codes)
    for half, (number, mixing) in enumerate(zip(numbers, known, strict=True)):
        own = sources == number
        positions = (codes[own] % SHIFT).long()
        channels[own] = positions % width + half * width
        assert mixing.value_codes is not None
        values[own] = mixing.value_codes[positions // width, positions % width]
    is_regular = bool((channels == channels[:1]).all()) and bool((values == values[:1]).all())
    return Reading(tuple(known), values[0], channels[0]) if is_regular else None
