"""What is checked of a trainer's arguments (data: `data_checks`), and of what its steps are given and return."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .config import TrainerConfig
from .data_checks import kind_of
from .failure import with_text
from .method_checks import misfit
from .metrics import Mean
from .state import TrainerState
from .world import World

_log = logging.getLogger("trainer")
NO_LOSS_FN = "the default training_step needs loss_fn: pass loss_fn=... to DDPTrainer, or override training_step"


def check_model(model: Any, optimizer: Any, own_update: bool) -> None:
    """TypeError or ValueError for a model that is none or unfinished, and for an optimizer built on something else.

    `own_update`: whether the script has its own way to call the optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; found {kind_of(model)}")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise TypeError(f"model must be the bare module, the trainer wraps it itself; found {kind_of(model)}: pass model.module")
    if unfinished := [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]:
        raise ValueError(
            f"the model is not built yet: {', '.join(unfinished)} have no shape before the first forward. Call model(...) on one "
            "batch, then build the optimizer"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; found {kind_of(optimizer)}")
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
        raise TypeError(f"config must be a TrainerConfig, as in config=TrainerConfig(epochs=3); found {kind_of(config)}")
    if not isinstance(world, World | None):
        raise TypeError(f"world must be a World, as World.from_env() returns it; found {kind_of(world)}")
    if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
        raise TypeError(f"loss_fn must be callable as loss_fn(outputs, targets); found {kind_of(loss_fn)}")
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


def check_loss(output: Mapping[str, Any]) -> Tensor | Mean:
    """The loss in a training step's output, if it can be trained on: TypeError or ValueError naming what was returned."""
    if "loss" not in output:
        raise ValueError(f"training_step must return a mapping with the key 'loss'; its keys are {list(output)}")
    loss: Tensor | Mean = output["loss"]
    total = loss.total if isinstance(loss, Mean) else loss
    if not isinstance(total, Tensor):
        raise TypeError(
            "training_step must return the loss as a 0-dim tensor, as the loss function gave it (without .item()), or as a Mean "
            f"of such a sum; found {kind_of(total)}"
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
            f"the default training_step takes batches (inputs, targets); found {kind_of(batch)}{length}: override training_step, "
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
        found = "None (is a return missing?)" if metrics is None else kind_of(metrics)
        raise TypeError(f"summarize must return the metrics, a dict of numbers by name; it returned {found}")
    for key, value in metrics.items():
        if not isinstance(key, str) or not isinstance(value, (int, float, Real, np.bool_)):
            raise TypeError(
                f"summarize must return numbers by name; found {key!r}: {value!r} ({kind_of(value)}); float(...) makes one"
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
