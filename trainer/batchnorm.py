"""BatchNorm over the batches of all ranks together, and what that needs of the split."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from .plan import Window, most_and_fewest
from .world import World


def synchronized(model: nn.Module, world: World) -> nn.Module:
    """`model` with SyncBatchNorm in place of every BatchNorm, parameters and keys kept; called with the model on its device.

    Torch has it for CUDA only: elsewhere the model stays as it is, with one warning on rank 0. One process needs none.
    """
    if world.size == 1:
        return model
    if world.device.type != "cuda":
        if world.is_main:
            warnings.warn(
                f"sync_batchnorm=True has no effect: SyncBatchNorm works on CUDA only, and this runs on {world.device.type}. "
                "Each rank normalises by its own batches",
                RuntimeWarning,
                stacklevel=4,
            )
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def is_synchronized(model: nn.Module, world: World) -> bool:
    """Whether the model has SyncBatchNorm on several ranks, so that all must run as many forwards.

    ValueError where it has, and the device cannot do it.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if not layers or world.size == 1:
        return False
    if world.device.type == "cpu":
        raise ValueError(
            f"SyncBatchNorm does not work on CPU: {', '.join(layers)}. Pass the model with BatchNorm, and sync_batchnorm=True in "
            "TrainerConfig, which converts it where that works"
        )
    return True


def check_windows(sizes: Sequence[int], batch_size: int, world_size: int) -> None:
    """ValueError for a window that gives some ranks more micro-batches than others: those would wait for ever."""
    for size in sizes:
        most, fewest = -(-size // world_size), size // world_size  # samples of rank 0, of the last rank
        if len(set(most_and_fewest(size, batch_size, world_size))) > 1:
            raise ValueError(
                f"SyncBatchNorm needs as many micro-batches on every rank, but a window of {size} samples gives {most} samples "
                f"to rank 0 and {fewest} to rank {world_size - 1}, in micro-batches of {batch_size}. For the epoch's last window "
                f"set drop_last=True; for the others choose a global batch that is a multiple of {world_size}"
            )


def check_window(window: Window, batch_size: int, world_size: int) -> None:
    """The same for a window as it comes; ValueError on every rank."""
    if window.spread is None:
        check_windows([window.size], batch_size, world_size)
    elif len(set(window.spread)) > 1:
        most, fewest = window.spread
        raise ValueError(
            f"SyncBatchNorm needs as many micro-batches on every rank, but of a window of {window.size} samples the stream's "
            f"shards gave {most} to one rank and {fewest} to another: let all shards hold as many samples"
        )
