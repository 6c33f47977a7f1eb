"""The types as a user's own script meets them: through mypy, as strict as it can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="the type checker comes with the extra 'test'")

ROOT = Path(__file__).parents[1]
SCRIPT = """
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from callbacks import Checkpoint, EarlyStopping, JSONLines, Profiler, ProgressBar, TensorBoard, WeightsAndBiases
from trainer import Callback, CheckpointError, CheckpointFolder, DDPTrainer, Mean, TrainerConfig, TrainerState, World


class Regression(DDPTrainer):
    def training_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
        return {"loss": Mean(loss, targets.numel())}

    def eval_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor | float | Mean]:
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(model(inputs), targets), "rows": float(len(inputs))}

    def predict_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        predicted: Tensor = model(batch[0])
        return predicted

    def prepare_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.world.device), batch[1].to(self.world.device)

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def before_epoch(self) -> None:
        self.model.requires_grad_(self.state.epoch > 0)

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics | {"root": metrics["loss"] ** 0.5}


class StopAtLoss(Callback):
    def __init__(self, target: float) -> None:
        self.target = target
        self.seen = 0

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.seen = trainer.state.step

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if metrics["loss"] < self.target:
            trainer.stop(f"loss {metrics['loss']:.4f}")

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}


def schedule(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / total_steps)


def main() -> int:
    world = World.from_env("cpu", timeout=timedelta(minutes=5))
    with world.main_first():
        data = TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))
    sizes: list[int] = world.gather(len(data))
    word: str = world.broadcast("a")
    total: Tensor = world.sum(torch.tensor(sum(sizes) + len(word)))
    model = nn.Linear(2, 1)
    watching = [
        Checkpoint("runs/a", every_steps=10, monitor="loss", mode="min"),
        EarlyStopping("loss", patience=3),
        JSONLines("runs/a/log.jsonl"),
        Profiler("runs/a", first=5),
        ProgressBar(),
        StopAtLoss(0.1),
        TensorBoard("runs/a"),
        WeightsAndBiases(project="a"),
    ]
    with Regression(
        model,
        SGD(model.parameters(), lr=0.1),
        data,
        {"near": data, "far": data},
        scheduler=schedule,
        loader_options={"num_workers": 2},
        config=TrainerConfig(epochs=3, global_batch_size=4, precision="bf16", schedule="step", max_grad_norm=1.0),
        callbacks=watching,
        world=world,
    ) as trainer:
        try:
            state: TrainerState = trainer.fit(resume_from="runs/a")
        except CheckpointError as error:
            print(error, CheckpointFolder("runs/a").steps())
            return 1
        metrics: dict[str, float] = trainer.evaluate()
        print(metrics["near/loss"], trainer.total_steps, trainer.predict(data), total.tolist())
    return state.step


class Plain(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).mean()
        return loss


main()
"""
WRONG = """
from typing import Any

from torch import nn

from callbacks import EarlyStopping
from trainer import Callback, DDPTrainer, Mean, TrainerConfig, World

TrainerConfig(epochs="3")
TrainerConfig(precision="fp8")
TrainerConfig(epoch=3)
EarlyStopping("loss", patience=3, mode="least")
Mean("1", 2)
steps: str = World.from_env().gather(1)


class Trainer(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> str:
        return "loss"


class Watch(Callback):
    def on_eval(self, trainer: DDPTrainer) -> None: ...
"""
# By line of WRONG: mypy's code of the error, and what its message has to name.
ERRORS = {
    9: ("arg-type", '"epochs"'),
    10: ("arg-type", '"precision"'),
    11: ("call-arg", '"epoch"'),
    12: ("arg-type", '"mode"'),
    13: ("arg-type", '"Mean"'),
    14: ("assignment", '"list[int]"'),
    18: ("override", '"training_step"'),
    23: ("override", '"on_eval"'),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy has read once: torch takes most of its time."""
    return tmp_path_factory.mktemp("mypy")


def check(script: str, folder: Path, cache: Path) -> tuple[int, str]:
    """mypy's exit status and output for a script outside the repository. It finds the library as an installed one: silently."""
    (folder / "script.py").write_text(script)
    strict = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *strict, "--no-pretty", "--no-color-output", "script.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_typed_script_with_every_public_name_has_no_error(tmp_path: Path, cache: Path) -> None:
    assert check(SCRIPT, tmp_path, cache) == (0, "")


def test_each_wrong_use_is_an_error_that_names_it(tmp_path: Path, cache: Path) -> None:
    status, output = check(WRONG, tmp_path, cache)
    assert status == 1
    errors = [line for line in output.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors] == list(ERRORS), output
    for line, (code, word) in zip(errors, ERRORS.values(), strict=True):
        assert line.endswith(f"[{code}]")
        assert word in line
