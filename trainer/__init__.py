"""A distributed-data-parallel trainer for PyTorch in one class."""

from .callback import Callback
from .checkpoint import CheckpointError
from .config import TrainerConfig
from .ddp_trainer import DDPTrainer
from .folder import CheckpointFolder
from .metrics import Mean
from .state import TrainerState
from .world import World

__all__ = [
    "Callback",
    "CheckpointError",
    "CheckpointFolder",
    "DDPTrainer",
    "Mean",
    "TrainerConfig",
    "TrainerState",
    "World",
]
