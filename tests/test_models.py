"""Models as people have them: unused, frozen and shared parameters, odd layouts, numbers that go wrong."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from callbacks import Checkpoint
from tests.helpers import Numbers, Recorder, Toy, ValueToy, mean_of_outputs
from tests.ranks import Ranks
from trainer import DDPTrainer, TrainerConfig

NAN = float("nan")


def train(
    model: nn.Module, numbers: Any, kind: type[DDPTrainer] = DDPTrainer, callbacks: Any = (), **settings: Any
) -> DDPTrainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=settings.pop("weight_decay", 0.0))
    config = TrainerConfig(**{"batch_size": 1, "shuffle": False} | settings)
    data = Numbers(numbers, torch.float32)
    trainer = kind(model, optimizer, data, loss_fn=mean_of_outputs, config=config, callbacks=callbacks)
    trainer.fit()
    return trainer


class Spare(Toy):
    """A toy with a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.spare = nn.Linear(2, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_unused_parameters_are_named_before_the_optimizer_moves(ranks: Ranks, world_size: int) -> None:
    """At one process too; the way out is in the text."""

    def run() -> str:
        model = Spare()
        with pytest.raises(RuntimeError) as error:
            train(model, 6, accumulation_steps=2)
        assert model.w.item() == 0.0
        return str(error.value)

    for message in ranks(world_size, run):
        assert "spare.weight, spare.bias" in message
        assert "find_unused_parameters" in message


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@pytest.mark.parametrize("skipping", [(0, 1), (1,)], ids=["all", "one"])
def test_a_parameter_that_is_unused_later_on_is_named_before_the_optimizer_moves(
    ranks: Ranks, skipping: tuple[int, ...], debug: str
) -> None:
    """DDP itself would say so a step later, of gradients that differ between the ranks."""

    class Later(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            model.module.uses = self.state.step < 2 or self.world.rank not in skipping  # type: ignore[union-attr]
            return mean_of_outputs(model(batch[0]), batch[1])

    class Sometimes(Toy):
        uses = True

        def __init__(self) -> None:
            super().__init__(torch.float32)
            self.heads = nn.ParameterDict({"7": nn.Parameter(torch.zeros(()))})

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.heads["7"] * x if self.uses else super().forward(x)

    def run() -> None:
        train(Sometimes(), 10, kind=Later, log_every=10)

    outcomes = ranks.outcomes(2, run, timeout=30, env={"TORCH_DISTRIBUTED_DEBUG": debug})
    for rank in skipping:
        assert "does not depend on heads.7, so" in outcomes[rank].message
        assert "find_unused_parameters" in outcomes[rank].message
    assert not any(outcome.ok for outcome in outcomes)


def test_a_parameter_that_only_an_earlier_micro_batch_used_is_named(ranks: Ranks) -> None:
    """Its gradient is there, of this rank alone."""

    class Heads(Toy):
        def __init__(self) -> None:
            super().__init__(torch.float32)
            self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + self.a * x + (0.0 if self.calls > 2 and self.calls % 2 == 0 else self.b * x)

    outcomes = ranks.outcomes(2, lambda: train(Heads(), 12, accumulation_steps=2, log_every=10) and None, timeout=30)
    for outcome in outcomes:
        assert "does not depend on b, so" in outcome.message


@pytest.mark.parametrize("world_size", [1, 2])
def test_unused_parameters_stay_as_they_are_with_the_option(ranks: Ranks, world_size: int) -> None:
    """Bitwise, even with weight decay."""

    def run() -> tuple[float, bool]:
        model = Spare()
        before = copy.deepcopy(model.spare)
        train(model, 4 * world_size, global_batch_size=4, weight_decay=0.5, ddp_options={"find_unused_parameters": True})
        return model.w.item(), torch.equal(before.weight, model.spare.weight)

    right = -1.5 if world_size == 1 else -1.5 * 0.5 - 5.5
    assert ranks(world_size, run) == [(right, True)] * world_size


def test_parameters_used_in_different_micro_batches_are_all_reduced(ranks: Ranks) -> None:
    """Sums of 2.5 and 2.0 on both ranks, in each of three windows; c is never used."""

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.zeros(())) for _ in range(3))

        def forward(self, x: Tensor, which: str) -> Tensor:
            return {"a": self.a, "b": self.b}[which] * x

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            turn = vars(self).setdefault("turn", 0)
            self.turn = turn + 1
            which = ("a", "b" if self.world.is_main else "a", "b")[turn % 3]
            outputs: Tensor = model(torch.tensor(self.world.rank + 1.0), which) * 3  # times 3: a sum over the micro-batches
            return outputs

        def optimizer_step(self) -> None:
            found = [None if p.grad is None else p.grad.item() for p in self.model.parameters()]
            vars(self).setdefault("found", []).append(found)

    def run() -> list[list[float | None]]:
        options = {"find_unused_parameters": True}
        found: list[list[float | None]] = vars(train(Choice(), 18, Trainer, accumulation_steps=3, ddp_options=options))["found"]
        return found

    assert ranks(2, run) == [[[2.5, 2.0, None]] * 3] * 2


LAYOUTS = (
    *("transposed buffer", "expanded buffer", "channels last", "one weight in channels last", "a buffer of 1 x 3 x 1 x 1"),
    *("a buffer transposed by the forward", "a buffer expanded by the forward"),
)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_odd_layouts_train_alike_at_one_process_and_two(ranks: Ranks, kind: str) -> None:

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(4, 4, 1, bias=kind != "one weight in channels last")
            table = torch.arange(32.0)
            if kind == "transposed buffer":
                self.register_buffer("table", table.reshape(1, 8, 4).transpose(0, 1))
            elif kind == "expanded buffer":
                self.register_buffer("table", table[:4].reshape(1, 4).expand(3, 4))
            elif kind == "a buffer of 1 x 3 x 1 x 1":
                self.register_buffer("table", torch.ones(1, 3, 1, 1))
            elif "forward" in kind:
                self.register_buffer("table", None)
            if "1 x" in kind or "channels last" in kind:
                self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, x: Tensor) -> Tensor:
            if "forward" in kind:  # as one that grows with the inputs
                self.table = torch.ones(8, 4).t() if "transposed" in kind else torch.ones(8).expand(4, 8)
            outputs: Tensor = self.conv(x.reshape(-1, 1, 1, 1).expand(-1, 4, 2, 2))
            return outputs

    def run() -> tuple[float, bool]:
        model = Odd()
        before = copy.deepcopy(dict(model.named_buffers()))
        train(model, 8, global_batch_size=4, batch_size=2)
        expected = {"table": torch.ones(4, 8)} if "forward" in kind else before
        same = all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())
        return model.conv.weight.double().norm().item(), same

    alone = ranks(1, run)[0]
    for norm, same in ranks(2, run):
        assert same
        assert norm == pytest.approx(alone[0], rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_a_run_ends_on_all_ranks_once_its_parameters_are_not_finite(ranks: Ranks, world_size: int, tmp_path: Path) -> None:
    """The error names the step and the rank whose loss was so first; no file holds such parameters."""
    numbers = [1.0, 2.0, 3.0, NAN, *range(5, 13)]  # step 2; rank 1, if there is one

    def run() -> str:
        folder = tmp_path / str(world_size)
        with pytest.raises(FloatingPointError) as error:
            train(Toy(torch.float32), numbers, callbacks=[Checkpoint(folder, every_steps=1)], global_batch_size=2, log_every=4)
        return str(error.value)

    for message in ranks(world_size, run):
        assert f"not finite at step 4: the loss was not finite at step 2 on rank {world_size - 1}" in message
    files = sorted((tmp_path / str(world_size)).glob("*.pt"))
    assert files
    for file in files:
        assert torch.load(file, map_location="cpu", weights_only=True)["model"]["w"].isfinite()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_the_report_of_the_step_that_broke_the_parameters_is_given_first(ranks: Ranks, world_size: int) -> None:
    """A curve that ends on good numbers would hide why the run did."""

    def run() -> list[tuple[int, str]]:
        recorder = Recorder()
        with pytest.raises(FloatingPointError):
            train(Toy(torch.float32), [1.0, 1.0, NAN, 1.0, 1.0], callbacks=[recorder], global_batch_size=1, log_every=1)
        return [(call.step, str(call.metrics["loss"])) for call in recorder.reports]

    assert ranks(world_size, run)[0] == [(1, "0.0"), (2, "-1.0"), (3, "nan")]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_an_error_of_that_report_does_not_hide_why_the_run_ends(ranks: Ranks, world_size: int) -> None:
    class Rounds(DDPTrainer):
        def summarize(self, means: dict[str, float]) -> dict[str, float]:
            return {**means, "percent": int(means["loss"])}

    def run() -> str:
        with pytest.raises(FloatingPointError, match="the parameters are not finite at step 2") as error:
            train(Toy(torch.float32), [1.0, NAN, 1.0, 1.0], kind=Rounds, global_batch_size=1, log_every=1)
        return repr(error.value.__context__)

    assert ranks(world_size, run) == ["ValueError('cannot convert float NaN to integer')"] * world_size


def test_a_run_told_to_warn_goes_on_with_parameters_that_are_not_finite() -> None:
    recorder = Recorder()
    with (
        pytest.warns(RuntimeWarning, match="parameters are not finite at step 1"),
        pytest.warns(RuntimeWarning, match="^the loss"),
    ):
        trainer = train(Toy(torch.float32), [NAN, 1.0, 2.0], callbacks=[recorder], log_every=1, on_nonfinite="warn")
    assert trainer.state.step == 3
    assert len(recorder.reports) == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_frozen_may_be_infinite_as_a_mask_is(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    class Masked(Toy):
        def __init__(self) -> None:
            super().__init__(torch.float32)
            self.mask = nn.Parameter(torch.full((), -math.inf), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.mask.exp()

    def run() -> int:
        return train(Masked(), 4, callbacks=[Checkpoint(tmp_path)], log_every=1).state.step

    assert ranks(world_size, run) == [4 // world_size] * world_size
    assert list(tmp_path.glob("step-*.pt"))


def test_an_infinite_loss_that_leaves_the_parameters_alone_only_warns() -> None:
    class Shifted(Toy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ones_like(x)) + (x - 2.0).reciprocal()

    with pytest.warns(RuntimeWarning, match="not finite at step 3 on rank 0"):
        trainer = train(Shifted(torch.float32), 5, log_every=5)
    assert trainer.state.step == 5


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_without_anything_to_train_still_evaluates(ranks: Ranks, world_size: int) -> None:

    def run() -> tuple[dict[str, float], str]:
        model = ValueToy(torch.float32).requires_grad_(False)
        optimizer = torch.optim.SGD([model.w], lr=1.0)
        data = Numbers([1.0, 0.0, 1.0], torch.float32)
        trainer = DDPTrainer(model, optimizer, data, data, loss_fn=mean_of_outputs)
        metrics = trainer.evaluate()
        with pytest.raises(ValueError, match="requires a gradient") as error:
            trainer.fit()
        return metrics, str(error.value)

    assert [metrics for metrics, _ in ranks(world_size, run)] == [{"loss": pytest.approx(2 / 3)}] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_without_any_parameter_still_evaluates(ranks: Ranks, world_size: int) -> None:
    def run() -> dict[str, float]:
        optimizer = torch.optim.SGD([{"params": []}], lr=1.0)
        return DDPTrainer(nn.Identity(), optimizer, loss_fn=mean_of_outputs).evaluate(Numbers([1.0, 0.0, 1.0]))

    assert ranks(world_size, run) == [{"loss": pytest.approx(2 / 3)}] * world_size


def test_shared_parameters_train_alike_at_one_process_and_two(ranks: Ranks) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(1, 1)
            self.second = nn.Linear(1, 1)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.second(self.first(x.reshape(-1, 1) / 10))
            return outputs

    def run() -> float:
        model = Tied()
        train(model, 8, global_batch_size=4)
        return model.first.weight.item()

    alone = ranks(1, run)[0]
    assert ranks(2, run) == pytest.approx([alone] * 2, rel=1e-6)


def test_gradient_compression_sends_half_the_bytes_and_still_trains(ranks: Ranks) -> None:
    def run() -> float:
        model = Toy(torch.float32)
        train(model, 8, global_batch_size=4, gradient_compression="bf16")
        return model.w.item()

    assert ranks(2, run) == [-7.0] * 2


def test_out_of_memory_says_what_to_change() -> None:
    class Greedy(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match=r"batch_size=1: halve it .* curve stays the same"):
        train(Toy(torch.float32), 4, Greedy)


def test_predictions_come_in_dataset_order_on_rank_0_alone(ranks: Ranks) -> None:
    class Trainer(DDPTrainer):
        def predict_step(self, model: nn.Module, batch: Any) -> Any:
            doubled = 2 * batch[0]
            names = [f"sample {int(value)}" for value in batch[0]]
            return {"doubled": doubled, "names": names, "pair": (doubled, batch[0]), "array": doubled.numpy()}

    def run() -> list[Any]:
        model = Toy(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = Trainer(model, optimizer, config=TrainerConfig(eval_batch_size=3))
        return [trainer.predict(Numbers(size, torch.float32)) for size in (1, 2, 7, 13)]

    for world_size in (1, 2, 4):
        first, *others = ranks(world_size, run)
        assert others == [[None] * 4] * (world_size - 1)
        for found, size in zip(first, (1, 2, 7, 13), strict=True):
            assert found["doubled"].tolist() == [2.0 * number for number in range(size)]
            assert found["names"] == [f"sample {number}" for number in range(size)]
            assert found["pair"][1].tolist() == list(map(float, range(size)))
            assert isinstance(found["array"], np.ndarray)
            assert found["array"].tolist() == found["doubled"].tolist()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, of its own
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, "tied"])
@pytest.mark.parametrize("samples", [8, 5])
def test_sparse_gradients_train_alike_at_one_process_and_more(ranks: Ranks, kind: Any, samples: int) -> None:
    """Also where a rank has no share of the last window."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.Linear(3, 6, bias=False, dtype=torch.float64)
            tied = kind == "tied"
            self.table = (nn.Embedding if tied else kind)(6, 3, sparse=True, dtype=torch.float64)
            if tied:  # of a gradient that is dense
                self.table.weight = self.out.weight
            self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            found = self.table(x.long().reshape(-1, 1) % 6).reshape(-1, 3) * (x.reshape(-1, 1) + 1) + self.bias
            return self.out(found)

    def run() -> list[list[float]]:
        model = Words()
        config = TrainerConfig(epochs=2, global_batch_size=4, batch_size=1, shuffle=False)
        trainer = DDPTrainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Numbers(samples), loss_fn=mean_of_outputs, config=config
        )
        trainer.fit()
        return [parameter.detach().flatten().tolist() for parameter in model.parameters()]

    wanted = ranks(1, run)[0]
    for world_size in (2, 3):
        for found in ranks(world_size, run):
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-12)


def test_names_of_the_wrapped_model_are_explained(ranks: Ranks) -> None:
    class Penalty(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            old = dict(self.model.named_parameters())
            return model(batch[0]).mean() + sum((value - old[name]).sum() for name, value in model.named_parameters())

    with pytest.raises(KeyError, match=r"module\.w.*begin with module\.; take those of self\.model"):
        train(Toy(torch.float32), 4, kind=Penalty)
