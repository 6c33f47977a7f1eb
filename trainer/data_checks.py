"""What is checked of data, samplers and DataLoader options, before anything has cost time."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from .config import TrainerConfig
from .data import LOADER_OPTIONS
from .plan import Plan

_log = logging.getLogger("trainer")


def check_dataset(data: Any, name: str) -> None:
    """TypeError or ValueError for what is no map-style dataset with samples."""
    if isinstance(data, DataLoader):
        raise TypeError(
            f"{name} must be a Dataset, not a DataLoader: the trainer makes the batches. Pass loader.dataset, set batch_size in "
            "TrainerConfig, and give num_workers, collate_fn, ... as loader_options"
        )
    if isinstance(data, list) and any(isinstance(item, (Dataset, DataLoader)) for item in data[:1]):
        raise TypeError(
            f"{name} must be one Dataset; found a list of them: join them in a torch.utils.data.ConcatDataset (for several "
            "evaluation sets pass a mapping of names to datasets)"
        )
    missing = " and ".join(method for method in ("__getitem__", "__len__") if not hasattr(data, method))
    if missing or (isinstance(data, (str, bytes, tuple, type, Mapping)) and not isinstance(data, Dataset)):
        hint = ": tensors go into a torch.utils.data.TensorDataset" if isinstance(data, tuple) else ""
        hint = f", which has no {missing}" if missing else hint
        raise TypeError(f"{name} must be a map-style Dataset, with __getitem__ and __len__; found {kind_of(data)}{hint}")
    if isinstance(data, IterableDataset):  # it has a __getitem__, which is Dataset's own
        raise TypeError(f"{name} must be a map-style Dataset, with __getitem__ and __len__; found {kind_of(data)}, a stream")
    if _length(data, name) == 0:
        raise ValueError(f"{name} is empty: {kind_of(data)} of length 0")


def check_stream(stream: Any, sampler: Any, config: TrainerConfig) -> None:
    """ValueError for what a dataset without a length cannot do."""
    if sampler is not None:
        raise ValueError("a sampler gives positions in train_data, but an IterableDataset has none: leave one of them out")
    if config.drop_last and getattr(stream, "sharded", False):
        raise ValueError("drop_last=True needs to know the end beforehand, which a stream that shards itself does not tell")


def check_some(window: Any) -> None:
    """ValueError for an epoch of a stream in which nothing came."""
    if window is None:
        raise ValueError(
            "train_data, an IterableDataset, gave nothing to train on in this epoch: it is empty, or used up, or shorter than "
            "one global batch, with drop_last=True"
        )


def named_sets(data: Any, argument: str) -> dict[str, Dataset[Any]]:
    """Evaluation data by name; a single dataset has the name ''. Checked; `argument` is what the user knows it by."""
    if data is None:
        return {}
    if not isinstance(data, Mapping) or isinstance(data, Dataset):
        _check_eval_set(data, argument)
        return {"": data}
    if not data:
        raise ValueError(f"{argument} is a mapping without datasets: pass some, or None")
    for name, dataset in data.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"the names in {argument} must be non-empty strings; found {name!r}")
        _check_eval_set(dataset, f"{argument}[{name!r}]")
    return dict(data)


def _check_eval_set(data: Any, name: str) -> None:
    if not isinstance(data, IterableDataset):
        check_dataset(data, name)


def check_loader_options(options: Any) -> None:
    """TypeError or ValueError for a DataLoader option that the trainer settles itself, or that DataLoader would not take."""
    settled = {
        "batch_size": "set TrainerConfig.batch_size",
        "shuffle": "set TrainerConfig.shuffle",
        "drop_last": "set TrainerConfig.drop_last",
        "sampler": "pass sampler= to DDPTrainer",
        "batch_sampler": "pass sampler= to DDPTrainer and set TrainerConfig.batch_size",
        "dataset": "pass train_data and eval_data",
        "in_order": "the order is what makes a run reproducible",
    }
    if not isinstance(options, Mapping):
        raise TypeError(f"loader_options must be a mapping of DataLoader's keyword arguments; found {kind_of(options)}")
    for option in options:
        if option in settled:
            raise ValueError(f"loader_options: {option!r} is settled by the trainer: {settled[option]}")
        if option not in LOADER_OPTIONS:
            raise ValueError(f"loader_options: there is no option {option!r}; there are {', '.join(sorted(LOADER_OPTIONS))}")
    _check_values(options)


def _check_values(options: Mapping[str, Any]) -> None:
    workers, generator = options.get("num_workers", 0), options.get("generator")
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise TypeError(f"loader_options: num_workers must be a Python int; found {workers!r} ({kind_of(workers)})")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"loader_options: generator must be a torch.Generator; found {kind_of(generator)}")
    for name in ("collate_fn", "worker_init_fn"):
        if options.get(name) is not None and not callable(options[name]):
            raise TypeError(f"loader_options: {name} must be callable; found {kind_of(options[name])}")
    if workers == 0 and options.get("timeout"):
        raise ValueError(f"loader_options: timeout={options['timeout']} needs num_workers of 1 or more")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of too many workers, say: it comes again
            DataLoader([], batch_size=None, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"loader_options: DataLoader refuses them: {error}") from error


def check_sampler(sampler: Any) -> None:
    """TypeError or ValueError for a sampler that gives no global order of single samples."""
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "sampler: a DistributedSampler splits the data itself, and pads it; leave it out, the trainer splits exactly"
        )
    if isinstance(sampler, BatchSampler):
        raise ValueError(
            "sampler: a BatchSampler gives batches, not samples; pass its inner sampler and set TrainerConfig.batch_size"
        )
    iterable = hasattr(sampler, "__iter__") and hasattr(sampler, "__len__") and not isinstance(sampler, (str, bytes, type))
    if not isinstance(sampler, Sampler) and not iterable:
        raise TypeError(f"sampler must be a torch.utils.data.Sampler with a length; found {kind_of(sampler)}")
    if not hasattr(sampler, "__len__"):
        raise TypeError(f"sampler must have a length, __len__: {kind_of(sampler)} has none")
    if _length(sampler, "sampler") == 0:
        raise ValueError(f"sampler is empty: {kind_of(sampler)} of length 0")


def check_index(index: Any) -> int:
    """What a sampler gave, as an int. TypeError for what is none."""
    if isinstance(index, int):
        return index
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(f"the sampler must give indices of single samples, ints; found {index!r} ({kind_of(index)})") from None


def check_plan(plan: Plan, config: TrainerConfig) -> None:
    """ValueError when `drop_last` leaves nothing to train on. Rank 0 tells of processes that have nothing to do."""
    if (idle := plan.world_size - plan.window_size) > 0 and plan.rank == 0:
        _log.warning(
            "a global batch of %d samples leaves %d of %d processes without any in every step: raise global_batch_size",
            *(plan.window_size, idle, plan.world_size),
        )
    if plan.steps_per_epoch == 0:
        accumulation = f" x accumulation_steps {config.accumulation_steps}" if config.accumulation_steps > 1 else ""
        how = f"world size {plan.world_size} x batch_size {plan.batch_size}{accumulation}"
        if config.global_batch_size is not None:
            how = f"global_batch_size={config.global_batch_size}; world size {plan.world_size}"
        raise ValueError(
            f"drop_last=True leaves nothing to train on: {plan.samples} samples are fewer than one global batch of "
            f"{plan.window_size} ({how}). Lower it, or set drop_last=False"
        )


def _length(data: Any, name: str) -> int:
    try:
        return len(data)
    except (TypeError, ValueError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name}: the length of {kind_of(data)} cannot be used: {error}") from error


def kind_of(value: Any) -> str:
    """What to call `value` in an error."""
    if value is None:
        return "None"
    kind = value if isinstance(value, type) else type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {name} itself, no instance of it" if isinstance(value, type) else name
