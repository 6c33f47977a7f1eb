from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks are forked from here, and OpenMP's threads survive no fork

import pytest
import torch

from tests.ranks import Ranks
from trainer import World

torch.set_num_threads(1)
# The first optimizer of a process imports a thousand modules: a second that every forked rank would spend again.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@pytest.fixture
def ranks() -> Ranks:
    """``ranks(world_size, function, *args)``: the function's values, in rank order. See `tests.ranks.Ranks`."""
    return Ranks()


@pytest.fixture(autouse=True)
def _no_world_left_open() -> Iterator[None]:
    """A trainer that a test has not closed leaves its world open, which the next test would be given."""
    yield
    if World.is_open():
        World.from_env().close()
