"""The curves of a run, at Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from trainer import Callback, DDPTrainer

_log = logging.getLogger("callbacks")
_LAST = "last-step"  # a file beside an offline run's, which wandb itself cannot look into


class WeightsAndBiases(Callback):
    """Logs to a run of Weights & Biases; with ``mode="offline"`` into files in `folder`, for ``wandb sync``.

    Keys: ``train/<key>`` at each report, ``eval/<key>`` after each evaluation, ``epoch/<key>`` at the end of each epoch, at W&B's
    own step, which is `TrainerState.step`. The fields of the config are the run's config.

    - `project`, `name`: of the run; W&B's defaults if None.
    - `folder`: where wandb makes its own folder ``wandb`` (default: the current one); made if need be.
    - `init`: further keyword arguments of ``wandb.init``, such as ``entity``, ``tags``, ``mode`` and ``config`` (a mapping, which
      is added to the fields of the config).

    The run's id is part of a checkpoint: a resumed run goes on with it. W&B cannot be made to forget: steps beyond the
    restored one that it holds already are not logged again, so that each is there once, with its first values (which a run that
    resumes with the same settings repeats). One line in the log says up to where. For other values pass ``resume_from`` or
    ``fork_from`` of ``wandb.init``, where your server knows them. A run that begins at step 0 gets a new id, unless `init` has
    one. The run ends with `fit`; after an error it is marked as failed.

    wandb writes in the background: a process that is killed loses what it logged in its last second or so.

    Raises ModuleNotFoundError without the package, TypeError for unusable arguments; RuntimeError, at the start of `fit`, when a
    run of wandb is open in this process already, and what ``wandb.init`` raises.
    """

    def __init__(
        self, project: str | None = None, name: str | None = None, folder: str | os.PathLike[str] | None = None, **init: Any
    ) -> None:
        spec = find_spec("wandb")
        if spec is None or spec.origin is None:  # a folder "wandb" with a run's files passes for a package without one
            raise ModuleNotFoundError("WeightsAndBiases needs the package wandb: pip install wandb", name="wandb")
        for argument, value in (("project", project), ("name", name)):
            if not isinstance(value, str | None):
                raise TypeError(f"{argument} must be a text or None; found {value!r}")
        if not isinstance(folder, (str, os.PathLike)) and folder is not None:
            raise TypeError(f"folder must be the path of a folder; found {folder!r}")
        if not isinstance(init.get("config", {}), Mapping):
            raise TypeError(f"config must be a mapping, to be added to the trainer's; found {init['config']!r}")
        self._options = {"project": project, "name": name, "dir": None if folder is None else os.fspath(folder), **init}
        self._id: str | None = None
        self._run: Any = None  # a wandb.Run, which only rank 0 has use for
        self._held = self._row = 0
        self._last: BinaryIO | None = None

    @property
    def run_id(self) -> str | None:
        """The id of the run, as in its address; None before `fit`, and on the ranks other than 0."""
        return self._id

    def before_fit(self, trainer: DDPTrainer) -> None:
        import wandb  # here, not above: it takes a second

        if wandb.run is not None:
            raise RuntimeError(
                f"the run {wandb.run.id} of wandb is open in this process, and WeightsAndBiases opens its own: leave out "
                "wandb.init(), whose arguments WeightsAndBiases takes, or call wandb.finish() before fit"
            )

    def on_fit_start(self, trainer: DDPTrainer) -> None:
        import wandb

        options, step = dict(self._options), trainer.state.step
        options["config"] = {**trainer.config.plain(), **options.get("config", {})}
        if self._id is not None and step > 0 and "fork_from" not in options:
            options.setdefault("id", self._id)
        if not {"resume", "resume_from", "fork_from"} & options.keys():
            options["resume"] = "allow"
        if options["dir"] is not None:
            Path(options["dir"]).mkdir(parents=True, exist_ok=True)
        if "settings" not in options and hasattr(settings := wandb.Settings(), "x_transaction_log_flush_interval"):
            settings.x_transaction_log_flush_interval = 1.0  # seconds, not 15: what a killed process loses of an offline run
            options["settings"] = settings
        self._run = wandb.init(**options)
        self._id, self._row = self._run.id, 0
        self._held = self._run.step - 1  # its next step. Online, where the server knows
        if self._run.offline:
            self._held = self._open_last(Path(self._run.dir).parent)
        if self._held > step:
            _log.warning(
                "WeightsAndBiases: run %s goes on from step %d and holds steps up to %d already; those are not logged again",
                self._id,
                step,
                self._held,
            )

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._write("train", trainer, metrics)

    def on_eval(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._write("eval", trainer, metrics)

    def on_epoch_end(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self._write("epoch", trainer, metrics)

    def on_fit_end(self, trainer: DDPTrainer) -> None:
        self._close(0)

    def on_exception(self, trainer: DDPTrainer, error: BaseException) -> None:
        self._close(1)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]

    def _write(self, kind: str, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        step = trainer.state.step
        if step <= self._held:
            return
        if step > self._row:  # a row grows until wandb sees a later step, or the end; an unfinished one is lost with the process
            self._note(self._row)
            self._row = step
        self._run.log({f"{kind}/{key}": value for key, value in metrics.items()}, step=step)

    def _open_last(self, folder: Path) -> int:
        """Begin the file that holds the last step logged. The last one of this run's earlier parts; 0 if there is none."""
        earlier = [path.read_text().partition(" ") for path in folder.parent.glob(f"offline-run-*/{_LAST}")]
        if folder.is_dir():  # a disabled run has none
            self._last = (folder / _LAST).open("wb")
        return max((int(step) for step, _, name in earlier if name == self._id), default=0)

    def _note(self, step: int) -> None:
        """Put down the last step whose row is finished."""
        if self._last is not None:
            self._last.seek(0)
            self._last.write(f"{step:012} {self._id}".encode())  # as long as the one before: a kill leaves no mixture
            self._last.flush()

    def _close(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
            self._note(self._row)
        if self._last is not None:
            self._last.close()
            self._last = None
