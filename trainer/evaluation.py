"""Distributed evaluation: every sample exactly once, on the bare module, leaving everything as it was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from .data import Loader, requests
from .metrics import WeightedSums, agree_on_keys, as_mapping, means
from .order import sequence
from .plan import chunks
from .randomness import EVAL_SAMPLE, EVAL_STEP, mix, preserved, seed_generators
from .replica import Replica

if TYPE_CHECKING:
    from .ddp_trainer import DDPTrainer


def evaluate(trainer: DDPTrainer, replica: Replica, dataset: Dataset[Any], options: Mapping[str, Any]) -> dict[str, float]:
    """The means of `eval_step`'s values over `dataset`, the same on every rank, which all call this.

    Rank r takes samples r, r + W, ... in order. Raises RuntimeError when the samples counted are not the dataset's, or the
    ranks' parameters differ; ValueError for keys that differ between ranks.
    """
    world, config = trainer.world, trainer.config
    length = len(dataset)  # type: ignore[arg-type]
    shares = list(chunks(range(world.rank, length, world.size), config.eval_batch_size or config.batch_size))
    sums, counted = WeightedSums(world.device), 0
    world.broadcast_tensors(list(trainer.model.buffers()))  # each rank's own have drifted, as BatchNorm's do
    with _evaluating(trainer.model), nullcontext() if config.seed is None else preserved(world.device):
        loader = Loader(dataset, {**options, "persistent_workers": False}, config.seed, EVAL_SAMPLE)
        for number, batch in enumerate(loader.batches(requests(0, iter(shares), sequence))):
            batch = trainer.prepare_batch(batch)
            if config.seed is not None:
                seed_generators(mix(EVAL_STEP, config.seed, number, world.rank), world.device)
            sums.add(as_mapping(trainer.eval_step(trainer.model, batch), "eval_step"), len(shares[number]))
            counted += len(shares[number])
    keys = sums.keys
    gathered = world.gather((keys, sums.take(keys).tolist() if keys else [], counted, length, replica.fingerprint()))
    return _reduced(trainer, replica, gathered)


Part = tuple[tuple[str, ...], list[float], int, int, tuple[int, ...]]
"""What one rank contributes: keys, sums and weights, samples counted, length of its dataset, fingerprint of its parameters."""


def _reduced(trainer: DDPTrainer, replica: Replica, parts: list[Part]) -> dict[str, float]:
    """The same on every rank: summed in rank order."""
    if len({fingerprint for *_, fingerprint in parts}) > 1:
        replica.raise_drift(trainer.state.step)
    keys = agree_on_keys([keys for keys, *_ in parts], "eval_step")
    counted, lengths = sum(part[2] for part in parts), {part[3] for part in parts}
    if lengths != {counted}:
        raise RuntimeError(
            f"{counted} samples were evaluated, but the ranks' datasets hold {sorted(lengths)}: pass the same one on every rank"
        )
    packed = [0.0] * (2 * len(keys))
    for own, sums, *_ in parts:
        for place, key in enumerate(own):
            packed[keys.index(key)] += sums[place]
            packed[len(keys) + keys.index(key)] += sums[len(own) + place]
    return means(keys, packed)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every sub-module's own mode is put back, also after an error.

    Not under `torch.inference_mode`: tensors that the model caches must stay usable in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
