"""What a run reports: the true mean over all samples on all ranks since the last report."""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.helpers import Numbers, Ranks, Recorder, Toy, ValueToy, mean_of_outputs, toy_trainer
from trainer import DDPTrainer, Mean, TrainerConfig, World


class Seen(DDPTrainer):
    """Keeps, on every rank, each reduced report and each mean over an epoch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.summaries: list[dict[str, float]] = []

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        self.summaries.append(dict(metrics))
        return metrics


def reports(numbers: Any, kind: type[DDPTrainer] = DDPTrainer, model: nn.Module | None = None, **config: Any) -> Recorder:
    recorder = Recorder()
    with toy_trainer(numbers, model or ValueToy(), kind=kind, callbacks=[recorder], **config) as trainer:
        trainer.fit()
    return recorder


@pytest.mark.parametrize(("world_size", "batch", "accumulation"), [(1, 8, 1), (1, 2, 4), (2, 2, 2), (2, 4, 1), (4, 1, 2)])
def test_a_report_is_the_mean_over_the_window_on_all_ranks(ranks: Ranks, world_size: int, batch: int, accumulation: int) -> None:
    """3.5, 11.5 and 17.5 for the tail of four samples, the same on every rank."""

    def fit() -> tuple[list[float], list[float]]:
        recorder = Recorder()
        trainer = toy_trainer(20, ValueToy(), kind=Seen, callbacks=[recorder], batch_size=batch, accumulation_steps=accumulation)
        trainer.fit()
        assert isinstance(trainer, Seen)
        return [call.metrics["loss"] for call in recorder.reports], [summary["loss"] for summary in trainer.summaries]

    results = ranks(world_size, fit)
    assert results[0][0] == [3.5, 11.5, 17.5]
    for _, seen in results:
        assert seen == [3.5, 11.5, 17.5, 9.5]  # the last is the epoch's


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_report_spans_the_windows_and_epochs_since_the_last_one(ranks: Ranks, world_size: int) -> None:
    """Epochs of 0..19 in windows of 8, 8 and 4; means are over samples, not over windows."""
    (recorder, *_) = ranks(world_size, reports, 20, batch_size=3, global_batch_size=8, epochs=2, log_every=2)
    values = {call.step: call.metrics["loss"] for call in recorder.reports}
    assert values == {2: 7.5, 4: (70 + 28) / 12, 6: (92 + 70) / 12}
    assert [(call.step, call.metrics) for call in recorder.named("on_epoch_end")] == [(3, {"loss": 9.5}), (6, {"loss": 9.5})]
    assert [call.metrics for call in recorder.named("on_step") if call.step % 2] == [{}, {}, {}]


def test_the_planned_last_step_reports_what_is_left(ranks: Ranks) -> None:
    (recorder, _) = ranks(2, reports, 20, batch_size=1, max_steps=7, log_every=5)
    assert [(call.step, call.metrics["loss"]) for call in recorder.reports] == [(5, 4.5), (7, 11.5)]
    assert recorder.named("on_epoch_end") == []  # whole epochs only


class Rich(DDPTrainer):
    """A number, a tensor with a graph, one of one element, and means over the odd numbers and over those above 100."""

    def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x = batch[0]
        odd, large = x[x % 2 == 1], x[x > 100]
        return {
            "loss": model(x).mean(),
            "half": float(x.mean() / 2),
            "double": (2 * model(x)).mean().reshape(1),
            "odd": Mean(odd.sum(), len(odd)),
            "large": Mean(large.sum(), torch.tensor(len(large))),
        }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_value_is_weighted_by_its_own_denominator(ranks: Ranks, world_size: int) -> None:
    """At two ranks all odd numbers are on rank 1: the mean of the ranks' means would be wrong, and 0 / 0 on rank 0 no
    matter. What nobody has is NaN, and no error."""
    recorder = ranks(world_size, reports, 11, Rich, batch_size=2, global_batch_size=6)[0]
    first, second = [call.metrics for call in recorder.reports]
    keys = ("loss", "half", "double", "odd")
    assert [first[key] for key in keys] == [2.5, 1.25, 5.0, 3.0]  # 0..5
    assert [second[key] for key in keys] == [8.0, 4.0, 16.0, 8.0]  # 6..10
    (epoch,) = [call.metrics for call in recorder.named("on_epoch_end")]
    assert [epoch[key] for key in keys] == [5.0, 2.5, 10.0, 5.0]
    assert all(math.isnan(metrics["large"]) for metrics in (first, second, epoch))
    assert all(type(value) is float for metrics in (first, second, epoch) for value in metrics.values())
    assert set(first) == {*keys, "large", "lr", "samples_per_second"}
    assert set(epoch) == {*keys, "large"}


def test_summarize_adds_to_every_report_and_to_the_means_over_an_epoch(ranks: Ranks) -> None:
    class Trainer(DDPTrainer):
        def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
            return {**metrics, "squared": metrics["loss"] ** 2}

    recorder, _ = ranks(2, reports, 8, Trainer, batch_size=2)
    assert [call.metrics["squared"] for call in recorder.reports] == [1.5**2, 5.5**2]
    assert [call.metrics["squared"] for call in recorder.named("on_epoch_end")] == [3.5**2]


def test_a_report_has_each_group_s_rate_and_the_norm_before_clipping(ranks: Ranks) -> None:
    def fit() -> list[dict[str, float]]:
        recorder = Recorder()
        model = nn.ModuleDict({"a": Toy(), "b": Toy()})
        groups = [{"params": model["a"].parameters(), "lr": 0.5}, {"params": model["b"].parameters(), "lr": 0.25}]

        class Trainer(DDPTrainer):
            def training_step(self, model: nn.Module, batch: Any) -> Tensor:
                return torch.func.functional_call(model, {}, (batch[0],)).mean()

        model.forward = lambda x: model["a"](3 * x) + model["b"](4 * x)  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(groups)
        config = TrainerConfig(batch_size=2, log_every=1, shuffle=False, max_grad_norm=1.0)
        Trainer(model, optimizer, Numbers(8), config=config, callbacks=[recorder]).fit()
        return [call.metrics for call in recorder.reports]

    metrics, _ = ranks(2, fit)
    assert [(call["lr"], call["lr/1"]) for call in metrics] == [(0.5, 0.25)] * 2
    # the gradient is (3, 4) times the mean
    assert [call["grad_norm"] for call in metrics] == pytest.approx([5 * 1.5, 5 * 5.5], rel=1e-12)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_is_bit_for_bit_the_same_however_much_is_reported(ranks: Ranks, world_size: int) -> None:
    """With a report at every step and further values, and with a single report at the end."""

    class Talkative(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            outputs = model(batch[0].unsqueeze(1))
            loss = (outputs.squeeze(1) - batch[1].sin()).square().mean()
            return {"loss": loss, "largest": outputs.abs().max(), "spread": outputs.std(correction=0)}

    class Silent(Talkative):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(model, batch)["loss"]

    def fit(kind: type[DDPTrainer], log_every: int) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = Numbers([number / 10 for number in range(30)], torch.float32)
        config = TrainerConfig(batch_size=2, accumulation_steps=2, log_every=log_every, epochs=2)
        kind(model, optimizer, data, config=config).fit()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    talkative, silent = ranks(world_size, fit, Talkative, 1), ranks(world_size, fit, Silent, 1000)
    assert talkative == silent
    assert len({tuple(weights) for weights in talkative}) == 1


@pytest.mark.parametrize(("world_size", "where"), [(1, 0), (2, 1), (3, 2)])
def test_nan_is_reported_as_it_is_with_one_warning_and_leaves_the_next_window_alone(
    ranks: Ranks, world_size: int, where: int
) -> None:
    """Sample 5 is NaN. It is not 0, not skipped, not the running mean."""
    numbers = [float(x) for x in range(16)]
    numbers[5] = math.nan

    def fit() -> tuple[list[float], list[float], list[tuple[type[Warning], str]]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder = reports(numbers, batch_size=2, global_batch_size=8)
        told = [(warning.category, str(warning.message)) for warning in caught if "finite" in str(warning.message)]
        losses = [call.metrics["loss"] for call in recorder.reports]
        return losses, [call.metrics["loss"] for call in recorder.named("on_epoch_end")], told

    (losses, epoch, told), *others = ranks(world_size, fit)
    assert math.isnan(losses[0])
    assert losses[1] == 11.5
    assert math.isnan(epoch[0])
    assert told == [
        (
            RuntimeWarning,
            f"the loss was not finite at step 1 on rank {where}. It is reported as it is",
        )
    ]
    assert all(not other_told for *_, other_told in others)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_warning_names_the_first_bad_step_between_two_reports(ranks: Ranks, bad: float) -> None:
    """Windows of 4, reports at every third step: step 5 is bad on ranks 0 and 2, step 6 on rank 1, then step 8 again."""
    numbers = [1.0] * 48
    numbers[16] = numbers[18] = numbers[21] = numbers[28] = bad

    def fit() -> tuple[list[float], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder = reports(numbers, batch_size=1, log_every=3)
        return [call.metrics["loss"] for call in recorder.reports], [str(warning.message) for warning in caught]

    (losses, told), *_ = ranks(4, fit)
    assert [math.isfinite(loss) for loss in losses] == [True, False, False, True]
    assert [loss for loss in losses if math.isfinite(loss)] == [1.0, 1.0]
    told = [message for message in told if "finite" in message]
    assert len(told) == 1
    assert told[0].startswith("the loss was not finite at step 5 on rank 0, 2.")


class Activations(nn.Module):
    """Watches the large activation of every forward. Returns two values that have a graph with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.alive: set[int] = set()
        self.most = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        activation = self.linear(x.unsqueeze(1)).expand(-1, 4096).exp()
        number = id(activation)
        self.alive.add(number)
        weakref.finalize(activation, self.alive.discard, number)
        self.most = max(self.most, len(self.alive))
        return activation.square().mean(), activation.square().sum()


@pytest.mark.parametrize("undetached", [False, True])
def test_no_activation_outlives_its_micro_batch(ranks: Ranks, undetached: bool) -> None:
    """Also when a step returns a value whose graph no backward frees; reference counts alone must do it."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            loss, energy = model(batch[0])
            return {"loss": loss, "energy": energy if undetached else energy.detach()}

    class Counting(Recorder):
        def __init__(self, model: Activations) -> None:
            super().__init__()
            self.model = model
            self.counts: list[int] = []

        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            super().on_step(trainer, metrics)
            self.counts.append(len(self.model.alive))

    def fit() -> tuple[list[int], int]:
        gc.disable()
        model = Activations()
        counting = Counting(model)
        data = Numbers([0.0] * 400, torch.float32)
        config = TrainerConfig(batch_size=2, accumulation_steps=4, log_every=7)
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), data, config=config, callbacks=[counting]).fit()
        return counting.counts, model.most

    ((counts, most),) = ranks(1, fit)
    assert counts == [0] * 50
    assert most == 1


def test_speed_counts_all_ranks_and_leaves_evaluation_out(ranks: Ranks) -> None:
    """On a clock that only the steps move: half a second for a micro-batch, 100 seconds for an evaluation's batch."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            self.now += 0.5
            return mean_of_outputs(model(batch[0]), batch[1])

        def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
            self.now += 100
            return mean_of_outputs(model(batch[0]), batch[1])

    def fit() -> list[tuple[int, float]]:
        recorder = Recorder()
        trainer = toy_trainer(
            44, eval_numbers=9, kind=Trainer, callbacks=[recorder], batch_size=2, accumulation_steps=2, log_every=2, eval_every=1
        )
        trainer.now = 0.0  # type: ignore[attr-defined]
        time.perf_counter = lambda: trainer.now  # type: ignore[attr-defined]
        trainer.fit()
        return [(call.step, call.metrics["samples_per_second"]) for call in recorder.reports]

    # windows of 8 and two micro-batches; the last one has 4 samples, in one micro-batch a rank
    assert ranks(2, fit)[0] == [(2, 16 / 2), (4, 16 / 2), (6, (8 + 4) / 1.5)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_are_kept_in_float64(ranks: Ranks, world_size: int) -> None:
    """In float32 ten times 1 beside 2^24 would be lost, and 0.1 has another value."""
    numbers = [2.0**24] + [1.0] * 10 + [0.1]

    def fit() -> dict[str, float]:
        recorder = Recorder()
        model = ValueToy(torch.float32)
        trainer = DDPTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            Numbers(numbers, torch.float32),
            loss_fn=mean_of_outputs,
            config=TrainerConfig(batch_size=1, log_every=100, shuffle=False),
            callbacks=[recorder],
        )
        trainer.fit()
        return recorder.reports[-1].metrics if recorder.reports else {}

    tenth = torch.tensor(0.1).double().item()
    assert ranks(world_size, fit)[0]["loss"] == (2.0**24 + 10 + tenth) / 12


# Keys.


class Keys(DDPTrainer):
    """Rank r returns ``keys[r]`` besides the loss."""

    keys: tuple[tuple[str, ...], ...] = ()

    def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {**dict.fromkeys(self.keys[self.world.rank], 1.0), "loss": model(batch[0]).mean()}

    eval_step = training_step


@pytest.mark.parametrize(("log_every", "where"), [(2, 2), (100, 5)])
def test_keys_that_differ_between_ranks_are_an_error_on_every_rank(ranks: Ranks, log_every: int, where: int) -> None:
    """At the first report, or the epoch's end before it."""

    class Trainer(Keys):
        keys = (("a",), ("a", "b"))

    def fit() -> tuple[str, int]:
        trainer = toy_trainer(10, kind=Trainer, batch_size=1, log_every=log_every)
        with pytest.raises(ValueError) as caught:
            trainer.fit()
        return str(caught.value), trainer.state.step

    (message, step), other = ranks(2, fit)
    assert (message, step) == other
    assert step == where
    assert message.startswith(
        "training_step returned other keys on other ranks: ['a', 'loss'] on rank 0, ['a', 'b', 'loss'] on rank 1"
    )


def test_keys_of_an_evaluation_that_differ_are_an_error_on_every_rank(ranks: Ranks) -> None:
    class Trainer(Keys):
        keys = ((), (), ("b",))

    def evaluate() -> str:
        trainer = toy_trainer(4, eval_numbers=5, kind=Trainer)
        with pytest.raises(ValueError) as caught:
            trainer.evaluate()
        return str(caught.value)

    messages = ranks(3, evaluate)
    assert len(set(messages)) == 1
    assert messages[0].startswith("eval_step returned other keys on other ranks: ['loss'] on rank 0, ['b', 'loss'] on rank 2")


def test_the_order_of_keys_does_not_matter(ranks: Ranks) -> None:
    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            values = {"loss": model(batch[0]).mean(), "ten": batch[0].mean() * 10, "hundred": batch[0].mean() * 100}
            return values if self.world.rank == 0 else dict(reversed(values.items()))

        eval_step = training_step

    def fit() -> tuple[list[dict[str, float]], dict[str, float]]:
        recorder = Recorder()
        trainer = toy_trainer(8, ValueToy(), eval_numbers=3, kind=Trainer, callbacks=[recorder], batch_size=4)
        trainer.fit()
        return [call.metrics for call in recorder.named("on_epoch_end")], trainer.evaluate()

    (epochs, evaluated), (_, other) = ranks(2, fit)
    assert epochs == [{"loss": 3.5, "ten": 35.0, "hundred": 350.0}]
    assert evaluated == other == {"loss": 1.0, "ten": 10.0, "hundred": 100.0}


def test_keys_that_change_later_are_an_error_that_names_them(ranks: Ranks) -> None:
    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            values = {"loss": model(batch[0]).mean(), "extra": 1.0}
            return values if self.state.step < 3 else {"loss": values["loss"]}

    (outcome,) = ranks.outcomes(1, lambda: toy_trainer(8, kind=Trainer, batch_size=1).fit())
    assert outcome.error == "ValueError"
    assert "a step must return the same keys every time: they were ['loss', 'extra'], now ['loss']" in outcome.message


def test_a_rank_that_joins_after_the_first_report_must_have_its_keys(ranks: Ranks) -> None:
    """A run that goes on with an epoch's last window, where rank 1 has no sample, hears of its keys in the next epoch."""

    class Stopping(Recorder):
        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 2:
                trainer.stop("before the last window")

    class Trainer(Keys):
        keys = ((), ())

    def fit() -> None:
        trainer = toy_trainer(5, kind=Trainer, callbacks=[Stopping()], batch_size=1, epochs=2)
        trainer.fit()
        assert trainer.state.step == 2
        Trainer.keys = ((), ("b",))
        trainer.fit()

    outcomes = ranks.outcomes(2, fit, timeout=20)
    assert outcomes[1].error == "ValueError"
    assert "['loss']" in outcomes[1].message
    assert "['b', 'loss']" in outcomes[1].message


def test_a_rank_that_never_has_a_sample_hears_of_the_others_bad_losses(ranks: Ranks) -> None:
    """Windows of one sample: rank 1 has none to mark a step with."""

    def fit() -> tuple[int, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = toy_trainer([1.0, math.inf, 2.0, 3.0], global_batch_size=1, lr=0.0, log_every=4, on_nonfinite="warn")
            step = trainer.fit().step
        return step, [str(item.message) for item in caught if str(item.message).startswith("the loss was")]

    (step, said), other = ranks(2, fit)
    assert (step, other) == (4, (4, []))
    assert len(said) == 1
    assert "the loss was not finite at step 2 on rank 0" in said[0]


def test_a_loss_over_items_keeps_the_key_of_its_speed_to_itself() -> None:
    class Own(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": Mean(model(batch[0]).sum(), 2), "items_per_second": torch.tensor(1.0)}

    with pytest.raises(ValueError, match="the key 'items_per_second', under which the trainer reports its own"):
        toy_trainer(8, kind=Own, batch_size=2).fit()


@pytest.mark.parametrize(("bad", "where"), [(5, "at step 2"), (19, "by step 6"), (45, "by step 12")])
def test_beyond_the_steps_that_are_marked_the_warning_says_by_when(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, bad: int, where: str
) -> None:
    """Windows of 4 on two ranks, reports at every sixth step, of which three are told apart, the last for all that follow."""
    from trainer import reports as module

    monkeypatch.setattr(module, "_MARKS", 3)
    numbers = [1.0] * 48
    numbers[bad] = math.nan

    def fit() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reports(numbers, batch_size=2, log_every=6)
        return [str(warning.message) for warning in caught if "finite" in str(warning.message)]

    told, _ = ranks(2, fit)
    assert told == [f"the loss was not finite {where} on rank 1. It is reported as it is"]


def test_the_rank_that_returns_other_keys_is_named_though_it_had_no_sample_before(ranks: Ranks) -> None:
    """Rank 0 of a stream that shards itself, whose part is empty until after the first report."""

    class Uneven(IterableDataset[Tensor]):
        sharded = True

        def __iter__(self) -> Iterator[Tensor]:
            world, epoch = World.from_env(), self.epoch
            return iter([torch.ones((), dtype=torch.float64)] * (2 if world.rank == 1 or epoch else 0))

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Other(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            loss = model(batch).mean()
            return {"loss": loss, "mine" if self.world.rank == 0 else "theirs": loss.detach()}

    def fit() -> None:
        model = Toy()
        config = TrainerConfig(batch_size=1, log_every=1, epochs=2)
        Other(model, torch.optim.SGD(model.parameters(), lr=1.0), Uneven(), config=config).fit()

    outcome, _ = ranks.outcomes(2, fit)
    assert outcome.error == "ValueError"
    assert "['loss', 'mine'] on rank 0" in outcome.message
    assert "['loss', 'theirs'] on rank 1" in outcome.message
