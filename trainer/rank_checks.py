"""What every rank must have been given alike."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset, Subset

from .config import TrainerConfig
from .world import World


def check_same_on_all_ranks(
    world: World, model: nn.Module, train_data: Any, samples: int | None, eval_sets: Mapping[str, Any], config: TrainerConfig
) -> None:
    """Raise ValueError on every rank, naming rank and values, unless all ranks were given the same. Called on every rank."""
    sets = {f"eval_data {name}".strip(): data for name, data in eval_sets.items()}
    mine: dict[str, Any] = {"the length of train_data": samples}
    mine |= {f"the length of {name}": None if isinstance(data, IterableDataset) else len(data) for name, data in sets.items()}
    mine["the order of eval_data"] = list(eval_sets)
    for name, data in {"train_data": train_data, **sets}.items():
        mine[f"a checksum of the indices of {name}"] = _of_indices(data)
    mine |= {f"config.{name}": value for name, value in config.plain().items()}
    tensors = _tensors(model)
    mine["the model"] = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    gathered = world.gather(mine)
    rank = next((rank for rank, theirs in enumerate(gathered) if theirs != gathered[0]), None)
    if rank is None:
        return
    first, others = gathered[0], gathered[rank]
    what = next(name for name in [*first, *others] if first.get(name) != others.get(name))
    left, right = first.get(what), others.get(what)
    if what == "the model":
        described = world.gather(tensors)
        left, right = sorted(set(described[0]) - set(described[rank])), sorted(set(described[rank]) - set(described[0]))
    raise ValueError(
        f"the ranks were given different things: {what} is {left!r} on rank 0, {right!r} on rank {rank}. Give every rank the same"
    )


def _of_indices(dataset: Any) -> int | None:
    """A checksum of about a thousand of a `Subset`'s indices; None for any other dataset."""
    if not isinstance(dataset, Subset):
        return None
    some = range(0, len(dataset.indices), max(1, len(dataset.indices) // 1000))
    return zlib.crc32(repr([[dataset.indices[index] for index in some], _of_indices(dataset.dataset)]).encode())


def _tensors(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [f"{name} {tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}" for name, tensor in named]
