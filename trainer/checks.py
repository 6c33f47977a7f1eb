"""What is checked of a trainer's arguments, before anything has cost time, and of what its steps are given and return."""

from __future__ import annotations

import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from .config import TrainerConfig
from .data import LOADER_OPTIONS
from .failure import with_text
from .method_checks import misfit
from .metrics import Mean
from .plan import Plan
from .state import TrainerState
from .world import World

_log = logging.getLogger("trainer")
NO_LOSS_FN = "the default training_step needs loss_fn: pass loss_fn=... to DDPTrainer, or override training_step"


def check_model(model: Any, optimizer: Any, own_update: bool) -> None:
    """TypeError or ValueError for a model that is none or unfinished, and for an optimizer built on something else.

    `own_update`: whether the script has its own way to call the optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; found {_kind(model)}")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise TypeError(f"model must be the bare module, the trainer wraps it itself; found {_kind(model)}: pass model.module")
    if unfinished := [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]:
        raise ValueError(
            f"the model is not built yet: {', '.join(unfinished)} have no shape before the first forward. Call model(...) on one "
            "batch, then build the optimizer"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; found {_kind(optimizer)}")
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [tuple(item.shape) for group in optimizer.param_groups for item in group["params"] if id(item) not in own]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the optimizer's parameters are not the model's (the first has shape {foreign[0]}): build it on "
            "model.parameters() of the model you pass"
        )
    if not own_update and (signature := misfit(type(optimizer).step, 1)):
        wanted = ", ".join([*signature.parameters][1:])
        raise TypeError(
            f"optimizer: {type(optimizer).__name__}.step takes ({wanted}), a function that computes the "
            "loss anew, which no micro-batch of a window can: take another optimizer, or override optimizer_step"
        )


def check_settings(config: Any, world: Any, loss_fn: Any) -> None:
    """TypeError for what is no config, no world or no loss function; ValueError for options that DDP would not take."""
    if not isinstance(config, TrainerConfig):
        raise TypeError(f"config must be a TrainerConfig, as in config=TrainerConfig(epochs=3); found {_kind(config)}")
    if not isinstance(world, World | None):
        raise TypeError(f"world must be a World, as World.from_env() returns it; found {_kind(world)}")
    if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
        raise TypeError(f"loss_fn must be callable as loss_fn(outputs, targets); found {_kind(loss_fn)}")
    _check_ddp_options(config.ddp_options)


def check_loss_fn(loss_fn: Any) -> None:
    """ValueError for what the default `training_step` cannot train with."""
    if loss_fn is None:
        raise ValueError(NO_LOSS_FN)
    if getattr(loss_fn, "reduction", None) == "sum":
        raise ValueError(
            f"loss_fn: {type(loss_fn).__name__} has reduction='sum', but the default training_step takes means over the batch's "
            "samples: use reduction='mean', or override training_step and return Mean(total, count)"
        )


def _check_ddp_options(options: Mapping[str, Any]) -> None:
    settled = ("module", "device_ids", "output_device", "dim", "process_group", "device_mesh", "static_graph")
    known = [name for name in inspect.signature(nn.parallel.DistributedDataParallel).parameters if name not in settled]
    for option in options:
        if option in settled and option != "static_graph":  # of which TrainerConfig lets only False pass
            raise ValueError(f"ddp_options: {option!r} is settled by the trainer, from model and world: leave it out")
        if option not in (*known, *settled):
            raise ValueError(f"ddp_options: DistributedDataParallel has no option {option!r}; there are {', '.join(known)}")


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
        raise TypeError(f"{name} must be a map-style Dataset, with __getitem__ and __len__; found {_kind(data)}{hint}")
    if isinstance(data, IterableDataset):  # it has a __getitem__, which is Dataset's own
        raise TypeError(f"{name} must be a map-style Dataset, with __getitem__ and __len__; found {_kind(data)}, a stream")
    if _length(data, name) == 0:
        raise ValueError(f"{name} is empty: {_kind(data)} of length 0")


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
        raise TypeError(f"loader_options must be a mapping of DataLoader's keyword arguments; found {_kind(options)}")
    for option in options:
        if option in settled:
            raise ValueError(f"loader_options: {option!r} is settled by the trainer: {settled[option]}")
        if option not in LOADER_OPTIONS:
            raise ValueError(f"loader_options: there is no option {option!r}; there are {', '.join(sorted(LOADER_OPTIONS))}")
    _check_values(options)


def _check_values(options: Mapping[str, Any]) -> None:
    workers, generator = options.get("num_workers", 0), options.get("generator")
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise TypeError(f"loader_options: num_workers must be a Python int; found {workers!r} ({_kind(workers)})")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"loader_options: generator must be a torch.Generator; found {_kind(generator)}")
    for name in ("collate_fn", "worker_init_fn"):
        if options.get(name) is not None and not callable(options[name]):
            raise TypeError(f"loader_options: {name} must be callable; found {_kind(options[name])}")
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
        raise TypeError(f"sampler must be a torch.utils.data.Sampler with a length; found {_kind(sampler)}")
    if not hasattr(sampler, "__len__"):
        raise TypeError(f"sampler must have a length, __len__: {_kind(sampler)} has none")
    if _length(sampler, "sampler") == 0:
        raise ValueError(f"sampler is empty: {_kind(sampler)} of length 0")


def check_index(index: Any) -> int:
    """What a sampler gave, as an int. TypeError for what is none."""
    if isinstance(index, int):
        return index
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(f"the sampler must give indices of single samples, ints; found {index!r} ({_kind(index)})") from None


def check_plan(plan: Plan, config: TrainerConfig) -> None:
    """ValueError when `drop_last` leaves nothing to train on."""
    if plan.steps_per_epoch == 0:
        accumulation = f" x accumulation_steps {config.accumulation_steps}" if config.accumulation_steps > 1 else ""
        how = f"world size {plan.world_size} x batch_size {plan.batch_size}{accumulation}"
        if config.global_batch_size is not None:
            how = f"global_batch_size={config.global_batch_size}; world size {plan.world_size}"
        raise ValueError(
            f"drop_last=True leaves nothing to train on: {plan.samples} samples are fewer than one global batch of "
            f"{plan.window_size} ({how}). Lower it, or set drop_last=False"
        )


def check_loss(output: Mapping[str, Any]) -> Tensor | Mean:
    """The loss in a training step's output, if it can be trained on: TypeError or ValueError naming what was returned."""
    if "loss" not in output:
        raise ValueError(f"training_step must return a mapping with the key 'loss'; its keys are {list(output)}")
    loss: Tensor | Mean = output["loss"]
    total = loss.total if isinstance(loss, Mean) else loss
    if not isinstance(total, Tensor):
        raise TypeError(
            "training_step must return the loss as a 0-dim tensor, as the loss function gave it (without .item()), or as a Mean "
            f"of such a sum; found {_kind(total)}"
        )
    if total.numel() != 1:
        wanted = "the sum over the batch's items" if isinstance(loss, Mean) else "the mean over the batch's samples"
        raise ValueError(
            f"the loss must be a scalar, {wanted}; found a tensor of shape {tuple(total.shape)}. With reduction='none', take "
            f"{'.sum()' if isinstance(loss, Mean) else '.mean()'}"
        )
    if not total.requires_grad:
        raise ValueError(
            "the loss has no graph: nothing to differentiate. It must be computed from model(...) without .detach(), .item() or "
            "torch.no_grad()"
        )
    if total.is_complex():
        raise ValueError(f"the loss must be a real number; found {total.dtype}: take .real or .abs()")
    return loss


def check_pair(batch: Any) -> tuple[Any, Any]:
    """A batch of the default steps. TypeError for what is not ``(inputs, targets)``."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(
            f"the default training_step takes batches (inputs, targets); found {_kind(batch)}{length}: override training_step, "
            "or let each sample of the dataset be such a pair"
        )
    return batch[0], batch[1]


def summarized(summarize: Callable[[dict[str, float]], Any], means: dict[str, float]) -> dict[str, float]:
    """What `summarize` makes of `means`. TypeError for what is no dict of numbers."""
    given = dict(means)
    try:
        metrics = summarize(means)
    except (ArithmeticError, LookupError) as error:
        text = (
            f"summarize raised {type(error).__name__}: {error}, given {given}. It is called for training reports, for an epoch's "
            "means and for evaluations, also where numbers have grown without bounds"
        )
        raise with_text(text, error) from error
    if not isinstance(metrics, dict):
        found = "None (is a return missing?)" if metrics is None else _kind(metrics)
        raise TypeError(f"summarize must return the metrics, a dict of numbers by name; it returned {found}")
    for key, value in metrics.items():
        if not isinstance(key, str) or not isinstance(value, (int, float, Real, np.bool_)):
            raise TypeError(
                f"summarize must return numbers by name; found {key!r}: {value!r} ({_kind(value)}); float(...) makes one"
            )
    return {key: value if type(value) in (int, float) else float(value) for key, value in metrics.items()}


def check_trained(model: nn.Module, optimizer: Optimizer, is_main: bool) -> None:
    """Warn of parameters that require a gradient and are not the optimizer's; ValueError when none is."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trainable = [(name, id(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad]
    left_out = [name for name, key in trainable if key not in held]
    remedy = "build it on model.parameters(), add them with add_param_group, or freeze them with requires_grad_(False)"
    if left_out and len(left_out) == len(trainable):
        raise ValueError(f"no parameter that requires a gradient is the optimizer's, so nothing would be trained: {remedy}")
    if left_out and is_main:
        names = ", ".join(left_out[:5]) + " ..." * (len(left_out) > 5)
        warnings.warn(
            f"{names} require gradients, but the optimizer does not have them, so they never change: {remedy}", stacklevel=4
        )


def warn_before_fit(model: nn.Module, state: TrainerState, is_finished: bool, is_main: bool) -> None:
    """Warn, on rank 0, of what was probably not meant.

    A run that is resumed after its end, or a second `fit`, takes no step. And `fit` leaves modes alone, so that frozen parts stay
    frozen; a whole model in evaluation mode was probably forgotten.
    """
    if is_main and is_finished:
        _log.warning(
            "nothing left to train: the planned end was reached at step %d, after %d epochs; raise epochs or max_steps to go on",
            *(state.step, state.epoch),
        )
    if is_main and not model.training:
        warnings.warn(
            "the model is in evaluation mode, and fit leaves it there: call model.train() first to train with dropout and batch "
            "statistics",
            UserWarning,
            stacklevel=4,
        )


def _length(data: Any, name: str) -> int:
    try:
        return len(data)
    except (TypeError, ValueError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name}: the length of {_kind(data)} cannot be used: {error}") from error


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    kind = value if isinstance(value, type) else type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {name} itself, no instance of it" if isinstance(value, type) else name
