"""Objects with reset, update and compute, such as those of torchmetrics, in an evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .metrics import Mean, scalar
from .world import World


@runtime_checkable
class Meter(Protocol):
    """Collects what `eval_step` passes to its `update`, and computes one number, or a mapping of numbers, from all of it."""

    def reset(self) -> Any: ...
    def update(self, *args: Any, **kwargs: Any) -> Any: ...
    def compute(self) -> Any: ...


EvalOutput = Tensor | Mapping[str, Tensor | float | Mean | Meter]
"""What `eval_step` may return."""


class Meters:
    """The meters that `eval_step` returned in one evaluation, by key."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._meters: dict[str, Meter] = {}
        self._begun = False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._meters)

    def take_from(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """What in `output` is no meter. Raises ValueError for a meter that was not in the first output."""
        # Asking for a protocol takes far longer than asking for a class, and most values are tensors.
        found = {key: value for key, value in output.items() if not isinstance(value, Tensor) and isinstance(value, Meter)}
        if not self._begun:
            self._meters, self._begun = found, True
        if not found and not self._meters:
            return output
        for key in found.keys() | self._meters.keys():
            if found.get(key) is not self._meters.get(key):
                raise ValueError(
                    f"eval_step must return the same object as {key!r} every time: make it once, and keep it in the trainer"
                )
        return {key: value for key, value in output.items() if key not in found}

    def compute(self, keys: list[tuple[str, ...]], fed: list[bool]) -> dict[str, float]:
        """The meters' numbers, the same on every rank, which all call this; of one that gives a mapping, ``key/name``.

        `keys`: the meters' keys on every rank; `fed`: whether `eval_step` ran there. Raises ValueError where ranks differ.
        """
        first = fed.index(True)
        if not any(keys):
            return {}
        if not all(fed):  # a rank without samples has met no meter: it takes part with an empty one
            mine = self._world.rank == first
            spare = self._world.gather({key: _emptied(meter) for key, meter in self._meters.items()} if mine else {})[first]
            self._meters = self._meters or spare
        metrics: dict[str, float] = {}
        for key in keys[first]:  # in the same order on every rank
            meter = self._meters[key]
            with torch.no_grad(), self._gathering(meter, fed):
                computed = meter.compute()
            named = (
                {f"{key}/{name}": value for name, value in computed.items()} if isinstance(computed, Mapping) else {key: computed}
            )
            metrics |= {name: float(scalar(value, name)) for name, value in named.items()}
        self._check_agreement(metrics)
        return metrics

    def reset(self) -> None:
        """So that the next evaluation starts afresh."""
        for meter in self._meters.values():
            meter.reset()

    @contextmanager
    def _gathering(self, meter: Meter, fed: list[bool]) -> Iterator[None]:
        """While `meter` computes: its states are collected by `World.gather`, also from ranks that hold none.

        torchmetrics collects a list that it does not join first item by item, so all ranks' lists need the same length: the
        shorter are filled up with `filler`, which travels as None and is dropped.
        """
        filler = torch.empty(0)

        def gather(state: Tensor, group: Any = None) -> list[Tensor]:
            gathered = self._world.gather(None if state is filler else state)
            return [other for other, has_state in zip(gathered, fed, strict=True) if has_state and other is not None]

        parts: list[Any] = [
            part for part in (meter.modules() if isinstance(meter, nn.Module) else ()) if hasattr(part, "dist_sync_fn")
        ]
        own = [part.dist_sync_fn for part in parts]
        lists = [(part, name) for part in parts for name in _lists(part)]
        held = [getattr(part, name) for part, name in lists]
        lengths = self._world.gather(list(map(len, held))) if lists else []
        for part in parts:
            part.dist_sync_fn = part.dist_sync_fn or gather
        for (part, name), items, longest in zip(lists, held, map(max, *lengths, [0] * len(lists)), strict=True):
            setattr(part, name, items + [filler] * (longest - len(items)))
        try:
            yield
        finally:
            for part, function in zip(parts, own, strict=True):
                part.dist_sync_fn = function
            for (part, name), items in zip(lists, held, strict=True):
                setattr(part, name, items)

    def _check_agreement(self, metrics: dict[str, float]) -> None:
        gathered = self._world.gather({key: repr(value) for key, value in metrics.items()})  # as text, NaN equals NaN
        for rank, others in enumerate(gathered):
            for key, value in gathered[0].items():
                if others.get(key) != value:
                    raise ValueError(
                        f"{key!r} must be the same on every rank; compute() gave {value} on rank 0 and {others.get(key)} on rank "
                        f"{rank}. It must combine the ranks' counts, as torchmetrics does, or with world.sum or world.gather"
                    )


def _lists(part: Any) -> list[str]:
    """The states of a torchmetrics metric that are lists of tensors, and not joined to one before they are collected."""
    reductions: Mapping[str, Any] = getattr(part, "_reductions", {})
    return [
        name
        for name, reduction in reductions.items()
        if isinstance(getattr(part, name), list) and getattr(reduction, "__name__", "") != "dim_zero_cat"
    ]


def _emptied(meter: Meter) -> Meter:
    meter = copy.deepcopy(meter)
    meter.reset()
    return meter
