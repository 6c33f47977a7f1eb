"""`DDPTrainer`: the loop, its overridable steps and its distributed evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from . import checkpoint_content, checkpoint_folder, checks, data_checks, rank_checks
from .callback import Callback, Dispatcher
from .config import TrainerConfig
from .cuda_graph import CudaGraphs
from .evaluation import evaluate
from .failure import collective_call, explain, report_failure, resume_point, set_names
from .method_checks import check_methods
from .metrics import as_mapping
from .plan import Window
from .precision import Precision
from .prediction import predict
from .randomness import STEP, seed_for
from .replica import Replica
from .reports import Reporter
from .schedule import Schedule
from .state import TrainerState
from .steps import Steps
from .stopping import StopAgreement
from .train_data import TrainData
from .weighting import Weighting
from .world import World

if TYPE_CHECKING:
    from typing_extensions import Self


class DDPTrainer(Steps):
    """Trains one model with one optimizer on any number of processes; evaluates it exactly on all of them.

    The sequence of optimizer updates is a function of (first weights, seed, data, global batch). The same script runs as
    ``python script.py`` and under ``torchrun``. Subclass it and override the steps, or instantiate it with a `loss_fn`.

    The loop of `fit`, with every hook in its place:

        on_fit_start
        for each epoch:
            before_epoch()                                          # every rank
            order = permutation(seed, epoch)                        # same on every rank, never stored whole
            for each window of global_batch_size positions:         # the last may be shorter
                for each micro-batch of this rank's share:          # gradients travel on the last one only
                    seed torch, random, numpy from (seed, window, micro-batch, rank)
                    loss = training_step(model, batch)["loss"]      # a mean over its samples
                    (loss * samples * world.size / window_samples).backward()       # DDP divides by world.size
                clip; optimizer_step(); zero the gradients; scheduler.step()
                step += 1; samples += ...; epoch += 1 after the epoch's last window # all counters before any hook
                on_step(metrics)                                    # reduced at every log_every-th and the planned last
                if evaluation is due:  evaluate; on_eval            # every eval_every steps, or at the epoch's and run's end
                if the epoch is over:  on_epoch_end
                agree on stopping                                   # at reports, after on_eval and on_epoch_end
                on_safe_point                                       # fires for the last step of every run
                leave together if agreed
        on_fit_end

    Args:
        model: the bare module. It is moved to this rank's device and takes rank 0's weights.
        optimizer: built on ``model.parameters()``.
        train_data: map-style or iterable dataset; may be None for a trainer that only evaluates.
        eval_data: map-style or iterable dataset, or several by name.
        loss_fn: ``loss_fn(model(inputs), targets)`` is the default step's loss, a 0-dim mean; a module is moved to the device.
        scheduler: an LRScheduler on `optimizer`, or a callable that makes one from ``(optimizer, total_steps)``.
        sampler: one global order over `train_data`, split over the ranks by the trainer; replaces shuffling.
        loader_options: keyword arguments of DataLoader such as ``num_workers`` and ``collate_fn``.
        config: every knob that is a plain value.
        callbacks: watch the run on rank 0.
        world: default `World.from_env`.

    Raises TypeError or ValueError on every rank for arguments that cannot work, and for ranks that were given different ones.
    """

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
        checks.check_model(model, optimizer, own_update=self._overrides("optimizer_step"))
        check_methods(self, DDPTrainer, Steps)
        self.config = TrainerConfig() if config is None else config
        checks.check_settings(self.config, world, loss_fn)
        self._opened_world = world is None and not World.is_open()
        self.world = World.from_env() if world is None else world
        self.world.check_outside_hook("DDPTrainer")
        self._replica = Replica(model, optimizer, self.world, self.config)
        self.model, self.optimizer, self.state = self._replica.model, optimizer, TrainerState()
        self.loss_fn = loss_fn.to(self.world.device) if isinstance(loss_fn, nn.Module) else loss_fn  # it may hold class weights
        with self.world.together():  # what is wrong on one rank is an error on all
            self.eval_sets = data_checks.named_sets(eval_data, "eval_data")
            self._train = TrainData(train_data, sampler, loader_options, self.config, self.world)
            if train_data is not None and not self._overrides("training_step"):
                checks.check_loss_fn(loss_fn)
            self._schedule = Schedule(scheduler, optimizer, self.config, self.total_steps, bool(self.eval_sets), self.world)
            self._hooks = Dispatcher(callbacks, self.world)
        self.scheduler, self.callbacks = self._schedule.scheduler, self._hooks.callbacks
        self._precision = Precision(self.config.precision, self.world.device, self.config.scaler_options)
        self._replica.check_windows(self._train.window_sizes)
        self._graphs = CudaGraphs(self.world, self.config, self._train.window_size)
        self._agreement = StopAgreement(self.world, self.config.log_every, self.config.max_minutes)
        rank_checks.check_same_on_all_ranks(self.world, self.model, train_data, self._train.samples, self.eval_sets, self.config)
        self._replica.broadcast_state()

    # ---------------------------------------------------------------------------------------------- called on every rank

    def fit(self, resume_from: str | Path | None = None) -> TrainerState:
        """Train from `state` to the planned end (``epochs`` or ``max_steps``); a finished run takes no step.

        `resume_from`: a checkpoint file (missing: FileNotFoundError), or a folder whose newest whole ``step-*.pt`` is taken
        (empty or missing: a fresh start). Rank 0 alone needs to see it. ValueError for that of another model, optimizer,
        scheduler, seed, data or global batch; CheckpointError where it, or each in the folder, is damaged. Errors end the job.

        Returns `state`, the same on every rank, after every hook of `on_fit_end` has finished.
        """
        self.world.check_usable("fit")
        end = partial(report_failure, trainer=self, hooks=self._hooks, agreement=self._agreement)
        try:
            with collective_call("fit", self.world, end, resume_point(self.state)), torch.enable_grad(), self._graphs.on_stream():
                self._begin(resume_from)
                while not (self.finished or self.state.stop_reason is not None):
                    self._fit_epoch()
                self.world.run_on_main(lambda: self._hooks.on_fit_end(self))
        finally:
            self._agreement.close()
            self._graphs.release()
            self._replica.release()
        return self.state

    def evaluate(self, data: Dataset[Any] | Mapping[str, Dataset[Any]] | None = None) -> dict[str, float]:
        """The means of `eval_step`'s values over every sample of `data` (default: `eval_data`), the same on every rank.

        Every sample counts exactly once, at any world and batch size. Keys: `eval_step`'s, or ``name/key`` with several datasets.
        Fires no hook, moves no scheduler; modes and random state are put back. ValueError without data.
        """
        self.world.check_usable("evaluate")
        self._replica.use.check_meeting("evaluate")
        sets = self.eval_sets if data is None else data_checks.named_sets(data, "data")
        if not sets:
            raise ValueError("nothing to evaluate: pass eval_data to DDPTrainer, or a dataset to evaluate()")
        metrics: dict[str, float] = {}
        with collective_call("evaluate", self.world, partial(explain, trainer=self), set_names(sets)):
            for name, dataset in sets.items():
                means = evaluate(self, self._replica, self._precision, dataset, self._train.options)
                means = checks.summarized(self.summarize, means)
                metrics |= {f"{name}/{key}" if name else key: value for key, value in means.items()}
        return metrics

    def predict(self, data: Dataset[Any]) -> Any:
        """`predict_step`'s outputs over `data` (map-style), in dataset order, on rank 0 and its CPU; None on the other ranks.

        Batches are joined: tensors and arrays along their first dimension, lists one after another, tuples and mappings by field.
        TypeError for a stream or DataLoader, ValueError for outputs without a row for each sample.
        """
        self.world.check_usable("predict")
        self._replica.use.check_meeting("predict")
        data_checks.check_dataset(data, "data")
        with collective_call("predict", self.world, partial(explain, trainer=self)):
            return predict(self, self._replica, self._precision, data, self._train.options)

    def close(self) -> None:
        """Let go of the DDP wrapper, and close the world if this trainer opened it. Also at the end of a ``with`` block."""
        self.world.check_outside_hook("close")
        self._replica.release()
        if self._opened_world:
            self.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if error is not None and not self.world.failed and (not isinstance(error, SystemExit) or error.code):
            self.world.record_failure(error)
        self.close()

    # ------------------------------------------------------------------------- local, no communication: usable in hooks

    def stop(self, reason: str) -> None:
        """Ask all ranks to leave `fit` together. Any rank may ask; outside `fit` it does nothing. SIGTERM and SIGUSR1 ask too.

        They leave after the same step, at which they next agree: within ``log_every`` steps or two seconds, whichever is less.
        """
        self._agreement.ask(reason)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, known before `fit`; None without train_data, and for a stream with epochs."""
        return self._train.total_steps

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch; None without train_data, and for a stream."""
        return self._train.steps_per_epoch

    @property
    def epoch_step(self) -> int:
        """Windows trained on in this epoch, 0 after its last (skipped updates too; of a sharded stream as if all were whole)."""
        return self.state.epoch_samples // self._train.window_size

    @property
    def finished(self) -> bool:
        """Whether the planned end (``epochs`` or ``max_steps``) is reached."""
        state, config = self.state, self.config
        took_all_steps = config.max_steps is not None and state.step >= config.max_steps
        return took_all_steps or (config.last_epoch is not None and state.epoch >= config.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: plain values and tensors (not copied). On rank 0, where the callbacks are, it is complete."""
        of_order = self._train.state_dict(self.state)
        return checkpoint_content.take(self, self._run_config(), self._precision, self._hooks) | of_order

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, the same on every rank. ValueError, with nothing changed, where it does not fit."""
        self._train.check_shards(state)
        checkpoint_content.restore(self, state, self._run_config(), self._precision, self._hooks)
        self._train.load_state_dict(state)

    # ------------------------------------------------------------------------------------------------------- the loop

    def _fit_epoch(self) -> None:
        self.before_epoch()
        if self._replica.refresh():
            checks.check_trained(self.model, self.optimizer, self.world.is_main)
        self._graphs.refresh(self.model, self.optimizer)
        for window, batches in self._train.windows(self.state):
            self._settle(window, self._step(window, batches))
            if self.finished or self.state.stop_reason is not None:
                return

    def _step(self, window: Window, batches: Iterable[Any]) -> bool:
        """One optimizer update; False when fp16 gradients overflowed, and it was skipped on all ranks."""
        self._replica.begin_window(window)
        self._graphs.begin_window(window, self._replica.trainable)
        for number, (share, batch) in enumerate(zip(window.micro_batches, batches, strict=True)):
            # After the fetch, which draws from the same generators.
            seed_for(STEP, self.config.seed, self.state.window, number, self.world.rank, device=self.world.device)
            batch = self.prepare_batch(batch)
            last = number == len(window.micro_batches) - 1
            output = self._graphs.run_pass(self._pass, batch, len(share), window, last)
            self._reporter.add(output, len(share))
            del output  # a value that still has a graph would keep it alive through the next forward
        self._replica.end_window(window)
        self._precision.unscale(self.optimizer, self._replica.trainable)
        self._weighting.normalize(self._replica.trainable, window)
        self._reporter.note_rates()
        updated, norm = self._graphs.run_update(self._update, self.optimizer)
        self._reporter.grad_norm = norm
        if updated:
            self._schedule.after("step")
        return updated

    def _pass(self, batch: Any, samples: int, window: Window, last: bool) -> Mapping[str, Any]:
        """Forward and backward of one micro-batch; what `training_step` returned."""
        with self._precision.autocast():
            output = as_mapping(self.training_step(self._replica.use.model_for(last), batch), "training_step")
        loss = checks.check_loss(output)
        if last:
            self._replica.use.require_call()
        self._precision.scale(self._weighting.weigh(loss, samples, window)).backward()  # type: ignore[no-untyped-call]
        return output

    def _update(self) -> tuple[bool, Tensor | None]:
        """Whether the parameters were updated, and the norm of the gradient, which is zeroed."""
        trainable, norm = self._replica.trainable, None
        if self.config.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(trainable, self.config.max_grad_norm)
        if updated := not self._precision.overflowed(self.optimizer):
            self.optimizer_step()
        self._graphs.zero_gradients(trainable)
        return updated, norm

    def _settle(self, window: Window, updated: bool) -> None:
        """What follows an update: counters first, then report, evaluation, hooks, and the agreement on stopping."""
        state, config = self.state, self.config
        state.step += updated
        state.skipped_steps += not updated
        state.samples += window.size
        state.epoch_samples += window.size
        if window.last:
            state.epoch, state.epoch_samples = state.epoch + 1, 0
            self._schedule.after("epoch")
        finished = self.finished
        self._reporter.end_step(state.step if updated else state.step + 1, window.size)
        report_due = updated and (finished or state.step % config.log_every == 0)
        due = (window.last or finished) if config.eval_every is None else (updated and state.step % config.eval_every == 0)
        evaluation_due = due and bool(self.eval_sets)
        if report_due or window.last:
            self._reporter.reduce(state, self._weighting.pop_empty_windows())
        try:
            if updated:
                self._hooks.on_step(self, self._report() if report_due else {})
        finally:
            self._reporter.check_parameters(state.step)
        if evaluation_due:
            self._hooks.on_eval(self, self._evaluate())
        if window.last:
            self._hooks.on_epoch_end(self, checks.summarized(self.summarize, self._reporter.pop_epoch()))
        reason = self._agreement.settle(state.window, report_due or evaluation_due or window.last, finished)
        state.stop_reason = None if finished else reason  # on a planned end nobody was stopped
        if updated or window.last or reason is not None:
            self._hooks.on_safe_point(self)

    # ------------------------------------------------------------------------------------------------------ its parts

    def _begin(self, resume_from: str | Path | None) -> None:
        """Everything before the first step. What rank 0 finds wrong is raised on every rank."""
        # Rank 0's resume_from counts: where only it sees the folder, a script may have passed None on the others.
        content = self.world.run_on_main(lambda: None if resume_from is None else checkpoint_folder.find(resume_from))
        if content is not None:
            self.load_state_dict(content)
        self.state.stop_reason = None
        checks.warn_before_fit(self.model, self.state, self.finished, self.world.is_main)
        self._train.open(own_transfer=self._overrides("prepare_batch"))
        self._weighting = Weighting(self.world, uneven=self._train.shards_itself)
        self._agreement.open(self.state.window)
        self._hooks.take_over(self.world.run_on_main(lambda: self._hooks.on_fit_start(self)))  # before the clock starts
        self._reporter = Reporter(self.world, self._replica, self.config, self.optimizer, self._overrides("optimizer_step"))

    def _report(self) -> dict[str, float]:
        return checks.summarized(self.summarize, self._reporter.pop_report(bool(self._weighting.by_items)))

    def _evaluate(self) -> dict[str, float]:
        with self._reporter.pause(), self._agreement.evaluating():
            metrics = self.evaluate()
        self._schedule.after_evaluation(metrics)
        return metrics

    def _run_config(self) -> dict[str, Any]:
        return self.config.plain() | self._train.identity
