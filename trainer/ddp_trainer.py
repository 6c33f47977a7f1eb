"""`DDPTrainer`: the loop, its overridable steps and its distributed evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from . import checkpoint, checks, snapshot
from .agreement import StopAgreement
from .callback import Callback, Dispatcher
from .config import TrainerConfig
from .data import to_device
from .evaluation import evaluate
from .metrics import StepOutput, as_mapping
from .plan import Window
from .randomness import STEP, mix, seed_generators
from .replica import Replica
from .reports import Reporter
from .schedule import Schedule
from .state import TrainerState
from .train_data import TrainData
from .world import World


class DDPTrainer:
    """Trains one model with one optimizer on any number of processes; evaluates it exactly on all of them.

    The sequence of optimizer updates is a function of (seed, data, global batch) alone. The same script runs as
    ``python script.py`` and under ``torchrun``. Subclass it and override the steps, or instantiate it with a `loss_fn`.

    The loop of `fit`, with every hook in its place::

        on_fit_start
        for each epoch:
            before_epoch()                                          # every rank
            order = permutation(seed, epoch)                        # same on every rank, never stored whole
            for each window of global_batch_size positions:         # the last may be shorter
                for each micro-batch of this rank's share:          # gradients travel on the last one only
                    seed torch, random, numpy from (seed, window, micro-batch, rank)
                    loss = training_step(model, batch)["loss"]      # a mean over its samples
                    (loss * samples * world.size / window_samples).backward()       # DDP divides by world.size
                clip; optimizer_step(); scheduler.step(); zero the gradients
                step += 1; samples += ...; epoch += 1 after the epoch's last window # all counters before any hook
                on_step(metrics)                                    # reduced at every log_every-th step, empty between
                if evaluation is due:  evaluate; on_eval            # every eval_every steps, or at the epoch's end
                if the epoch is over:  on_epoch_end
                agree on stopping                                   # at reports, after on_eval and on_epoch_end
                on_safe_point                                       # fires for the last step of every run
                leave together if agreed
        on_fit_end

    Args:
        model: the bare module. It is moved to this rank's device and takes rank 0's weights.
        optimizer: built on ``model.parameters()``.
        train_data: map-style dataset; may be None for a trainer that only evaluates.
        eval_data: map-style dataset, or several by name.
        loss_fn: ``loss_fn(model(inputs), targets)`` is the default step's loss: 0-dim, the mean over the samples.
        scheduler: an LRScheduler on `optimizer`, or a callable that makes one from ``(optimizer, total_steps)``.
        sampler: one global order over `train_data`, split over the ranks by the trainer; replaces shuffling.
        loader_options: keyword arguments of DataLoader such as ``num_workers`` and ``collate_fn``.
        config: every knob that is a plain value.
        callbacks: watch the run on rank 0.
        world: default `World.from_env`.

    Raises TypeError or ValueError on every rank for arguments that cannot work, and for ranks that were given different ones.
    """

    model: nn.Module
    """The bare module, without any wrapper."""
    eval_sets: dict[str, Dataset[Any]]
    """The evaluation data by name; a single dataset has the name ''. Empty if there is none."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_data: Dataset[Any] | None = None,
        eval_data: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        scheduler: LRScheduler | Callable[[Optimizer, int], LRScheduler] | None = None,
        sampler: Sampler[int] | None = None,
        loader_options: Mapping[str, Any] | None = None,
        config: TrainerConfig | None = None,
        callbacks: Sequence[Callback] = (),
        world: World | None = None,
    ) -> None:
        checks.check_model(model, optimizer)
        self.config = TrainerConfig() if config is None else config
        checks.check_settings(self.config, world, loss_fn)
        self._opened_world = world is None and not World.is_open()
        self.world = World.from_env() if world is None else world
        self.world.outside_hook("DDPTrainer")
        self.model = model.to(self.world.device)
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.state = TrainerState()
        with self.world.together():  # what is wrong on one rank is an error on all
            self.eval_sets = checks.named_sets(eval_data, "eval_data")
            self._train = TrainData(train_data, sampler, loader_options, self.config, self.world.rank, self.world.size)
            if train_data is not None and loss_fn is None and type(self).training_step is DDPTrainer.training_step:
                raise ValueError(checks.NO_LOSS_FN)
            self._schedule = Schedule(scheduler, optimizer, self.config, self.total_steps, bool(self.eval_sets))
            self._hooks = Dispatcher(callbacks, self.world, active=self.world.is_main)
        self.scheduler = self._schedule.scheduler
        self._replica = Replica(model, self.world, self.config.ddp_options)
        self._agreement = StopAgreement(self.world, self.config.log_every)
        self._reporter: Reporter
        checks.agree(self.world, model, self._train.plan.samples, self.eval_sets, self.config)
        self.world.broadcast_tensors([*model.parameters(), *model.buffers()])

    # ---------------------------------------------------------------------------------------------- called on every rank

    def fit(self, resume_from: str | Path | None = None) -> TrainerState:
        """Train from `state` to the planned end (``epochs`` or ``max_steps``); a finished run takes no step.

        `resume_from`: a checkpoint file (missing: FileNotFoundError), or a folder whose newest whole ``step-*.pt`` is taken
        (empty or missing: a fresh start). Rank 0 alone needs to see it. Raises ValueError when the checkpoint is of another
        model, seed, dataset length, shuffle, drop_last or global batch.

        Returns `state`, the same on every rank, after every hook of `on_fit_end` has finished. An exception ends the whole job.
        """
        self.world.outside_hook("fit")
        try:
            with torch.enable_grad():
                self._begin(resume_from)
                while not self._finished():
                    self._fit_epoch()
                self.world.run_on_main(lambda: self._hooks.on_fit_end(self))
        except BaseException as error:
            self._hooks.on_exception(self, error)  # first: torchrun may end this process at any moment
            self.world.record_failure(error)
            raise
        finally:
            self._agreement.close()
            self._replica.release()
        return self.state

    def evaluate(self, data: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None) -> dict[str, float]:
        """The means of `eval_step`'s values over every sample of `data` (default: `eval_data`), the same on every rank.

        Every sample counts exactly once, at any world and batch size. Keys are those of `eval_step`; with a mapping of datasets
        ``name/key``. Fires no hook, moves no scheduler; modes and random state are put back. Raises ValueError without data.
        """
        self.world.outside_hook("evaluate")
        sets = self.eval_sets if data is None else checks.named_sets(data, "data")
        if not sets:
            raise ValueError("nothing to evaluate: pass eval_data to DDPTrainer, or a dataset to evaluate()")
        metrics: dict[str, float] = {}
        for name, dataset in sets.items():
            means = checks.check_summary(self.summarize(evaluate(self, self._replica, dataset, self._train.options)))
            metrics |= {f"{name}/{key}" if name else key: value for key, value in means.items()}
        return metrics

    def close(self) -> None:
        """Let go of the DDP wrapper, and close the world if this trainer opened it. Also at the end of a ``with`` block."""
        self.world.outside_hook("close")
        self._replica.release()
        if self._opened_world:
            self.world.close()

    def __enter__(self) -> DDPTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if error is not None and not self.world.failed:
            self.world.record_failure(error)
        self.close()

    # ------------------------------------------------------------------------------------- to override; run on every rank

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """The loss of one micro-batch: a 0-dim tensor with a graph, the mean over the batch's samples.

        Or a mapping with ``loss`` and whatever else shall be reported: 0-dim tensors and numbers are means over the batch's
        samples, a `Mean` carries its own denominator. Compute the loss from `model`, the argument: it is the one whose gradients
        are averaged over the ranks. Default: ``loss_fn(model(inputs), targets)`` for batches ``(inputs, targets)``.
        """
        if self.loss_fn is None:
            raise ValueError(checks.NO_LOSS_FN)
        inputs, targets = checks.check_pair(batch)
        return self.loss_fn(model(inputs), targets)

    def eval_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """What to evaluate on one batch: a 0-dim tensor, or a mapping of values as in `training_step` (``loss`` is optional).

        `model` is the bare module, in evaluation mode, without gradients. Default: `training_step`. Override it where that does
        more than compute the loss: mixup or label smoothing there would leak into the evaluation.
        """
        return self.training_step(model, batch)

    def prepare_batch(self, batch: Any) -> Any:
        """The batch as the steps get it. Default: every tensor on this rank's device, containers kept."""
        return to_device(batch, self.world.device)

    def optimizer_step(self) -> None:
        """Update the parameters from the window's gradients, which are averaged and clipped. Default: ``optimizer.step()``.

        The place for what follows every update, such as a moving average of the weights.
        """
        self.optimizer.step()

    def before_epoch(self) -> None:
        """Before an epoch's first window, and again when a run resumes within it; `state.epoch` is the epoch to come.

        The place to unfreeze layers. Must depend on `state` only, so that all ranks do the same.
        """

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add what follows from the reduced means, such as perplexity or F1. Default: `metrics` as they are."""
        return metrics

    # ------------------------------------------------------------------------- local, no communication: usable in hooks

    def stop(self, reason: str) -> None:
        """Ask all ranks to leave `fit` together. Any rank may ask; outside `fit` it does nothing.

        They leave after the same step, at which they next agree: within ``log_every`` steps or about two seconds.
        """
        self._agreement.ask(reason)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, known before `fit`; None without train_data."""
        return self._train.total_steps

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch; None without train_data."""
        return self._train.steps_per_epoch

    @property
    def epoch_step(self) -> int:
        """Optimizer steps taken in the current epoch; 0 after an epoch's last."""
        return self.state.epoch_samples // self._train.plan.window_size

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: plain values and tensors (not copied). On rank 0, where the callbacks are, it is complete."""
        return snapshot.take(self, self._run_config(), self._hooks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, the same on every rank.

        Raises ValueError, with nothing changed, where it does not fit this trainer.
        """
        snapshot.restore(self, state, self._run_config(), self._hooks)

    # ------------------------------------------------------------------------------------------------------- the loop

    def _fit_epoch(self) -> None:
        self.before_epoch()
        self._replica.refresh()
        batches = self._train.batches(self.state)
        for window in self._train.windows(self.state):
            self._step(window, batches)
            self._settle(window)
            if self._finished():
                return

    def _step(self, window: Window, batches: Iterator[Any]) -> None:
        """One optimizer update."""
        self._replica.begin_window()
        for number, share in enumerate(window.micro_batches):
            last = number == len(window.micro_batches) - 1
            batch = self.prepare_batch(next(batches))
            if self.config.seed is not None:  # after the fetch, which draws from the same generators
                seed_generators(mix(STEP, self.config.seed, self.state.window, number, self.world.rank), self.world.device)
            output = as_mapping(self.training_step(self._replica.handed(last), batch), "training_step")
            loss = checks.check_loss(output)
            if last:
                self._replica.require_call()
            self._reporter.add(output, len(share))
            # the window's mean = the sum over ranks and micro-batches of  loss * samples / window.size
            # DDP averages the ranks' gradients, which divides by world.size: undone here
            (loss * (len(share) * self.world.size / window.size)).backward()  # type: ignore[no-untyped-call]
        if not window.micro_batches:
            self._replica.backward_zeros()
        if self.config.max_grad_norm is not None:
            self._reporter.grad_norm = nn.utils.clip_grad_norm_(self._replica.trainable, self.config.max_grad_norm)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        # a copy: the scheduler writes the next rate into the same tensor
        self._reporter.rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self.optimizer_step()
        self._schedule.after_step()
        self._replica.zero_gradients()

    def _settle(self, window: Window) -> None:
        """What follows an update: counters first, then report, evaluation, hooks, and the agreement on stopping."""
        state, config = self.state, self.config
        state.step += 1
        state.samples += window.size
        state.epoch_samples += window.size
        epoch_over = state.epoch_samples == self._train.plan.epoch_samples
        if epoch_over:
            state.epoch, state.epoch_samples = state.epoch + 1, 0
            self._schedule.after_epoch()
        self._reporter.end_step(window.size)
        at_end = state.step == self.total_steps
        report_due = at_end or state.step % config.log_every == 0
        evaluation_due = state.step % config.eval_every == 0 if config.eval_every else epoch_over or at_end
        if report_due or epoch_over:
            self._reporter.reduce(state.step)
        self._hooks.on_step(self, checks.check_summary(self.summarize(self._reporter.take_report())) if report_due else {})
        if evaluation_due and self.eval_sets:
            self._hooks.on_eval(self, self._evaluate())
        if epoch_over:
            self._hooks.on_epoch_end(self, checks.check_summary(self.summarize(self._reporter.take_epoch())))
        reason = self._agreement.settle(state.step, due=report_due or evaluation_due or epoch_over)
        state.stop_reason = None if at_end else reason  # on a planned end nobody was stopped
        self._hooks.on_safe_point(self)

    # ------------------------------------------------------------------------------------------------------ its parts

    def _begin(self, resume_from: str | Path | None) -> None:
        """Everything before the first step. What rank 0 finds wrong is raised on every rank."""
        self._train.require()
        # Rank 0 decides: where only it sees the folder, a script may have told the others to start afresh.
        content = self.world.run_on_main(lambda: None if resume_from is None else checkpoint.find(resume_from))
        if content is not None:
            self.load_state_dict(content)
        self.state.stop_reason = None
        checks.warn_of_evaluation_mode(self.model, self.world.is_main)
        self.model.zero_grad()
        self._train.open(self.world.run_on_main)
        self._reporter = Reporter(self.world, self._replica, self.config.log_every)
        self._agreement.open(self.state.step)
        self.world.run_on_main(lambda: self._hooks.on_fit_start(self))

    def _finished(self) -> bool:
        return self.state.stop_reason is not None or self.state.step >= (self.total_steps or 0)

    def _evaluate(self) -> dict[str, float]:
        with self._reporter.pause():
            metrics = self.evaluate()
        self._schedule.after_evaluation(metrics)
        return metrics

    def _run_config(self) -> dict[str, Any]:
        return self.config.plain() | {"samples": self._train.plan.samples, "global_batch": self._train.plan.window_size}
