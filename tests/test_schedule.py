"""Schedulers move once per optimizer step, epoch or evaluation, alike on every rank; clipping is of the whole gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from tests.helpers import Numbers, Ranks, Recorder, Toy, mean_of_outputs, toy_trainer
from trainer import DDPTrainer, TrainerConfig, World

Scheduler = Callable[[Optimizer, int], LRScheduler]


def halving(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda turn: 0.5**turn)


def plateau(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.0)


class Weighing(DDPTrainer):
    """Keeps the rate that each step used and the weight after it, on every rank."""

    def fit(self, resume_from: Any = None) -> Any:
        self.rates: list[float] = []
        self.weights: list[float] = []
        return super().fit(resume_from)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.weights.append(next(iter(self.model.parameters())).item())


def scheduled(
    numbers: int | Sequence[float],
    scheduler: Scheduler | None,
    kind: type[Weighing] = Weighing,
    eval_numbers: int | None = None,
    lr: float = 1.0,
    **config: Any,
) -> dict[str, Any]:
    """T1 with SGD and this scheduler: the rates that steps used and the one left in the end, the scheduler's moves, ..."""
    World.from_env()
    model, recorder = Toy(), Recorder()
    trainer = kind(
        model,
        SGD(model.parameters(), lr=lr),
        Numbers(numbers),
        None if eval_numbers is None else Numbers(eval_numbers),
        loss_fn=mean_of_outputs,
        scheduler=scheduler,
        config=TrainerConfig(**{"shuffle": False, "log_every": 1, **config}),
        callbacks=[recorder],
    )
    trainer.fit()
    return {
        "lr": [call.metrics["lr"] for call in recorder.reports],
        "rates": [*trainer.rates, trainer.optimizer.param_groups[0]["lr"]],
        "moves": None if trainer.scheduler is None else trainer.scheduler.last_epoch,
        "weights": trainer.weights,
        "reports": [call.metrics for call in recorder.reports],
        "evaluations": [call.metrics for call in recorder.named("on_eval")],
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_scheduler_moves_once_per_step_whatever_ranks_and_accumulation(ranks: Ranks, world_size: int) -> None:
    """Rates 1, 0.5, 0.25; w = -3.5, -9.25, -13.625; three moves."""
    accumulated = [{"batch_size": 4 // world_size, "accumulation_steps": 2}, {"batch_size": 1, "global_batch_size": 8}]

    def run() -> list[dict[str, Any]]:
        return [scheduled(20, halving, **config) for config in accumulated]

    by_rank = ranks(world_size, run)
    for rank, results in enumerate(by_rank):
        for result in results:
            assert result["lr"] == ([1.0, 0.5, 0.25] if rank == 0 else [])
            assert result["rates"] == [1.0, 0.5, 0.25, 0.125]
            assert result["moves"] == 3
            assert result["weights"] == [-3.5, -9.25, -13.625]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_plateau_is_seen_once_per_evaluation_by_all_ranks(ranks: Ranks, world_size: int) -> None:
    """The metric is 1.0 three times; the rate is 1, 0.1 and 0.01 after these evaluations."""

    class Constant(Weighing):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": 1.0}

    def run() -> dict[str, Any]:
        return scheduled(6, plateau, Constant, eval_numbers=5, schedule="eval", batch_size=6, epochs=3)

    for result in ranks(world_size, run):
        assert result["rates"] == pytest.approx([1.0, 1.0, 0.1, 0.01])
        assert result["moves"] == 3


class Told(Weighing):
    """Evaluates to what it is told: by rank, then by evaluation. The ranks evaluate equally many samples."""

    VALUES = ((1.0, 0.5, 0.4), (1.0, 1.5, 1.6))
    KEY = "loss"

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        return {self.KEY: self.VALUES[self.world.rank][self.state.epoch - 1], "other": 0.0}


def test_the_plateau_follows_the_mean_over_all_ranks(ranks: Ranks) -> None:
    """1.0, 1.0, 1.0 over both ranks, though rank 0 alone sees 1.0, 0.5, 0.4."""

    def run() -> dict[str, Any]:
        return scheduled(6, plateau, Told, eval_numbers=4, schedule="eval", batch_size=3, epochs=3)

    first, second = ranks(2, run)
    assert [evaluation["loss"] for evaluation in first["evaluations"]] == [1.0, 1.0, 1.0]
    assert first["rates"] == second["rates"] == pytest.approx([1.0, 1.0, 0.1, 0.01])
    assert first["weights"] == second["weights"]


def test_the_plateau_follows_the_monitored_key(ranks: Ranks) -> None:
    class Named(Told):
        KEY = "accuracy"

    def run(monitor: str) -> Any:
        return scheduled(4, plateau, Named, eval_numbers=4, schedule="eval", monitor=monitor, batch_size=4, epochs=3)["rates"]

    assert ranks(1, run, "accuracy") == [[1.0] * 4]  # 1.0, 0.5, 0.4: always better
    assert ranks(1, run, "other") == [pytest.approx([1.0, 1.0, 0.1, 0.01])]  # 0.0 each time
    (outcome,) = ranks.outcomes(1, run, "loss")
    assert outcome.error == "ValueError"
    assert all(word in outcome.message for word in ("'loss'", "accuracy", "other"))


def test_a_direct_evaluation_moves_no_scheduler(ranks: Ranks) -> None:
    class Curious(Weighing):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            if model.training:
                self.evaluate(Numbers(3))
            return super().training_step(model, batch)

    def run() -> list[dict[str, Any]]:
        settings = {"eval_numbers": 4, "batch_size": 4, "schedule": "eval"}
        return [scheduled(8, scheduler, Curious, **settings) for scheduler in (plateau, halving)]

    for results in ranks(2, run):
        assert [result["moves"] for result in results] == [1, 1]  # the one evaluation, at the epoch's end


def test_any_scheduler_can_move_with_evaluations_or_with_epochs(ranks: Ranks) -> None:
    """Two steps an epoch. A step uses the rate from before the move that it causes."""

    def run() -> list[Any]:
        numbers = {"numbers": 8, "batch_size": 2, "epochs": 3}
        return [
            scheduled(scheduler=halving, schedule="epoch", **numbers),
            scheduled(scheduler=halving, schedule="epoch", max_steps=5, **numbers),  # the last epoch is cut short
            scheduled(scheduler=halving, schedule="eval", eval_numbers=3, eval_every=4, **numbers),
            scheduled(scheduler=halving, schedule="eval", eval_numbers=3, **numbers),
        ]

    results = ranks(2, run)[0]
    assert [(result["lr"], result["moves"]) for result in results] == [
        ([1.0, 1.0, 0.5, 0.5, 0.25, 0.25], 3),
        ([1.0, 1.0, 0.5, 0.5, 0.25], 2),
        ([1.0, 1.0, 1.0, 1.0, 0.5, 0.5], 1),
        ([1.0, 1.0, 0.5, 0.5, 0.25, 0.25], 3),
    ]


def test_a_callable_gets_optimizer_and_total_steps_when_the_trainer_is_built() -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def make(*args: Any, **kwargs: Any) -> LRScheduler:
        calls.append((args, kwargs))
        return halving(*args)

    model = Toy()
    optimizer = SGD(model.parameters(), lr=1.0)
    config = TrainerConfig(epochs=3, batch_size=2, accumulation_steps=2)
    with DDPTrainer(model, optimizer, Numbers(10), loss_fn=mean_of_outputs, scheduler=make, config=config) as trainer:
        assert calls == [((optimizer, 9), {})]
        assert trainer.total_steps == 9
        assert isinstance(trainer.scheduler, LambdaLR)


def test_a_class_of_the_user_s_own_is_as_good_as_a_function() -> None:
    class Warmup(torch.optim.lr_scheduler.LambdaLR):
        def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
            self.steps = steps
            super().__init__(optimizer, lambda step: (step + 1) / steps)

    class Mine(torch.optim.lr_scheduler.StepLR):
        pass

    def made(kind: Any) -> Any:
        trainer = toy_trainer(8, batch_size=2)
        return DDPTrainer(
            trainer.model, trainer.optimizer, Numbers(8), loss_fn=mean_of_outputs, scheduler=kind, config=trainer.config
        ).scheduler

    class Factory:
        def __new__(cls, optimizer: torch.optim.Optimizer, steps: int) -> Any:
            return Warmup(optimizer, steps)

    assert made(Warmup).steps == made(Factory).steps == 4
    for kind in (Mine, torch.optim.swa_utils.SWALR):  # made as torch makes them: the steps would be taken for something else
        with pytest.raises(TypeError, match="whose second argument is"):
            made(kind)


def test_a_schedule_sized_by_total_steps_reaches_its_end(ranks: Ranks) -> None:
    """M = 5, K = 2, 2 epochs; OneCycleLR would raise at a step too many."""

    def cycle(optimizer: Optimizer, total_steps: int) -> LRScheduler:
        assert total_steps == 6
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=total_steps)

    def run() -> dict[str, Any]:
        return scheduled(10, cycle, batch_size=1, accumulation_steps=2, epochs=2)

    result = ranks(2, run)[0]
    assert len(result["lr"]) == result["moves"] == 6


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=total_steps)


@pytest.mark.parametrize(
    ("config", "moves"),
    [({"schedule": "epoch"}, "once per epoch, 3 times"), ({"schedule": "eval", "eval_every": 3}, "after each evaluation")],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_length_in_steps_is_told_where_the_scheduler_moves_more_rarely(
    ranks: Ranks, world_size: int, config: dict[str, Any], moves: str
) -> None:
    def run() -> list[str]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            scheduled(12, cosine, eval_numbers=4, batch_size=1, global_batch_size=2, epochs=3, **config)
        return [str(warning.message) for warning in warned]

    first, *others = ranks(world_size, run)
    assert len(first) == 1
    assert f"was made for T_max=18, the run's steps, but schedule={config['schedule']!r} moves it {moves}" in first[0]
    assert others == [[]] * (world_size - 1)


@pytest.mark.parametrize("config", [{"schedule": "step"}, {"schedule": "epoch", "global_batch_size": 12}])
def test_a_length_that_is_the_number_of_moves_is_no_reason_to_warn(config: dict[str, Any]) -> None:
    scheduled(12, cosine, **{"batch_size": 12, "epochs": 3} | config)


def test_groups_without_a_rate_are_left_out_of_reports(ranks: Ranks) -> None:
    """Adafactor of other libraries has None for a rate that it finds itself."""

    class Own(SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=1.0)
            self.param_groups[0]["lr"] = None
            del self.param_groups[1]["lr"]

        def step(self, closure: Any = None) -> None:
            pass

    def run() -> list[set[str]]:
        model, recorder = nn.Sequential(Toy(), Toy(), Toy()), Recorder()
        optimizer = Own([{"params": list(part.parameters())} for part in model])
        config = TrainerConfig(batch_size=2, log_every=1)
        DDPTrainer(model, optimizer, Numbers(4), loss_fn=mean_of_outputs, config=config, callbacks=[recorder]).fit()
        return [set(call.metrics) for call in recorder.reports]

    assert ranks(1, run) == [[{"loss", "lr/2", "samples_per_second"}] * 2]


@pytest.mark.parametrize(
    ("scheduler", "config", "message"),
    [
        (plateau, {}, "ReduceLROnPlateau follows an evaluation: set schedule='eval'; found schedule='step'"),
        (halving, {"schedule": "eval"}, "schedule='eval' needs eval_data"),
        (lambda *_: halving(SGD(Toy().parameters(), lr=1.0), 1), {}, "built on another optimizer"),
    ],
)
def test_a_scheduler_that_could_not_follow_is_an_error(
    ranks: Ranks, scheduler: Scheduler, config: dict[str, Any], message: str
) -> None:
    (outcome,) = ranks.outcomes(1, scheduled, 4, scheduler, **config)
    assert outcome.error == "ValueError"
    assert message in outcome.message


def test_a_callable_without_train_data_is_an_error(ranks: Ranks) -> None:
    def run() -> None:
        model = Toy()
        DDPTrainer(model, SGD(model.parameters(), lr=1.0), scheduler=halving)

    (outcome,) = ranks.outcomes(1, run)
    assert outcome.error == "ValueError"
    assert "needs the total number of steps, which is unknown without train_data" in outcome.message


def grouped(lr: Any) -> list[dict[str, float]]:
    """The reports of a run with three groups of rates `lr`, `lr` / 10 and 0.25, halved at each step."""
    model, recorder = nn.Sequential(Toy(), Toy(), Toy()), Recorder()
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in zip(model, (lr, lr / 10, 0.25), strict=True)]
    DDPTrainer(
        model,
        SGD(groups, lr=1.0),
        Numbers(6),
        loss_fn=mean_of_outputs,
        scheduler=halving,
        config=TrainerConfig(batch_size=2, log_every=1, shuffle=False),
        callbacks=[recorder],
    ).fit()
    return [call.metrics for call in recorder.reports]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_rate_that_a_step_used_is_reported_for_each_group(ranks: Ranks, as_tensor: bool) -> None:
    """Rates may be tensors, which a scheduler fills with the next rate."""
    rate: Any = torch.tensor(1.0, dtype=torch.float64) if as_tensor else 1.0
    (reports,) = ranks(1, grouped, rate)
    assert [set(report) for report in reports] == [{"loss", "lr", "lr/1", "lr/2", "samples_per_second"}] * 3
    for turn, report in enumerate(reports):
        assert [report["lr"], report["lr/1"], report["lr/2"]] == pytest.approx([0.5**turn, 0.1 * 0.5**turn, 0.25 * 0.5**turn])


@pytest.mark.parametrize("scheduler", [None, StepLR, ExponentialLR, ConstantLR])
def test_rates_without_and_with_schedulers_built_beforehand(ranks: Ranks, scheduler: Any) -> None:
    options = {
        StepLR: {"step_size": 2, "gamma": 0.5},
        ExponentialLR: {"gamma": 0.5},
        ConstantLR: {"total_iters": 2, "factor": 0.25},
    }
    wanted = {None: [1.0] * 4, StepLR: [1, 1, 0.5, 0.5], ExponentialLR: [1, 0.5, 0.25, 0.125], ConstantLR: [0.25, 0.25, 1, 1]}

    def run() -> list[float]:
        model, recorder = Toy(), Recorder()
        optimizer = SGD(model.parameters(), lr=1.0)
        DDPTrainer(
            model,
            optimizer,
            Numbers(8),
            loss_fn=mean_of_outputs,
            scheduler=None if scheduler is None else scheduler(optimizer, **options[scheduler]),
            config=TrainerConfig(batch_size=1, accumulation_steps=2, log_every=1),
            callbacks=[recorder],
        ).fit()
        return [call.metrics["lr"] for call in recorder.reports]

    assert ranks(1, run) == [wanted[scheduler]]


def clipped(numbers: Sequence[float], **config: Any) -> tuple[list[float], list[dict[str, float]]]:
    result = scheduled(numbers, None, **config)
    return result["weights"], result["reports"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_sees_the_mean_gradient_once_per_window(ranks: Ranks, world_size: int) -> None:
    """The gradients of the windows are 3, 0.25 and -8, whatever the ranks' own parts of them; the last is a tail."""
    numbers = [9, -5, 1, 7, 0.5, 0, 1, -0.5, -10, -6]

    def run() -> list[Any]:
        splits = [{"batch_size": 1}, {"batch_size": 4}]
        return [clipped(numbers, global_batch_size=4, max_grad_norm=1.0, **split) for split in splits]

    for rank, results in enumerate(ranks(world_size, run)):
        for weights, reports in results:
            assert weights == pytest.approx([-1.0, -1.25, -0.25], rel=1e-5)
            norms = [report["grad_norm"] for report in reports]
            assert norms == (pytest.approx([3.0, 0.25, 8.0], rel=1e-12) if rank == 0 else [])


def test_a_gradient_below_the_maximum_is_left_as_it_is(ranks: Ranks) -> None:
    weights, _ = ranks(1, partial(clipped, [1, 0, 0.25, 0.5], batch_size=2, max_grad_norm=0.75))[0]
    assert weights == [-0.5, -0.875]


def test_the_norm_is_reported_only_when_clipping(ranks: Ranks) -> None:
    (_, reports), (_, without) = ranks(1, lambda: (clipped([1, 2], max_grad_norm=5.0), clipped([1, 2])))[0]
    assert reports[0]["grad_norm"] == 1.5
    assert "grad_norm" not in without[0]
