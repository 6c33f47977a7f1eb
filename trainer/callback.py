"""The hooks, and the dispatcher that calls them on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .method_checks import check_hooks

if TYPE_CHECKING:
    from .ddp_trainer import DDPTrainer
    from .world import World

_log = logging.getLogger("trainer")


class Callback:
    """Watches a run from global rank 0; override the hooks you need.

    Every hook is called on rank 0 only, after the counters of ``trainer.state`` have advanced. What it receives is already
    reduced over all ranks, so a hook needs no communication, and may not start any: `fit`, `evaluate`, `predict`, `close` and
    every collective of `World` raise RuntimeError inside one. A hook watches; what changes the model belongs in the overridable
    methods of the trainer, which run on every rank. The other ranks wait while a hook works, so keep it short.
    """

    @property
    def name(self) -> str:
        """Unique within a trainer; the key of this callback's state in a checkpoint. The class name unless assigned."""
        name: str = self.__dict__.get("name", type(self).__name__)
        return name

    @name.setter
    def name(self, name: str) -> None:
        self.__dict__["name"] = name

    def before_fit(self, trainer: DDPTrainer) -> None:
        """Once per `fit`, before any callback's `on_fit_start`: raise here what rules the run out. Nothing may be written yet."""

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        """Once per `fit`, after a checkpoint was restored and before the first step."""

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        """After every optimizer step. `metrics` is empty except at reports, every ``log_every`` steps and at the planned last.

        Then it holds the means since the last report by key, ``lr`` (``lr/1``, ... for more parameter groups),
        ``samples_per_second``, with weights of items ``items_per_second``, and with clipping ``grad_norm``.
        """

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        """After each evaluation that `fit` runs (not after a direct call of `evaluate`); its means by key, or ``name/key``."""

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        """After the last step of an epoch; means over its samples (in a resumed epoch: since then). Not if it was cut short."""

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        """After every step, and after an epoch's last window or a stop even if its update was skipped (fp16); last of all, when
        everything is settled. The only place to write a checkpoint.

        A callback that changes its own state here must stand before the one that writes the file: else the change is not in it.
        """

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        """Once, when `fit` ends: as planned or stopped, but not after an error."""

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        """When `fit` ends with an error: close files here. Nothing may communicate any more."""

    def for_other_ranks(self) -> dict[str, Any]:
        """Attributes that the other ranks' copies of this callback, which see no hook, are given when `fit` has started.

        Name to picklable value: say, a folder that each rank has named by its own clock. Called on rank 0.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What this callback remembers, as plain values and tensors; saved in each checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, before `on_fit_start`."""


class Dispatcher:
    """Calls the callbacks, in the order given, on rank 0; on other ranks they only take over what it has shared.

    Raises (on every rank) TypeError for what is no `Callback`, ValueError for a name used twice.
    """

    def __init__(self, callbacks: Sequence[Callback], world: World) -> None:
        names: set[str] = set()
        if isinstance(callbacks, (str, bytes, Mapping)) or not isinstance(callbacks, Iterable):
            raise TypeError(f"callbacks must be a list of trainer.Callback instances, as in [ProgressBar()]; found {callbacks!r}")
        self._given = tuple(callbacks)
        for callback in self._given:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks must be instances of trainer.Callback; found {callback!r}")
            name: Any = callback.name
            if not isinstance(name, str) or not name:
                raise TypeError(f"the name of a callback must be a non-empty text; found {name!r} ({callback!r})")
            if callback.name in names:
                raise ValueError(
                    f"two callbacks are named {callback.name!r}: give one another name, as in callback.name = "
                    f"'{callback.name} 2' (the name is the key of its state in a checkpoint)"
                )
            names.add(callback.name)
            check_hooks(callback, Callback)
        self._names = names
        self._world = world  # which refuses to communicate while it is told that a hook runs
        self.callbacks = self._given if world.is_main else ()
        # The hooks of every step cost nothing where nobody overrides them.
        self._watch_steps, self._watch_safe_points = (
            any(getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook) for callback in self.callbacks)
            for hook in ("on_step", "on_safe_point")
        )

    def on_fit_start(self, trainer: DDPTrainer) -> dict[str, dict[str, Any]]:
        """What the other ranks' callbacks are to `take_over`, by name."""
        shared: dict[str, dict[str, Any]] = {}
        self._run("before_fit", lambda callback: callback.before_fit(trainer))
        self._run("on_fit_start", lambda callback: callback.on_fit_start(trainer))
        self._run("for_other_ranks", lambda callback: shared.update({callback.name: callback.for_other_ranks()}))
        return shared

    def take_over(self, shared: Mapping[str, dict[str, Any]]) -> None:
        """Give the callbacks of ranks other than 0, which see no hook, what rank 0's `on_fit_start` returned."""
        if not self._world.is_main:
            for callback in self._given:
                vars(callback).update(shared.get(callback.name, {}))

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if self._watch_steps:
            self._run("on_step", lambda callback: callback.on_step(trainer, metrics), metrics)

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._run("on_eval", lambda callback: callback.on_eval(trainer, metrics), metrics)

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._run("on_epoch_end", lambda callback: callback.on_epoch_end(trainer, metrics), metrics)

    def on_safe_point(self, trainer: DDPTrainer) -> None:
        if self._watch_safe_points:
            self._run("on_safe_point", lambda callback: callback.on_safe_point(trainer))

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self._run("on_fit_end", lambda callback: callback.on_fit_end(trainer))

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        interrupt: list[BaseException] = []

        def close(callback: Callback) -> None:  # every callback gets to close its files, whatever the others do
            try:
                callback.on_exception(trainer, error)
            except BaseException as raised:
                _log.exception("%s.on_exception failed too, after %r", callback.name, error)
                if not isinstance(raised, Exception):
                    interrupt.append(raised)

        self._run("on_exception", close)
        if interrupt:
            raise interrupt[0]

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        self._run("state_dict", lambda callback: saved.update({callback.name: callback.state_dict()}))
        return saved

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        def load(callback: Callback) -> None:
            if callback.name in state:
                callback.load_state_dict(state[callback.name])

        self._run("load_state_dict", load)
        unknown = sorted(set(state) - self._names)
        if unknown and self._world.is_main:  # one line, not one a rank
            _log.warning("ignored the checkpoint's state of callbacks that this trainer has not: %s", ", ".join(unknown))

    def _run(self, hook: str, call: Callable[[Callback], None], metrics: Mapping[str, float] | None = None) -> None:
        outer = self._world.running_hook  # a state_dict is often asked for inside another hook
        for callback in self.callbacks:
            self._world.running_hook = f"{callback.name}.{hook}"
            try:
                call(callback)
            except KeyError as error:
                if metrics is not None and error.args and error.args[0] not in metrics and hasattr(error, "add_note"):
                    error.add_note(_of_metrics(metrics))  # from Python 3.11 on
                raise
            finally:
                self._world.running_hook = outer


def _of_metrics(metrics: Mapping[str, float]) -> str:
    if metrics:
        return f"(the metrics are {', '.join(map(repr, metrics))})"
    return "(metrics are empty between reports, every log_every steps: ask `if metrics:` first)"
