"""Objects with reset, update and compute take part in an evaluation, exact on uneven shares and on ranks without samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix
from torchmetrics.functional.classification import multiclass_auroc
from torchmetrics.retrieval import RetrievalMRR

from tests.helpers import Numbers, Ranks, Toy, toy_trainer
from trainer import DDPTrainer, World

SIZES = (1, 2, 3, 7, 10)
CLASSES = 3


class Errors(MulticlassConfusionMatrix):
    """How many answers were wrong: a count, so that one that is added twice shows."""

    def compute(self) -> Tensor:
        matrix = super().compute()
        return matrix.sum() - matrix.trace()


class Highest(CatMetric):
    def compute(self) -> Tensor:
        return super().compute().max()


def scores_of(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of three classes and the right class, both made from the number."""
    generator = torch.Generator().manual_seed(7)
    table = torch.rand(100, CLASSES, generator=generator).softmax(dim=1)
    return table[targets.long()], targets.long() * 7 % CLASSES


class Classified(DDPTrainer):
    def meters(self) -> None:
        self.errors = Errors(CLASSES)
        self.several = MetricCollection({"sum": SumMetric(), "highest": Highest()})
        self.auroc = MulticlassAUROC(CLASSES)  # keeps scores of two dimensions and whole numbers

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        scores, classes = scores_of(batch[0])
        self.errors.update(scores, classes)
        self.several.update(batch[1])
        self.auroc.update(scores, classes)
        return {"mean": batch[1].mean(), "errors": self.errors, "auroc": self.auroc, "all": self.several}


def classified(size: int) -> list[dict[str, float]]:
    """Twice: the second evaluation starts afresh."""
    World.from_env()
    trainer = toy_trainer(1, kind=Classified, batch_size=2)
    trainer.meters()
    return [trainer.evaluate(Numbers(size)) for _ in range(2)]


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")  # that a class has no sample
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_meters_of_torchmetrics_see_every_sample_once(ranks: Ranks, world_size: int, size: int) -> None:
    numbers = torch.arange(size, dtype=torch.float64)
    scores, classes = scores_of(numbers)
    right = {
        "mean": float(numbers.mean()),
        "errors": float((scores.argmax(dim=1) != classes).sum()),
        "auroc": float(multiclass_auroc(scores, classes, CLASSES)),
        "all/highest": size - 1.0,
        "all/sum": float(numbers.sum()),
    }
    for results in ranks(world_size, classified, size):
        for metrics in results:
            assert metrics == pytest.approx(right, rel=1e-6)
            assert list(metrics) == list(right)


class Largest:
    """The simplest meter: no base class, and the ranks' maximum by `World.gather`."""

    def __init__(self, world: World | None) -> None:
        self.world = world
        self.reset()

    def reset(self) -> None:
        self.value = float("-inf")

    def update(self, numbers: Tensor) -> None:
        self.value = max(self.value, float(numbers.max()))

    def compute(self) -> float:
        return self.value if self.world is None else max(self.world.gather(self.value))


class WithLargest(DDPTrainer):
    make: Callable[[World], Any] = Largest

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        if not hasattr(self, "largest"):
            self.largest = type(self).make(self.world)
        self.largest.update(batch[0])
        return {"largest": self.largest}


def largest(kind: type[DDPTrainer], numbers: list[float]) -> Any:
    World.from_env()
    trainer = toy_trainer(1, kind=kind, batch_size=2)
    try:
        return trainer.evaluate(Numbers(numbers)), trainer.largest.value if hasattr(trainer, "largest") else 0.0
    except ValueError as error:
        return str(error), trainer.largest.value


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("numbers", [[3.0, 9.0, -1.0], [9.0, 3.0]])
def test_a_meter_of_ones_own_takes_part_and_is_reset(ranks: Ranks, world_size: int, numbers: list[float]) -> None:
    """Of three ranks the last has no sample of two, and takes part with an empty copy; the meter holds its world."""
    for rank, (found, value) in enumerate(ranks(world_size, largest, WithLargest, numbers)):
        assert found == {"largest": 9.0}
        assert value == float("-inf") or rank >= len(numbers)


class Alone(WithLargest):
    make = staticmethod(lambda world: Largest(None))


def test_a_meter_that_does_not_combine_the_ranks_is_an_error_on_all(ranks: Ranks) -> None:
    message = (
        "'largest' must be the same on every rank; compute() gave 3.0 on rank 0 and 9.0 on rank 1. It must combine the ranks' "
        "counts, as torchmetrics does, or with world.sum or world.gather"
    )
    assert ranks(2, largest, Alone, [3.0, 9.0]) == [(message, float("-inf"))] * 2
    assert ranks(1, largest, Alone, [3.0, 9.0]) == [({"largest": 9.0}, float("-inf"))]


def test_another_meter_each_time_is_an_error() -> None:
    class Anew(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            return {"largest": Largest(None)}

    with pytest.raises(ValueError, match="eval_step must return the same object as 'largest' every time: make it once"):
        toy_trainer(1, kind=Anew, eval_numbers=3, batch_size=2).evaluate()


def test_a_meter_that_comes_later_is_an_error() -> None:
    class Late(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            return {"largest": Largest(None) if float(batch[0].max()) > 1 else batch[0].mean()}

    with pytest.raises(ValueError, match="largest"):
        toy_trainer(1, kind=Late, eval_numbers=3, batch_size=2).evaluate()


def test_a_meter_is_reset_after_an_error_too() -> None:
    class Failing(WithLargest):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            if float(batch[0].min()) < 0:
                raise ArithmeticError
            return super().eval_step(model, batch)

    trainer = toy_trainer(1, kind=Failing, batch_size=1)
    with pytest.raises(ArithmeticError):
        trainer.evaluate(Numbers([9.0, -1.0]))
    assert trainer.evaluate(Numbers([3.0])) == {"largest": 3.0}


def test_a_meter_in_training_is_an_error_that_says_where_it_belongs() -> None:
    class Trained(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return {"loss": model(batch[0]).mean(), "largest": Largest(None)}

    with pytest.raises(TypeError, match=r"'largest' must be a real scalar .* have their place in eval_step"):
        toy_trainer(2, Toy(), kind=Trained, batch_size=2).fit()


class Ranked(DDPTrainer):
    """Each sample is a query of its own with three answers: its states are lists that torchmetrics collects item by item."""

    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        scores, classes = scores_of(batch[0])
        queries = batch[0].long().reshape(-1, 1).expand(-1, CLASSES)
        self.found.update(scores, nn.functional.one_hot(classes, CLASSES).bool(), indexes=queries)
        return {"mrr": self.found}

    def evaluated(self, size: int) -> float:
        self.found = RetrievalMRR()
        return self.evaluate(Numbers(size))["mrr"]


def ranked(size: int, batch: int) -> list[float]:
    World.from_env()
    trainer = toy_trainer(1, kind=Ranked, batch_size=batch)
    assert isinstance(trainer, Ranked)
    return [trainer.evaluated(size), trainer.evaluated(size)]


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")  # that a rank has no sample
@pytest.mark.parametrize("batch", [1, 2])
def test_states_that_are_lists_may_be_of_other_lengths_on_other_ranks(ranks: Ranks, batch: int) -> None:
    for size in SIZES:
        scores, classes = scores_of(torch.arange(size, dtype=torch.float64))
        places = scores.argsort(dim=1, descending=True).eq(classes.reshape(-1, 1)).int().argmax(dim=1) + 1
        wanted = (1 / places).mean().item()
        for world_size in (1, 2, 3):
            for found in ranks(world_size, ranked, size, batch):
                assert found == pytest.approx([wanted] * 2, rel=1e-6)


def test_meters_come_in_one_order_whatever_that_of_each_rank(ranks: Ranks) -> None:
    class Two(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            for meter in self.found.values():
                meter.update(batch[0])
            names = list(self.found)
            return {name: self.found[name] for name in (names if self.world.is_main else reversed(names))}

    def run() -> dict[str, float]:
        trainer = toy_trainer(1, kind=Two, batch_size=1)
        assert isinstance(trainer, Two)
        trainer.found = {"sum": SumMetric(), "largest": Largest(trainer.world)}
        return trainer.evaluate(Numbers(4))

    assert ranks(2, run, timeout=20) == [{"sum": 6.0, "largest": 3.0}] * 2


def test_an_object_that_comes_in_a_later_batch_only_is_refused() -> None:
    """Its number would be of a part of the data."""

    class Late(DDPTrainer):
        total = SumMetric()
        number = 0

        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            self.number += 1
            self.total.update(batch[0])
            return {"loss": batch[0].mean()} | ({"total": self.total} if self.number == 2 else {})

    with pytest.raises(ValueError, match="eval_step must return the same object as 'total' every time"):
        toy_trainer(1, kind=Late, batch_size=2).evaluate(Numbers(4))
