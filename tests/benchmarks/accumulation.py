"""What accumulation saves: the time of a micro-batch when every one is reduced over the ranks, and when every fourth is.

    torchrun --standalone --nproc-per-node 2 tests/benchmarks/accumulation.py

Both are this project's trainer, in turn in one run; prints microseconds per micro-batch (medians over the rounds) and the ratio.
"every one again" is the same once more: how far its ratio is from 1 says what a ratio means.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from loop import of_trainer, prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "mlp", "cnn"), default="mlp")
    parser.add_argument("--batches", type=int, default=200, help="micro-batches of 32 samples, per rank and round")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    world, data = prepared(options.batches)
    every = {"every one": 1, "every fourth": 4, "every one again": 1}
    given = {name: argparse.Namespace(**vars(options), accumulation=count, progress=False) for name, count in every.items()}
    epochs = {name: of_trainer(own, data, world) for name, own in given.items()}
    times: dict[str, list[float]] = {name: [] for name in epochs}
    for number in range(options.rounds + 1):
        for name, epoch in epochs.items():
            world.barrier()
            seconds = epoch(number)
            if number > 0:  # the first is for warming up
                times[name].append(1e6 * seconds / options.batches)
    if world.is_main:
        print(f"{options.model}, {world.size} processes, torch {torch.__version__}")
        print("| reduced | µs per micro-batch | ratio |\n|---|---|---|")
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times["every one"], strict=True))
            print(f"| {name} | {statistics.median(own):.0f} | {ratio:.2f} |")
    world.close()


if __name__ == "__main__":
    main()
