"""How often a signal ends a job with one checkpoint, in time, for each way of delivery under torchrun:

    python tests/benchmarks/signals.py --rounds 20

Each round is a job of its own on two processes whose steps take between 5 and 60 ms, with a report every 10 steps; at a random
instant it is told to stop: SIGTERM or SIGUSR1 to one rank or to all ranks, SIGTERM to every process (torchrun, ranks and their
DataLoader workers, as Slurm does), to torchrun alone, and SIGUSR1 to a torchrun with --signals-to-handle. A round is good when

- there is exactly one checkpoint in the folder, whole, of the step after which every rank has left, and it names the signal;
- every rank and worker has gone within the longest step + the save + 2 s (torchrun itself ends a second or so later);
- the exit code is torchrun's own for a signal to it (not 0), and 0 otherwise.

Each line has the seconds from the signal to the end of the last rank or worker, and to torchrun's; and what was wrong in the
rounds that were not good. What else runs on the machine counts here: Python and torch take a second of a core to end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.jobs import Job  # noqa: E402

CHILD = "--child"
PROCESSES, LOG_EVERY, LONGEST = 2, 10, 0.06  # seconds of a step's own work
SLACK, LIMIT = 2.0, 120.0  # seconds


class Way(NamedTuple):
    signal: signal.Signals
    whom: str
    workers: int = 0
    options: tuple[str, ...] = ()

    @property
    def through_torchrun(self) -> bool:
        return self.whom in ("torchrun", "every process")


WAYS = (
    Way(signal.SIGTERM, "one rank"),
    Way(signal.SIGTERM, "all ranks"),
    Way(signal.SIGTERM, "every process", workers=2),
    Way(signal.SIGTERM, "torchrun"),
    Way(signal.SIGUSR1, "one rank"),
    Way(signal.SIGUSR1, "all ranks"),
    Way(signal.SIGUSR1, "torchrun", options=("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",)),
)


def train(folder: Path, workers: int) -> None:
    import torch
    from torch import Tensor, nn

    from callbacks import Checkpoint
    from tests.helpers import Numbers, Toy
    from trainer import Callback, DDPTrainer, TrainerConfig, checkpoint

    class Slow(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            time.sleep(float(torch.rand(())) * LONGEST)
            loss: Tensor = model(batch[0]).mean()
            return loss

    class Told(Callback):
        def __init__(self) -> None:
            self.last, self.longest = time.monotonic(), 0.0

        def on_fit_start(self, trainer: DDPTrainer) -> None:
            self.last = time.monotonic()

        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            now = time.monotonic()
            self.longest, self.last = max(self.longest, now - self.last), now
            (folder / "step").write_text(str(trainer.state.step))

        def on_fit_end(self, trainer: DDPTrainer) -> None:
            (folder / "seconds").write_text(f"{self.longest} {checkpoint.Writes.last_seconds}")

    (folder / f"ready-{os.environ['RANK']}").touch()
    model = nn.Sequential(Toy())
    with Slow(
        model,
        torch.optim.SGD(model.parameters(), lr=0.001),
        Numbers(1_000_000),
        loader_options={"num_workers": workers},
        config=TrainerConfig(batch_size=4, log_every=LOG_EVERY),
        callbacks=[Checkpoint(folder / "files"), Told()],
    ) as trainer:
        state = trainer.fit()
    (folder / f"left-{trainer.world.rank}").write_text(f"{state.step} {state.stop_reason}")


def tell(job: Job, way: Way, chance: random.Random) -> None:
    if way.whom == "every process":
        job.signal_all(way.signal)
        return
    ranks = job.ranks()
    pids = {"one rank": [ranks[chance.randrange(PROCESSES)]], "all ranks": list(ranks.values()), "torchrun": [job.agent.pid]}
    for pid in pids[way.whom]:
        os.kill(pid, way.signal)


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def round_of(folder: Path, way: Way, chance: random.Random) -> tuple[float, float, list[str]]:
    """The seconds from the signal to the end of ranks and workers, and of torchrun; what was wrong."""
    from trainer import CheckpointFolder

    with Job(Path(__file__), PROCESSES, CHILD, folder, way.workers, options=way.options) as job:
        job.until(lambda: int(text(folder / "step") or 0) > 0, LIMIT)
        time.sleep(chance.uniform(0, 1.5))
        pids = [process.pid for process in job.processes()]
        began = time.monotonic()
        tell(job, way, chance)
        seconds = job.until_gone(LIMIT, pids) - began
        last = job.until_gone(LIMIT) - began
        output = job.output[-3000:]
    left = [text(folder / f"left-{rank}") for rank in range(PROCESSES)]
    files = CheckpointFolder(folder / "files")
    newest = files.newest()
    longest, save = map(float, (text(folder / "seconds") or "0 0").split())
    wrong = []
    if len(set(left)) != 1 or not left[0].endswith(f"received {way.signal.name}"):
        wrong.append(f"ranks left with {left}")
    if newest is None or len(files.steps()) != 1 or f"{newest['state']['step']} {newest['state']['stop_reason']}" != left[0]:
        wrong.append(f"checkpoints of steps {list(files.steps())}")
    if seconds > longest + save + SLACK:
        wrong.append(f"{seconds:.1f} s (step {longest:.2f} s, save {save:.2f} s)")
    if (job.agent.returncode == 0) is way.through_torchrun:
        wrong.append(f"exit code {job.agent.returncode}")
    if wrong:
        print(f"{way.signal.name} to {way.whom}: {'; '.join(wrong)}\n{output}", file=sys.stderr)
    return seconds, last, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print("| signal | to | good rounds | seconds: median (max) | with torchrun | otherwise |\n|---|---|---|---|---|---|")
    for way in WAYS:
        seconds, lasts, wrong = list[float](), list[float](), list[str]()
        good = 0
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="signals-") as name:
                took, last, faults = round_of(Path(name), way, chance)
            seconds.append(took)
            lasts.append(last)
            good += not faults
            wrong += faults
        whom = way.whom + f", {way.workers} workers a rank" * bool(way.workers) + " (told to pass it on)" * bool(way.options)
        times = " | ".join(f"{statistics.median(values):.2f} ({max(values):.2f})" for values in (seconds, lasts))
        print(f"| {way.signal.name} | {whom} | {good} of {options.rounds} | {times} | {'; '.join(wrong) or '-'} |", flush=True)


if __name__ == "__main__":
    if CHILD in sys.argv:
        train(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
