"""A distributed-data-parallel trainer for PyTorch in one class.

Where things live, one file each:

- What a script sees: `ddp_trainer` (the loop), `steps` (what it overrides), `config`, `state`, `callback`.
- What is trained on: `train_data`, by a `plan` (windows and shares of ranks) and in an `order`; `data` (fetching), `stream`
  (datasets without a length), `workers`, `prefetch` (copies to the GPU), `randomness`.
- A step: `replica` (this rank's model), its `ddp_wrapper` and `model_use` (what a step does with it), `weighting` (what a loss
  counts), `precision`, `schedule`, `cuda_graph`, `batchnorm`.
- Numbers: `metrics` (means), `meters` (such as torchmetrics'), `reports`, `evaluation`, `prediction`, `checksum` (of parameters).
- Processes: `world` (all communication), `coordination` (what stands on it), `launch` (who a process is), `rendezvous` (how they
  meet, and who is still there), `transport` (how objects and tensors travel).
- How a run ends: `stopping` (together), `signals`, `failure` (what is said of an error).
- Files: `checkpoint` (one), `checkpoint_folder` (a run's), `checkpoint_content` (what is in one), `model_keys`, `host_copy`.
- What can be wrong: `checks` (arguments), `data_checks`, `method_checks`, `rank_checks`; on a machine: `doctor` and its
  `doctor_checks`.
"""

from .callback import Callback
from .checkpoint import CheckpointError
from .checkpoint_folder import CheckpointFolder
from .config import TrainerConfig
from .ddp_trainer import DDPTrainer
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
