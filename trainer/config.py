"""Every knob of a run that is a plain value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ScheduleUnit = Literal["step", "epoch", "eval"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
Compression = Literal["fp16", "bf16"]
OnNonfinite = Literal["stop", "warn"]


@dataclass(frozen=True)
class TrainerConfig:
    """The plain values a run is made of. Equal on every rank.

    Raises TypeError for a value of the wrong type and ValueError for one out of range, naming field and value.
    """

    epochs: int | None = None
    """Passes over the data, 1 or more. None: 1, or no limit when `max_steps` is given. With both, whichever comes first."""
    max_steps: int | None = None
    """Optimizer steps after which the run ends, 1 or more."""
    max_minutes: float | None = None
    """Minutes of `fit` after which the run ends, at the next step on which the ranks agree on stopping; above 0."""
    batch_size: int = 32
    """Samples per rank and micro-batch: the memory knob; 1 or more."""
    accumulation_steps: int = 1
    """Micro-batches per rank and optimizer step, 1 or more. The global batch is world size x batch_size x accumulation_steps."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks, 1 or more: the training knob. When given, each rank takes its share of them in
    as many micro-batches of at most `batch_size` as that needs, at any world size, dividing or not."""
    eval_batch_size: int | None = None
    """Samples per rank and batch in evaluation, 1 or more. None: `batch_size`."""
    eval_every: int | None = None
    """Steps between evaluations, 1 or more. None: at each epoch's end and at the planned end of the run."""
    log_every: int = 10
    """Steps between reports, 1 or more; the planned last step reports too."""
    schedule: ScheduleUnit = "step"
    """When the scheduler moves: after every optimizer step, every epoch, or every evaluation that `fit` runs (its length is then
    a number of epochs, or of evaluations). "eval" gives the value of `monitor` to a ReduceLROnPlateau."""
    monitor: str = "loss"
    """The key of the evaluation that `schedule="eval"` follows; with several evaluation sets `name/key`."""
    max_grad_norm: float | None = None
    """Gradients are scaled down to this L2 norm (over all parameters, of the whole window's gradient), above 0."""
    precision: PrecisionName = "fp32"
    """What the steps compute in: fp32, or autocast to bf16 or fp16 (the latter with loss scaling)."""
    scaler_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for `torch.amp.GradScaler`, with ``precision="fp16"``."""
    compile: bool = False
    """`torch.compile` for the model's forward while `fit` runs; the keys of its state stay as they are."""
    channels_last: bool = False
    """Lay weights and batches of four dimensions (images) out with the channels last, which convolutions on GPUs like."""
    sync_batchnorm: bool = False
    """BatchNorm normalises by the batches of all ranks together (torch has that for CUDA only; on CPU: one warning)."""
    cuda_graph: bool = False
    """On a GPU, record what the steps do there as CUDA graphs and replay that. The steps must not wait for the device, must
    return tensors there, and must not count or exchange anything in Python; the optimizer needs ``fused=True`` or
    ``capturable=True``; recurrent layers with dropout need ``seed=None``. Elsewhere: one warning, and nothing else."""
    gradient_compression: Compression | None = None
    """Send gradients between the ranks in this format. Prefer bf16 with a `Mean` over many items a sample: sums of their
    gradients travel, which may overflow fp16."""
    shuffle: bool = True
    """A new order each epoch, a function of seed and epoch alone. False: the order of the dataset."""
    drop_last: bool = False
    """Leave out an epoch's last window when it is shorter than the global batch."""
    seed: int | None = 0
    """0 or more. Every random number of `fit` follows from it (not the first weights, drawn before). None: the trainer touches no
    random state, rank 0 draws the seed of all orders once, which checkpoints hold, and a resumed run is otherwise not exact."""
    on_nonfinite: OnNonfinite = "stop"
    """When the parameters are no longer finite at a report: end the run on all ranks, or warn once and go on."""
    ddp_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for `torch.nn.parallel.DistributedDataParallel`, such as ``find_unused_parameters``."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation_steps", "log_every"):
            self._check_count(name)
        for name in ("epochs", "max_steps", "global_batch_size", "eval_batch_size", "eval_every"):
            self._check_count(name, optional=True)
        self._check_count("seed", optional=True, least=0)
        for name in ("compile", "channels_last", "cuda_graph", "sync_batchnorm", "shuffle", "drop_last"):
            self._check_type(name, bool, "True or False")
        self._check_type("monitor", str, "a key of the evaluation")
        self._check_type("ddp_options", Mapping, "a mapping of DistributedDataParallel's keyword arguments")
        self._check_type("scaler_options", Mapping, "a mapping of GradScaler's keyword arguments")
        if self.scaler_options and self.precision != "fp16":
            raise ValueError(f"scaler_options belong to precision='fp16'; found precision={self.precision!r}")
        if self.cuda_graph and (self.precision == "fp16" or self.ddp_options.get("find_unused_parameters")):
            raise ValueError(
                "cuda_graph=True excludes precision='fp16', whose updates the host decides about (bf16 works), and "
                "find_unused_parameters: a recording uses the same parameters every time"
            )
        self._check_choice("schedule", get_args(ScheduleUnit))
        self._check_choice("precision", get_args(PrecisionName))
        self._check_choice("on_nonfinite", get_args(OnNonfinite))
        self._check_choice("gradient_compression", (*get_args(Compression), None))
        self._check_positive("max_grad_norm", "None switches clipping off")
        self._check_positive("max_minutes", "None sets no limit")
        if self.global_batch_size is not None and self.accumulation_steps != 1:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} and accumulation_steps={self.accumulation_steps} exclude each "
                "other: with global_batch_size the accumulation is derived; leave accumulation_steps at 1"
            )
        if self.ddp_options.get("static_graph"):
            raise ValueError(
                "ddp_options: static_graph=True is refused: with gradient accumulation it leaves gradients unsynchronised; "
                "leave it out"
            )

    def window_size(self, world_size: int) -> int:
        """Samples per optimizer step over all ranks, except in an epoch's last window."""
        return self.global_batch_size or world_size * self.batch_size * self.accumulation_steps

    def plain(self) -> dict[str, Any]:
        """Field by field, for a checkpoint or a log; what is not a plain value becomes its text."""
        values = {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        for name in ("ddp_options", "scaler_options"):
            values[name] = {key: _plain(value) for key, value in getattr(self, name).items()}
        return values

    @property
    def last_epoch(self) -> int | None:
        """Epochs after which the run ends; None without a limit."""
        return self.epochs or (1 if self.max_steps is None else None)

    def _check_choice(self, name: str, choices: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; found {value!r}")

    def _check_count(self, name: str, optional: bool = False, least: int = 1) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            words = "a Python int or None" if optional else "a Python int"
            raise TypeError(f"{name} must be {words}; found {value!r} ({type(value).__name__})")
        if value < least:
            raise ValueError(f"{name} must be {least} or more{' (or None)' if optional else ''}; found {value}")

    def _check_positive(self, name: str, words: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a Python number above 0 or None; found {value!r} ({type(value).__name__})")
        if not value > 0:
            raise ValueError(f"{name} must be above 0 ({words}); found {value!r}")

    def _check_type(self, name: str, expected: type, words: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, expected):
            raise TypeError(f"{name} must be {words}; found {value!r} ({type(value).__name__})")


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration's member: its value
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)  # numpy's float64 is a float
    return kind(value) if kind else None if value is None else repr(value)
