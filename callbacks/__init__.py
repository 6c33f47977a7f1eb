"""Callbacks for `trainer.DDPTrainer`, one a file. They use the public names of `trainer` alone, as your own would."""

from .checkpoint import Checkpoint
from .early_stopping import EarlyStopping
from .jsonl import JSONLines
from .profiler import Profiler
from .progress import ProgressBar
from .summary import Summary
from .tensorboard import TensorBoard
from .wandb import WeightsAndBiases

__all__ = ["Checkpoint", "EarlyStopping", "JSONLines", "Profiler", "ProgressBar", "Summary", "TensorBoard", "WeightsAndBiases"]
