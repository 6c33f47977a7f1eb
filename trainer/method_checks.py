"""What was probably meant by methods that nothing calls, or that take other arguments than they are called with."""

from __future__ import annotations

import difflib
import inspect
import warnings
from typing import Any

_OF_OTHERS = {  # methods that other libraries call, and what does their work here
    "validation_step": "the trainer calls eval_step",
    "evaluation_step": "the trainer calls eval_step",
    "test_step": "the trainer calls eval_step",
    "configure_optimizers": "pass optimizer and scheduler to the trainer",
    "train_dataloader": "pass train_data to the trainer",
    "val_dataloader": "pass eval_data to the trainer",
}
_HOOKS_OF_OTHERS = {
    "on_train_start": "on_fit_start",
    "on_train_begin": "on_fit_start",
    "on_train_end": "on_fit_end",
    "on_epoch_start": "on_fit_start and on_epoch_end; before_epoch of the trainer",
    "on_epoch_begin": "on_fit_start and on_epoch_end; before_epoch of the trainer",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_end": "on_step",
    "on_step_end": "on_step",
    "on_batch_end": "on_step",
    "on_validation_end": "on_eval",
    "on_validation_epoch_end": "on_eval",
    "on_evaluate": "on_eval",
    "on_log": "on_step",
    "on_save": "on_safe_point",
}


def check_methods(trainer: Any, of_all: type, with_steps: type) -> None:
    """TypeError for an overridden step that cannot be called as it is, and for a name that is the trainer's own. Warns of
    methods that nothing calls.

    `of_all`: the class whose methods every trainer has; `with_steps`: the one that has those to override, and no others.
    """
    steps = [name for name, value in vars(with_steps).items() if inspect.isfunction(value) and not name.startswith("_")]
    _check_names(type(trainer), of_all, with_steps)
    for name in dir(type(trainer)):
        if name.startswith("_") or hasattr(of_all, name) or not callable(getattr(type(trainer), name)):
            continue
        instead = _OF_OTHERS.get(name)
        if instead is None and (meant := _close(name, steps)):
            instead = f"did you mean {meant}?"
        if instead is not None:
            text = f"{type(trainer).__name__}.{name} is never called by the trainer: {instead}"
            warnings.warn(text, UserWarning, stacklevel=3)
    for name in steps:
        _check_arguments(getattr(trainer, name), getattr(with_steps, name), name)


def _check_names(kind: type, of_all: type, with_steps: type) -> None:
    """TypeError where `kind` replaces what only the trainer knows of, or has what an attribute of the trainer's would hide."""
    used = {name for name in {**vars(of_all), **vars(with_steps)} if name.startswith("_") and not name.startswith("__")}
    for own in kind.__mro__[: kind.__mro__.index(of_all)]:
        for name in vars(own):
            if name in used:
                raise TypeError(f"{own.__name__}.{name} has a name that the trainer uses itself: rename it")
            if name in with_steps.__annotations__:
                raise TypeError(
                    f"{own.__name__}.{name} would be hidden by the trainer's attribute of that name, which is what DDPTrainer is "
                    "given for it: pass it there, or rename it"
                )


def check_hooks(callback: Any, of_all: type) -> None:
    """TypeError for a hook that cannot be called as it is. Warns of methods that look like hooks, and are none."""
    hooks = [name for name in vars(of_all) if name.startswith(("on_", "before_"))]
    for name in hooks:
        _check_arguments(getattr(callback, name), getattr(of_all, name), f"{type(callback).__name__}.{name}")
    for name in dir(type(callback)):
        if name.startswith(("on_", "before_")) and name not in hooks and callable(getattr(type(callback), name)):
            meant = _HOOKS_OF_OTHERS.get(name) or _close(name, hooks)
            if meant:
                text = f"{type(callback).__name__}.{name} is no hook, and never called: did you mean {meant}?"
                warnings.warn(text, UserWarning, stacklevel=4)


def _check_arguments(method: Any, base: Any, label: str) -> None:
    """TypeError unless `method`, bound, takes the arguments of `base`."""
    wanted = inspect.signature(base).parameters
    if not callable(method):
        raise TypeError(f"{label} must be a method ({', '.join(wanted)}); found {method!r}")
    if signature := misfit(method, len(wanted) - 1):
        raise TypeError(f"{label} must take ({', '.join(wanted)}); found it with {signature}, self left out")


def misfit(function: Any, count: int) -> inspect.Signature | None:
    """The signature of `function` where it cannot be called with `count` positional arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return None
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return signature
    return None


def _close(name: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.8)), None)
