"""`sync_batchnorm`: converted on CUDA, plain on CPU with one warning, and refused where ranks would wait for each other."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import BatchNormToy, Numbers, Ranks, mean_of_outputs, rank_pairs
from trainer import DDPTrainer, TrainerConfig, World
from trainer.batchnorm import check_windows, is_synchronized, synchronized


def trained(sync_batchnorm: bool) -> tuple[list[str], float]:
    """The warnings, and what a step made of the running mean."""
    world, model = World.from_env(), BatchNormToy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = DDPTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            rank_pairs(world.size, 1),
            loss_fn=mean_of_outputs,
            config=TrainerConfig(batch_size=2, shuffle=False, sync_batchnorm=sync_batchnorm),
        )
        trainer.fit()
    assert type(trainer.model.norm) is nn.BatchNorm1d
    trainer.evaluate(Numbers(2))  # rank 0's statistics everywhere
    return [str(item.message) for item in caught], float(model.norm.running_mean)


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_cpu_it_is_plain_batchnorm_with_one_warning(ranks: Ranks, world_size: int) -> None:
    """A warning on rank 0 where it makes a difference; rank 0's batch has the mean 1."""
    results = ranks(world_size, trained, True)
    said = [message for messages, _ in results for message in messages]
    assert len(said) == (world_size > 1)
    assert all(
        "sync_batchnorm=True has no effect: SyncBatchNorm works on CUDA only, and this runs on cpu" in text for text in said
    )
    assert [mean for _, mean in results] == [mean for _, mean in ranks(world_size, trained, False)] == [0.1] * world_size


class CudaWorld:
    """What `synchronized` asks of a world."""

    def __init__(self, size: int) -> None:
        self.size, self.is_main, self.device = size, True, torch.device("cuda")


def test_on_cuda_every_layer_is_converted_and_parameters_and_keys_stay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2)))
    keys, parameters = list(model.state_dict()), list(model.parameters())
    world: Any = CudaWorld(2)
    converted = synchronized(model, world)
    assert converted is model
    assert [type(module) for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)] == [
        nn.SyncBatchNorm
    ] * 2
    assert list(model.state_dict()) == keys
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert is_synchronized(model, world)


def test_one_process_needs_no_conversion() -> None:
    model, world = BatchNormToy(), CudaWorld(1)
    assert synchronized(model, world) is model  # type: ignore[arg-type]
    assert type(model.norm) is nn.BatchNorm1d
    assert not is_synchronized(nn.SyncBatchNorm(1), world)  # type: ignore[arg-type]


def refused() -> str:
    World.from_env()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(BatchNormToy())
    with pytest.raises(ValueError) as error:
        DDPTrainer(model, torch.optim.SGD(model.parameters(), lr=0.0), Numbers(4), loss_fn=mean_of_outputs)
    return str(error.value)


def test_layers_that_cannot_work_on_cpu_are_named_at_construction(ranks: Ranks) -> None:
    assert (
        ranks(2, refused)
        == [
            "SyncBatchNorm does not work on CPU: norm. Pass the model with BatchNorm, and sync_batchnorm=True in TrainerConfig, "
            "which converts it where that works"
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("size", "batch_size", "world_size"), [(8, 4, 2), (7, 4, 2), (16, 4, 2), (13, 4, 2), (3, 1, 3), (12, 4, 3), (10, 4, 3)]
)
def test_windows_that_give_every_rank_as_many_micro_batches_pass(size: int, batch_size: int, world_size: int) -> None:
    check_windows([size], batch_size, world_size)


@pytest.mark.parametrize(("size", "batch_size", "world_size"), [(1, 4, 2), (9, 4, 2), (2, 1, 3), (4, 1, 3), (25, 4, 3)])
def test_windows_that_do_not_are_refused_with_the_way_out(size: int, batch_size: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"a window of {size} samples gives .* set drop_last=True.* a multiple of {world_size}"):
        check_windows([batch_size * world_size, size], batch_size, world_size)


@pytest.mark.parametrize(("samples", "drop_last", "fits"), [(8, False, True), (9, False, False), (9, True, True)])
def test_the_plan_is_checked_at_construction(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, samples: int, drop_last: bool, fits: bool
) -> None:
    monkeypatch.setattr("trainer.replica.batchnorm.is_synchronized", lambda model, world: True)

    def construct() -> bool:
        World.from_env()
        model = BatchNormToy()
        config = TrainerConfig(batch_size=4, drop_last=drop_last)
        try:
            DDPTrainer(
                model, torch.optim.SGD(model.parameters(), lr=0.0), Numbers(samples), loss_fn=mean_of_outputs, config=config
            )
        except ValueError as error:
            return "drop_last" not in str(error)
        return True

    assert ranks(2, construct) == [fits] * 2
