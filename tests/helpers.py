"""Toys whose right answers can be computed by hand, a callback that records, and a launch through torchrun."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ranks import Outcome, Ranks, RanksFailed
from trainer import Callback, DDPTrainer, TrainerConfig

__all__ = [
    "BatchNormToy",
    "Call",
    "Completed",
    "Numbers",
    "Outcome",
    "Ranks",
    "RanksFailed",
    "Recorder",
    "Toy",
    "ValueToy",
    "mean_of_outputs",
    "opening_files_for",
    "rank_pairs",
    "run_torchrun",
    "toy_trainer",
]


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is ``(x_i, x_i)``, two tensors of no dimension: the numbers 0, 1, 2, ... or those given."""

    def __init__(self, numbers: int | Sequence[float], dtype: torch.dtype = torch.float64) -> None:
        values = range(numbers) if isinstance(numbers, int) else numbers
        self.values = torch.tensor(list(values), dtype=dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.values[index], self.values[index]


def mean_of_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the toys."""
    return outputs.mean()


class Toy(nn.Module):
    """T1: ``y = w x`` with w = 0 at first. With `mean_of_outputs` and SGD at a rate of 1 a step takes the mean of the
    window's numbers off w.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class ValueToy(Toy):
    """T2 and T3: ``y = x + 0 w``. The right loss of a window is the mean of its numbers, that of an evaluation the mean
    of all: with scores in {0, 1} for numbers, the accuracy.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.w


class BatchNormToy(nn.Module):
    """T4: batch normalisation (momentum 0.1), then a weight of 1. For `rank_pairs`, at a learning rate of 0."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=0.1, dtype=dtype)
        self.linear = nn.Linear(1, 1, bias=False, dtype=dtype)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.norm(x.unsqueeze(1)))
        return outputs


def toy_trainer(
    numbers: int | Sequence[float],
    model: nn.Module | None = None,
    *,
    eval_numbers: int | Sequence[float] | None = None,
    lr: float = 1.0,
    callbacks: Sequence[Callback] = (),
    kind: type[DDPTrainer] = DDPTrainer,
    **config: Any,
) -> DDPTrainer:
    """A toy (T1 unless `model` is given) on `Numbers`, with plain SGD; not shuffled, a report every step."""
    model = Toy() if model is None else model
    return kind(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        Numbers(numbers),
        None if eval_numbers is None else Numbers(eval_numbers),
        loss_fn=mean_of_outputs,
        config=TrainerConfig(**{"shuffle": False, "log_every": 1, **config}),
        callbacks=callbacks,
    )


def rank_pairs(world_size: int, steps: int, dtype: torch.dtype = torch.float64) -> Numbers:
    """The data of T4: not shuffled, two samples per rank and step, rank r gets ``[r, r + 2]`` (mean r + 1) every time.

    Rank r takes every `world_size`-th position of a window from r on.
    """
    return Numbers([rank + 2 * turn for _ in range(steps) for turn in (0, 1) for rank in range(world_size)], dtype)


class Call(NamedTuple):
    """One call of a hook."""

    name: str
    step: int
    epoch: int
    metrics: dict[str, float]


class Recorder(Callback):
    """Records every call of a hook, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    @property
    def order(self) -> list[tuple[str, int]]:
        """The hooks' names with the step at which they were called."""
        return [(call.name, call.step) for call in self.calls]

    @property
    def reports(self) -> list[Call]:
        """The calls of on_step that came with metrics."""
        return [call for call in self.named("on_step") if call.metrics]

    def _record(self, name: str, trainer: DDPTrainer, metrics: Mapping[str, float] | None = None) -> None:
        self.calls.append(Call(name, trainer.state.step, trainer.state.epoch, dict(metrics or {})))

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        self._record("on_fit_start", trainer)

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._record("on_step", trainer, metrics)

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._record("on_eval", trainer, metrics)

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._record("on_epoch_end", trainer, metrics)

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        self._record("on_safe_point", trainer)

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self._record("on_fit_end", trainer)

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self._record("on_exception", trainer)


@dataclass(frozen=True)
class Completed:
    """How a launch ended; `seconds` from its start."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool


def run_torchrun(
    script: str | Path,
    nproc: int,
    *args: str,
    timeout: float = 60.0,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Completed:
    """Runs `script` (its text, or the path of a file) by ``torchrun --standalone`` on `nproc` processes.

    Only for what forked ranks cannot show: a launch takes seconds. With nproc 0 it is ``python script`` instead. At the
    limit torchrun is told to end, which ends its workers. Raises nothing for a failed script: look at `returncode`.
    """
    with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
        if isinstance(script, str):
            file = Path(folder) / "script.py"
            file.write_text(script)
        else:
            file = script.resolve()
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *options]
        command = [sys.executable, *(launcher if nproc else []), str(file), *args]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environment, **(env or {})},
            cwd=cwd or folder,
        )
        timed_out = False
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            stdout, stderr = _end(process)
        except BaseException:
            _end(process)
            raise
        return Completed(process.returncode, stdout, stderr, time.monotonic() - started, timed_out)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=45)  # torchrun kills workers that take longer than 30 s to leave
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def opening_files_for(room: int, ending: Callable[[], Any]) -> Callable[..., io.BufferedWriter]:
    """In place of `open`: files that take `room` bytes, then `ending`."""

    class Limited(io.FileIO):
        def write(self, data: Any) -> int:
            fits = super().write(memoryview(data)[: max(0, room - self.tell())])
            if fits < memoryview(data).nbytes:
                ending()
            return fits

    return lambda path, mode: io.BufferedWriter(Limited(path, mode)) if mode == "wb" else open(path, mode)
