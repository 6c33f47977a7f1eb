"""The number format that the steps compute in: fp32, or autocast to bf16 or fp16, the latter with loss scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_SCALE = 1e-4  # where gradients still overflow at that, they are not finite by themselves
_MOST_OVERFLOWS = 30  # in a row


class Precision:
    """Autocast around the steps, and around the update what fp16 needs: scaled losses, and no update after an overflow.

    An overflow on one rank reaches all of them with the reduced gradients, so all ranks skip the same updates.
    """

    def __init__(self, kind: str, device: torch.device, scaler_options: Mapping[str, Any]) -> None:
        self._type = _TYPES.get(kind)
        self._device = device.type
        self._nothing = nullcontext()
        self._in_a_row = 0  # overflows
        self.scaler: torch.amp.GradScaler | None = None
        if kind == "fp16":
            self.scaler = torch.amp.GradScaler(self._device, **scaler_options)
            self.scaler.scale(torch.zeros((), device=device))  # makes its scale, also on a rank that may have no loss at first

    def autocast(self) -> AbstractContextManager[Any]:
        """For the forward and the loss."""
        return self._nothing if self._type is None else torch.autocast(self._device, self._type)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer, trainable: Sequence[nn.Parameter]) -> None:
        """Once per window, before anything looks at the gradients, those too that the optimizer does not have."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in trainable:
                if id(parameter) not in held and parameter.grad is not None:
                    parameter.grad.div_(self.scaler._scale)  # type: ignore[arg-type]  # __init__ has made it

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Whether the update must be skipped; adapts the scale. In fp16 the host waits for the device here.

        Raises FloatingPointError, on all ranks, where no scale helps: such a run would go on for ever without an update.
        """
        if self.scaler is None:
            return False
        found = self.scaler._found_inf_per_device(optimizer).values()
        overflowed = any(value.item() for value in found)
        self.scaler.update()
        self._in_a_row = self._in_a_row + 1 if overflowed else 0
        if self._in_a_row >= _MOST_OVERFLOWS and (scale := self.scaler.get_scale()) < _LEAST_SCALE:
            raise FloatingPointError(
                f"precision='fp16': {self._in_a_row} updates in a row were skipped, as the gradients were infinite or NaN at "
                f"every loss scale down to {scale:.0e}: they are not finite by themselves. Look for a division by zero, a "
                "logarithm of zero or bad samples, or train with precision='bf16'"
            )
        return overflowed

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
