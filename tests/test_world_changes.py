"""The split as people train: torchvision's crops and flips, workers, momentum; other numbers of processes, also within a run."""

from __future__ import annotations

import zlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

from callbacks import Checkpoint
from tests.helpers import Ranks, Recorder
from trainer import DDPTrainer, TrainerConfig, World

IMAGES, GLOBAL_BATCH, EPOCHS = 23, 5, 4
STEPS = 5  # an epoch; the last over three images
TOLERANCE = 1e-12  # relative


class Images(Dataset[Any]):
    """Small pictures, cropped and flipped at random whenever they are fetched; the third part of a sample is its index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randint(256, (IMAGES, 3, 9, 9), dtype=torch.uint8, generator=generator)
        self.labels = torch.randint(4, (IMAGES,), generator=generator)
        self.transform = v2.Compose(
            [v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float64, scale=True)],
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.transform(self.images[index]), self.labels[index], index


class Classifier(DDPTrainer):
    """Remembers the images that this rank has trained on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[int, int, int]] = []  # epoch, index, a checksum of the image

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels, indices = batch
        looks = [zlib.crc32(image.numpy().tobytes()) for image in images]
        self.seen += [(self.state.epoch, index, look) for index, look in zip(indices.tolist(), looks, strict=True)]
        return nn.functional.cross_entropy(model(images), labels)


class Found(NamedTuple):
    """What a run, or a part of one, has left on a rank; the losses on rank 0 only."""

    losses: list[tuple[int, float]]  # step, loss
    weights: list[Tensor]
    seen: list[tuple[int, int, int]]
    stopped: tuple[int, int, int]  # steps, epochs, samples of the current epoch


def train(folder: Path | None = None, stop_after: int | None = None, workers: int = 0, batch: int = 2, seed: int = 1) -> Found:
    """Begins or continues the run in `folder`; rank 0 asks to stop after `stop_after` steps. `seed`: of the first weights."""

    class Stopping(Recorder):
        def on_step(self, trainer: DDPTrainer, metrics: Any) -> None:
            super().on_step(trainer, metrics)
            if trainer.state.step == stop_after:
                trainer.stop("enough")

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 4)).double()
    recorder = Stopping()
    trainer = Classifier(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        Images(),
        loader_options={"num_workers": workers},
        config=TrainerConfig(epochs=EPOCHS, global_batch_size=GLOBAL_BATCH, batch_size=batch, log_every=1, seed=4),
        callbacks=[recorder, *([Checkpoint(folder)] if folder else [])],
    )
    state = trainer.fit(resume_from=folder)
    losses = [(call.step, call.metrics["loss"]) for call in recorder.reports]
    weights = [parameter.detach() for parameter in model.parameters()]
    return Found(losses, weights, trainer.seen, (state.step, state.epoch, state.epoch_samples))


@cache
def alone() -> Found:
    """The uninterrupted run of one process."""
    found: Found = Ranks()(1, train)[0]
    return found


def assert_same_run(losses: list[tuple[int, float]], weights: list[Tensor], seen: list[tuple[int, int, int]]) -> None:
    """Of all processes and parts together: every step's loss, the weights by their norm, every image once and looking alike."""
    wanted = alone()
    assert [step for step, _ in losses] == list(range(1, EPOCHS * STEPS + 1))
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in wanted.losses], rel=TOLERANCE, abs=0.0)
    for ours, theirs in zip(weights, wanted.weights, strict=True):
        assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()
    assert Counter((epoch, index) for epoch, index, _ in seen) == Counter(
        (epoch, index) for epoch in range(EPOCHS) for index in range(IMAGES)
    )
    assert sorted(seen) == sorted(wanted.seen)


def test_the_images_are_changed_at_random() -> None:
    """Or there would be nothing to show: few images look alike in any two epochs."""
    assert len({look for *_, look in alone().seen}) > 0.9 * EPOCHS * IMAGES


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_with_random_crops_and_flips_is_the_same_on_any_number_of_processes(
    ranks: Ranks, world_size: int, workers: int
) -> None:
    """Five images a step, over ranks that they do not divide by, in micro-batches of one, two and seven."""

    def run() -> list[Found]:
        World.from_env()  # one group for all of them
        return [train(workers=workers, batch=batch) for batch in ((1, 7) if workers == 0 else (2,))]

    for runs in zip(*ranks(world_size, run), strict=True):
        assert_same_run(runs[0].losses, runs[-1].weights, [image for part in runs for image in part.seen])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("sizes", "stops"), [((2, 3, 1), (3, 11)), ((3, 1, 2), (5, 14)), ((1, 4, 2), (1, 2))])
def test_a_run_whose_number_of_processes_changes_is_the_run_of_one_process(
    ranks: Ranks, tmp_path: Path, sizes: tuple[int, int, int], stops: tuple[int, int], workers: int
) -> None:
    """Stopped within an epoch or at its end, and continued by more or fewer processes."""
    losses: list[tuple[int, float]] = []
    seen: list[tuple[int, int, int]] = []
    for part, (size, stop) in enumerate(zip(sizes, (*stops, None), strict=True)):
        found = ranks(size, train, tmp_path, stop, workers, seed=10 + part if part else 1)
        losses += found[0].losses
        seen += [image for one in found for image in one.seen]
        steps = stop or EPOCHS * STEPS
        assert {one.stopped for one in found} == {(steps, steps // STEPS, steps % STEPS * GLOBAL_BATCH)}
    assert_same_run(losses, found[0].weights, seen)
