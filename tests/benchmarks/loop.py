"""The loop's own cost beside loops written by hand, measured in turn in one run:

    torchrun --standalone --nproc-per-node 1 tests/benchmarks/loop.py --model tiny
    PIN=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/loop.py --model tiny --accumulation 4

Prints microseconds per micro-batch (medians over the rounds), and the ratio to the loop by hand: DistributedSampler, DataLoader,
DistributedDataParallel and `no_sync` before a window's last micro-batch, nothing reduced or logged. "without DDP" gathers whole
batches and leaves out everything else; at one process it is the least that the training itself takes. "by hand again" is the same
loop once more: how far its ratio is from 1 says what a ratio means. With PIN set in the environment each rank keeps to one core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from callbacks import ProgressBar
from trainer import Callback, DDPTrainer, TrainerConfig, World

Epoch = Callable[[int], float]


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "tiny":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.LogSoftmax(dim=1))
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(dim=1))
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10), nn.LogSoftmax(dim=1))


def by_hand(options: argparse.Namespace, data: TensorDataset, world: World) -> Epoch:
    model = DistributedDataParallel(network(options.model)) if world.size > 1 or torch.distributed.is_initialized() else None
    model = model or network(options.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data, world.size, world.rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    def epoch(number: int) -> float:
        sampler.set_epoch(number)
        started = time.perf_counter()
        for place, (inputs, targets) in enumerate(loader, 1):
            last = place % options.accumulation == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (functional.nll_loss(model(inputs), targets) / options.accumulation).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        return time.perf_counter() - started

    return epoch


def without_ddp(options: argparse.Namespace, data: TensorDataset, world: World) -> Epoch:
    model = network(options.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = data.tensors

    def epoch(number: int) -> float:
        own = torch.randperm(len(data))[: options.batches * 32].split(32)
        started = time.perf_counter()
        for place, indices in enumerate(own, 1):
            (functional.nll_loss(model(inputs[indices]), targets[indices]) / options.accumulation).backward()
            if place % options.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        return time.perf_counter() - started

    return epoch


class StopAfterEpoch(Callback):
    def on_epoch_end(self, trainer: DDPTrainer, metrics: object) -> None:
        trainer.stop("to be measured again")


def of_trainer(options: argparse.Namespace, data: TensorDataset, world: World) -> Epoch:
    model = network(options.model)
    steps = options.batches // options.accumulation

    class Timed(DDPTrainer):
        """From the first step's end to the last's, as set-up is no part of the others' time either."""

        seconds = 0.0

        def optimizer_step(self) -> None:
            super().optimizer_step()
            step = self.state.step % steps
            if step == 0:
                self.started = time.perf_counter()
            if step == steps - 1:
                self.seconds = (time.perf_counter() - self.started) * steps / (steps - 1)

    config = TrainerConfig(epochs=10_000, batch_size=32, accumulation_steps=options.accumulation, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    callbacks = [StopAfterEpoch(), *[ProgressBar()] * options.progress]
    trainer = Timed(model, optimizer, data, loss_fn=functional.nll_loss, config=config, callbacks=callbacks, world=world)

    def epoch(number: int) -> float:
        trainer.fit()
        return trainer.seconds

    return epoch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "mlp", "cnn"), default="tiny")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--batches", type=int, default=200, help="micro-batches of 32 samples, per rank and round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--progress", action="store_true", help="with a ProgressBar on the trainer")
    return parser.parse_args()


def prepared(batches: int) -> tuple[World, TensorDataset]:
    """The world, pinned if PIN is set, and data for so many micro-batches on each rank."""
    torch.set_num_threads(1)
    if os.environ.get("PIN"):  # before the group is opened, whose threads inherit it
        os.sched_setaffinity(0, {int(os.environ.get("LOCAL_RANK", 0)) % (os.cpu_count() or 1)})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    world = World.from_env("cpu")
    samples = batches * 32 * world.size
    generator = torch.Generator().manual_seed(1)
    images: Tensor = torch.randn(samples, 1, 28, 28, generator=generator)
    return world, TensorDataset(images, torch.randint(0, 10, (samples,), generator=generator))


def main() -> None:
    options = parse()
    world, data = prepared(options.batches)
    if world.size == 1 and "RANK" in os.environ:  # DDP around one process too, as a script under torchrun has it
        torch.distributed.init_process_group("gloo")
    makers = {"by hand": by_hand, "trainer": of_trainer, "without DDP": without_ddp, "by hand again": by_hand}
    epochs = {name: make(options, data, world) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in epochs}
    for number in range(options.rounds + 1):
        for name, epoch in epochs.items():
            world.barrier()
            seconds = epoch(number)
            if number > 0:  # the first is for warming up
                times[name].append(1e6 * seconds / options.batches)
    if world.is_main:
        print(f"{options.model}, {world.size} processes, accumulation {options.accumulation}, torch {torch.__version__}")
        print("| loop | µs per micro-batch | ratio | over the loop without DDP, µs |")
        print("|---|---|---|---|")
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own, times["by hand"], strict=True))
            over = statistics.median(a - b for a, b in zip(own, times["without DDP"], strict=True))
            print(f"| {name} | {statistics.median(own):.0f} | {ratio:.2f} | {over:.0f} |")
    world.close()


if __name__ == "__main__":
    main()
