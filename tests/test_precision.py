"""bf16 and fp16: autocast, loss scaling, skipped updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callbacks import Checkpoint
from tests.helpers import Numbers, Recorder, Toy, mean_of_outputs
from tests.ranks import Ranks
from trainer import DDPTrainer, TrainerConfig, TrainerState

INF = math.inf


def toy(numbers: list[float], w: float = 0.0, callbacks: Any = (), eval_data: Any = None, **settings: Any) -> DDPTrainer:
    model = Toy(torch.float32)
    nn.init.constant_(model.w, w)
    scheduler = settings.pop("scheduler", None)
    return DDPTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        Numbers(numbers, torch.float32),
        eval_data,
        loss_fn=mean_of_outputs,
        scheduler=scheduler,
        config=TrainerConfig(**{"batch_size": 1, "shuffle": False, "log_every": 1} | settings),
        callbacks=callbacks,
    )


def weight(trainer: DDPTrainer) -> float:
    return float(trainer.model.w.detach())  # type: ignore[arg-type]


def slower(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


@pytest.mark.filterwarnings("ignore:the loss was not finite")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_skipped_update_moves_neither_step_nor_scheduler_on_any_rank(ranks: Ranks, world_size: int) -> None:
    """With two ranks only rank 1 sees the infinite sample."""
    numbers = [1.0, INF, 1.0] if world_size == 1 else [1.0, 1.0, 1.0, INF, 1.0, 1.0]

    def run() -> tuple[Any, ...]:
        recorder = Recorder()
        options = {"init_scale": 4.0}
        trainer = toy(numbers, 1.0, [recorder], scheduler=slower, precision="fp16", scaler_options=options)
        state = trainer.fit()
        assert trainer.scheduler is not None
        counts = (state.step, state.skipped_steps, state.samples, state.epoch, trainer.scheduler.last_epoch)
        return weight(trainer), counts, trainer.state_dict()["scaler"]["scale"], recorder.order

    found = ranks(world_size, run)
    for value, counts, scale, _ in found:
        assert (value, counts, scale) == (-0.5, (2, 1, 3 * world_size, 1, 2), 2.0)
    steps = [("on_step", 1), ("on_safe_point", 1), ("on_step", 2), ("on_epoch_end", 2), ("on_safe_point", 2)]
    assert found[0][3] == [("on_fit_start", 0), *steps, ("on_fit_end", 2)]


@pytest.mark.filterwarnings("ignore:the loss was not finite")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_only_overflows_ends_with_an_error_on_every_rank(ranks: Ranks, world_size: int) -> None:
    """With max_steps it would go on for ever: a skipped update is no step."""

    def run() -> float:
        trainer = toy([1.0, INF] * 4, 1.0, precision="fp16", max_steps=3, global_batch_size=2)
        with pytest.raises(FloatingPointError, match=r"30 updates in a row were skipped.* scale down to 6e-05: they"):
            trainer.fit()
        assert (trainer.state.step, trainer.state.skipped_steps) == (0, 29)  # and one more: 2 ** 16 halved 30 times
        return weight(trainer)

    assert ranks(world_size, run) == [1.0] * world_size


@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_an_epoch_that_ends_on_a_skipped_update_still_evaluates_and_reaches_a_safe_point() -> None:
    recorder = Recorder()
    trainer = toy([1.0, INF], 1.0, [recorder], Numbers([2.0], torch.float32), precision="fp16", epochs=2)
    state = trainer.fit()
    assert (state.step, state.skipped_steps, state.epoch, state.epoch_samples) == (2, 2, 2, 0)
    epoch = [("on_step", 1), ("on_safe_point", 1), ("on_eval", 1), ("on_epoch_end", 1), ("on_safe_point", 1)]
    assert recorder.order[1:6] == epoch


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_unscaled_before_they_are_clipped(ranks: Ranks, world_size: int) -> None:
    """Norm 0.5 under a limit of 1 is not clipped, whatever the loss scale."""

    def run() -> tuple[float, list[float]]:
        recorder = Recorder()
        trainer = toy([0.5] * world_size, 0.0, [recorder], precision="fp16", max_grad_norm=1.0)
        trainer.fit()
        return weight(trainer), [call.metrics["grad_norm"] for call in recorder.reports]

    found = ranks(world_size, run)
    assert [value for value, _ in found] == [-0.5] * world_size
    assert found[0][1] == [0.5]


@pytest.mark.filterwarnings("ignore:other require gradients")
def test_gradients_that_the_optimizer_does_not_have_are_unscaled_too() -> None:
    """As in fp32: a norm of sqrt(0.5), under the limit."""

    class Two(Toy):
        def __init__(self) -> None:
            super().__init__(torch.float32)
            self.other = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w + self.other) * x

    recorder, model = Recorder(), Two()
    DDPTrainer(
        model,
        torch.optim.SGD([model.w], lr=1.0),
        Numbers([0.5], torch.float32),
        loss_fn=mean_of_outputs,
        config=TrainerConfig(precision="fp16", scaler_options={"init_scale": 2.0**14}, max_grad_norm=1.0, log_every=1),
        callbacks=[recorder],
    ).fit()
    assert model.w.item() == -0.5
    assert recorder.reports[0].metrics["grad_norm"] == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_a_share_of_the_first_window_has_a_scaler_too(ranks: Ranks, world_size: int) -> None:
    assert ranks(world_size, lambda: weight(toy_fitted([1.0], precision="fp16"))) == [-1.0] * world_size


def toy_fitted(numbers: list[float], **settings: Any) -> DDPTrainer:
    trainer = toy(numbers, **settings)
    trainer.fit()
    return trainer


@pytest.mark.filterwarnings("ignore:the loss was not finite")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_is_stopped_at_a_skipped_update_has_a_checkpoint_of_it(tmp_path: Path, steps: int) -> None:
    class Stops(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            if batch[0].isinf().any():
                self.stop("now")
            return mean_of_outputs(model(batch[0]), batch[1])

    def fit() -> TrainerState:
        model = Toy(torch.float32)
        return Stops(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            Numbers([*[1.0] * steps, INF, 1.0, 1.0], torch.float32),
            config=TrainerConfig(precision="fp16", batch_size=1, shuffle=False, log_every=1),
            callbacks=[Checkpoint(tmp_path)],
        ).fit(resume_from=tmp_path)

    state = fit()
    assert state.stop_reason == "now"
    saved = torch.load(max(tmp_path.glob("*.pt")), weights_only=True)["state"]
    assert (saved["step"], saved["skipped_steps"], saved["epoch_samples"]) == (steps, 1, steps + 1)
    assert (state.step, state.skipped_steps, state.epoch_samples) == (steps, 1, steps + 1)
    state = fit()
    assert (state.step, state.skipped_steps, state.stop_reason) == (steps + 2, 1, None)


def test_accumulation_with_a_scaler_equals_the_run_without_one() -> None:
    """Windows of three micro-batches and a tail of one."""

    def run(**settings: Any) -> float:
        trainer = toy([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], accumulation_steps=3, max_grad_norm=1e6, **settings)
        assert trainer.fit().step == 3
        return weight(trainer)

    assert run(precision="fp16") == run()


@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_the_scaler_resumes_bitwise(tmp_path: Path) -> None:
    """Growth every two steps, an overflow at the second."""
    numbers = [1.0, INF, 0.5, 0.25, 2.0, 1.0, 0.75, 1.5, 0.125, 3.0]
    settings: dict[str, Any] = {"precision": "fp16", "scaler_options": {"init_scale": 65536.0, "growth_interval": 2}}

    def scales(folder: Path, **limits: Any) -> tuple[DDPTrainer, dict[str, Any]]:
        trainer = toy(numbers, 1.0, [Checkpoint(folder)], scheduler=slower, **settings, **limits)
        trainer.fit(resume_from=folder)
        return trainer, trainer.state_dict()

    whole, state = scales(tmp_path / "whole")
    _, saved = scales(tmp_path / "parts", max_steps=4)
    resumed = toy(numbers, 0.0, scheduler=slower, **settings)
    resumed.load_state_dict(saved)
    assert resumed.state_dict()["scaler"] == saved["scaler"]
    assert saved["scaler"]["_growth_tracker"] == 1
    resumed, again = scales(tmp_path / "parts")
    assert weight(resumed) == weight(whole)
    assert (again["scaler"], again["state"]) == (state["scaler"], state["state"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_steps_run_under_autocast_in_training_evaluation_and_prediction(precision: str) -> None:
    kinds: list[torch.dtype] = []

    class Linear(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            kinds.append(outputs.dtype)
            return outputs

    model = Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
    config = TrainerConfig(batch_size=4, precision=precision)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = DDPTrainer(model, optimizer, data, data, loss_fn=nn.functional.mse_loss, config=config)
    trainer.fit()
    trainer.predict(data)
    assert kinds == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]] * 3
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("world_size", [1, 2])
def test_means_of_bf16_values_are_summed_in_float64(ranks: Ranks, world_size: int) -> None:
    """1,000 batches of loss 1 have the mean 1, not 256 / 1,000."""

    class Constant(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
            return torch.ones((), dtype=torch.bfloat16)

    def run() -> float:
        model = Toy(torch.float32)
        config = TrainerConfig(eval_batch_size=1, precision="bf16")
        trainer = Constant(model, torch.optim.SGD(model.parameters(), lr=1.0), config=config)
        return trainer.evaluate(Numbers(1_000, torch.float32))["loss"]

    assert ranks(world_size, run) == [1.0] * world_size


def test_scaler_options_without_fp16_are_refused() -> None:
    with pytest.raises(ValueError, match="precision='fp16'"):
        TrainerConfig(scaler_options={"init_scale": 4.0})
