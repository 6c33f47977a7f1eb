"""Distributed evaluation: every sample exactly once, on the bare module, with everything left as it was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from .data import NO_EPOCH, Loader, requests
from .meters import Meters
from .metrics import WeightedSums, agree_on_keys, as_mapping, means
from .order import dataset_order
from .plan import Plan, chunks
from .precision import Precision
from .randomness import EVAL_SAMPLE, EVAL_STEP, preserved, seed_for
from .replica import Replica
from .stream import open_stream

if TYPE_CHECKING:
    from .ddp_trainer import DDPTrainer


def evaluate(
    trainer: DDPTrainer, replica: Replica, precision: Precision, dataset: Dataset[Any], options: Mapping[str, Any]
) -> dict[str, float]:
    """The means of `eval_step`'s values over `dataset`, the same on every rank, which all call this.

    Rank r takes samples r, r + W, ... in order. Raises RuntimeError when the samples counted are not the dataset's (a stream
    has no count to compare with), or the ranks' parameters differ; ValueError for keys that differ between ranks.
    """
    world, size = trainer.world, trainer.config.eval_batch_size or trainer.config.batch_size
    sums, meters = WeightedSums(world.device), Meters(world)
    counted, number, length = 0, 0, None
    if isinstance(dataset, IterableDataset):
        batches = _of_stream(trainer, dataset, options, size)
    else:
        length = len(dataset)  # type: ignore[arg-type]
        shares = list(chunks(range(world.rank, length, world.size), size))
        batches = batches_of(trainer, dataset, options, shares)
    try:
        with evaluating(trainer, replica):
            for samples, batch in batches:
                batch = prepared(trainer, batch, number)
                with precision.autocast():
                    output = as_mapping(trainer.eval_step(trainer.model, batch), "eval_step")
                sums.add(meters.take_from(output), samples)
                counted, number = counted + samples, number + 1
                del batch, output  # freed now: the next batch takes their memory while it is still in the cache
        own = sums.pop(sums.keys).tolist() if sums.keys else []
        gathered = world.gather(RankResult(sums.keys, own, meters.keys, counted, length, replica.fingerprint()))
        metrics = _reduced(trainer, replica, gathered)
        return metrics | meters.compute([result.meters for result in gathered], [result.counted > 0 for result in gathered])
    finally:
        meters.reset()


def batches_of(
    trainer: DDPTrainer, dataset: Dataset[Any], options: Mapping[str, Any], shares: list[range]
) -> Iterator[tuple[int, Any]]:
    """The batches of `shares` of a map-style dataset, each with its number of samples."""
    loader = Loader(dataset, {**options, "persistent_workers": False}, trainer.config.seed, EVAL_SAMPLE)
    batches = loader.batches(requests(NO_EPOCH, iter(shares), dataset_order))
    for share in shares:
        yield len(share), next(batches)  # a zip would hold on to the batch


def _of_stream(
    trainer: DDPTrainer, dataset: IterableDataset[Any], options: Mapping[str, Any], size: int
) -> Iterator[tuple[int, Any]]:
    world = trainer.world
    plan = Plan(0, size * world.size, size, world.rank, world.size)
    stream = open_stream(dataset, {**options, "persistent_workers": False}, plan, trainer.config.seed, EVAL_SAMPLE, world)
    for window, batches in stream.windows(NO_EPOCH, 0):
        yield from zip(map(len, window.micro_batches), batches, strict=True)


def prepared(trainer: DDPTrainer, batch: Any, number: int) -> Any:
    """Batch `number` of this rank's, on the device, with the generators seeded for it."""
    seed_for(EVAL_STEP, trainer.config.seed, number, trainer.world.rank, device=trainer.world.device)
    return trainer.prepare_batch(batch)


class RankResult(NamedTuple):
    """What one rank contributes to an evaluation."""

    keys: tuple[str, ...]
    sums: list[float]
    """Those of `keys`, then their weights."""
    meters: tuple[str, ...]
    counted: int
    """Samples."""
    length: int | None
    """Of its dataset; None for a stream."""
    fingerprint: tuple[int, ...]
    """Of its parameters."""


def _reduced(trainer: DDPTrainer, replica: Replica, results: list[RankResult]) -> dict[str, float]:
    """The same on every rank: summed in rank order."""
    if len({result.fingerprint for result in results}) > 1:
        replica.raise_drift(trainer.state.step)
    agree_on_keys([result.keys + result.meters for result in results], "eval_step")
    keys = next((result.keys for result in results if result.counted), ())
    counted, lengths = sum(result.counted for result in results), {result.length for result in results}
    if counted == 0:
        raise ValueError("nothing to evaluate: the stream gave no sample on any rank")
    if lengths not in ({counted}, {None}):
        held = sorted(length or 0 for length in lengths)
        raise RuntimeError(
            f"{counted} samples were evaluated, but the ranks' datasets hold {held}: pass the same one on every rank"
        )
    packed = [0.0] * (2 * len(keys))
    for result in results:
        for index, key in enumerate(result.keys):
            packed[keys.index(key)] += result.sums[index]
            packed[len(keys) + keys.index(key)] += result.sums[len(result.keys) + index]
    return means(keys, packed)


@contextmanager
def evaluating(trainer: DDPTrainer, replica: Replica) -> Iterator[None]:
    """Rank 0's buffers everywhere, evaluation mode, no gradients; modes and random state are put back, also after an error.

    Not under `torch.inference_mode`: tensors that the model caches must stay usable in training.
    """
    model, world = trainer.model, trainer.world
    replica.send_buffers()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), nullcontext() if trainer.config.seed is None else preserved(world.device):
            yield
    finally:
        try:
            for module, training in modes:
                if type(module).train is not nn.Module.train and module.training is not training:
                    module.train(training)  # it may have done more than to change its mode
        finally:
            for module, training in modes:
                module.training = training
