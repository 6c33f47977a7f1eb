"""What can be wrong with a trainer's arguments, found before anything has cost time, and the same on every rank."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from .config import TrainerConfig
from .data import LOADER_OPTIONS
from .plan import Plan
from .world import World


def check_model(model: Any, optimizer: Any) -> None:
    """TypeError or ValueError for a model that is none, and for an optimizer built on something else."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; found {_kind(model)}")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise TypeError(f"model must be the bare module, the trainer wraps it itself; found {_kind(model)}: pass model.module")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; found {_kind(optimizer)}")
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [tuple(item.shape) for group in optimizer.param_groups for item in group["params"] if id(item) not in own]
    if foreign:
        raise ValueError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's (the first has shape {foreign[0]}): "
            "build it on model.parameters() of the model you pass"
        )


def check_dataset(data: Any, name: str) -> None:
    """TypeError or ValueError for what is no map-style dataset with samples."""
    if isinstance(data, DataLoader):
        raise TypeError(
            f"{name} must be a Dataset, not a DataLoader: the trainer makes the batches. Pass loader.dataset, set batch_size in "
            "TrainerConfig, and give num_workers, collate_fn, ... as loader_options"
        )
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(f"{name} must be a map-style Dataset, with __getitem__ and __len__; found {_kind(data)}")
    if len(data) == 0:
        raise ValueError(f"{name} is empty: {_kind(data)} of length 0")


def named_sets(data: Any) -> dict[str, Dataset[Any]]:
    """Evaluation data by name; a single dataset has the name ''. Checked."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        check_dataset(data, "eval_data")
        return {"": data}
    for name, dataset in data.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"the names of evaluation sets must be non-empty strings; found {name!r}")
        check_dataset(dataset, f"eval_data[{name!r}]")
    return dict(data)


def check_loader_options(options: Mapping[str, Any]) -> None:
    """ValueError for a DataLoader option that the trainer settles itself, or that does not exist."""
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
        raise TypeError(f"loader_options must be a mapping of DataLoader's keyword arguments; found {_kind(options)}")
    for option in options:
        if option in settled:
            raise ValueError(f"loader_options: {option!r} is settled by the trainer: {settled[option]}")
        if option not in LOADER_OPTIONS:
            raise ValueError(f"loader_options: there is no option {option!r}; there are {', '.join(sorted(LOADER_OPTIONS))}")


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
    if not isinstance(sampler, Sampler) and not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        raise TypeError(f"sampler must be a torch.utils.data.Sampler with a length; found {_kind(sampler)}")
    try:
        length = len(sampler)
    except TypeError:
        raise TypeError(f"sampler must have a length: {_kind(sampler)} has none") from None
    if length == 0:
        raise ValueError(f"sampler is empty: {_kind(sampler)} of length 0")


def check_plan(plan: Plan) -> None:
    """ValueError when `drop_last` leaves nothing to train on."""
    if plan.steps_per_epoch == 0:
        raise ValueError(
            f"drop_last=True leaves nothing to train on: {plan.samples} samples are fewer than one global batch of "
            f"{plan.window_size} (world size {plan.world_size}, batch_size {plan.batch_size}). Lower the batch size or set "
            "drop_last=False"
        )


def agree(world: World, model: nn.Module, train_samples: int, eval_sets: Mapping[str, Any], config: TrainerConfig) -> None:
    """Raise ValueError on every rank, naming rank and values, unless all ranks were given the same. Called on every rank."""
    mine: dict[str, Any] = {"the length of train_data": train_samples}
    mine |= {f"the length of eval_data {name}".strip(): len(data) for name, data in eval_sets.items()}
    mine |= {f"config.{name}": value for name, value in config.plain().items()}
    tensors = _tensors(model)
    mine["the model"] = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    gathered = world.gather(mine)
    others = next(({"rank": rank, **theirs} for rank, theirs in enumerate(gathered) if theirs != gathered[0]), None)
    if others is None:
        return
    first, rank = gathered[0], others.pop("rank")
    what = next(name for name in [*first, *others] if first.get(name) != others.get(name))
    left, right = first.get(what), others.get(what)
    if what == "the model":
        described = world.gather(tensors)
        left, right = sorted(set(described[0]) - set(described[rank])), sorted(set(described[rank]) - set(described[0]))
    raise ValueError(f"the ranks were given different things: {what} is {left!r} on rank 0, {right!r} on rank {rank}")


def check_loss(output: Mapping[str, Any]) -> Tensor:
    """The loss in a training step's output, if it can be trained on: TypeError or ValueError naming what was returned."""
    if "loss" not in output:
        raise ValueError(f"training_step must return the key 'loss'; it returned {sorted(output)}")
    loss = output["loss"]
    if not isinstance(loss, Tensor):
        raise TypeError(f"training_step must return the loss as a 0-dim tensor; found {_kind(loss)}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must be a scalar, the mean over the batch's samples; found a tensor of shape {tuple(loss.shape)}. With "
            "reduction='none', take .mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph: nothing to differentiate. It must be computed from model(...) without .detach(), .item() or "
            "torch.no_grad()"
        )
    return loss


def warn_of_evaluation_mode(model: nn.Module, is_main: bool) -> None:
    """`fit` leaves modes alone, so that frozen parts stay frozen; a whole model in evaluation mode was probably forgotten."""
    if not model.training and is_main:
        warnings.warn(
            "the model is in evaluation mode, and fit leaves it there: call model.train() first to train with dropout and batch "
            "statistics",
            UserWarning,
            stacklevel=4,
        )


def _tensors(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [f"{name} {tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}" for name, tensor in named]


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
