"""A fingerprint of the parameters, cheap enough to be compared over the ranks at every report."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS, _BITS = 4, 20  # of the fingerprint that travel, and the bits of each: their squares are exact in float64
_BLOCK = 1 << 18  # elements weighted at a time: 2 MB, whatever the size of a parameter
_FACTOR = 0x5851F42D4C957F2D  # odd


def per_parameter(parameters: Sequence[Tensor]) -> Tensor:
    """A weighted sum of each parameter's bits, read as integers: int64 of shape (len(parameters),), on their device.

    It wraps. The weights are odd, so that it changes with every single bit, and all different, so that it changes when elements
    swap their values or move in opposite directions.
    """
    sums = []
    for parameter in parameters:
        bits = parameter.detach()
        bits = torch.view_as_real(bits) if bits.is_complex() else bits
        blocks = torch.split(bits.view(_INTEGERS[bits.element_size()]).flatten(), _BLOCK)
        weights = _weights(bits.device)
        parts = [(block * weights[: len(block)]).sum() for block in blocks]
        sums.append(functools.reduce(lambda before, part: before * _FACTOR + part, parts))
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def words(parameters: Sequence[Tensor]) -> Tensor:
    """The fingerprint w as four 20-bit words and their squares: float64 of shape (8,), made to be summed over ranks."""
    sums = per_parameter(parameters)
    factors, shifts = _constants(len(parameters), sums.device)
    parts = (((sums * factors).sum() >> shifts) & ((1 << _BITS) - 1)).double()
    return torch.cat([parts, parts * parts])


def all_equal(summed: Sequence[float], world_size: int) -> bool:
    """Whether `words` summed over the ranks came from equal ones: W * sum(w^2) = (sum w)^2 holds then only (Cauchy-Schwarz)."""
    sums, squares = summed[:_WORDS], summed[_WORDS:]
    return all(world_size * int(square) == int(total) ** 2 for total, square in zip(sums, squares, strict=True))


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Random odd numbers, the same on every rank: int64 of shape (_BLOCK,)."""
    return (torch.randint(1 << 62, (_BLOCK,), generator=torch.Generator().manual_seed(_BLOCK)) | 1).to(device)


@functools.cache
def _constants(parameters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An odd factor for each parameter, so that two which swap their values are noticed; the bit shifts of the words."""
    numbers = random.Random(parameters)
    factors = [numbers.getrandbits(62) | 1 for _ in range(parameters)]
    return torch.tensor(factors, device=device), torch.arange(_WORDS, device=device) * _BITS
