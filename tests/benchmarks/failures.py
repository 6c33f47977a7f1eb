"""How a job under torchrun ends when one rank fails, or hangs, at each of eight points:

    python tests/benchmarks/failures.py --rounds 10

Each round is a job of its own on two processes. One of them, at random (rank 0 in the three points that are its alone: a
callback, saving and loading), raises an error; or it hangs, and the others were told to wait for 5 s. Measured: the seconds from
then until the last process has gone, torchrun and workers included. A round is good when

- all were gone within 5 s (a hang: the time limit + 5 s), with an exit code that is not 0;
- after an error: torchrun shows that rank's traceback as the root cause;
- after a hang: what another rank says names the rank that hangs. (Before init there is only one thing to say: who did not come.)
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.jobs import Job  # noqa: E402

CHILD = "--child"
PROCESSES = 2
POINTS = ("before init", "dataset", "worker", "forward", "callback", "evaluation", "saving", "loading")
OF_RANK_0 = ("callback", "saving", "loading")
KINDS = ("error", "hang")
WAIT, WITHIN, LEFT, LIMIT = 5.0, 5.0, 15.0, 120.0  # seconds


def train(folder: Path, kind: str, point: str, rank: int) -> None:
    def act(here: str, when: bool = True) -> None:
        if here == point and when and int(os.environ["RANK"]) == rank:
            (folder / "began").write_text(str(time.monotonic()))
            hang() if kind == "hang" else boom(point)

    import torch
    from torch import Tensor, nn
    from torch.utils.data import get_worker_info

    import trainer.checkpoint_folder
    from callbacks import Checkpoint
    from tests.helpers import Numbers, Toy
    from trainer import Callback, DDPTrainer, TrainerConfig, World, checkpoint

    class Data(Numbers):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            act("dataset" if get_worker_info() is None else "worker", index >= 80)
            return super().__getitem__(index)

    class Acting(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            act("forward", self.state.step == 8)
            return self.eval_step(model, batch)

        def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
            act("evaluation", not model.training and self.state.step == 10)
            loss: Tensor = model(batch[0]).mean()
            return loss

    class Told(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            act("callback", trainer.state.step == 8)

    write, find = checkpoint.write, trainer.checkpoint_folder.find

    def acting_write(path: Path, content: Mapping[str, Any]) -> None:
        act("saving", content["state"]["step"] == 8)
        write(path, content)

    def acting_find(resume_from: Any) -> Any:
        act("loading")
        return find(resume_from)

    checkpoint.write, trainer.checkpoint_folder.find = acting_write, acting_find
    act("before init")
    world = World.from_env(timeout=timedelta(seconds=WAIT if kind == "hang" else 600))
    model = nn.Sequential(Toy())
    with Acting(
        model,
        torch.optim.SGD(model.parameters(), lr=0.001),
        Data(400),
        Numbers(5),
        loader_options={"num_workers": 2 * (point == "worker")},
        config=TrainerConfig(batch_size=4, shuffle=False, log_every=4, eval_every=5),
        callbacks=[Told(), Checkpoint(folder / "files", every_steps=4)],
        world=world,
    ) as training:
        training.fit(resume_from=folder / "files")


def boom(point: str) -> NoReturn:
    raise ArithmeticError(f"boom: {point}")


def hang() -> NoReturn:
    while True:
        time.sleep(1)


def round_of(folder: Path, kind: str, point: str, rank: int) -> tuple[float, list[str]]:
    """The seconds from the fault to the end of everything, and what was wrong."""
    wrong = []
    with Job(Path(__file__), PROCESSES, CHILD, folder, kind, point, rank) as job:
        deadline = time.monotonic() + LIMIT
        while job.agent.poll() is None and time.monotonic() < deadline:
            job.processes()
            time.sleep(0.02)
        try:
            gone = job.until_gone(LEFT)
        except TimeoutError:
            gone = time.monotonic()
            wrong.append(f"{len(job.alive())} processes were still there {LEFT:.0f} s after torchrun")
        output = job.output
    seconds = gone - float((folder / "began").read_text())
    if seconds > WITHIN + (WAIT if kind == "hang" else 0):
        wrong.append(f"{seconds:.1f} s")
    if job.agent.returncode == 0:
        wrong.append("exit code 0")
    cause = output.partition("Root Cause (first observed failure):")[2]
    if kind == "error":
        if f"boom: {point}" not in cause or not re.search(rf"rank +: {rank} ", cause):
            wrong.append("torchrun shows another cause, or none")
    elif not re.search(rf"rank {rank} did not answer|waited .* for rank {rank} to join", output):
        wrong.append("nobody names the rank that hangs")
    if wrong:
        print(f"{kind}, {point}, rank {rank}: {'; '.join(wrong)}\n{output[-3000:]}", file=sys.stderr)
    return seconds, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--points", nargs="+", choices=POINTS, default=POINTS)
    parser.add_argument("--seed", type=int, default=0, help="of the ranks")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print("| what | where | good rounds | seconds to the end: median (max) | otherwise |\n|---|---|---|---|---|")
    for kind in options.kinds:
        for point in options.points:
            seconds, wrong = list[float](), list[str]()
            good = 0
            for _ in range(options.rounds):
                rank = 0 if point in OF_RANK_0 else chance.randrange(PROCESSES)
                with tempfile.TemporaryDirectory(prefix="failures-") as name:
                    took, faults = round_of(Path(name), kind, point, rank)
                seconds.append(took)
                good += not faults
                wrong += faults
            times = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"
            print(f"| {kind} | {point} | {good} of {options.rounds} | {times} | {'; '.join(wrong) or '-'} |", flush=True)


if __name__ == "__main__":
    if CHILD in sys.argv:
        train(Path(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5]))
    else:
        main()
