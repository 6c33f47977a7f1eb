"""A forward and a backward that run no code of the model's: what a rank without samples contributes to a reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Zeros(nn.Module):
    """Stands in for a model during one forward: touches every trainable parameter, changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack([_NoGradient.apply(parameter) for parameter in trainable]).sum()


class _NoGradient(torch.autograd.Function):
    """A zero that depends on a parameter and gives it no gradient.

    DDP reduces that as zeros. With ``find_unused_parameters`` it counts as unused, so that a parameter which no rank has used
    keeps no gradient, as in one process: a gradient of zeros would let weight decay and momentum move it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None
