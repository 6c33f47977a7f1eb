"""Every sample is evaluated once, on any number of ranks, and everything is left as it was found."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset

from callbacks import Checkpoint, EarlyStopping
from tests.helpers import BatchNormToy, Numbers, Ranks, Recorder, Toy, ValueToy, mean_of_outputs, rank_pairs, toy_trainer
from trainer import Callback, CheckpointFolder, DDPTrainer, Mean, TrainerConfig, World
from trainer.metrics import WeightedSums

SIZES, BATCH_SIZES = (1, 2, 7, 10, 13, 64), (1, 3, 8)
TOLERANCE = 1e-12


class Scored(DDPTrainer):
    """Loss and accuracy of the toy, and the samples seen."""

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        assert len(inputs) <= (self.config.eval_batch_size or self.config.batch_size)
        self.seen = [*getattr(self, "seen", []), *targets.tolist()]
        outputs = model(inputs)
        return {
            "loss": outputs.square().mean(),
            "accuracy": (outputs > 0).double().mean(),
            "items": Mean(outputs.sum(), torch.tensor(2 * len(outputs))),
            "number": 0.25,
        }


def random_numbers(size: int) -> list[float]:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).tolist()


def evaluated(eval_batch_size: int | None = None, batch_size: int = 32) -> list[tuple[dict[str, float], list[float]]]:
    """For each of SIZES, the metrics and this rank's samples."""
    World.from_env()
    trainer = toy_trainer(1, ValueToy(), kind=Scored, eval_batch_size=eval_batch_size, batch_size=batch_size)
    results = []
    for size in SIZES:
        trainer.seen = []
        results.append((trainer.evaluate(Numbers(random_numbers(size))), trainer.seen))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sample_is_evaluated_once_at_any_world_and_batch_size(ranks: Ranks, world_size: int) -> None:
    """The values of one process in float64, the same bits on every rank."""
    sizes: list[dict[str, int]] = [*({"eval_batch_size": size} for size in BATCH_SIZES), {"batch_size": 3}]
    by_rank = ranks(world_size, lambda: [evaluated(**size) for size in sizes])
    for place in range(len(sizes)):
        for number, size in enumerate(SIZES):
            values = random_numbers(size)
            results = [rank[place][number] for rank in by_rank]
            assert sorted(sample for _, seen in results for sample in seen) == sorted(values)  # counted items = N
            assert [seen for _, seen in results] == [values[rank::world_size] for rank in range(world_size)]
            first = results[0][0]
            assert all(metrics == first for metrics, _ in results)
            assert list(first) == ["loss", "accuracy", "items", "number"]
            assert first["loss"] == pytest.approx(math.fsum(value * value for value in values) / size, rel=TOLERANCE, abs=0)
            assert first["accuracy"] == sum(value > 0 for value in values) / size
            assert first["items"] == pytest.approx(math.fsum(values) / (2 * size), rel=TOLERANCE, abs=0)
            assert first["number"] == 0.25


def toy_losses(runs: Sequence[tuple[Sequence[float], int]]) -> list[float]:
    """The loss of `ValueToy` on these numbers, at this batch size."""
    World.from_env()
    return [toy_trainer(1, ValueToy(), batch_size=batch).evaluate(Numbers(numbers))["loss"] for numbers, batch in runs]


CASES: list[tuple[str, Sequence[float], Sequence[int], float]] = [
    ("ranks of unequal accuracy", [0, 0, 1, 1, 1, 1, 1, 1, 1, 1], (2, 3, 8), 0.8),
    ("one wrong of 21", [1] * 20 + [0], (1, 2, 5), 20 / 21),
    ("a shorter last batch", [10, 10, 9], (2, 1), 29 / 3),
    ("a last batch of ten", [0.7] * 256 + [0.8] * 256 + [0.9] * 10, (256, 100), 393 / 522),
    ("five samples", [0, 1, 2, 3, 4], (1, 2, 8), 2.0),
    ("five squares", [0, 1, 4, 9, 16], (1, 2, 8), 6.0),
    ("fewer samples than ranks", [1, 0], (8, 1), 0.5),
    ("one sample", [0.125], (1, 4), 0.125),
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_known_means_come_out_at_any_world_size(ranks: Ranks, world_size: int) -> None:
    """Nothing padded, no mean of means, ranks without samples."""
    runs = [(numbers, batch) for _, numbers, batches, _ in CASES for batch in batches]
    wanted = [(name, value) for name, _, batches, value in CASES for _ in batches]
    by_rank = ranks(world_size, toy_losses, runs)
    assert all(found == by_rank[0] for found in by_rank)
    for (name, value), found in zip(wanted, by_rank[0], strict=True):
        assert found == pytest.approx(value, rel=TOLERANCE), name


def test_no_data_is_an_error_rather_than_a_nan(ranks: Ranks) -> None:

    def run(data: Any) -> None:
        toy_trainer(4).evaluate(data)

    for data, message in (
        (None, "pass eval_data"),
        (Numbers(0), "empty"),
        ({"val": Numbers(0)}, "data['val'] is empty"),
        ({}, "without datasets"),
    ):
        (outcome,) = ranks.outcomes(1, run, data)
        assert outcome.error == "ValueError"
        assert message in outcome.message


def test_a_sum_over_the_ranks_is_the_same_on_all_of_them(ranks: Ranks) -> None:

    def run() -> tuple[list[list[float]], list[list[float]]]:
        world = World.from_env()
        mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]] if world.is_main else [[4.0, 5.0], [6.0, 7.0]])
        total = world.sum(mine)
        return total.tolist(), mine.tolist()

    (total, first), (again, second) = ranks(2, run)
    assert total == again == [[5, 7], [9, 11]]
    assert (first, second) == ([[1, 2], [3, 4]], [[4, 5], [6, 7]])  # left alone


def test_sums_are_kept_in_float64() -> None:
    """In bf16 they would stop at 256, in float32 counts would stop at 2**24."""
    sums = WeightedSums(torch.device("cpu"))
    one = torch.ones((), dtype=torch.bfloat16)
    for _ in range(1_000):
        sums.add({"low": one, "counted": Mean(one, 1), "on the device": Mean(one, torch.tensor(2**24 + 1))}, 1)
    assert sums.pop(sums.keys).tolist() == [1_000, 1_000, 1_000, 1_000, 1_000, 1_000 * (2**24 + 1)]


def test_different_lengths_on_different_ranks_are_an_error_on_all(ranks: Ranks) -> None:
    """The trainer counts."""

    def run() -> None:
        toy_trainer(4).evaluate(Numbers(6 + World.from_env().rank))

    for outcome in ranks.outcomes(2, run, timeout=30):
        assert outcome.error == "RuntimeError"
        assert "[6, 7]" in outcome.message


class Frozen(nn.Module):
    """Batch normalisation that the user has put in evaluation mode, dropout, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64).requires_grad_(False).eval()
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.dropout(self.norm(x.unsqueeze(1))))
        return outputs


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


class Modes(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, bool]]] = []

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.seen.append(("on_step", modes(trainer.model)))

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.seen.append(("on_eval", modes(trainer.model)))


class Modal(DDPTrainer):
    """Keeps the modes of the model and whether gradients are recorded, step by step."""

    def fit(self, resume_from: Any = None) -> Any:
        self.trained_in: list[tuple[dict[str, bool], bool]] = []
        self.evaluated_in: list[tuple[dict[str, bool], bool]] = []
        return super().fit(resume_from)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.trained_in.append((modes(self.model), torch.is_grad_enabled()))
        return super().training_step(model, batch)

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        self.evaluated_in.append((modes(model), torch.is_grad_enabled()))
        assert model is self.model
        assert not torch.is_inference_mode_enabled()
        return {"loss": model(batch[0]).mean()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_modes_after_an_evaluation_are_those_before_it(ranks: Ranks, world_size: int) -> None:
    """Module by module; frozen statistics stay; dropout is off in evaluation."""

    def run() -> Any:
        model, callback = Frozen(), Modes()
        before = model.norm.running_mean.clone(), model.norm.running_var.clone()
        settings = {"batch_size": 2, "eval_every": 2, "max_steps": 5, "lr": 0.1}
        trainer = toy_trainer(40, model, eval_numbers=6, kind=Modal, callbacks=[callback], **settings)
        trainer.fit()
        assert torch.equal(model.norm.running_mean, before[0])
        assert torch.equal(model.norm.running_var, before[1])
        assert trainer.evaluate() == trainer.evaluate()
        with torch.no_grad():  # dropout is on outside
            assert any(not torch.equal(model(torch.ones(9).double()), model(torch.ones(9).double())) for _ in range(5))
        return trainer.trained_in, trainer.evaluated_in, callback.seen

    training = {"": True, "norm": False, "dropout": True, "linear": True}
    for rank, (trained_in, evaluated_in, hooks) in enumerate(ranks(world_size, run)):
        assert trained_in == [(training, True)] * 5
        assert evaluated_in
        assert all(seen == (dict.fromkeys(training, False), False) for seen in evaluated_in)
        order = ["on_step", "on_step", "on_eval", "on_step", "on_step", "on_eval", "on_step"]
        assert hooks == ([(name, training) for name in order] if rank == 0 else [])


class Caching(nn.Module):
    """Makes a table at its first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(1, dtype=x.dtype) * 2
        return self.w * self.table * x


def test_what_a_model_caches_in_evaluation_can_be_trained_with(ranks: Ranks) -> None:

    class Curious(Callback):
        def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            with torch.enable_grad():
                outputs = trainer.model(torch.ones(2, dtype=torch.float64)).sum()
                assert torch.autograd.grad(outputs, [trainer.model.w])[0] == 4.0

    def run() -> float:
        model = Caching()
        trainer = toy_trainer(4, model, eval_numbers=3, batch_size=2, max_steps=1, callbacks=[Curious()])
        assert trainer.evaluate() == {"loss": 2.0}
        assert model.table is not None
        trainer.fit()
        return model.w.item()

    assert ranks(2, run) == [1.0 - 2 * 1.5] * 2  # the mean of 0, 1, 2, 3, times the table


def test_a_hook_may_use_the_bare_model_on_rank_0_alone(ranks: Ranks) -> None:
    """Nothing is sent, so that the ranks' next message is a later one: 10 + 20 = 30."""

    class Using(Callback):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            trainer.model.eval()
            with torch.no_grad():
                trainer.model(torch.ones(3, dtype=torch.float64))
            trainer.model.train()

    class Summing(DDPTrainer):
        def before_epoch(self) -> None:
            mine = torch.tensor(10.0 * (1 + self.world.rank))
            self.sums = [*getattr(self, "sums", []), self.world.sum(mine).item()]

    def run() -> tuple[list[float], float]:
        model = BatchNormToy()
        numbers = rank_pairs(2, 1).values.tolist()
        trainer = toy_trainer(numbers, model, kind=Summing, lr=0.0, batch_size=2, epochs=3, callbacks=[Using()])
        trainer.fit()
        return trainer.sums, model.norm.running_mean.item()

    (sums, first), (again, _) = ranks(2, run, timeout=30)
    assert sums == again == [30.0] * 3
    assert first == pytest.approx(1 - 0.9**3)


NAN = math.nan


class Told(DDPTrainer):
    """Evaluates to what it is told, one value an evaluation; NaN on the last rank alone."""

    VALUES = (NAN, 0.5, NAN, 0.4, 0.6)

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        value = self.VALUES[self.state.step - 1]
        spared = math.isnan(value) and self.world.rank < self.world.size - 1
        return {"loss": 0.45 if spared else value}


class Best(Callback):
    """The step of best.pt at each safe point; stands behind the callback that writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[int | None] = []

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        path = self.folder / "best.pt"
        self.steps.append(torch.load(path, weights_only=True)["state"]["step"] if path.exists() else None)


@pytest.mark.filterwarnings("ignore:loss is NaN")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("more", [(), (NAN, 0.1)], ids=["as it is", "and on"])
def test_nan_is_never_the_best_and_never_an_improvement(
    ranks: Ranks, tmp_path: Path, world_size: int, more: tuple[float, ...]
) -> None:
    """The best is 0.4 at evaluation 4; two files were the best; with a NaN after 0.6 the patience of 2 is over."""

    class Longer(Told):
        VALUES = (*Told.VALUES, *more)

    def run() -> Any:
        best, stopping, recorder = Best(tmp_path), EarlyStopping("loss", patience=2), Recorder()
        callbacks = [Checkpoint(tmp_path, async_write=False, monitor="loss"), stopping, best, recorder]
        settings = {"batch_size": 1, "eval_every": 1, "epochs": len(Longer.VALUES), "global_batch_size": 2}
        trainer = toy_trainer(2, eval_numbers=4, kind=Longer, callbacks=callbacks, **settings)
        state = trainer.fit()
        return best.steps, stopping.best, state.step, state.stop_reason, [c.metrics["loss"] for c in recorder.named("on_eval")]

    by_rank = ranks(world_size, run)
    steps, best, last, reason, metrics = by_rank[0]
    assert metrics == pytest.approx(Longer.VALUES[:last], nan_ok=True)
    assert steps == [None, 2, 2, 4, 4, 4][:last]
    assert best == 0.4
    for outcome in by_rank:
        assert outcome[2:4] == (last, reason)
    assert (last, reason is None) == ((6, False) if more else (5, True))
    assert max(CheckpointFolder(tmp_path).steps()) == last


class Hooked(DDPTrainer):
    """Evaluates inside the training step, before and after the forward."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        before = self.evaluate(Numbers(5))
        loss = super().training_step(model, batch)
        self.inside = [*getattr(self, "inside", []), (before["loss"], self.evaluate(Numbers(5))["loss"])]
        return loss * (1 + torch.rand(()).double() + random.random() + np.random.rand())

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).mean()


class Plain(Hooked):
    """The same without evaluating."""

    def evaluate(self, data: Any = None) -> dict[str, float]:
        return {"loss": 0.0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluate_works_inside_a_training_step(ranks: Ranks, world_size: int) -> None:
    """It fires no hook, and what the step draws afterwards is what it draws without."""

    def run(kind: type[Hooked]) -> Any:
        recorder = Recorder()
        trainer = toy_trainer(20, kind=kind, batch_size=2, accumulation_steps=2, callbacks=[recorder])
        trainer.fit()
        return trainer.model.w.item(), recorder.order, trainer.inside

    for plain, hooked in zip(ranks(world_size, run, Plain), ranks(world_size, run, Hooked), strict=True):
        assert hooked[:2] == plain[:2]
        assert hooked[2][0] == (0.0, 0.0)
        assert hooked[2][-1][0] == hooked[2][-1][1] < 0


@pytest.mark.parametrize("numbers", [17, 21])
def test_evaluate_inside_a_step_that_not_every_rank_takes_is_an_error(ranks: Ranks, numbers: int) -> None:
    """Of the last window rank 0 has a micro-batch more than rank 1, which would wait in its reduction."""

    def run() -> None:
        toy_trainer(numbers, kind=Hooked, batch_size=2, accumulation_steps=2).fit()

    outcomes = ranks.outcomes(2, run, timeout=30)
    assert all(outcome.error == "RuntimeError" and not outcome.timed_out for outcome in outcomes)
    fewest = numbers % 8 // 4
    words = f"in micro-batch {fewest + 1} of a window of {numbers % 8} samples, of which some ranks have only {fewest}: they"
    assert words in outcomes[0].message


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluate_between_forward_and_backward_leaves_the_graph_whole(ranks: Ranks, world_size: int) -> None:
    """Rank 0's statistics arrive on the other ranks, where the backward of a batch normalisation holds on to its own."""

    def run() -> float:
        model = BatchNormToy()
        trainer = toy_trainer(rank_pairs(2, 3).values.tolist(), model, kind=Hooked, lr=0.1, global_batch_size=4, batch_size=4)
        trainer.fit()
        return model.linear.weight.item()

    assert len(set(ranks(world_size, run))) == 1


def test_a_direct_evaluation_fires_no_hook_and_counts_nothing(ranks: Ranks) -> None:
    def run() -> None:
        recorder = Recorder()
        trainer = toy_trainer(4, eval_numbers=3, callbacks=[recorder])
        trainer.evaluate()
        trainer.evaluate(Numbers(2))
        assert recorder.calls == []
        assert (trainer.state.step, trainer.state.samples) == (0, 0)

    ranks(2, run)


class Noise(Dataset[Any]):
    """Three numbers a sample, from three generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        draws = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor(draws, dtype=torch.float64), float(index)


class Failing(DDPTrainer):
    """Draws in evaluation, and may fail there."""

    fails = False

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        torch.rand(3)
        random.random()
        np.random.rand()
        if self.fails:
            raise ArithmeticError("in eval_step")
        return {"loss": batch[0].mean()}


def states() -> tuple[Any, Any, Any]:
    kind, keys, place, gauss, cached = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, keys.tolist(), place, gauss, cached)


def test_evaluate_puts_everything_back_also_after_an_error(ranks: Ranks) -> None:
    """Random states, modes and grad mode, whichever they were."""

    def run() -> None:
        model = Frozen()
        model.linear.eval()
        trainer = toy_trainer(4, model, kind=Failing, batch_size=2)
        before = states(), modes(model)
        for grad_mode in (True, False):
            for trainer.fails in (False, True):
                with torch.set_grad_enabled(grad_mode):
                    try:
                        trainer.evaluate(Noise(5))
                    except ArithmeticError:
                        assert trainer.fails
                    else:
                        assert not trainer.fails
                    assert torch.is_grad_enabled() == grad_mode
                assert (states(), modes(model)) == before
        assert trainer.model is model

    ranks(1, run)


def test_evaluation_between_steps_does_not_change_what_they_draw(ranks: Ranks) -> None:
    """Bitwise the same weights with and without evaluations, which draw."""

    class Dropping(Failing):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return model(batch[0] + torch.rand(()).double() + random.random()).mean()

    def run(eval_every: int | None) -> float:
        model = Toy()
        trainer = Dropping(
            model,
            SGD(model.parameters(), lr=0.1),
            Numbers(12),
            None if eval_every is None else Noise(3),
            config=TrainerConfig(batch_size=2, eval_every=eval_every),
        )
        trainer.fit()
        return model.w.item()

    assert ranks(2, run, None) == ranks(2, run, 1) == ranks(2, run, 2)


def test_evaluation_draws_the_same_every_time_and_on_any_number_of_ranks(ranks: Ranks) -> None:
    """Samples draw by their position."""

    def run() -> list[float]:
        trainer = toy_trainer(4, kind=Failing, batch_size=3)
        return [trainer.evaluate(Noise(11))["loss"] for _ in range(2)]

    values = {value for world_size in (1, 2, 3) for pair in ranks(world_size, run) for value in pair}
    assert max(values) - min(values) < 1e-15


def test_rank_0s_statistics_are_evaluated_on_every_rank(ranks: Ranks) -> None:
    """Each rank's own have drifted: rank r has seen means of r + 1 alone."""

    def run() -> tuple[list[float], float]:
        model = BatchNormToy()
        numbers = rank_pairs(2, 3).values.tolist()
        trainer = toy_trainer(numbers, model, lr=0.0, batch_size=2)
        trainer.fit()
        own = model.norm.running_mean.item()
        trainer.evaluate(Numbers(4))
        return [own, model.norm.running_mean.item()], trainer.evaluate(Numbers(4))["loss"]

    (first, loss), (second, other) = ranks(2, run)
    assert first == [pytest.approx(1 - 0.9**3)] * 2
    assert second[0] != pytest.approx(first[0])
    assert second[1] == first[1]
    assert loss == other


def test_several_sets_are_named_and_each_is_summarized(ranks: Ranks) -> None:
    class Summing(DDPTrainer):
        def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
            return metrics | {"double": 2 * metrics["loss"]}

    def run() -> Any:
        World.from_env()
        model, recorder = ValueToy(), Recorder()
        trainer = Summing(
            model,
            SGD(model.parameters(), lr=1.0),
            Numbers(4),
            {"low": Numbers(3), "high": Numbers([8, 10])},
            loss_fn=mean_of_outputs,
            config=TrainerConfig(batch_size=2, log_every=1, shuffle=False),
            callbacks=[recorder],
        )
        trainer.fit()
        direct = [trainer.evaluate(), trainer.evaluate(Numbers(5)), trainer.evaluate({"one": Numbers([1])})]
        return direct, [
            (call.name, {key: call.metrics[key] for key in call.metrics if "/" in key or key in ("loss", "double")})
            for call in recorder.calls
            if call.metrics
        ]

    by_rank = ranks(2, run)
    both = {"low/loss": 1.0, "low/double": 2.0, "high/loss": 9.0, "high/double": 18.0}
    for direct, _ in by_rank:
        assert direct == [both, {"loss": 2.0, "double": 4.0}, {"one/loss": 1.0, "one/double": 2.0}]
    assert by_rank[0][1] == [
        ("on_step", {"loss": 1.5, "double": 3.0}),
        ("on_eval", both),
        ("on_epoch_end", {"loss": 1.5, "double": 3.0}),
    ]


def test_a_summarized_metric_can_be_monitored(ranks: Ranks, tmp_path: Path) -> None:
    class Negated(Told):
        VALUES = (0.3, 0.2, 0.1, 0.0)

        def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
            return {"score": 1 - metrics["loss"]}

    def run() -> Any:
        callbacks = [
            EarlyStopping("score", 1, mode="min"),
            Checkpoint(tmp_path, async_write=False, monitor="score", mode="max"),
            best := Best(tmp_path),
        ]
        trainer = toy_trainer(2, eval_numbers=2, kind=Negated, callbacks=callbacks, epochs=4, log_every=100)
        return trainer.fit().step, best.steps

    assert ranks(1, run) == [(2, [1, 2])]


def test_a_step_that_returns_a_tensor_gives_the_loss_and_one_without_loss_gives_what_it_has(ranks: Ranks) -> None:
    class Bare(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            return {"accuracy": (batch[0] > 1).double().mean()}

    def run() -> Any:
        World.from_env()
        return [toy_trainer(4, ValueToy(), kind=kind).evaluate(Numbers(4)) for kind in (DDPTrainer, Bare)]

    assert ranks(2, run) == [[{"loss": 1.5}, {"accuracy": 0.5}]] * 2


def test_keys_that_differ_between_ranks_are_an_error_on_all(ranks: Ranks) -> None:
    class Differing(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": 1.0, f"of rank {self.world.rank}": 2.0}

    for outcome in ranks.outcomes(2, lambda: toy_trainer(4, kind=Differing).evaluate(Numbers(4)), timeout=30):
        assert outcome.error == "ValueError"
        assert all(text in outcome.message for text in ("of rank 0", "of rank 1"))
