"""The counters of a run."""

from dataclasses import dataclass


@dataclass
class TrainerState:
    """How far a run has come: counts of *finished* things, equal on every rank.

    All of them have advanced before any hook of a step fires. A step is one optimizer update.
    """

    epoch: int = 0
    """Epochs finished."""
    step: int = 0
    """Optimizer updates taken since the start of the run."""
    samples: int = 0
    """Samples trained on since the start of the run, on all ranks together."""
    epoch_samples: int = 0
    """Of those, in the current epoch: where a resume continues. 0 after an epoch's last window."""
    skipped_steps: int = 0
    """Windows whose update was skipped because the gradients had overflowed."""
    stop_reason: str | None = None
    """Why ``fit`` ended early; None when it ran to its planned end."""

    @property
    def window(self) -> int:
        """Windows trained on since the start of the run: what a step's random numbers are counted by."""
        return self.step + self.skipped_steps
