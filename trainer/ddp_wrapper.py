"""DDP's wrapper: made and settled, made to reduce zeros, and let go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def settled(model: nn.Module, device: torch.device, options: dict[str, Any]) -> DistributedDataParallel:
    """`model` in DistributedDataParallel, with the buckets that it keeps.

    DDP lays its buckets out anew after its first backward, and a ring all-reduce rounds differently by position in the bucket:
    without this, the first step after a resume would round unlike the uninterrupted run's.
    """
    wrapped = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None, **options)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    backward_zeros(wrapped)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return wrapped


def backward_zeros(wrapped: nn.Module) -> None:
    """Take part in one reduction of the gradients with zeros, running no code of the model's."""
    assert isinstance(wrapped, DistributedDataParallel)
    model, wrapped.module = wrapped.module, _Zeros(wrapped.module)
    kept, wrapped.require_forward_param_sync = wrapped.require_forward_param_sync, False  # buffers stay as they are
    try:
        wrapped(None).backward()  # without any argument DDP fails on GPUs
    finally:
        wrapped.module, wrapped.require_forward_param_sync = model, kept


def unreduced(wrapped: nn.Module) -> list[int]:
    """The indices, among the trainable parameters, of those whose gradients the last backward has left unreduced.

    DDP says so itself, but in its next forward only.
    """
    if isinstance(wrapped, DistributedDataParallel):
        try:
            wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if (listed := re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))) is None:
                raise
            return list(map(int, listed[1].split()))
    return []


def drop_groups(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Drop what wrappers hold of their process group, before that is destroyed.

    A wrapper that is still alive when the interpreter ends can abort the process, whether its group was destroyed or not.
    """
    for wrapped in list(wrappers):
        for name in ("reducer", "logger", "process_group", "device_mesh"):
            wrapped.__dict__.pop(name, None)


class _Zeros(nn.Module):
    """Stands in for a model during one forward: touches every trainable parameter, changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, nothing: None) -> Tensor:
        owners: dict[int, nn.Module] = {}  # the first module that has a parameter: the one DDP asks whether it is sparse
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), module)
        kinds = (nn.Embedding, nn.EmbeddingBag)
        sparse = {key for key, module in owners.items() if isinstance(module, kinds) and module.sparse}
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack([_NoGradient.apply(parameter, id(parameter) in sparse) for parameter in trainable]).sum()


class _NoGradient(torch.autograd.Function):
    """A zero that depends on a parameter and gives it no gradient.

    DDP reduces that as zeros; of a sparse gradient it takes an empty one only. With ``find_unused_parameters`` it counts as
    unused, so that a parameter which no rank has used keeps no gradient, as in one process: a gradient of zeros would let
    weight decay and momentum move it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, is_sparse: bool) -> Tensor:
        ctx.sparse = (parameter.shape, parameter.dtype) if is_sparse else None
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        if ctx.sparse is None:
            return None, None
        shape, dtype = ctx.sparse
        indices = torch.empty(1, 0, dtype=torch.int64, device=gradient.device)
        values = torch.empty(0, *shape[1:], dtype=dtype, device=gradient.device)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False), None
