"""Distributed evaluation: every sample exactly once, on the bare module, leaving everything as it was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from .data import NO_EPOCH, Loader, requests, to_device
from .meters import Meters
from .metrics import WeightedSums, agree_on_keys, as_mapping, means
from .order import sequence
from .plan import Plan, chunks
from .precision import Precision
from .randomness import EVAL_SAMPLE, EVAL_STEP, mix, preserved, seed_generators
from .replica import Replica
from .stream import open_stream

if TYPE_CHECKING:
    from .ddp_trainer import DDPTrainer


class Parts(NamedTuple):
    """What evaluation needs of a trainer besides its public names."""

    replica: Replica
    precision: Precision


def evaluate(trainer: DDPTrainer, parts: Parts, dataset: Dataset[Any], options: Mapping[str, Any]) -> dict[str, float]:
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
        batches = _of_shares(trainer, dataset, options, shares)
    try:
        with _evaluating(trainer, parts):
            for samples, batch in batches:
                batch = _prepared(trainer, batch, number)
                with parts.precision.autocast():
                    output = as_mapping(trainer.eval_step(trainer.model, batch), "eval_step")
                sums.add(meters.take_from(output), samples)
                counted, number = counted + samples, number + 1
                del batch, output  # their memory is the next ones', while it is still in the processor's cache
        sent = Part(
            sums.keys,
            sums.take(sums.keys).tolist() if sums.keys else [],
            meters.keys,
            counted,
            length,
            parts.replica.fingerprint(),
        )
        gathered = world.gather(sent)
        metrics = _reduced(trainer, parts.replica, gathered)
        return metrics | meters.compute([part.meters for part in gathered], [part.counted > 0 for part in gathered])
    finally:
        meters.reset()


def predict(trainer: DDPTrainer, parts: Parts, dataset: Dataset[Any], options: Mapping[str, Any]) -> Any:
    """`predict_step`'s outputs in dataset order on rank 0, None on the others. Rank r takes the r-th of W stretches.

    Raises ValueError for outputs without a row for each sample and for datasets of different lengths, RuntimeError when the
    ranks' parameters differ.
    """
    world, size = trainer.world, trainer.config.eval_batch_size or trainer.config.batch_size
    length = len(dataset)  # type: ignore[arg-type]
    own = range(world.rank * length // world.size, (world.rank + 1) * length // world.size)
    outputs = []
    with _evaluating(trainer, parts):
        for number, (samples, batch) in enumerate(_of_shares(trainer, dataset, options, list(chunks(own, size)))):
            batch = _prepared(trainer, batch, number)
            with parts.precision.autocast():
                output = _listed(to_device(trainer.predict_step(trainer.model, batch), torch.device("cpu")), samples)
            _check_rows(output, samples)
            outputs.append(output)
    lengths, fingerprints = map(set, zip(*world.gather((length, parts.replica.fingerprint())), strict=True))
    if len(lengths) > 1:
        raise ValueError(f"the ranks predict on datasets of {sorted(lengths)} samples: pass the same one on every rank")
    if len(fingerprints) > 1:
        parts.replica.raise_drift(trainer.state.step)
    gathered = world.gather_on_main(outputs)
    return None if gathered is None else joined([output for part in gathered for output in part])


def _listed(output: Any, samples: int) -> Any:
    """`output` with a list in place of a tuple of texts, one for each sample, which is how `default_collate` leaves them."""
    if isinstance(output, Mapping):
        return {key: _listed(value, samples) for key, value in output.items()}
    if not isinstance(output, tuple):
        return output
    if len(output) == samples and all(isinstance(value, (str, bytes)) for value in output):
        return list(output)
    values = [_listed(value, samples) for value in output]
    return output._make(values) if hasattr(output, "_make") else type(output)(values)


def _check_rows(output: Any, samples: int) -> None:
    """ValueError for what has no row for each sample: what joining them gives would depend on how the data was split."""
    if isinstance(output, (Mapping, tuple)):
        for part in output.values() if isinstance(output, Mapping) else output:
            _check_rows(part, samples)
    elif output is not None and (found := _other_than_rows(output, samples)):
        raise ValueError(f"predict_step must return a row for each sample of the batch; found {found}")


def _other_than_rows(output: Any, samples: int) -> str:
    if isinstance(output, list):
        return "" if len(output) == samples else f"a list of {len(output)} for {samples} samples"
    if not isinstance(output, (Tensor, np.ndarray)):
        return f"{type(output).__name__} (tensors, arrays, lists, and tuples and mappings of them have rows)"
    kind = "tensor" if isinstance(output, Tensor) else "array"
    if output.ndim == 0:
        return f"a 0-dim {kind}"
    return "" if len(output) == samples else f"a {kind} of shape {tuple(output.shape)} for {samples} samples"


def joined(outputs: list[Any]) -> Any:
    """Batches of outputs as one, in order.

    Tensors and arrays along their first dimension (a list of samples where their other dimensions differ), lists one after
    another, tuples and mappings field by field.
    """
    first = outputs[0]
    given = [output for output in outputs if output is not None]
    if not given:
        return None
    if len(given) < len(outputs):
        raise ValueError("predict_step gave None for some batches and rows for others: which ones, depends on the split")
    if isinstance(first, (Tensor, np.ndarray)):
        if len({output.shape[1:] for output in outputs}) > 1:
            return [sample for output in outputs for sample in output]
        return torch.cat(outputs) if isinstance(first, Tensor) else np.concatenate(outputs)
    if isinstance(first, Mapping):
        return {key: joined([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple):
        values = [joined(list(column)) for column in zip(*outputs, strict=True)]
        return first._make(values) if hasattr(first, "_make") else type(first)(values)
    return [sample for output in outputs for sample in output]


def _of_shares(
    trainer: DDPTrainer, dataset: Dataset[Any], options: Mapping[str, Any], shares: list[range]
) -> Iterator[tuple[int, Any]]:
    loader = Loader(dataset, {**options, "persistent_workers": False}, trainer.config.seed, EVAL_SAMPLE)
    batches = loader.batches(requests(NO_EPOCH, iter(shares), sequence))
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


def _prepared(trainer: DDPTrainer, batch: Any, number: int) -> Any:
    if trainer.config.seed is not None:
        seed_generators(mix(EVAL_STEP, trainer.config.seed, number, trainer.world.rank), trainer.world.device)
    return trainer.prepare_batch(batch)


class Part(NamedTuple):
    """What one rank contributes."""

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


def _reduced(trainer: DDPTrainer, replica: Replica, parts: list[Part]) -> dict[str, float]:
    """The same on every rank: summed in rank order."""
    if len({part.fingerprint for part in parts}) > 1:
        replica.raise_drift(trainer.state.step)
    agree_on_keys([part.keys + part.meters for part in parts], "eval_step")
    keys = next((part.keys for part in parts if part.counted), ())
    counted, lengths = sum(part.counted for part in parts), {part.length for part in parts}
    if counted == 0:
        raise ValueError("nothing to evaluate: the stream gave no sample on any rank")
    if lengths not in ({counted}, {None}):
        held = sorted(length or 0 for length in lengths)
        raise RuntimeError(
            f"{counted} samples were evaluated, but the ranks' datasets hold {held}: pass the same one on every rank"
        )
    packed = [0.0] * (2 * len(keys))
    for part in parts:
        for place, key in enumerate(part.keys):
            packed[keys.index(key)] += part.sums[place]
            packed[len(keys) + keys.index(key)] += part.sums[len(part.keys) + place]
    return means(keys, packed)


@contextmanager
def _evaluating(trainer: DDPTrainer, parts: Parts) -> Iterator[None]:
    """Rank 0's buffers everywhere, evaluation mode, no gradients; modes and random state are put back, also after an error.

    Not under `torch.inference_mode`: tensors that the model caches must stay usable in training.
    """
    model, world = trainer.model, trainer.world
    parts.replica.send_buffers()
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
