"""What a checkpoint says about a run, and whether a run may continue from it."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import checkpoint, model_keys
from .callback import Dispatcher
from .precision import Precision
from .schedule import LENGTHS
from .state import TrainerState

if TYPE_CHECKING:
    from .ddp_trainer import DDPTrainer


_log = logging.getLogger("trainer")


def take(trainer: DDPTrainer, run_config: Mapping[str, Any], precision: Precision, hooks: Dispatcher) -> dict[str, Any]:
    """Everything a run continues from: plain values and tensors (not copied)."""
    return {
        "format": checkpoint.FORMAT,
        "state": dataclasses.asdict(trainer.state),
        "config": dict(run_config),
        "model": model_keys.plain_keys(trainer.model.state_dict()),
        "optimizer": _plain_numbers(trainer.optimizer.state_dict()),
        "scheduler": None if trainer.scheduler is None else _plain_numbers(trainer.scheduler.state_dict()),
        "scaler": precision.state_dict(),
        "callbacks": hooks.state_dict(),
    }


def restore(
    trainer: DDPTrainer, state: Mapping[str, Any], run_config: Mapping[str, Any], precision: Precision, hooks: Dispatcher
) -> None:
    """Take over what `take` gave. Raises ValueError, with nothing changed, where it does not fit."""
    model = check(state, run_config, trainer.model, trainer.optimizer, trainer.scheduler)
    trainer.model.load_state_dict(model)
    restore_optimizer(state["optimizer"], trainer.optimizer)
    if trainer.scheduler is not None:
        _warn_of_length(trainer, state["scheduler"])
        trainer.scheduler.load_state_dict(state["scheduler"])
    precision.load_state_dict(state.get("scaler"))
    trainer.state = TrainerState(**state["state"])
    hooks.load_state_dict(state["callbacks"])


def _warn_of_length(trainer: DDPTrainer, saved: Mapping[str, Any]) -> None:
    """On rank 0, of a scheduler that was made for another number of steps than it goes on for."""
    own = trainer.scheduler.state_dict() if trainer.scheduler is not None else {}
    for name in LENGTHS:
        made_for = name in own and own[name] == trainer.total_steps
        if made_for and saved.get(name, own[name]) != own[name] and trainer.world.is_main:
            _log.warning(
                "the scheduler was made for %d steps, but goes on with the checkpoint's %s=%d: it keeps the length it had. Set "
                "epochs and max_steps as they were, or take a schedule without a length",
                *(own[name], name, saved[name]),
            )


def check(
    state: Mapping[str, Any],
    run_config: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
) -> dict[str, Any]:
    """Raise ValueError unless a run with these parts may continue from `state`; nothing is changed.

    Returns the model's part under the model's own keys.
    """
    parts = ("state", "config", "model", "optimizer", "scheduler", "callbacks")
    if missing := [part for part in parts if part not in state]:
        raise ValueError(f"this is not what DDPTrainer.state_dict() gave: {', '.join(missing)} missing; found {list(state)[:8]}")
    own = model.state_dict()
    saved = model_keys.in_keys_of(own, state["model"])
    _check_run(state["config"], run_config)
    _check_model(saved, own)
    _check_optimizer(state["optimizer"], optimizer)
    if (state["scheduler"] is None) != (scheduler is None):
        with_it, without = ("this trainer", "the checkpoint's run") if scheduler else ("the checkpoint's run", "this trainer")
        raise ValueError(f"{with_it} has a scheduler and {without} has none: build the trainer as the run's was")
    if scheduler is not None:
        _check_kind("scheduler", state["scheduler"], scheduler.state_dict(), scheduler)
    return saved


_IMPLEMENTATION = ("fused", "foreach", "capturable")


def restore_optimizer(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """`optimizer.load_state_dict`, with the tensors of its state in the type they were saved in, in memory of their own.

    How it computes is not the file's to say: that was chosen for the device that the file was written on.
    """
    groups = [
        group | {key: own[key] for key in _IMPLEMENTATION if key in own and key in group}
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    saved = {**saved, "param_groups": groups}
    optimizer.load_state_dict(saved)  # casts them to the parameter's type, which is not always theirs: ASGD, NAdam
    fused = {parameter for group in optimizer.param_groups if group.get("fused") for parameter in group["params"]}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        restored = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and isinstance(restored.get(key), Tensor):
                own = restored[key]
                as_own = key == "step" and parameter in fused  # whose kernels read it in just that type
                restored[key] = value.to(own.device, own.dtype if as_own else value.dtype, copy=True)


def _plain_numbers(value: Any) -> Any:
    """`value` with plain numbers for numpy's, which a function of the user's may give, and a file could not hold."""
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({_plain_numbers(key): _plain_numbers(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(_plain_numbers, value))
    return value.item() if isinstance(value, (np.bool_, np.integer, np.floating)) else value


def _check_run(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ValueError naming both values where continuing would train on other samples, or draw other numbers, than the run did."""
    for name, remedy in _SAME.items():
        if name in saved and saved[name] != own[name]:
            raise ValueError(
                f"the checkpoint's run had {name}={saved.get(name)!r}, this trainer has {name}={own[name]!r}: {remedy}"
            )


_SAME = {
    "seed": "every random number follows from it; set the checkpoint's seed",
    "samples": "the dataset has another length, so a position in it means another sample; pass the dataset of the run",
    "rows": "the dataset has another length, so an index of the sampler means another sample; pass the dataset of the run",
    "sampler": "the order would be another one; pass a sampler where the run had one, and none where it had none",
    "shuffle": "the order would be another one; set it as it was",
    "drop_last": "an epoch would end elsewhere; set it as it was",
    "global_batch": "a step would mean other samples; set global_batch_size to the checkpoint's (at any world size)",
}


def _check_model(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ValueError naming the keys and shapes in which a checkpoint's model differs from this one."""
    missing, unexpected = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    shapes = [
        f"{key}: {tuple(saved[key].shape)} in the file, {tuple(own[key].shape)} here"
        for key in own
        if key in saved and getattr(saved[key], "shape", None) != getattr(own[key], "shape", None)
    ]
    differences = [
        f"{words} {', '.join(keys[:5])}{' ...' if len(keys) > 5 else ''}"
        for words, keys in (("not in the file:", missing), ("only in the file:", unexpected), ("other shapes:", shapes))
        if keys
    ]
    if differences:
        raise ValueError(f"the checkpoint is of another model; {'; '.join(differences)}. Build the model it was saved from")


def _check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """ValueError when a checkpoint's optimizer has other parameter groups than this one."""
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ValueError(
            f"the checkpoint's optimizer has parameter groups of {theirs} parameters, this one of {ours}: build it as it was, "
            "with all groups from the start (what before_epoch adds comes too late for a resume)"
        )
    _check_kind("optimizer", saved["param_groups"][0], optimizer.param_groups[0], optimizer)


def _check_kind(what: str, saved: Mapping[str, Any], own: Mapping[str, Any], part: Any) -> None:
    """ValueError when each has settings that the other lacks: then `part` is of another class than the checkpoint's."""
    theirs, ours = sorted(set(saved) - set(own)), sorted(set(own) - set(saved))
    if theirs and ours:  # one of them alone may come with another version of torch
        raise ValueError(
            f"the checkpoint's {what} is of another kind than {type(part).__name__}: it has {', '.join(theirs)}, and no "
            f"{', '.join(ours)}. Build the {what} as the run's was"
        )
