"""The callbacks together, over a crash and a resume, and over many steps."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from callbacks import Checkpoint, JSONLines, ProgressBar, TensorBoard
from tests.helpers import Ranks, Toy, toy_trainer
from trainer import Callback, DDPTrainer


class KillAt(Callback):
    """kill -9, as the machine would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        if trainer.state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def read_lines(folder: Path, kind: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == kind]


def read_curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars(tag)
    return [(event.step, event.value) for event in events]


@pytest.mark.parametrize("world_size", [1, 2])
def test_logs_of_a_killed_and_resumed_run_are_those_of_a_whole_one(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """Twelve steps, five an epoch; a checkpoint after the sixth; killed at the ninth."""

    def run(folder: Path, *callbacks: Callback) -> int:
        trainer = toy_trainer(
            10,
            eval_numbers=3,
            lr=0.5,
            callbacks=[
                ProgressBar(),
                TensorBoard(folder / "tensorboard"),
                JSONLines(folder / "log.jsonl"),
                Checkpoint(folder / "checkpoints", every_steps=6, every_epochs=None),
                *callbacks,
            ],
            batch_size=2 // world_size,
            max_steps=12,
            eval_every=3,
        )
        with trainer:
            return trainer.fit(resume_from=folder / "checkpoints").step

    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert ranks(world_size, run, whole) == [12] * world_size
    killed = ranks.outcomes(world_size, run, broken, KillAt(9))
    assert killed[0].exit_code == -signal.SIGKILL
    assert [step for step, _ in read_lines(broken, "step")] == list(range(1, 10))
    assert ranks(world_size, run, broken) == [12] * world_size

    assert [step for step, _ in read_lines(broken, "step")] == list(range(1, 13))
    assert [step for step, _ in read_curve(broken, "eval/loss")] == [3, 6, 9, 12]
    for kind in ("step", "eval"):
        assert read_lines(broken, kind) == read_lines(whole, kind)
    for tag in ("train/loss", "eval/loss"):
        assert read_curve(broken, tag) == read_curve(whole, tag)
    # An epoch's mean that spans a restart begins at the restored step: epoch 2 is steps 6 to 10.
    assert [step for step, _ in read_lines(broken, "epoch")] == [5, 10]


class Wide(Toy):
    """An activation of a megabyte, to which `alive` points."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        activation = self.w * torch.zeros(131072, dtype=torch.float64)
        self.alive.add(activation)
        return x * self.w + activation.exp().mean()


def test_no_activation_outlives_its_micro_batch(ranks: Ranks, tmp_path: Path) -> None:
    class Count(Callback):
        def __init__(self, model: Wide) -> None:
            self.model = model
            self.most = 0

        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            gc.collect()
            self.most = max(self.most, len(self.model.alive))
            assert all(type(value) is float for value in metrics.values())

    def fit() -> tuple[int, float]:
        model = Wide()
        count = Count(model)
        callbacks = [ProgressBar(), TensorBoard(tmp_path / "tensorboard"), JSONLines(tmp_path / "log.jsonl"), count]
        options: dict[str, Any] = {"lr": 0.0, "batch_size": 1, "accumulation_steps": 4}
        toy_trainer(80, model, callbacks=callbacks, **options).fit()  # 20 steps, to settle
        before = memory()
        toy_trainer(720, model, callbacks=callbacks, **options).fit()
        return count.most, memory() - before

    ((most, growth),) = ranks(1, fit)
    assert most <= 1
    assert growth < 10e6


def memory() -> float:
    """Bytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
