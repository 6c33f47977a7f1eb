"""What an evaluation costs beside one by hand, measured in turn in one run:

    torchrun --standalone --nproc-per-node 1 tests/benchmarks/evaluation.py --model cnn

By hand: whole batches gathered from the tensors, sums of loss and hits kept in tensors, one all_reduce and one look at the end;
the samples of the last batches are counted once only because their number divides. Prints microseconds per batch (medians over
the rounds) and the ratio to the loop by hand; "by hand again" is the same once more. Both give the same accuracy, or this fails.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.loop import network, prepared  # noqa: E402
from trainer import DDPTrainer, TrainerConfig, World  # noqa: E402


class Classifier(DDPTrainer):
    def eval_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = model(inputs)
        return {"loss": functional.nll_loss(outputs, targets), "accuracy": (outputs.argmax(1) == targets).float().mean()}


def by_hand(model: nn.Module, data: TensorDataset, batch_size: int, world: World) -> dict[str, float]:
    inputs, targets = data.tensors
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for indices in torch.arange(world.rank, len(data), world.size).split(batch_size):
            own = targets[indices]
            outputs = model(inputs[indices])
            sums[0] += functional.nll_loss(outputs, own, reduction="sum")
            sums[1] += (outputs.argmax(1) == own).sum()
            sums[2] += len(own)
    model.train()
    loss, hits, count = world.sum(sums).tolist()
    return {"loss": loss / count, "accuracy": hits / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "mlp", "cnn"), default="cnn")
    parser.add_argument("--batches", type=int, default=100, help="of 32 samples, per rank")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    world, data = prepared(options.batches)
    model = network(options.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Classifier(model, optimizer, None, data, config=TrainerConfig(batch_size=32), world=world)
    ways = {
        "by hand": lambda: by_hand(model, data, 32, world),
        "trainer": trainer.evaluate,
        "by hand again": lambda: by_hand(model, data, 32, world),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected = by_hand(model, data, 32, world)
    shuffled = random.Random(1)  # what runs first in a round is slower
    for number in range(options.rounds + 1):
        for name, evaluate in shuffled.sample(list(ways.items()), len(ways)):
            world.barrier()
            started = time.perf_counter()
            result = evaluate()
            if number > 0:  # the first is for warming up
                times[name].append(1e6 * (time.perf_counter() - started) / options.batches)
            if abs(result["accuracy"] - expected["accuracy"]) > 1e-7:
                raise RuntimeError(f"{name}: {result}, by hand: {expected}")
    if world.is_main:
        print(f"{options.model}, {world.size} processes, torch {torch.__version__}")
        print("| evaluation | µs per batch | ratio |\n|---|---|---|")
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times["by hand"], strict=True))
            print(f"| {name} | {statistics.median(own):.0f} | {ratio:.2f} |")
    world.close()


if __name__ == "__main__":
    main()
