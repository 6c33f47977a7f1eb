"""A distributed-data-parallel trainer for PyTorch in one class.

Where things live, one file each:

- What a script sees: `ddp_trainer` (the loop), `steps` (what it overrides), `config`, `state`, `callback`.
- What is trained on: `train_data`, by a `plan` (windows and shares of ranks) and in an `order`; `data` (fetching), `stream`
  (datasets without a length), `workers`, `ahead` (copies to the GPU), `randomness`.
- A step: `replica` (this rank's model) and its `wrapper`, `weighting` (what a loss counts), `precision`, `schedule`, `capture`
  (CUDA graphs), `batchnorm`.
- Numbers: `metrics` (means), `meters` (such as torchmetrics'), `reports`, `evaluation`, `checksum` (of the parameters).
- Processes: `world` (all communication), `launch` (who a process is), `parcel` (objects that travel).
- How a run ends: `agreement` (together), `signals`, `failure` (what is said of an error), `roll_call` (who is still there).
- Files: `checkpoint` (one), `folder` (a run's), `snapshot` (what it says of a run), `host_copy`.
- What can be wrong before the first step: `checks`, `spelling`, `equality`; on a machine: `doctor` and its `checkup`.
"""

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
