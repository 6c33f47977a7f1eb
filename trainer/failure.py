"""What to say of an error that ends a run, beside what its author said."""

from __future__ import annotations

import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from . import workers
from .rendezvous import CAUSE, CLOSED, TIMED_OUT

if TYPE_CHECKING:
    from .callback import Dispatcher
    from .ddp_trainer import DDPTrainer
    from .state import TrainerState
    from .stopping import StopAgreement
    from .world import World

_WRAPPER = "(?:DistributedDataParallel|_StandIn)"
_HIDDEN = re.compile(rf"'{_WRAPPER}' object has no attribute '(\w+)'")
_NO_LIST = re.compile(rf"'{_WRAPPER}' object is not (?:subscriptable|iterable)|cannot unpack non-iterable {_WRAPPER} object")
_PATIENCE = 0.2  # seconds for the hooks to close their files, before torchrun is told
_HOME = os.path.dirname(__file__)
_PHASES = {  # by the function of this package that was running; the first that fits counts
    "_step": "in a training step",
    "_check_calls": "for the other ranks",
    "_draw_sampler": "for rank 0, which draws the sampler's order",
    "run_on_main": "for rank 0, which reads a checkpoint or runs a hook",
    "evaluate": "in an evaluation",
    "predict": "in a prediction",
    "reduce": "in a report",
    "settle": "to agree on stopping",
    "refresh": "to set up the model's wrapper",
    "_begin": "to set up",
}


def resume_point(state: TrainerState) -> str:
    """From where a run goes on; empty at its start."""
    return f" after step {state.step}, sample {state.samples}" if state.samples else ""


def set_names(sets: Mapping[str, Any]) -> str:
    """Which sets are evaluated, in order; empty for a single one without a name."""
    return f" of {', '.join(sets)}" if any(sets) else ""


@contextmanager
def collective_call(
    call: str, world: World, on_error: Callable[[BaseException], BaseException], detail: str = ""
) -> Iterator[None]:
    """A call that every rank must make, with the same `detail`; an error leaves it as ``on_error(error)``.

    Inside an evaluation that `fit` runs, that is left to `fit`. Raises RuntimeError on every rank where their calls differ.
    """
    outer, world.running_call = world.running_call, call
    try:
        if outer is None:
            _check_calls(call + detail, world)
        yield
    except BaseException as raised:
        error = on_error(raised) if outer is None or call == "fit" else raised
        if error is raised:
            raise
        try:
            raise error from raised
        finally:
            del error  # whose traceback holds this frame: the cycle would keep the model alive
    finally:
        world.running_call = outer


def report_failure(error: BaseException, trainer: DDPTrainer, hooks: Dispatcher, agreement: StopAgreement) -> BaseException:
    """Report what ends `fit` to the callbacks and torchrun; returns it, explained where there is more to say."""
    workers.dismiss()
    consequence = trainer.world.is_consequence(error)
    is_cause = not consequence and error is not trainer.world.remote_error
    if is_cause:
        error = explain(error, trainer)
    with _recorded_meanwhile(error, trainer.world) if is_cause else nullcontext():
        hooks.on_exception(trainer, error)
    agreement.close()  # from here on torchrun may end this process at once
    if consequence:
        agreement.obey()
        error = explain(error, trainer)
    if not is_cause:
        trainer.world.record_failure(error)
    return error


@contextmanager
def _recorded_meanwhile(error: BaseException, world: World) -> Iterator[None]:
    """torchrun is told of `error`, once: after the block, or while it takes long, as a hook that waits for a server may."""
    is_told = threading.Lock()

    def tell() -> None:
        if is_told.acquire(blocking=False):
            world.record_failure(error)

    if isinstance(error, torch.AcceleratorError):  # NCCL's watchdog sees it too, and ends this process
        tell()
    timer = threading.Timer(_PATIENCE, tell)
    timer.daemon = True
    with suppress(RuntimeError):  # there may be no more threads, which may be the error itself
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        tell()


def explain(error: BaseException, trainer: DDPTrainer) -> BaseException:
    """`error`, or where more can be said than that, one of the same type that also says it. Local.

    Takes up to two seconds where a collective has failed: the other ranks are asked, in the store.
    """
    text = None
    if trainer.world.is_consequence(error):
        text = _explain_lost_ranks(error, trainer)
    elif isinstance(error, AttributeError):
        text = _explain_hidden_attribute(error)
    elif isinstance(error, TypeError) and _NO_LIST.search(str(error)):
        text = (
            f"{error}: the model that training_step is given may be wrapped, and can only be called; its parts are self.model's. "
            "(It is the first argument: training_step(self, model, batch))"
        )
    elif isinstance(error, KeyError) and _is_wrapped_name(error, trainer):
        text = (
            f"{error}: the model that training_step is given may be wrapped, and then the names of its parameters begin with "
            "module.; take those of self.model"
        )
    elif isinstance(error, ValueError) and str(error).startswith("Expected more than 1 value per channel when training"):
        text = (
            f"{error}: a micro-batch of one sample leaves BatchNorm nothing to normalise by. Choose batch_size and global batch "
            "so that no rank's share ends with one, or leave out an epoch's short last window with drop_last=True"
        )
    elif isinstance(error, RuntimeError):
        text = _explain_memory(error, trainer)
    return error if text is None else with_text(text, error)


def with_text(text: str, error: BaseException) -> BaseException:
    """An error of the type of `error` with that text, or of the nearest type that takes one."""
    for kind in type(error).__mro__:
        with suppress(Exception):
            said: BaseException = kind(text)
            if text in str(said):  # a KeyError's has quotes around it
                said.__cause__ = error
                return said
    return error


def _is_call(gathered: Any) -> bool:
    return isinstance(gathered, tuple) and [type(item) for item in gathered] == [str, bool]


def _check_calls(call: str, world: World) -> None:
    """RuntimeError on every rank unless all make this call. Where one comes from an error that was caught, all begin anew."""
    gathered: list[Any] = world.gather((call, world.failed))
    made = [other if _is_call(other) else ("something else", False) for other in gathered]
    if all(map(_is_call, gathered)) and any(failed for _, failed in made):
        world.recover()
    calls = [other for other, _ in made]
    if set(calls) != {call}:
        ranks = {call: ", ".join(str(rank) for rank, other in enumerate(calls) if other == call) for call in calls}
        found = "; ".join(f"{call} on rank {where}" for call, where in ranks.items())
        raise RuntimeError(
            f"the ranks have made different calls: {found}. Every rank must make the same ones in the same order: is there an "
            "`if rank == 0` around one of them, or around a load_state_dict?"
        )


def _explain_lost_ranks(error: BaseException, trainer: DDPTrainer) -> str:
    """For a rank whose collective failed, and which only waited: what it waited for, and which rank is to blame."""
    roll_call, timed_out = trainer.world.roll_call, re.search("[Tt]im(ed|ing) out", str(error)) is not None
    said, silent = ({}, []) if roll_call is None else roll_call.ask(timed_out)
    causes, left, gave_up = (", ".join(map(str, said.get(why, []))) for why in (CAUSE, CLOSED, TIMED_OUT))
    running = _running(error)
    phase = next((words for function, words in _PHASES.items() if function in running), "between two steps")
    if phase.startswith("for rank 0") and trainer.world.is_main:
        phase = "for the other ranks"
    whose = "others failed too" if roll_call is not None else "another rank failed, hangs, or came later than the time limit"
    if causes:
        whose = f"rank {causes} failed with an error of its own"
    elif left:
        whose = (
            f"rank {left} has closed its world: every rank must make the same calls. Is there an `if rank == 0` around one of "
            "them?"
        )
    elif gave_up and not timed_out and not silent:
        whose = (
            f"rank {gave_up} had waited for longer than the time limit, and gave up: this rank came late. "
            "World.from_env(timeout=...) sets another limit"
        )
    elif len(silent) == 1:
        whose = f"rank {silent[0]} did not answer: it hangs, is slow, or was killed"
    elif silent:
        whose = f"rank {', '.join(map(str, silent))} did not answer: one hangs, is slow, or was killed; others may wait for it"
    return f"{error}\nrank {trainer.world.rank} was waiting {phase}, after step {trainer.state.step}; {whose}"


def _running(error: BaseException) -> set[str]:
    """The functions of this package that `error` has come through; a script's may have the same names."""
    return {frame.name for frame in traceback.extract_tb(error.__traceback__) if os.path.dirname(frame.filename) == _HOME}


def _explain_hidden_attribute(error: AttributeError) -> str | None:
    if (hidden := _HIDDEN.search(str(error))) is None:
        return None
    return (
        f"the model that training_step is given may be wrapped in DistributedDataParallel, which hides {hidden[1]!r}: write "
        f"self.model.{hidden[1]} (but compute the loss from model(...), the argument)"
    )


def _is_wrapped_name(error: KeyError, trainer: DDPTrainer) -> bool:
    names = {f"module.{name}" for name, _ in [*trainer.model.named_parameters(), *trainer.model.named_buffers()]}
    return bool(error.args) and error.args[0] in names


def _explain_memory(error: RuntimeError, trainer: DDPTrainer) -> str | None:
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        return None
    config = trainer.config
    running = _running(error)
    if "write_behind" in running:
        return f"{error}\nout of memory with a copy of the state to be written: Checkpoint(async_write=False) needs none"
    if {"evaluate", "predict"} & running and "_step" not in running:
        batch = config.eval_batch_size or config.batch_size
        return f"{error}\nout of memory with batches of {batch}: halve eval_batch_size, which changes no result"
    size = f"global_batch_size={config.global_batch_size}" if config.global_batch_size else "the global batch"
    return (
        f"{error}\nout of memory with batch_size={config.batch_size}: halve it and keep {size} (set global_batch_size), and the "
        "curve stays the same"
    )
