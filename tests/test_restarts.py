"""Killed and told to stop under torchrun: the job goes on as if nothing had happened, with each sample trained on once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.run import get_args_parser
from torch.utils.data import Dataset

from callbacks import Checkpoint
from tests.helpers import Ranks, run_torchrun
from tests.jobs import Job
from trainer import CheckpointFolder, DDPTrainer, TrainerConfig

SAMPLES, GLOBAL_BATCH, EPOCHS = 22, 4, 10
STEPS = 6  # an epoch; the last over two samples
LIMIT = 60.0  # seconds for what takes five on an idle machine


class Noisy(Dataset[Any]):
    """Each sample is changed at random whenever it is fetched; its last part is its index."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.inputs, self.targets = torch.randn(length, 6, generator=generator), torch.randn(length, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index] + 0.3 * torch.randn(6), self.targets[index], index


class Logged(DDPTrainer):
    """Writes down what this rank trains on, before it does, and kills itself where it is told to: (restart, rank, step)."""

    deaths: tuple[tuple[int, int, int], ...] = ()
    pace = 0.0
    log = -1
    prefix = ""

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        if (int(os.environ["TORCHELASTIC_RESTART_COUNT"]), self.world.rank, self.state.step) in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        words = [self.prefix, self.state.step, self.state.epoch, *batch[2].tolist()]
        os.write(self.log, (" ".join(map(str, words)) + "\n").encode())
        time.sleep(self.pace)
        return self.eval_step(model, batch)

    def eval_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class Line(NamedTuple):
    """What one rank has trained on in one micro-batch."""

    attempt: tuple[int, int]  # the number of the job, and of its restart
    step: int
    epoch: int
    indices: tuple[int, ...]


def train(folder: Path, job: int, deaths: tuple[tuple[int, int, int], ...], every: int | None, workers: int, pace: float) -> None:
    """The whole run, or what is left of it. Dropout, random data, momentum, evaluation; `job` numbers the jobs on a folder."""
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(len(CheckpointFolder(folder).steps()))  # other weights where they are to come from a file
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))
    trainer = Logged(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        Noisy(SAMPLES),
        Noisy(5),
        loader_options={"num_workers": workers},
        config=TrainerConfig(epochs=EPOCHS, global_batch_size=GLOBAL_BATCH, batch_size=1, log_every=4, seed=5),
        callbacks=[Checkpoint(folder, every_steps=every, every_epochs=None)],
    )
    trainer.deaths, trainer.pace, trainer.prefix = deaths, pace, f"{job} {restart}"
    folder.mkdir(exist_ok=True)
    trainer.log = os.open(folder / f"trained-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with trainer:
        trainer.fit(resume_from=folder)


def trained(folder: Path, rank: int) -> list[Line]:
    file = folder / f"trained-{rank}.log"
    lines = [list(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []
    return [Line((job, restart), step, epoch, tuple(indices)) for job, restart, step, epoch, *indices in lines]


def newest_step(folder: Path) -> int:
    """The last one that rank 0 has begun, of any attempt; -1 before the first."""
    return max((line.step for line in trained(folder, 0)), default=-1)


def launch(folder: Path, job: int, **options: Any) -> Job:
    settings = {"deaths": (), "every": None, "workers": 0, "pace": 0.02, **options}
    torchrun = settings.pop("torchrun", ())
    return Job(Path(__file__), 2, repr({"folder": str(folder), "job": job, **settings}), options=torchrun)


class Found(NamedTuple):
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]


def final(folder: Path) -> Found:
    newest = CheckpointFolder(folder).newest()
    assert newest is not None
    assert newest["state"]["step"] == EPOCHS * STEPS
    return Found(newest["model"], newest["optimizer"])


@cache
def uninterrupted() -> Found:
    with TemporaryDirectory(prefix="uninterrupted-") as name:
        folder = Path(name)
        Ranks()(2, train, folder, 0, (), None, 0, 0.0)
        assert_each_sample_once(folder)
        return final(folder)


def assert_the_uninterrupted_run(folder: Path) -> None:
    """Bit for bit, and nothing unfinished is left."""
    found, wanted = final(folder), uninterrupted()
    torch.testing.assert_close(found.model, wanted.model, rtol=0, atol=0)
    torch.testing.assert_close(found.optimizer["state"], wanted.optimizer["state"], rtol=0, atol=0)
    assert found.optimizer["param_groups"] == wanted.optimizer["param_groups"]
    assert_each_sample_once(folder)
    assert not [path.name for path in folder.iterdir() if path.suffix in (".tmp", ".lock")]


def assert_each_sample_once(folder: Path) -> None:
    """In every epoch; of a step that was trained several times the last attempt counts."""
    lines = trained(folder, 0) + trained(folder, 1)
    last: dict[int, tuple[int, int]] = {}
    for line in lines:
        last[line.step] = max(line.attempt, last.get(line.step, line.attempt))
    counted = Counter((line.epoch, index) for line in lines if line.attempt == last[line.step] for index in line.indices)
    assert counted == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))


def test_ranks_that_are_killed_are_restarted_and_end_where_the_uninterrupted_run_does(tmp_path: Path) -> None:
    """Rank 1 in the eighth step, after the restart rank 0 in the sixteenth; with a checkpoint every two steps."""
    with launch(tmp_path, 1, deaths=((0, 1, 7), (1, 0, 15)), every=2, torchrun=["--max-restarts=2"]) as job:
        assert job.wait(LIMIT) == 0, job.output
    starts = {line.attempt: line.step for line in reversed(trained(tmp_path, 1))}
    assert starts.keys() == {(1, 0), (1, 1), (1, 2)}
    assert starts[1, 0] == 0
    assert 4 <= starts[1, 1] <= 6  # the file of step 6 may just have been on its way
    assert 12 <= starts[1, 2] <= 14
    assert_the_uninterrupted_run(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not hear of its parent's end")
def test_ranks_go_with_an_agent_that_is_killed_and_a_new_job_goes_on_at_once(tmp_path: Path) -> None:
    """No orphan writes on, and none holds the folder. Workers go too."""
    with launch(tmp_path, 1, every=2, workers=1, pace=0.05) as job:
        job.until(lambda: newest_step(tmp_path) >= 6, LIMIT)
        ranks, everyone = set(job.ranks().values()), job.processes()
        assert len(everyone) == 4  # two ranks, each with a worker
        job.agent.kill()
        job.until_gone(2, ranks)
        job.until_gone(10)  # a worker looks for its parent every five seconds
    before = max(CheckpointFolder(tmp_path).steps())
    with launch(tmp_path, 2, every=2, workers=1) as job:
        assert job.wait(LIMIT) == 0, job.output
    assert min(line.step for line in trained(tmp_path, 0) if line.attempt == (2, 0)) == before >= 4
    assert_the_uninterrupted_run(tmp_path)


WAYS = ["SIGTERM to the agent", "SIGTERM to all processes"]
HANDLED = []
if "--signals-to-handle" in get_args_parser().format_help():  # torchrun's own; else SIGUSR1 ends it
    WAYS.append("SIGUSR1 to the agent")
    HANDLED.append("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")


def test_a_job_that_is_told_to_stop_leaves_one_checkpoint_and_the_next_goes_on(tmp_path: Path) -> None:
    """In every way, one after the other on the same run, with workers."""
    for number, way in enumerate(WAYS):
        before, begin = set(CheckpointFolder(tmp_path).steps()), newest_step(tmp_path)
        with launch(tmp_path, number, workers=1, pace=0.05, torchrun=HANDLED) as job:
            job.until(lambda begin=begin: newest_step(tmp_path) >= begin + 3, LIMIT)
            told = time.monotonic()
            tell(job, way)
            assert job.until_gone(30) - told < 10, way
            assert job.agent.returncode == 1, (way, job.output)  # torchrun's own: SignalException
        (step,) = set(CheckpointFolder(tmp_path).steps()) - before
        assert [trained(tmp_path, rank)[-1].step + 1 for rank in (0, 1)] == [step, step], way
        newest = CheckpointFolder(tmp_path).newest()
        assert newest is not None
        assert newest["state"]["stop_reason"] == f"received {way.split()[0]}"
        assert newest["state"]["step"] == step
    Ranks()(2, train, tmp_path, len(WAYS), (), None, 0, 0.0)
    assert_the_uninterrupted_run(tmp_path)


def tell(job: Job, way: str) -> None:
    name, _, whom = way.partition(" to ")
    number = getattr(signal, name)
    if whom == "the agent":
        job.processes()
        job.agent.send_signal(number)
    else:
        job.signal_all(number)


if __name__ == "__main__":
    settings = eval(sys.argv[1])
    train(**{**settings, "folder": Path(settings["folder"])})


LOADING = """
import os, sys, time
import trainer.checkpoint_folder
from callbacks import Checkpoint
from tests.helpers import Numbers, Toy, mean_of_outputs
from trainer import Callback, DDPTrainer, TrainerConfig
import torch

class Closing(Callback):
    def on_exception(self, trainer, error):
        time.sleep(0.7)  # of rank 0 alone

def unreadable(resume_from):
    raise ArithmeticError("the cause")

trainer.checkpoint_folder.find = unreadable
model = Toy()
DDPTrainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), Numbers(8), loss_fn=mean_of_outputs, callbacks=[Closing()]
).fit(resume_from=sys.argv[1])
"""


def test_an_error_of_rank_0_that_is_raised_everywhere_is_shown_where_it_was(tmp_path: Path) -> None:
    """The other ranks raise a copy, with the traceback of a message."""
    done = run_torchrun(LOADING, 2, str(tmp_path), timeout=60)
    cause = done.stderr.partition("Root Cause (first observed failure):")[2]
    assert "in unreadable" in cause
    assert "ArithmeticError: the cause" in cause
