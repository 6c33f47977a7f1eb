"""The arithmetic of a window: what its gradient is divided by, when gradients travel, how many steps a run has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.helpers import Numbers, Ranks, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, DDPTrainer, TrainerConfig, World


class Weights(Callback):
    """The toy's weight after each step."""

    def __init__(self) -> None:
        self.after: list[float] = []

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        assert isinstance(trainer.model, Toy)
        self.after.append(trainer.model.w.item())


def weights_after(numbers: int | Sequence[float], **config: Any) -> list[float]:
    """T1: the weight after each step, on rank 0."""
    weights = Weights()
    trainer = toy_trainer(numbers, callbacks=[weights], **config)
    state = trainer.fit()
    assert state.step == trainer.total_steps
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    return weights.after


def all_weights_after(runs: Sequence[tuple[int | Sequence[float], dict[str, Any]]]) -> list[list[float]]:
    World.from_env()  # one group for all of them
    return [weights_after(numbers, **config) for numbers, config in runs]


# Case, world size, numbers, config, the weight after each step.
CASES: list[tuple[str, int, int | Sequence[float], dict[str, Any], list[float]]] = [
    ("one window", 1, 8, {"batch_size": 2, "accumulation_steps": 4}, [-3.5]),
    ("one window", 1, 8, {"batch_size": 4, "accumulation_steps": 2}, [-3.5]),
    ("one window", 1, 8, {"batch_size": 8}, [-3.5]),
    ("one window", 2, 8, {"batch_size": 1, "accumulation_steps": 4}, [-3.5]),
    ("one window", 4, 8, {"batch_size": 1, "accumulation_steps": 2}, [-3.5]),
    ("a tail", 1, 10, {"batch_size": 2, "accumulation_steps": 2}, [-1.5, -7.0, -15.5]),
    ("a tail on two ranks", 2, 20, {"batch_size": 2, "accumulation_steps": 2}, [-3.5, -15.0, -32.5]),
    ("a tail on four ranks", 4, 20, {"batch_size": 1, "accumulation_steps": 2}, [-3.5, -15.0, -32.5]),
    ("tails in two epochs", 1, 6, {"batch_size": 2, "accumulation_steps": 2, "epochs": 2}, [-1.5, -6.0, -7.5, -12.0]),
    ("the same on two ranks", 2, 12, {"batch_size": 2, "accumulation_steps": 2, "epochs": 2}, [-3.5, -13.0, -16.5, -26.0]),
    ("less than a window", 1, 6, {"batch_size": 2, "accumulation_steps": 8}, [-2.5]),
    ("less than a window on two ranks", 2, 6, {"batch_size": 2, "accumulation_steps": 8}, [-2.5]),
    ("a ragged micro-batch", 1, 5, {"batch_size": 2, "accumulation_steps": 3}, [-2.0]),
    ("a ragged micro-batch", 1, 5, {"batch_size": 5}, [-2.0]),
    ("a ragged micro-batch on two ranks", 2, 5, {"batch_size": 2, "accumulation_steps": 3}, [-2.0]),
    ("unequal numbers", 2, [1, 2, 3, 10], {"batch_size": 2}, [-4.0]),
    ("two samples and one", 2, [1, 10, 4], {"batch_size": 2}, [-5.0]),
    ("ranks without samples", 4, [7, 8], {"batch_size": 2}, [-7.5]),
    ("one sample on four ranks", 4, [5], {"batch_size": 1}, [-5.0]),
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_takes_the_mean_over_all_samples_of_its_window(ranks: Ranks, world_size: int) -> None:
    cases = [case for case in CASES if case[1] == world_size]
    found = ranks(world_size, all_weights_after, [(numbers, config) for _, _, numbers, config, _ in cases])[0]
    for (name, _, _, config, wanted), weights in zip(cases, found, strict=True):
        assert weights == pytest.approx(wanted, rel=1e-14), (name, config)
        if name == "one window":
            assert weights == wanted, config


SHAPES = [
    (samples, batch_size, accumulation)
    for samples in (1, 3, 5, 17, 23)
    for batch_size, accumulation in ((1, 1), (1, 3), (2, 2), (3, 1), (3, 8), (2, -5), (4, -6))
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_partial_windows_and_ragged_shares_are_weighted_by_their_samples(ranks: Ranks, world_size: int) -> None:
    """For many lengths, over two epochs. A negative accumulation here: the global batch."""
    runs = []
    for samples, batch_size, accumulation in SHAPES:
        key = "accumulation_steps" if accumulation > 0 else "global_batch_size"
        numbers = [(7 * place) % 11 - 3 for place in range(samples)]
        runs.append((numbers, {"batch_size": batch_size, key: abs(accumulation), "epochs": 2}))
    found = ranks(world_size, all_weights_after, runs)[0]
    for (numbers, config), weights in zip(runs, found, strict=True):
        size = config.get("global_batch_size") or world_size * config["batch_size"] * config["accumulation_steps"]
        wanted, weight = [], 0.0
        for _ in range(2):
            for first in range(0, len(numbers), size):
                window = numbers[first : first + size]
                weight -= sum(window) / len(window)
                wanted.append(weight)
        assert weights == pytest.approx(wanted, rel=1e-12, abs=1e-12), config


@pytest.mark.parametrize("steps", [0, -1])
def test_accumulation_of_no_micro_batches_is_an_error(steps: int) -> None:
    with pytest.raises(ValueError, match=f"accumulation_steps must be 1 or more; found {steps}"):
        TrainerConfig(accumulation_steps=steps)


class Counting(DDPTrainer):
    """Counts micro-batches and, by bucket, the reductions that DDP does; keeps each step's gradients."""

    def fit_and_count(self) -> tuple[int, Counter[int], list[list[float | None]]]:
        self.micro_batches, self.reductions, self.gradients = 0, Counter[int](), []
        wrap = self.world.wrap

        def counted(model: nn.Module, **options: Any) -> nn.Module:
            wrapped = wrap(model, **options)
            if self.world.size > 1:
                wrapped.register_comm_hook(None, self._hook)
            return wrapped

        self.world.wrap = counted
        try:
            self.fit()
        finally:
            self.world.wrap = wrap
        return self.micro_batches, self.reductions, self.gradients

    def _hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and knows no text
        self.reductions[bucket.index()] += 1
        return allreduce_hook(None, bucket)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.micro_batches += 1
        return super().training_step(model, batch)

    def optimizer_step(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.gradients.append([None if gradient is None else gradient.item() for gradient in gradients])
        super().optimizer_step()


def test_gradients_travel_once_per_window(ranks: Ranks) -> None:
    """In the window's last micro-batch, also in a tail; before it is divided by K the gradient is 4 * 1.5."""

    def run() -> list[Any]:
        World.from_env()
        whole, tail = [1, 2] * 4, [1, 2] * 5
        return [
            toy_trainer(whole, batch_size=1, accumulation_steps=4, kind=Counting).fit_and_count(),
            toy_trainer(tail, batch_size=1, accumulation_steps=2, kind=Counting).fit_and_count(),
        ]

    for whole, tail in ranks(2, run):
        assert whole == (4, {0: 1}, [[1.5]])
        assert tail == (5, {0: 3}, [[1.5]] * 3)


def test_a_rank_with_one_sample_weighs_a_third_of_one_with_three(ranks: Ranks) -> None:
    """Rank 0 has [1, 2, 3] and rank 1 has [10]: 16 / 4, not the mean of their means."""

    class Uneven(Counting):
        """Deals out the window unevenly, which the trainer itself never does by more than one sample."""

        def prepare_batch(self, batch: Any) -> Any:
            (inputs, targets), step = batch, self.state.step
            assert len(inputs) == [[2, 1], [1, 0]][step][self.world.rank]
            return inputs, targets

    def run() -> list[Any]:
        World.from_env()
        uneven = toy_trainer([1, 10, 3, 8], global_batch_size=3, batch_size=3, kind=Uneven)
        return [uneven.fit_and_count()[2], toy_trainer([1, 10, 2, 3], batch_size=2, kind=Counting).fit_and_count()[2]]

    for uneven, even in ranks(2, run):
        assert uneven == [[pytest.approx(14 / 3, rel=1e-14)], [pytest.approx(8.0, rel=1e-14)]]
        assert even == [[4.0]]


TOTALS = [(6, 2, 3), (5, 2, 3), (3, 8, 1), (1, 1, 1), (7, 3, 3), (9, 3, 3)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_total_steps_are_those_really_taken(ranks: Ranks, world_size: int) -> None:
    """M micro-batches per rank, K of them a step: ceil(M / K) steps per epoch, and no sample too many."""

    def run() -> list[tuple[Any, ...]]:
        World.from_env()
        counts = []
        for micro_batches, accumulation, _ in TOTALS:
            samples = 2 * micro_batches * world_size
            trainer = toy_trainer(samples, batch_size=2, accumulation_steps=accumulation, epochs=3, kind=Counting)
            before = (trainer.steps_per_epoch, trainer.total_steps)
            taken, _, _ = trainer.fit_and_count()
            counts.append((*before, trainer.state.step, taken, trainer.state.samples))
        return counts

    for counts in ranks(world_size, run):
        for (micro_batches, _, steps), found in zip(TOTALS, counts, strict=True):
            assert found == (steps, 3 * steps, 3 * steps, 3 * micro_batches, 6 * micro_batches * world_size)


@pytest.mark.parametrize(("config", "wanted"), [
    ({"max_steps": 4}, (4, 7, 1, 2)),  # by itself: as many epochs as it takes
    ({"max_steps": 4, "epochs": 3}, (4, 7, 1, 2)),
    ({"max_steps": 40, "epochs": 2}, (6, 10, 2, 0)),  # whichever comes first
    ({"max_steps": 7}, (7, 12, 2, 2)),
    ({"max_steps": 3}, (3, 5, 1, 0)),
])  # fmt: skip
def test_max_steps_ends_the_run_after_exactly_so_many(ranks: Ranks, config: dict[str, int], wanted: tuple[int, ...]) -> None:
    """M = 5 and K = 2: steps, micro-batches, finished epochs, micro-batches of the epoch begun."""

    def run() -> tuple[int, ...]:
        trainer = toy_trainer(5, batch_size=1, accumulation_steps=2, kind=Counting, **config)
        assert trainer.total_steps == wanted[0]
        micro_batches, _, _ = trainer.fit_and_count()
        state = trainer.state
        assert state.stop_reason is None
        assert state.samples == micro_batches
        return state.step, micro_batches, state.epoch, state.epoch_samples

    assert ranks(1, run) == [wanted]


class Alternating(nn.Module):
    """Three weights, of which a call uses those it names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(3))

    def forward(self, x: Tensor, *names: str) -> Tensor:
        weights = [getattr(self, name) for name in names]
        return x * sum(weights)


class Choosing(Counting):
    """Which weight a micro-batch uses, by rank."""

    USES = (("a", "b", "b"), ("a", "a", "b"))

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        name = self.USES[self.world.rank][self.micro_batches % 3]
        self.micro_batches += 1
        return model(batch[0], name).mean()


def test_a_parameter_used_before_the_last_micro_batch_is_reduced_too(ranks: Ranks) -> None:
    """With x = rank + 1 the summed gradients are a = 2.5, b = 2.0, c = None, in every window, on both ranks."""

    def run() -> list[list[float | None]]:
        options = {"find_unused_parameters": True}
        numbers = [1, 2] * 9
        trainer = toy_trainer(numbers, Alternating(), kind=Choosing, batch_size=1, accumulation_steps=3, ddp_options=options)
        return trainer.fit_and_count()[2]

    for gradients in ranks(2, run):
        assert gradients == [[pytest.approx(2.5 / 3), pytest.approx(2 / 3), None]] * 3


class Sparing(DDPTrainer):
    """Uses weight a always, b in the first window of an epoch, c never."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0], "a", *("b" if self.epoch_step == 0 else "")).mean()


@pytest.mark.parametrize("bucket_view", [False, True])
def test_a_rank_without_samples_does_not_move_a_parameter_that_nobody_used(ranks: Ranks, bucket_view: bool) -> None:
    """With find_unused_parameters: no gradient on one process is no gradient on many, nor any weight decay."""

    def run() -> list[float]:
        model = Alternating()
        config = TrainerConfig(
            global_batch_size=4,
            batch_size=4,
            epochs=2,
            shuffle=False,
            ddp_options={"find_unused_parameters": True, "gradient_as_bucket_view": bucket_view},
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        Sparing(model, optimizer, Numbers(9), loss_fn=mean_of_outputs, config=config).fit()
        return [parameter.item() for parameter in model.parameters()]

    (alone,) = ranks(1, run)
    assert alone[2] == 1.0
    for world_size in (2, 3):
        for weights in ranks(world_size, run):
            assert weights == pytest.approx(alone, rel=1e-12)


class Backward(Callback):
    """Looks at gradients of its own, as for a saliency map, and leaves them."""

    def __init__(self, hook: str) -> None:
        def backward(trainer: DDPTrainer, *_: Any) -> None:
            with torch.enable_grad():
                (100 * trainer.model(torch.ones((), dtype=torch.float64))).sum().backward()

        setattr(self, hook, backward)


class Sensitive(DDPTrainer):
    def before_epoch(self) -> None:
        self.model(torch.ones(3, dtype=torch.float64)).sum().backward()

    def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            loss: Tensor = mean_of_outputs(self.model(batch[0]), batch[1])
            loss.backward()
        return loss.detach()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_step", "on_eval", "on_epoch_end", "on_safe_point"])
def test_what_a_hook_or_an_evaluation_leaves_in_the_gradients_goes_into_no_update(
    ranks: Ranks, world_size: int, hook: str
) -> None:
    def run() -> float:
        options: dict[str, Any] = {"global_batch_size": 4, "batch_size": 2, "epochs": 2, "eval_every": 1, "eval_numbers": 3}
        trainer = toy_trainer(8, kind=Sensitive, callbacks=[Backward(hook)], **options)
        trainer.fit()
        return trainer.model.w.item()  # type: ignore[operator, no-any-return]

    assert ranks(world_size, run) == [-2 * (1.5 + 5.5)] * world_size


def test_what_an_evaluation_leaves_on_a_parameter_that_is_then_frozen_moves_it_no_more(ranks: Ranks) -> None:
    class Freezing(Sensitive):
        def before_epoch(self) -> None:
            self.model.first.requires_grad_(self.state.epoch == 0)  # type: ignore[union-attr, operator]
            if self.state.epoch == 1:
                self.kept = self.model.first.w.item()  # type: ignore[union-attr, operator]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Toy(), Toy()

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.first(x) + self.second(x)
            return outputs

    def run() -> float:
        trainer = toy_trainer(8, Two(), kind=Freezing, batch_size=2, epochs=2, eval_numbers=3)
        trainer.fit()
        return trainer.model.first.w.item() - vars(trainer)["kept"]  # type: ignore[union-attr, operator, no-any-return]

    assert ranks(1, run) == [0.0]
    assert ranks(2, run) == [0.0, 0.0]
