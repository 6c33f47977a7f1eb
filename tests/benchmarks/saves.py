"""What kills during a save leave behind, and what saving costs the training:

    python tests/benchmarks/saves.py --kills 100 --megabytes 140

Kills: a process that holds the folder's lock writes one checkpoint after the other (about 2 kB, then 20 MB) with
`CheckpointFolder.write`, keeps the newest two, and is killed with SIGKILL at a random instant. After each kill a new process gets
the lock, must find the newest file whole, sweeps, and must find nothing unfinished. "Unfinished" counts the kills during a write.

Stall: a model with Adam, of so many megabytes of state, trains on the CPU with one thread and saves every --every steps;
`async_write` on, off, and without any saving, in turn, --rounds times. Per round, after the first save (which makes the buffers):

- stall: the median time that `Checkpoint.on_safe_point` takes at a step with a save, less that at a step without;
- cost of a save: how much longer the steps took in all than those of the run without saving, per save. It holds what the
  stall does not: steps that are slower while the file is written. The end of the run is left out (there `fit` waits for it).

The table has the medians over the rounds, and what one save costs as a part of 50 s of work. Targets: at most 3.5 % of the work,
and a stall of at most 10 % of the synchronous one. A file should be written before the next is due: choose --every so that as
many steps take well longer than a synchronous save. The line above the table says how long a step took, and how many saves found
the file before still being written.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from callbacks import Checkpoint
from trainer import Callback, CheckpointFolder, DDPTrainer, TrainerConfig, checkpoint

WORK = 50.0  # seconds between two saves, of which the cost is a part
WIDTH = 1_000


# Kills.


def content(step: int, numbers: int) -> dict[str, Any]:
    return {"format": checkpoint.FORMAT, "state": {"step": step}, "model": {"w": torch.full((numbers,), float(step))}}


def save_for_ever(folder: Path, numbers: int) -> None:
    files = CheckpointFolder(folder)
    files.lock()
    step = max(files.steps(), default=0)
    while True:
        step += 1
        files.write(f"step-{step:08d}.pt", content(step, numbers))
        for old in list(files.steps().values())[:-2]:
            old.unlink()


def look(folder: Path) -> str:
    """What a restarted job finds: the step of the newest whole file (0: none), whether that is the newest of all, what was
    unfinished, and what still is after the sweep."""
    files = CheckpointFolder(folder)
    files.lock()
    found = files.newest() or content(0, 1)
    step = found["state"]["step"]
    right = step > 0 and bool((found["model"]["w"] == step).all()) and step == max(files.steps())
    before = len(list(folder.glob("*.tmp")))
    files.sweep()
    after = len(list(folder.glob("*.tmp")))
    files.unlock()
    return f"{step} {int(right)} {before} {after}"


def kill(folder: Path, numbers: int, seconds: float) -> None:
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            save_for_ever(folder, numbers)
        os._exit(1)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError("the process that saves ended by itself")


def in_new_process(folder: Path) -> list[int]:
    """`look`, or nothing but zeros where it failed."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = "0 0 0 0"
        with suppress(Exception):
            answer = look(folder)
        os.write(theirs, answer.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    answer = os.read(ours, 100).decode()
    os.close(ours)
    os.close(theirs)
    return [int(word) for word in answer.split()]


def count_kills(parent: Path, kills: int) -> None:
    print("| file, MB | kills | unfinished | without a whole newest file | steps saved | left after the sweep |")
    print("|---|---|---|---|---|---|")
    chance = random.Random(0)
    for megabytes, numbers, longest in ((0.002, 100, 0.1), (20, 5_000_000, 0.5)):
        unfinished = bad = left = 0
        step = 1
        with tempfile.TemporaryDirectory(dir=parent) as name:
            folder = Path(name)
            CheckpointFolder(folder).write("step-00000001.pt", content(1, numbers))
            for _ in range(kills):
                kill(folder, numbers, chance.uniform(0, longest))
                found, right, before, after = in_new_process(folder)
                bad += not right or found < step
                step = max(step, found)
                unfinished += before > 0
                left += after
        print(f"| {megabytes} | {kills} | {unfinished} | {bad} | {step:,} | {left} |", flush=True)


# Stall.


class Timed(Checkpoint):
    """Seconds in `on_safe_point`: at steps with a save, and at the others."""

    def __init__(self, folder: Path, every: int, async_write: bool) -> None:
        super().__init__(folder, every_steps=every, every_epochs=None, keep_last=1, async_write=async_write)
        self.every, self.saves, self.others, self.waited = every, list[float](), list[float](), 0

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        due = trainer.state.step % self.every == 0
        writing = self._files._writing
        self.waited += due and writing is not None and writing.is_alive()
        began = time.perf_counter()
        super().on_safe_point(trainer)
        (self.saves if due else self.others).append(time.perf_counter() - began)


class Clock(Callback):
    """When each step was over. A save comes after that, and is part of the time of the next step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.times.append(time.perf_counter())


def train(folder: Path | None, megabytes: float, every: int, saves: int, async_write: bool) -> tuple[Timed | None, float]:
    """The callback, and the seconds of `saves` saves from the second on, each with the `every` steps after it."""
    torch.manual_seed(0)
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))  # Adam keeps two more of each parameter
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    steps = (saves + 2) * every
    data = TensorDataset(torch.randn(8 * steps, WIDTH), torch.randn(8 * steps, WIDTH))
    saver = None if folder is None else Timed(folder, every, async_write)
    clock = Clock()
    with DDPTrainer(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-5),
        data,
        loss_fn=mean_square,
        config=TrainerConfig(batch_size=8, max_steps=steps, log_every=steps, shuffle=False),
        callbacks=[clock] if saver is None else [clock, saver],
    ) as trainer:
        trainer.fit()
    # the first save is before this interval, and the last, after the last step, behind it
    return saver, clock.times[-1] - clock.times[2 * every - 1]


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def compare(parent: Path, megabytes: float, every: int, saves: int, rounds: int) -> None:
    stalls: dict[str, list[float]] = {"async": [], "sync": []}
    costs: dict[str, list[float]] = {"async": [], "sync": []}
    ratios, waited, step, size = list[float](), 0, list[float](), 0
    for number in range(rounds + 1):  # the first is for what is set up on first use
        _, bare = train(None, megabytes, every, saves, False)
        round_stalls = {}
        for kind in stalls if number % 2 else reversed(stalls):
            with tempfile.TemporaryDirectory(dir=parent) as name:
                timed, seconds = train(Path(name), megabytes, every, saves, kind == "async")
                size = max(path.stat().st_size for path in Path(name).glob("*.pt"))
            assert timed is not None
            round_stalls[kind] = statistics.median(timed.saves[1:]) - statistics.median(timed.others)
            if number > 0:
                stalls[kind].append(round_stalls[kind])
                costs[kind].append((seconds - bare) / saves)
                waited += timed.waited
        if number > 0:
            ratios.append(round_stalls["async"] / round_stalls["sync"])
            step.append(bare / (saves * every))
    print(f"\n{size / 1e6:,.0f} MB a file; {saves} saves a run after the first, {rounds} rounds; a step takes ", end="")
    print(f"{1e3 * statistics.median(step):,.1f} ms; {waited} asynchronous saves found the one before still being written\n")
    print("| async_write | stall, ms | cost of a save, ms | one save in 50 s of work |\n|---|---|---|---|")
    for kind in stalls:
        stall, cost = (statistics.median(values) for values in (stalls[kind], costs[kind]))
        print(f"| {kind == 'async'} | {1e3 * stall:,.1f} | {1e3 * cost:,.0f} | {cost / WORK:.2%} |")
    ratios.sort()
    print(f"\nstall, asynchronous / synchronous: {statistics.median(ratios):.1%} ({ratios[0]:.1%} to {ratios[-1]:.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="for each size of file; 0: leave this part out")
    parser.add_argument("--megabytes", type=float, default=140, help="of state: parameters and Adam's")
    parser.add_argument("--every", type=int, default=20, help="steps from one save to the next")
    parser.add_argument("--saves", type=int, default=6, help="in each run, after the first")
    parser.add_argument("--rounds", type=int, default=5, help="of the three runs; 0: leave this part out")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's folder for temporary files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kills:
        count_kills(options.folder, options.kills)
    if options.rounds:
        compare(options.folder, options.megabytes, options.every, options.saves, options.rounds)


if __name__ == "__main__":
    main()
