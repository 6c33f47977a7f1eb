"""This rank's copy of the model, kept in step with the other ranks' copies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import batchnorm, checksum, ddp_wrapper
from .config import TrainerConfig
from .model_use import ModelUse
from .plan import Window
from .world import World


class Replica:
    """Wraps the model, sends what the ranks must have alike, and watches for drift."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World, config: TrainerConfig) -> None:
        model = model.to(world.device)
        _move_state(optimizer)
        self.model = batchnorm.synchronized(model, world) if config.sync_batchnorm else model
        """The bare module."""
        if config.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self._compiles = config.compile
        self._world = world
        self._batch_size = config.batch_size
        self.use = ModelUse(self.model, world, config)
        """What the training steps do with the model."""
        self._synchronized = batchnorm.is_synchronized(self.model, world)
        self._options = config.ddp_options
        self._compression = config.gradient_compression
        self._wrapped = self.model
        self._sends_buffers = False
        self._buffers: list[Tensor] = []  # as they were sent last
        self.parameters = list(self.model.parameters())
        """All of them, frozen ones too."""
        self.trainable: list[nn.Parameter] = []
        """The parameters that require a gradient, as wrapped."""

    def broadcast_state(self) -> None:
        """Rank 0's parameters and buffers on every rank.

        What is laid out so that it cannot be sent (an expanded or transposed buffer) gets a contiguous copy of its own.
        """
        tensors: list[Tensor] = [*self.model.parameters(), *self.model.buffers()]
        self._lay_out(tensors)
        self._world.broadcast_tensors(tensors)

    def send_buffers(self) -> None:
        """Rank 0's buffers on every rank, whose own drift, as BatchNorm's do."""
        buffers = list(self.model.buffers())
        if len(buffers) != len(self._buffers) or any(map(is_not, buffers, self._buffers)):  # a forward may exchange them
            self._lay_out(buffers)
            self._buffers = buffers
        self._world.broadcast_tensors(buffers)

    def refresh(self) -> bool:
        """Wrap the model, again if another set of parameters requires gradients by now: whether it was. Called on every rank.

        Raises ValueError when none does.
        """
        self.parameters = list(self.model.parameters())
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not trainable:
            raise ValueError(
                "no parameter of the model requires a gradient, so there is nothing to train: call requires_grad_() on those "
                "that shall learn, before fit or in before_epoch"
            )
        if list(map(id, trainable)) == list(map(id, self.trainable)):
            return False
        self.release()
        self._check_alike(trainable)
        self.model.zero_grad()  # what is frozen from now on keeps none, which the optimizer would go on to apply
        self._lay_out(self.parameters)
        self._world.broadcast_tensors(self.parameters)
        if self._compiles:  # in place, and inside of DDP's wrapper
            self.model.compile()
        self._wrapped = self._world.wrap(self.model, **{"init_sync": False, **self._options})  # they are in step already
        if self._compression is not None:
            self._world.compress(self._wrapped, self._compression)
        self.trainable = trainable
        self.use.watch(self._wrapped, trainable)
        if self._world.size > 1 and self._wrapped.broadcast_buffers:
            # DDP sends rank 0's buffers at each synchronised forward, which is a window's last. Sent at its start instead,
            # every micro-batch sees what a resumed run would see.
            self._wrapped.broadcast_buffers = False  # type: ignore[assignment]
            self._sends_buffers = True
        return True

    def release(self) -> None:
        """Let go of the wrapper; the model stays as it is."""
        self.use.forget()
        if self._compiles:
            self.model._compiled_call_impl = None
        self._wrapped, self._sends_buffers, self.trainable = self.model, False, []

    def begin_window(self, window: Window) -> None:
        """Before the first forward: rank 0's buffers, once per window."""
        if self._synchronized:
            batchnorm.check_window(window, self._batch_size, self._world.size)
        self.use.begin_window(window)
        if self._sends_buffers:
            self.send_buffers()

    def check_windows(self, sizes: Sequence[int]) -> None:
        """Raise ValueError where layers that meet in their forwards would wait for ever: see `batchnorm.check_windows`."""
        if self._synchronized:
            batchnorm.check_windows(sizes, self._batch_size, self._world.size)

    def end_window(self, window: Window) -> None:
        """After the window's last backward. A rank whose share is empty takes part in the reduction with gradients of zero."""
        if not window.micro_batches:
            ddp_wrapper.backward_zeros(self._wrapped)
        self.use.end_window(window)

    def fingerprint(self) -> tuple[int, ...]:
        """Equal on all ranks as long as their parameters are, bit for bit. Empty on one process, which has no other."""
        if self._world.size == 1:
            return ()
        return tuple(checksum.per_parameter(self.parameters).tolist())

    def raise_drift(self, step: int) -> None:
        """Name the parameters that differ between the ranks in a RuntimeError, the same on every rank. Called on every rank."""
        gathered = self._world.gather(self.fingerprint())
        names = [name for name, _ in self.model.named_parameters()]
        drifted = [name for name, sums in zip(names, zip(*gathered, strict=True), strict=True) if len(set(sums)) > 1]
        raise RuntimeError(
            f"the ranks' parameters have drifted apart by step {step}: {', '.join(drifted)}. Something changes them on some "
            "ranks only: look for code that depends on the rank, for random numbers in optimizer_step or before_epoch, for a "
            "forward that goes round the model that training_step was given, and for a hook that changes the model or the "
            "optimizer (hooks run on rank 0 only)"
        )

    def _check_alike(self, trainable: Sequence[Tensor]) -> None:
        shapes = self._world.gather([tuple(parameter.shape) for parameter in trainable])
        for rank, theirs in enumerate(shapes):
            if theirs != shapes[0]:
                raise RuntimeError(
                    f"rank {rank} has {len(theirs)} parameters to train and rank 0 has {len(shapes[0])}, or they differ in "
                    "shape: freeze, unfreeze and exchange the same ones on every rank"
                )

    def _lay_out(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout != torch.strided and self._world.size > 1:
                raise ValueError(
                    f"the model holds a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)}, which cannot be sent "
                    "to other ranks: keep it dense, or outside of parameters and buffers"
                )
            if tensor.layout == torch.strided and not _is_laid_out_plainly(tensor):
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _move_state(optimizer: Optimizer) -> None:
    """To its parameters' device: some optimizers make their state at once, others may have taken steps before."""
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")  # else the count of steps stays on the CPU
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and (key != "step" or on_device):
                    state[key] = value.to(parameter.device)


def _is_laid_out_plainly(tensor: Tensor) -> bool:
    """Contiguous, to the strides of dimensions of size 1, or channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    plain = torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() == plain or (tensor.ndim in formats and tensor.is_contiguous(memory_format=formats[tensor.ndim]))
