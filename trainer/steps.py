"""What a user of the trainer overrides: the steps of a run, each with the default that most scripts need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from . import checks
from .callback import Callback
from .config import TrainerConfig
from .data import to_device
from .meters import EvalOutput
from .metrics import StepOutput
from .state import TrainerState
from .world import World


class Steps:
    """The steps of a run. Override what your run does otherwise; every method runs on every rank."""

    model: nn.Module
    """The bare module, without any wrapper."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    """What was given, or what the given callable made; `fit` moves it."""
    loss_fn: Callable[[Any, Any], Tensor] | None
    """As it was given; a module is on `world.device`."""
    callbacks: tuple[Callback, ...]
    """On rank 0; empty on the others."""
    config: TrainerConfig
    state: TrainerState
    """Where the run is, the same on every rank. Steps may read it, never write it."""
    world: World
    """Rank, size, device, and what the ranks tell each other."""
    eval_sets: dict[str, Dataset[Any]]
    """The evaluation data by name; a single dataset has the name ''. Empty if there is none."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """The loss of one micro-batch: a 0-dim tensor with a graph, the mean over the batch's samples.

        Or a mapping with ``loss`` and whatever else shall be reported: 0-dim tensors and numbers are means over the batch's
        samples, a `Mean` carries its own denominator. Compute the loss from `model`, the argument: it is the one whose gradients
        are averaged over the ranks (it may be wrapped: take names and parts from ``self.model``). Default:
        ``loss_fn(model(inputs), targets)`` for batches ``(inputs, targets)``.
        """
        if self.loss_fn is None:
            raise ValueError(checks.NO_LOSS_FN)
        inputs, targets = checks.check_pair(batch)
        return self.loss_fn(model(inputs), targets)

    def eval_step(self, model: nn.Module, batch: Any) -> EvalOutput:
        """What to evaluate on one batch: a 0-dim tensor, or a mapping of values as in `training_step` (``loss`` is optional).

        An object with ``reset``, ``update`` and ``compute``, such as torchmetrics', may stand in the mapping too, the same every
        time, once this step has updated it: it is computed, then reset. torchmetrics' are combined over the ranks (keep them on
        `world.device`); one of your own must combine its numbers in ``compute``, with `World.sum` or `World.gather`.

        `model` is the bare module, in evaluation mode, without gradients. Default: `training_step`. Override it where that does
        more than compute the loss: mixup or label smoothing there would leak into the evaluation.
        """
        return self.training_step(model, batch)

    def predict_step(self, model: nn.Module, batch: Any) -> Any:
        """The outputs for one batch, a row for each sample: a tensor, an array, a list, or a tuple or mapping of those.

        `model` is the bare module, in evaluation mode, without gradients. Default: ``model(inputs)`` for batches
        ``(inputs, targets)`` or ``inputs``.
        """
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def prepare_batch(self, batch: Any) -> Any:
        """The batch as the steps get it. Default: every tensor on this rank's device, containers kept."""
        return to_device(batch, self.world.device, self.config.channels_last)

    def optimizer_step(self) -> None:
        """Update the parameters from the window's gradients, which are averaged and clipped. Default: ``optimizer.step()``.

        The place for what follows every update, such as a moving average of the weights, after ``super().optimizer_step()``.
        With ``cuda_graph=True`` it is recorded once: numbers in it, such as a decay that follows `state.step`, stay as they were.
        """
        self.optimizer.step()

    def before_epoch(self) -> None:
        """Before an epoch's first window, and again when a run resumes within it; `state.epoch` is the epoch to come.

        The place to unfreeze layers. Must depend on `state` only, so that all ranks do the same.
        """

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add what follows from the reduced means, such as perplexity or F1; the same on every rank. Default: as they are.

        Called for reports, epochs and evaluations, whose keys may differ.
        """
        return metrics

    def _overrides(self, step: str) -> bool:
        return getattr(type(self), step) is not getattr(Steps, step)
