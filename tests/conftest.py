from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks are forked from here, and OpenMP's threads survive no fork

import pytest
import torch

from tests.ranks import Ranks

torch.set_num_threads(1)
# The first optimizer of a process imports a thousand modules: a second that every forked rank would spend again.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@pytest.fixture
def ranks() -> Ranks:
    """``ranks(world_size, function, *args)``: the function's values, in rank order. See `tests.ranks.Ranks`."""
    return Ranks()
