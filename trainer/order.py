"""The order of an epoch: which sample stands at which position. The same on every rank, computed rather than stored."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .randomness import ORDER, mix

Order = Callable[[range], list[int]]
"""Gives the dataset indices at some positions of an epoch's order."""

BLOCK = 65_536  # positions computed at a time: 0.5 MB, whatever the length of the dataset
_ROUNDS = 8  # of the Feistel network; few rounds leave traces on small lengths
_Words = npt.NDArray[np.uint64]


class Permutation:
    """A random order of `length` samples, a function of (seed, epoch) alone.

    Up to `BLOCK` samples: a stable argsort of hashed positions. Above: a keyed bijection, computed block by block, so that any
    position is at hand at once and memory stays bounded. It is a Feistel network on Z_a x Z_b with a = ceil(sqrt(length)),
    b = ceil(length / a); results beyond the length are sent round again until they fall inside (cycle walking: Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._length = length
        self._keys = [np.uint64(mix(ORDER, seed, epoch, turn)) for turn in range(_ROUNDS)]
        self._left = int(np.ceil(np.sqrt(length)))
        self._right = -(-length // self._left)
        self._block_number = -1
        self._block: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def __call__(self, positions: range) -> list[int]:
        indices: list[int] = []
        while positions:
            number, first = divmod(positions[0], BLOCK)
            inside = range(first, min(BLOCK, positions[-1] - number * BLOCK + 1), positions.step)
            if number != self._block_number:
                self._block_number, self._block = number, self._compute(number * BLOCK)
            indices += self._block[inside.start : inside.stop : inside.step].tolist()
            positions = positions[len(inside) :]
        return indices

    def _compute(self, first: int) -> npt.NDArray[np.int64]:
        positions = np.arange(first, min(first + BLOCK, self._length), dtype=np.uint64)
        if self._length <= BLOCK:
            return np.argsort(_scramble(positions ^ self._keys[0]), kind="stable")
        places = self._encrypt(positions)
        while (outside := places >= self._length).any():
            places[outside] = self._encrypt(places[outside])
        return places.astype(np.int64)

    def _encrypt(self, numbers: _Words) -> _Words:
        a, b = np.uint64(self._left), np.uint64(self._right)
        left, right = numbers // b, numbers % b
        for key in self._keys[::2]:
            left = (left + _scramble(right ^ key) % a) % a
            right = (right + _scramble(left ^ self._keys[1] ^ key) % b) % b
        return left * b + right


def dataset_order(positions: range) -> list[int]:
    """The order of the dataset itself."""
    return list(positions)


def from_sampler(indices: list[int], length: int, samples: int) -> Order:
    """A user's sampler, drawn once: its indices are the order. ValueError unless there are `length` of them, as it announced,
    each below `samples`, the length of the dataset."""
    if len(indices) != length:
        raise ValueError(f"the sampler announced {length} samples with len(), but gave {len(indices)}")
    if min(indices) < 0 or max(indices) >= samples:
        wrong = next(index for index in indices if not 0 <= index < samples)
        raise ValueError(f"the sampler gave the index {wrong}, but train_data holds {samples} samples: 0 to {samples - 1}")
    return lambda positions: [indices[position] for position in positions]


def _scramble(words: _Words) -> _Words:
    """The splitmix64 finalizer on each word (products wrap)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
