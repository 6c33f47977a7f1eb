"""Means travel as sums and weights: `WeightedSums` collects them without ever waiting for the device."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Mean(NamedTuple):
    """A mean with its own denominator, such as tokens, pixels or boxes: ``total / count`` over everything seen."""

    total: Tensor
    """0-dim: the sum over the items."""
    count: Tensor | int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a mean
    """How many items that is; 0 is fine."""


StepOutput = Tensor | Mapping[str, Tensor | float | Mean]
"""What `training_step` may return; `eval_step` may return metric objects too."""


def as_mapping(output: Any, step: str) -> Mapping[str, Tensor | float | Mean]:
    """A step's output as a mapping; a tensor is its ``loss``. Raises TypeError naming what was returned."""
    if isinstance(output, Tensor):
        return {"loss": output}
    if not isinstance(output, Mapping):
        kind = type(output).__name__
        if output is None or isinstance(output, (int, float)):
            hint = "a number has no graph: leave out .item()" if step == "training_step" else "name it: {'loss': number}"
            kind = "None (is a return missing?)" if output is None else f"{kind} ({hint})"
        if isinstance(output, Mean):
            kind = "a Mean (name it: {'loss': Mean(...)})"
        raise TypeError(f"{step} must return the loss, a tensor, or a mapping such as {{'loss': loss, ...}}; it returned {kind}")
    return output


def widest(device: torch.device) -> torch.dtype:
    """The floating type that sums are kept in: float64, or float32 on a device that has none."""
    return torch.float32 if device.type == "mps" else torch.float64


class WeightedSums:
    """Sums and weights of named values on this rank, in float64 (float32 on a device that has none).

    On the CPU they are plain numbers, which is far less work than tensors of one number; elsewhere they are on the device, for
    which the host must not wait. The keys are fixed by the first `add`.
    """

    def __init__(self, device: torch.device) -> None:
        self._zero = torch.zeros((), dtype=widest(device), device=device)
        self._totals: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """In the order of the first `add`; empty before it."""
        return tuple(self._totals)

    def total(self, key: str) -> Tensor | float:
        """The running sum: a number, or 0-dim on the device, where it changes with every `add`; 0 before the first."""
        return self._totals.get(key, 0.0)

    def add(self, values: Mapping[Any, Tensor | float | Mean], samples: int) -> None:
        """Add one batch: a plain value is a mean over its `samples`, a `Mean` carries its own weight.

        Raises ValueError for other keys than before, and TypeError or ValueError for what is no scalar.
        """
        if values.keys() != self._totals.keys():
            if self._totals:
                raise ValueError(
                    f"a step must return the same keys every time: they were {list(self._totals)}, now {list(values)} (where "
                    "there is no value, return a Mean with count 0)"
                )
            if strange := [key for key in values if not isinstance(key, str)]:
                raise TypeError(
                    f"the keys that a step returns must be strings; found {strange[0]!r} ({type(strange[0]).__name__})"
                )
            self._totals = {key: 0.0 if self._zero.is_cpu else self._zero.clone() for key in values}
            self._counts = dict.fromkeys(values, 0.0)
        for key, value in values.items():
            if isinstance(value, Mean):
                count, value, weight = _number(value.count, key), value.total, 1
                self._counts[key] += self._zero + count if isinstance(count, Tensor) else count
            else:
                weight = samples
                self._counts[key] += samples
            number, total = _number(value, key), self._totals[key]
            if isinstance(total, Tensor):
                total.add_(number, alpha=weight)
            else:
                self._totals[key] = total + float(number) * weight

    def pop(self, keys: tuple[str, ...]) -> Tensor:
        """The sums of `keys`, then their weights, in one vector to be summed over ranks (zeros for unknown keys). Starts anew."""
        zero, numbers = self._zero, [sums.get(key, 0.0) for sums in (self._totals, self._counts) for key in keys]
        plain = [0.0 if isinstance(number, Tensor) else number for number in numbers]
        packed = torch.tensor(plain, dtype=zero.dtype, device=zero.device)
        if any(isinstance(number, Tensor) for number in numbers):
            packed = torch.stack([own if isinstance(own, Tensor) else sent for own, sent in zip(numbers, packed, strict=True)])
        self._totals = {key: total.zero_() if isinstance(total, Tensor) else 0.0 for key, total in self._totals.items()}
        self._counts = dict.fromkeys(self._totals, 0.0)
        return packed


def scalar(value: Any, key: str) -> Tensor | float:
    """`value` as one number, without its graph. Raises ValueError or TypeError naming `key` for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach() if value.ndim == 0 else value.detach().reshape(())
    if isinstance(value, (int, float, Real, np.bool_)):  # numpy's other numbers are Real
        return float(value)
    wanted = f"{key!r} must be a real scalar (0-dim tensor or number)"
    if isinstance(value, Tensor):
        mean = ".mean()" if value.is_floating_point() else ".float().mean()"
        raise ValueError(f"{wanted}; found a {value.dtype} tensor of shape {tuple(value.shape)}: take its {mean}, say")
    hint = " (objects with update and compute have their place in eval_step)" if hasattr(value, "compute") else ""
    raise TypeError(f"{wanted}, or a Mean; found {value!r} ({type(value).__name__}){hint}")


def _number(value: Any, key: str) -> Tensor | float:
    """As `scalar`, and a plain number where nobody has to wait for it: on the CPU."""
    number = scalar(value, key)
    return number.item() if isinstance(number, Tensor) and number.is_cpu else number


def means(keys: tuple[str, ...], packed: list[float]) -> dict[str, float]:
    """The means in a vector made by `WeightedSums.pop`; NaN where the weight is 0."""
    totals, weights = packed[: len(keys)], packed[len(keys) :]
    return {key: total / weight if weight else math.nan for key, total, weight in zip(keys, totals, weights, strict=True)}


def agree_on_keys(gathered: list[tuple[str, ...]], step: str) -> tuple[str, ...]:
    """The keys of all ranks, which must be the same (a rank that had no sample has none). Raises ValueError naming them."""
    known = {rank: keys for rank, keys in enumerate(gathered) if keys}
    agreed = next(iter(known.values()), ())
    for rank, keys in known.items():
        if set(keys) != set(agreed):
            raise ValueError(
                f"{step} returned other keys on other ranks: {sorted(agreed)} on rank {next(iter(known))}, {sorted(keys)} on "
                f"rank {rank}. Return the same keys on every rank (where there is no value, a Mean with count 0)"
            )
    return agreed
