"""Callbacks for `trainer.DDPTrainer`, one a file. They use the public names of `trainer` alone, as your own would."""

from .checkpoint import Checkpoint
from .early_stopping import EarlyStopping
from .jsonl import JSONLines
from .progress import ProgressBar
from .tensorboard import TensorBoard

__all__ = ["Checkpoint", "EarlyStopping", "JSONLines", "ProgressBar", "TensorBoard"]
