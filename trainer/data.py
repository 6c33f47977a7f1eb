"""From positions in the order to batches on the device: fetching, seeding of samples, workers, transfer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from .order import Order
from .randomness import SET_EPOCH, preserved, seed_for
from .workers import loader_options, started

LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
)
"""The keyword arguments of DataLoader that `loader_options` may hold; the trainer settles the others itself."""

_AT_ONCE = 64  # micro-batches

NO_EPOCH = -1
"""In place of an epoch where there is none: in evaluation."""

Request = tuple[int, range, list[int]]
"""One micro-batch to fetch: the epoch, positions in its order, and the dataset indices that stand there."""


def requests(epoch: int, shares: Iterable[range], order: Order) -> Iterator[Request]:
    """The micro-batches of `shares`, ready to be fetched."""
    return ((epoch, share, order(share)) for share in shares)


class Loader:
    """Fetches micro-batches of a map-style dataset, in the order asked for, here or in worker processes.

    `purpose` (see `randomness`) and `seed` decide the random numbers of each sample; ``seed=None`` leaves the generators alone.
    `order_seed` decides what the dataset draws for an epoch.
    """

    def __init__(
        self, dataset: Dataset[Any], options: Mapping[str, Any], seed: int | None, purpose: int, order_seed: int | None = None
    ) -> None:
        options = loader_options(options, seed)
        self._source = _Batches(dataset, options.pop("collate_fn", None), seed, purpose, order_seed)
        self._asked = _Requests()
        self._loader: DataLoader[Any] | None = None
        if options.get("num_workers") or options.get("pin_memory"):
            sampler, collate = self._asked, unchanged
            self._loader = DataLoader(self._source, batch_size=None, sampler=sampler, collate_fn=collate, **options)

    def batches(self, asked: Iterator[Request]) -> Iterator[Any]:
        """The batches asked for, one by one. One iteration at a time."""
        if self._loader is None:  # in this process a DataLoader would add nothing but its time
            return self._source.rows(asked) if self._source.are_rows else map(self._source.__getitem__, asked)
        self._asked.pending = asked
        return started(self._loader)


class _Requests(Sampler[Request]):
    """What the DataLoader takes for its sampler: whatever is asked for next."""

    def __init__(self) -> None:
        self.pending: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.pending


class _Batches(Dataset[Any]):
    """Answers a `Request` with a collated batch; every sample is fetched under its own random numbers."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any] | None,
        seed: int | None,
        purpose: int,
        order_seed: int | None,
    ) -> None:
        self.user_dataset = dataset
        self._order_seed = order_seed
        self._collate = collate or default_collate
        self._seed = seed
        self._purpose = purpose
        self._epoch = NO_EPOCH

    @property
    def are_rows(self) -> bool:
        """Whether the samples are rows of tensors, and a batch nothing but some of them: then `rows` may be asked."""
        return self._collate is default_collate and type(_innermost(self.user_dataset, [])[0]) is TensorDataset

    def rows(self, asked: Iterator[Request]) -> Iterator[list[Tensor]]:
        """The batches asked for, on the device that the tensors are on; it is sent the indices of many batches at once."""
        while chunk := [indices for _, _, indices in islice(asked, _AT_ONCE)]:
            dataset, indices = _innermost(self.user_dataset, list(chain.from_iterable(chunk)))
            tensors: tuple[Tensor, ...] = dataset.tensors
            rows = np.array(indices)
            if (
                dataset is not self.user_dataset and rows.dtype.kind in "iu"
            ):  # a Subset's may be of any integer type, and negative
                rows = rows.astype(np.int64, copy=False)
                rows += (rows < 0) * len(dataset)
            there = {device: _sent(torch.from_numpy(rows), device) for device in {tensor.device for tensor in tensors}}
            parts = [torch.split(there[tensor.device], [len(indices) for indices in chunk]) for tensor in tensors]
            for columns in zip(*parts, strict=True):
                yield [tensor.index_select(0, part) for tensor, part in zip(tensors, columns, strict=True)]

    def __getitem__(self, request: Request) -> Any:
        epoch, positions, indices = request
        dataset: Any = self.user_dataset
        if epoch not in (self._epoch, NO_EPOCH):  # here, because living workers have a copy of the dataset
            self._epoch = epoch
            tell_epoch(dataset, epoch, self._order_seed)
        if self.are_rows:
            return next(self.rows(iter([request])))
        dataset, indices = _innermost(dataset, indices)
        call, samples = "__getitems__", []
        of: Any = indices
        try:
            if _answers_batches(dataset):  # draws per batch
                seed_for(self._purpose, self._seed, epoch, positions[0])
                samples = dataset.__getitems__(indices)
                if isinstance(samples, list) and len(samples) != len(indices):  # else they are collated already
                    raise ValueError(f"__getitems__ must return every sample asked for: {len(indices)}; found {len(samples)}")
            else:
                for position, index in zip(positions, indices, strict=True):
                    call, of = "__getitem__", index
                    seed_for(self._purpose, self._seed, epoch, position)
                    samples.append(dataset[index])
            call, of = "collate_fn", indices
            return self._collate(samples)
        except Exception as error:
            where = f"({type(dataset).__name__}: {call} of {of}, in {_named(epoch)})"
            if isinstance(error, StopIteration):  # which would pass for the end of all batches
                raise RuntimeError(f"StopIteration is no error that a dataset may raise {where}") from error
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(where)
            raise


def tell_epoch(dataset: Any, epoch: int, seed: int | None) -> None:
    """Tell every dataset that has a `set_epoch`, also inside of torch's own combinations, which epoch it is.

    What it draws there, such as an order of its own, is the same in every rank and worker, and after a resume.
    """
    with preserved(torch.device("cpu")):
        seed_for(SET_EPOCH, seed, epoch)
        _tell(dataset, epoch)


def _tell(dataset: Any, epoch: int) -> None:
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)
    elif isinstance(dataset, Subset):
        _tell(dataset.dataset, epoch)
    elif isinstance(dataset, (ConcatDataset, ChainDataset, StackDataset)):
        parts: Any = dataset.datasets
        parts = parts.values() if isinstance(parts, dict) else parts
        for part in [] if isinstance(parts, Iterator) else parts:  # an iterator would be empty afterwards
            _tell(part, epoch)


def _innermost(dataset: Any, indices: list[int]) -> tuple[Any, list[int]]:
    """The dataset that a Subset is of, and its indices: a Subset's __getitems__ would hide what that one answers."""
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    return dataset, indices


def _named(epoch: int) -> str:
    return "an evaluation or prediction" if epoch == NO_EPOCH else f"epoch {epoch}"


def _answers_batches(dataset: Any) -> bool:
    """Whether it answers a whole batch at once. Subset and StackDataset have the method, but may only pass on what they hold."""
    method = getattr(type(dataset), "__getitems__", None)
    if isinstance(dataset, Subset) and method is Subset.__getitems__:
        return _answers_batches(dataset.dataset)
    if isinstance(dataset, StackDataset) and method is StackDataset.__getitems__:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return any(map(_answers_batches, parts))
    return callable(getattr(dataset, "__getitems__", None))


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on `device`, for which the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _moved(batch: Any, device: torch.device) -> Any:
    """``batch.to(device)``, without waiting for a GPU where its `to` knows of that."""
    if device.type == "cuda":
        with suppress(TypeError):
            return batch.to(device, non_blocking=True)
    return batch.to(device)


def unchanged(batch: Any) -> Any:
    """A `collate_fn` for what is collated already."""
    return batch


def to_device(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """`batch` with every tensor on `device`; containers keep their types, everything else is passed through as it is.

    Looks into mappings, lists, tuples, named tuples and dataclasses; an object with a method ``to`` is asked itself. Nothing is
    changed in place. Copies from pinned memory to a GPU do not wait. `channels_last`: lay out four dimensions so.
    """
    if isinstance(batch, Tensor):
        if channels_last and batch.ndim == 4:
            return batch.to(device, non_blocking=device.type == "cuda", memory_format=torch.channels_last)
        return batch if batch.device == device else batch.to(device, non_blocking=device.type == "cuda")
    if type(batch) is list:  # what most batches are
        return [to_device(value, device, channels_last) for value in batch]
    # PackedSequence, tokenizer outputs, graphs, ...; a mapping's attributes may be its keys
    if callable(getattr(type(batch) if isinstance(batch, Mapping) else batch, "to", None)):
        moved = _moved(batch, device)
        return batch if moved is None else moved  # None: it has moved itself
    if isinstance(batch, MutableMapping):
        mapping = copy.copy(batch)
        for key, value in batch.items():
            mapping[key] = to_device(value, device, channels_last)
        return mapping
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device, channels_last) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple):
        values = [to_device(value, device, channels_last) for value in batch]
        return batch._make(values) if hasattr(batch, "_make") else type(batch)(values)
    if isinstance(batch, list):
        moved_list = copy.copy(batch)
        moved_list[:] = [to_device(value, device, channels_last) for value in batch]
        return moved_list
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved_fields = copy.copy(batch)
        for item in dataclasses.fields(batch):
            object.__setattr__(moved_fields, item.name, to_device(getattr(batch, item.name), device, channels_last))
        return moved_fields
    return batch
