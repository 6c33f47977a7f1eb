"""What counted randomness costs, in microseconds on this machine:

    python tests/benchmarks/randomness.py

A step seeds torch, random and numpy once per micro-batch, a dataset once per sample.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from trainer.randomness import SAMPLE, STEP, mix, seed_generators

ROUNDS, CALLS = 21, 2_000


def microseconds(call: Callable[[int], object]) -> float:
    """The median over the rounds of the mean over the calls."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for number in range(CALLS):
            call(number)
        rounds.append(1e6 * (time.perf_counter() - began) / CALLS)
    return statistics.median(rounds)


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    print(f"a micro-batch  {microseconds(lambda n: seed_generators(mix(STEP, 0, n, 0, 0), device)):.1f}")
    print(f"a sample       {microseconds(lambda n: seed_generators(mix(SAMPLE, 0, 0, n))):.1f}")
    print(f"(torch.manual_seed alone: {microseconds(torch.manual_seed):.1f})")


if __name__ == "__main__":
    main()
