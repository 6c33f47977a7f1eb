"""This rank's copy of the model, kept in step with the other ranks' copies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import batchnorm, checksum, wrapper
from .config import TrainerConfig
from .plan import Window, most_and_fewest
from .world import World


class Replica:
    """Hands out the model for each micro-batch so that every gradient travels once per window, and watches for drift."""

    def __init__(self, model: nn.Module, world: World, config: TrainerConfig) -> None:
        self.model = batchnorm.synchronized(model, world) if config.sync_batchnorm else model
        """The bare module."""
        if config.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self._compiles = config.compile
        self._world = world
        self._batch_size = config.batch_size
        self._synchronized = batchnorm.is_synchronized(self.model, world)
        self._options = config.ddp_options
        self._compression = config.gradient_compression
        self._finds_unused = bool(config.ddp_options.get("find_unused_parameters"))
        self._wrapped = self.model
        self._handed = self.model
        self._sends_buffers = False
        self._buffers: list[Tensor] = []  # as they were sent last
        self._window: Window | None = None  # that a step is within
        self._handed_out = 0  # in this window
        self._called = False
        self._call_hook: RemovableHandle | None = None
        self._gradients_before: list[tuple[int, int] | None] | None = None
        self._use_is_known = False
        self.parameters = list(self.model.parameters())
        """All of them, frozen ones too."""
        self.trainable: list[nn.Parameter] = []
        """The parameters that require a gradient, as wrapped."""

    def align(self) -> None:
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
        self._hand_out(_StandIn(self.model) if self._wrapped is self.model else self._wrapped)
        self.trainable = trainable
        self._use_is_known = self._finds_unused
        if self._world.size > 1 and self._wrapped.broadcast_buffers:
            # DDP sends rank 0's buffers at each synchronised forward, which is a window's last. Sent at its start instead,
            # every micro-batch sees what a resumed run would see.
            self._wrapped.broadcast_buffers = False  # type: ignore[assignment]
            self._sends_buffers = True
        return True

    def release(self) -> None:
        """Let go of the wrapper; the model stays as it is."""
        self._hand_out(None)
        self._gradients_before = self._window = None
        if self._compiles:
            self.model._compiled_call_impl = None
        self._wrapped, self._sends_buffers, self.trainable = self.model, False, []

    def begin_window(self, window: Window) -> None:
        """Before the first forward: rank 0's buffers, once per window."""
        self.check_windows([window.size])
        self._window, self._handed_out = window, 0
        if self._sends_buffers:
            self.send_buffers()

    def check_windows(self, sizes: Sequence[int]) -> None:
        """Raise ValueError where layers that meet in their forwards would wait for ever: see `batchnorm.check_windows`."""
        if self._synchronized:
            batchnorm.check_windows(sizes, self._batch_size, self._world.size)

    def handed(self, last: bool) -> nn.Module:
        """The model for a micro-batch: the wrapped one for the window's last, the bare one (which is faster) before it."""
        self._called = self._call_hook is None
        self._handed_out += 1
        if last and not self._use_is_known:
            self._gradients_before = [_mark(parameter.grad) for parameter in self.trainable]
        return self._handed if last else self.model

    def require_call(self) -> None:
        """Raise RuntimeError unless the wrapper handed out last was called: without it the gradients would not be reduced.

        On one process that is found in a fit's first step.
        """
        before = self._gradients_before
        in_buckets = self._world.size > 1 and self._options.get("gradient_as_bucket_view")  # which a forward lays out
        if before is not None and not in_buckets and before != [_mark(parameter.grad) for parameter in self.trainable]:
            raise RuntimeError(
                "training_step changed the gradients itself: is there a backward() or a zero_grad() in it? Return the loss; the "
                "trainer calls backward, clips, steps and zeroes the gradients"
            )
        if not self._called:
            raise RuntimeError(
                "training_step did not call the model it was given in the window's last micro-batch, so the ranks' gradients "
                "would not be averaged. Compute the loss from model(...), the argument, not from self.model or model.module"
            )

    def check_meeting(self, call: str) -> None:
        """RuntimeError where a `training_step` makes a call that needs every rank, and some have no such micro-batch."""
        if self._window is None:
            return
        _, fewest = most_and_fewest(self._window.size, self._batch_size, self._world.size)
        if self._handed_out > fewest:
            raise RuntimeError(
                f"{call} needs every rank, but was called in micro-batch {self._handed_out} of a window of {self._window.size} "
                f"samples, of which some ranks have only {fewest}: they would never come. Call it in before_epoch or "
                "optimizer_step, set eval_every, or leave such windows out with drop_last=True"
            )

    def end_window(self, window: Window) -> None:
        """After the window's last backward. A rank whose share is empty takes part in the reduction with gradients of zero.

        Raises RuntimeError naming the parameters that the first window's last micro-batch did not use, or on several processes
        a later one's: their gradients would not be averaged over the ranks.
        """
        self._window = None
        if self._handed is not self._wrapped:
            self._hand_out(self._wrapped)
        if not window.micro_batches:
            wrapper.backward_zeros(self._wrapped)
        elif self._gradients_before is not None:
            before, self._gradients_before, self._use_is_known = self._gradients_before, None, True
            pairs = zip(self.trainable, before, strict=True)
            if unused := [parameter for parameter, mark in pairs if _mark(parameter.grad) == mark]:
                self._raise_unused(unused)
        elif places := wrapper.unreduced(self._wrapped):
            self._raise_unused([self.trainable[place] for place in places])

    def _raise_unused(self, unused: list[nn.Parameter]) -> None:
        names = [name for name, item in self.model.named_parameters() if any(item is other for other in unused)]
        raise RuntimeError(
            f"the loss of the window's last micro-batch does not depend on {', '.join(names)}, so their "
            "gradients would not be averaged over the ranks. Freeze what is not trained with requires_grad_(False), or set "
            "ddp_options={'find_unused_parameters': True} in TrainerConfig, which costs time in every step"
        )

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

    def _hand_out(self, module: nn.Module | None) -> None:
        """From now on to `training_step`, in a window's last micro-batch. A wrapper is watched for being called."""
        if self._call_hook is not None:
            self._call_hook.remove()
        self._handed = self.model if module is None else module
        self._call_hook = None
        if module is not None and module is not self.model:
            self._call_hook = module.register_forward_pre_hook(self._note_call)

    def _note_call(self, module: nn.Module, inputs: Any) -> None:
        self._called = self._called or torch.is_grad_enabled()  # DDP reduces nothing of a call without gradients


class _StandIn(nn.Module):
    """In place of DDP's wrapper, in a fit's first step on one process: what would fail on several fails there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    """Changes whenever something is added to a gradient."""
    return None if gradient is None else (id(gradient), gradient._version)


def _is_laid_out_plainly(tensor: Tensor) -> bool:
    """Contiguous, to the strides of dimensions of size 1, or channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    plain = torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() == plain or (tensor.ndim in formats and tensor.is_contiguous(memory_format=formats[tensor.ndim]))
