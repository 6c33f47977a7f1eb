"""What a training step does with the model it is given, on which it depends whether the ranks' gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import ddp_wrapper
from .config import TrainerConfig
from .plan import Window, most_and_fewest
from .world import World


class ModelUse:
    """Hands out the model for each micro-batch, so that every gradient travels once per window, and watches how it is used."""

    def __init__(self, model: nn.Module, world: World, config: TrainerConfig) -> None:
        self._model = model
        self._world = world
        self._batch_size = config.batch_size
        self._finds_unused = bool(config.ddp_options.get("find_unused_parameters"))
        self._in_buckets = world.size > 1 and bool(config.ddp_options.get("gradient_as_bucket_view"))
        self._wrapped = model
        self._for_last = model  # what the window's last micro-batch gets
        self._call_hook: RemovableHandle | None = None
        self._was_called = False
        self._trainable: list[nn.Parameter] = []
        self._parts_are_known = False  # whether it was seen, in a first window, that no parameter stays unused
        self._gradients_before: list[tuple[int, int] | None] | None = None
        self._window: Window | None = None  # that a step is within
        self._micro_batches = 0  # of this window, so far

    def watch(self, wrapped: nn.Module, trainable: list[nn.Parameter]) -> None:
        """From now on the steps get `wrapped`: the model in DDP's wrapper, or on one process itself."""
        self._wrapped, self._trainable = wrapped, trainable
        self._parts_are_known = self._finds_unused
        self._give(_StandIn(self._model) if wrapped is self._model else wrapped)

    def forget(self) -> None:
        """Of the wrapper nothing is kept."""
        self._wrapped, self._trainable = self._model, []
        self._give(self._model)
        self._gradients_before = self._window = None

    def begin_window(self, window: Window) -> None:
        self._window, self._micro_batches = window, 0

    def model_for(self, last: bool) -> nn.Module:
        """The model for a micro-batch: the wrapped one for the window's last, the bare one (which is faster) before it."""
        self._was_called = self._call_hook is None
        self._micro_batches += 1
        if last and not self._parts_are_known:
            self._gradients_before = [_mark(parameter.grad) for parameter in self._trainable]
        return self._for_last if last else self._model

    def require_call(self) -> None:
        """After the forward of a window's last micro-batch, before its backward.

        Raises RuntimeError unless the wrapper was called, without which the gradients would not be reduced: on one process that
        is found in a fit's first step. And where the step has changed the gradients itself.
        """
        before = self._gradients_before
        in_buckets = self._in_buckets  # which a forward lays out
        if before is not None and not in_buckets and before != [_mark(parameter.grad) for parameter in self._trainable]:
            raise RuntimeError(
                "training_step changed the gradients itself: is there a backward() or a zero_grad() in it? Return the loss; the "
                "trainer calls backward, clips, steps and zeroes the gradients"
            )
        if not self._was_called:
            raise RuntimeError(
                "training_step did not call the model it was given in the window's last micro-batch, so the ranks' gradients "
                "would not be averaged. Compute the loss from model(...), the argument, not from self.model or model.module"
            )

    def check_meeting(self, call: str) -> None:
        """RuntimeError where a `training_step` makes a call that needs every rank, and some have no such micro-batch."""
        if self._window is None:
            return
        _, fewest = self._window.spread or most_and_fewest(self._window.size, self._batch_size, self._world.size)
        if self._micro_batches > fewest:
            raise RuntimeError(
                f"{call} needs every rank, but was called in micro-batch {self._micro_batches} of a window of "
                f"{self._window.size} samples, of which some ranks have only {fewest}: they would never come. Call it in "
                "before_epoch or optimizer_step, set eval_every, or leave such windows out with drop_last=True"
            )

    def end_window(self, window: Window) -> None:
        """After the window's last backward.

        Raises RuntimeError naming the parameters that the first window's last micro-batch did not use, or on several processes
        a later one's: their gradients would not be averaged over the ranks.
        """
        self._window = None
        if self._for_last is not self._wrapped:  # the stand-in has seen its step
            self._give(self._wrapped)
        if not window.micro_batches:
            return
        if self._gradients_before is not None:
            before, self._gradients_before, self._parts_are_known = self._gradients_before, None, True
            pairs = zip(self._trainable, before, strict=True)
            if unused := [parameter for parameter, mark in pairs if _mark(parameter.grad) == mark]:
                self._raise_unused(unused)
        elif indices := ddp_wrapper.unreduced(self._wrapped):
            self._raise_unused([self._trainable[index] for index in indices])

    def _raise_unused(self, unused: Sequence[nn.Parameter]) -> None:
        names = [name for name, item in self._model.named_parameters() if any(item is other for other in unused)]
        raise RuntimeError(
            f"the loss of the window's last micro-batch does not depend on {', '.join(names)}, so their "
            "gradients would not be averaged over the ranks. Freeze what is not trained with requires_grad_(False), or set "
            "ddp_options={'find_unused_parameters': True} in TrainerConfig, which costs time in every step"
        )

    def _give(self, module: nn.Module) -> None:
        """`module` is what a window's last micro-batch gets from now on, watched for being called unless it is the bare model."""
        if self._call_hook is not None:
            self._call_hook.remove()
        self._for_last = module
        self._call_hook = None if module is self._model else module.register_forward_pre_hook(self._note_call)

    def _note_call(self, module: nn.Module, inputs: Any) -> None:
        self._was_called = self._was_called or torch.is_grad_enabled()  # DDP reduces nothing of a call without gradients


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
