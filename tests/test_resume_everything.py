"""Everything at once, in float32 at one to four processes: stopped, resumed and bit for bit the whole run.

Dropout, random numbers in the dataset, momentum, clipping, a scheduler on a plateau; fp16 with updates that overflow; a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset

from callbacks import Checkpoint
from tests.helpers import Ranks
from trainer import DDPTrainer, TrainerConfig

SAMPLES, GLOBAL_BATCH, EPOCHS = 30, 8, 3
WINDOWS = 4  # an epoch; the last over six samples
STOPS = {"within an epoch": 5, "at the end of one": 7}  # the windows, from 0 on, in which a rank asks to stop
RATE = 0.05

Sample = tuple[Tensor, Tensor]


class Noisy(Dataset[Sample]):
    """Each sample is scaled and shifted at random whenever it is fetched."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.inputs, self.targets = torch.randn(length, 6, generator=generator), torch.randn(length, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sample:
        return self.inputs[index] * (0.5 + torch.rand(())) + 0.3 * torch.randn(6), self.targets[index]


class NoisyStream(IterableDataset[Sample]):
    """The same without a length, through a small buffer out of which samples are drawn."""

    def __iter__(self) -> Iterator[Sample]:
        data = Noisy(SAMPLES)
        buffer: list[Sample] = []
        for index in range(SAMPLES):
            buffer.append(data[index])
            if len(buffer) == 6:
                yield buffer.pop(int(torch.randint(6, ())))
        yield from buffer


class Stopped(DDPTrainer):
    """The last rank asks to stop in window `stop_in`."""

    stop_in: int | None = None

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        if self.state.step + self.state.skipped_steps == self.stop_in and self.world.rank == self.world.size - 1:
            self.stop("enough")
        return self.eval_step(model, batch)

    def eval_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def make(weights: int, stream: bool, folder: Path | None = None, **settings: Any) -> Stopped:
    """`weights`: the seed of the model's first weights."""
    torch.manual_seed(weights)
    hidden = (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), *hidden, nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return Stopped(
        model,
        optimizer,
        NoisyStream() if stream else Noisy(SAMPLES),
        Noisy(5),
        scheduler=ReduceLROnPlateau(optimizer, factor=0.8, patience=0, threshold=0.5),
        config=TrainerConfig(
            **{"epochs": EPOCHS, "global_batch_size": GLOBAL_BATCH, "batch_size": 2, "log_every": 1, "seed": 11},
            **{"schedule": "eval", "eval_every": 2, "max_grad_norm": 0.5},
            **{"ddp_options": {"bucket_cap_mb": 0.0005}, **settings},  # several buckets, as a large model has
        ),
        callbacks=[Checkpoint(folder)] if folder else [],
    )


def bits(value: Any, place: str = "") -> dict[str, Any]:
    """Every value in nested containers by its place; tensors with their type and bits."""
    if isinstance(value, Tensor):
        return {place: (value.dtype, tuple(value.shape), value.detach().numpy().tobytes())}
    if isinstance(value, Mapping):
        return {inner: found for key, item in value.items() for inner, found in bits(item, f"{place}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return bits(dict(enumerate(value)), place)
    return {place: value}


def everything(trainer: DDPTrainer) -> dict[str, Any]:
    parts = ("model", "optimizer", "scheduler", "scaler", "state")
    return bits({part: trainer.state_dict()[part] for part in parts})


class Found(NamedTuple):
    """What a rank has seen of a whole run and of those stopped and resumed."""

    compared: int  # values
    wrong: dict[str, list[str]]  # places where the resumed run differs, by stop
    places: dict[str, tuple[int, int]]  # windows until the stop and samples of the epoch it was in, by stop
    skipped: dict[str, tuple[int, int]]  # updates skipped before and after the stop, by stop
    rate: float


def stop_and_resume(folder: Path, stream: bool, settings: dict[str, Any]) -> Found:
    whole = make(0, stream, **settings)
    whole.fit()
    wanted = everything(whole)
    wrong, places, skipped = {}, {}, {}
    for name, window in STOPS.items():
        part = make(0, stream, folder / name, **settings)
        part.stop_in = window
        state = part.fit()
        places[name] = (state.step + state.skipped_steps, state.epoch_samples)
        skipped[name] = (state.skipped_steps, whole.state.skipped_steps - state.skipped_steps)
        part.world.barrier()  # rank 0 has written its file
        rest = make(1 + window, stream, folder / name, **settings)
        rest.fit(resume_from=folder / name)
        found = everything(rest)
        wrong[name] = [place for place in wanted.keys() | found.keys() if found.get(place) != wanted.get(place)]
    return Found(len(wanted), wrong, places, skipped, whole.optimizer.param_groups[0]["lr"])


RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"precision": "fp16", "scaler_options": {"init_scale": 2.0**18, "growth_interval": 2}},
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stream", [False, True], ids=["samples", "stream"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_stopped_and_resumed_is_the_whole_run(
    ranks: Ranks, tmp_path: Path, recipe: str, stream: bool, world_size: int
) -> None:
    for found in ranks(world_size, stop_and_resume, tmp_path, stream, RECIPES[recipe]):
        assert found.wrong == {name: [] for name in STOPS}
        assert found.compared > 30
        assert found.rate < RATE  # the scheduler had something to do
        for name, (windows, samples) in found.places.items():
            assert windows - STOPS[name] in (1, 2)  # two where an update was skipped: after one nobody leaves
            assert samples == windows % WINDOWS * GLOBAL_BATCH
            assert (samples == 0) is (name == "at the end of one")
        if recipe == "fp16":
            assert min(found.skipped["within an epoch"]) > 0, "no update overflowed before the stop, or none after it"
