"""Random numbers are counted, not stored: each generator is seeded from where in the run it is used.

A micro-batch's numbers are a function of (seed, window, micro-batch, rank), a sample's of (seed, epoch, position in the
order). So a resumed run draws what the uninterrupted one draws, without any saved generator state, and an augmented sample is
the same however many ranks and workers there are.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = 0xFFFFFFFFFFFFFFFF

# random.seed of a number, without its looking for other kinds of seeds: two thirds of the time.
_python: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _python).seed
_seed_numpy = np.random.rand.__self__.seed  # type: ignore[attr-defined]  # what np.random.seed calls, in less time

# What a seed is for: mixed in first, so that no two uses ever share their numbers.
ORDER, SAMPLE, STEP, EVAL_SAMPLE, EVAL_STEP, SET_EPOCH = range(1, 7)


def mix(*words: int) -> int:
    """A 64-bit hash of the words: the splitmix64 finalizer (Steele, Lea, Flood 2014) absorbing one word after another."""
    state = 0
    for word in words:
        state = ((state ^ word) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed torch (the CPU's generator, and `device`'s if that is a GPU), random and numpy.

    torch's CPU generator and numpy's use the low 32 bits of a seed only. `torch.manual_seed` visits every device and costs
    many times as much.
    """
    word = seed & 0xFFFFFFFF
    torch.default_generator.manual_seed(word)
    _seed_python(word)
    _python.gauss_next = None
    try:
        _seed_numpy(word)
    except TypeError:  # the user has set another bit generator
        np.random.seed(word)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed >> 1)


def seed_for(purpose: int, seed: int | None, *position: int, device: torch.device | None = None) -> None:
    """Seed the generators from where in the run they are used; without a seed leave them alone."""
    if seed is not None:
        seed_generators(mix(purpose, seed, *position), device)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Put the states of all generators back afterwards, also after an error."""
    cuda = device.type == "cuda"
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda_state = torch.cuda.get_rng_state(device) if cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
