"""Captured steps: what a step does on a GPU, recorded once as CUDA graphs and replayed, which costs the host next to nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .config import TrainerConfig
from .metrics import Mean
from .plan import Window
from .world import World

T = TypeVar("T")
Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Records a function's GPU work without running it. Returns a replay, and the function's result, which each replay overwrites."""

_WARM_UP = 3  # windows that run eagerly first, in which optimizers and libraries set up what has no place in a recording
_MOST_KINDS = 8  # of batches; each recording holds the memory of a forward's results


class CudaGraphs:
    """Runs a window's passes (forward and backward) and its update: eagerly at first, then as replays of their recordings.

    Without ``cuda_graph`` everything stays eager, and what is left of its work is to zero the gradients.

    A replay repeats what was sent to the GPU, on the same memory: what Python decides is decided once, when it is recorded.
    What changes from step to step is therefore kept outside (random seeds, reports, the scheduler) or written into the memory
    that a recording reads: batches and learning rates. Gradients keep their memory, and are zeroed in place.

    Eager stay: windows shorter than the global batch, the first of each kind of batch, and, on several processes, each window's
    last pass, whose gradients DistributedDataParallel reduces while they are computed.
    """

    def __init__(self, world: World, config: TrainerConfig, window_size: int) -> None:
        self._record = _recorder(world) if config.cuda_graph else None
        self._device = world.device
        on_gpu = config.cuda_graph and world.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._seed = config.seed
        self._world = world
        self._window_size = window_size
        self._modes: list[bool] = []
        self._memory: Callable[[], list[Any]] = list
        self._kept: Sequence[nn.Parameter] = []
        self.release()

    def release(self) -> None:
        """Forget what is recorded, and its memory; it is recorded anew where it is needed again."""
        if self._record is not None:  # with a pool of its own: torch takes none whose graphs are all gone
            self._record = _recorder(self._world)
        for parameter in self._kept:
            parameter.grad = None
        self._recorded_memory: list[Any] = []
        self._kept, self._gradients = [], list[tuple[Tensor | None, int]]()  # the latter as an update left them
        self._windows = 0
        self._replays = self._keeps_gradients = False
        self._passes: dict[Any, _Recording | None] = {}
        self._update: _Recording | None = None
        self._rates: list[Tensor] = []
        self._settings: list[dict[str, Any]] = []
        self._warned = False

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Around a `fit`: all that is recorded, and what is wrapped and run eagerly before, on one stream of its own.

        Autograd's nodes keep the stream they were made on, and a recording cannot wait for another one.
        """
        if self._stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            with suppress(RuntimeError):  # where the device has failed, that is known already
                outer.wait_stream(self._stream)
            raise
        outer.wait_stream(self._stream)

    def refresh(self, model: nn.Module, optimizer: Optimizer) -> None:
        """After what may have changed modes, parameters, or what requires a gradient: a recording has them in it.

        Raises ValueError for a model that cannot be recorded.
        """
        if self._record is None:
            return
        if self._seed is not None:
            _check_recurrent(model)
        self._memory = lambda: _memory(model, optimizer)
        modes = [module.training for module in model.modules()] + [item.requires_grad for item in model.parameters()]
        if modes != self._modes or (self._recorded_memory and self._recorded_memory != self._memory()):
            self.release()
        self._modes = modes

    def begin_window(self, window: Window, parameters: Sequence[nn.Parameter]) -> None:
        """Discard what a hook or an evaluation has done to the gradients since the last update."""
        if not self._keeps_gradients:
            self.zero_gradients(parameters)
        elif any(item.grad is not old or _version(old) != version for item, (old, version) in self._noted(parameters)):
            for item, (old, _) in self._noted(parameters):
                item.grad = old  # the memory that the recordings have
            self.zero_gradients(parameters)
        if self._record is not None:
            self._replays = self._keeps_gradients and window.size == self._window_size
            self._windows += 1
            self._keeps_gradients = self._windows >= _WARM_UP

    def run_pass(self, function: Callable[..., T], batch: Any, samples: int, window: Window, last: bool) -> T:
        """``function(batch, samples, window, last)``: the forward, the loss and the backward of one micro-batch."""
        if self._record is None or not self._replays or (last and self._world.size > 1):
            return function(batch, samples, window, last)
        leaves, layout = tree_flatten(batch)
        kind = (samples, str(layout), *(_kind(leaf, self._device) for leaf in leaves))  # older torch cannot hash a layout
        if kind not in self._passes:  # the first of its kind runs eagerly; those of too many kinds always do
            if len(self._passes) < _MOST_KINDS:
                self._passes[kind] = None
            else:
                self._warn_of_kinds()
            return function(batch, samples, window, last)
        recording = self._passes[kind]
        if recording is None:
            inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            held = tree_unflatten(inputs, layout)
            with self._watching("training_step"):
                recording = _Recording(self._record, "training_step", lambda: function(held, samples, window, last), inputs)
            _check_output(recording.output, self._device)
            self._passes[kind] = recording
        return recording.replay(leaves)  # type: ignore[no-any-return]

    def run_update(self, function: Callable[[], T], optimizer: Optimizer) -> T:
        """``function()``: clipping, the optimizer's step, and zeroing the gradients."""
        if self._record is None or not self._replays:
            return function()
        rates = _rates(optimizer)
        if self._update is None:
            self._rates = [torch.as_tensor(rate, dtype=torch.float32, device=self._world.device).clone() for rate in rates]
            self._settings = _settings(optimizer)
            with self._watching("the optimizer's step"), _recordable(optimizer, self._rates):
                self._update = _Recording(self._record, "the optimizer's step", function, [])
        _check_settings(self._settings, _settings(optimizer))
        for held, rate in zip(self._rates, rates, strict=True):
            held.fill_(rate)
        result: T = self._update.replay([])
        self._note(self._kept)
        return result

    def zero_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After an update. Recordings add to gradients in their place; without any, the next backward sets them."""
        if self._keeps_gradients:
            self._kept = parameters
            torch._foreach_zero_([item.grad for item in parameters if item.grad is not None])
            self._note(parameters)
            return
        for parameter in parameters:
            parameter.grad = None

    @contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        """RuntimeError where what is recorded in this block did something in Python that no replay will do again."""
        before = self._memory()
        yield
        after = self._memory()
        if changed := sorted({name for name, *_ in {*before} ^ {*after}}):
            raise RuntimeError(
                f"{what} cannot be captured as a CUDA graph: it exchanges or counts in Python what a replay would leave as it "
                f"is: {', '.join(changed)}. Write into tensors in place (copy_, add_), on the device, or set cuda_graph=False"
            )
        self._recorded_memory = after

    def _note(self, parameters: Sequence[nn.Parameter]) -> None:
        self._gradients = [(item.grad, _version(item.grad)) for item in parameters]

    def _noted(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, tuple[Tensor | None, int]]]:
        return zip(parameters, self._gradients, strict=True)

    def _warn_of_kinds(self) -> None:
        if self._world.is_main and not self._warned:
            warnings.warn(
                f"cuda_graph: batches came in more than {_MOST_KINDS} shapes, or with as many values in what is not on the "
                "device; all others run eagerly. Pad them to a few shapes, and move tensors to the device",
                RuntimeWarning,
                stacklevel=2,
            )
        self._warned = True


class _Recording:
    """One function, recorded on tensors of its own."""

    def __init__(self, record: Recorder, what: str, function: Callable[[], Any], inputs: list[Any]) -> None:
        self._inputs = inputs
        try:
            self._replay, output = record(function)
        except RuntimeError as error:
            raise RuntimeError(
                f"{what} cannot be captured as a CUDA graph: {error}\nIt must not wait for the device (.item(), .cpu(), a mask "
                "as an index). Optimizers can do without with fused=True, some also with capturable=True. Or set cuda_graph=False"
            ) from error
        # Without their graph, which would hold on to the stream of the recording.
        self.output = tree_map_only(Tensor, Tensor.detach, dict(output) if isinstance(output, Mapping) else output)

    def replay(self, inputs: list[Any]) -> Any:
        """The function's result, in the tensors that hold it until the next replay."""
        for held, given in zip(self._inputs, inputs, strict=True):
            if isinstance(held, Tensor):
                held.copy_(given, non_blocking=True)
        self._replay()
        return self.output


def _recorder(world: World) -> Recorder | None:
    """None where there are no CUDA graphs, with one warning on rank 0."""
    if world.device.type == "cuda":
        pool = torch.cuda.graph_pool_handle()

        def record(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream(world.device)
            # Thread-local, as other threads write checkpoints.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                output = function()
            return graph.replay, output

        return record
    if world.is_main:
        warnings.warn(
            f"cuda_graph=True has no effect: CUDA graphs need a GPU, and this runs on {world.device.type}. Steps run eagerly",
            RuntimeWarning,
            stacklevel=4,
        )
    return None


def _version(gradient: Tensor | None) -> int:
    """Counts what Python has done to a gradient in its place; a replay does not count."""
    return 0 if gradient is None else gradient._version


def _kind(leaf: Any, device: torch.device) -> Any:
    """What a recording of a pass depends on. TypeError for what cannot be told apart, and so would stay as it was."""
    if isinstance(leaf, Tensor) and leaf.device.type != device.type:  # its values go into what is sent to the device
        return leaf.shape, leaf.dtype, leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride()
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return type(leaf), leaf
    raise TypeError(
        f"cuda_graph=True needs batches of tensors in tuples, lists and dicts; found {type(leaf).__name__} in one: let "
        "prepare_batch take it apart"
    )


def _check_output(output: Mapping[str, Any], device: torch.device) -> None:
    """Raise TypeError for a value that is no tensor on the device: it would stay at what it was."""
    for key, value in output.items():
        parts = tuple(value) if isinstance(value, Mean) else (value,)
        if not all(isinstance(part, Tensor) and part.device.type == device.type for part in parts):
            raise TypeError(
                f"with cuda_graph=True all that training_step returns must be tensors; {key!r} holds a plain number, or a tensor "
                f"that is not on {device.type}, which would stay as it is now. Compute it there, or set cuda_graph=False"
            )


@contextmanager
def _recordable(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """While an update is recorded: it reads the rates from the device. To everybody else they stay the numbers they were.

    Fused optimizers keep their state on the device anyway, but torch lets them be recorded as ``capturable`` only.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if group.get("fused") and "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: kept[key] for key in ("lr", "capturable") if key in kept})


def _memory(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """What a recording reads and writes without being given it: name and memory of each tensor, and values that are none."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found: list[Any] = [(name, id(tensor), tensor.data_ptr()) for name, tensor in tensors]
    for parameter, name in [(tensor, name) for name, tensor in tensors if isinstance(tensor, nn.Parameter)]:
        for key, value in optimizer.state.get(parameter, {}).items():
            where = f"the optimizer's {key} of {name}"
            found.append((where, id(value), value.data_ptr()) if isinstance(value, Tensor) else (where, repr(value)))
    return found


def _draws(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and module.training


def _check_recurrent(model: nn.Module) -> None:
    """ValueError for layers that ask the device for a number after each seeding."""
    recurrent = [name for name, module in model.named_modules() if _draws(module)]
    if recurrent:
        raise ValueError(
            f"cuda_graph=True: {', '.join(recurrent)} cannot be recorded with dropout and a seed, as cuDNN sets up its dropout "
            "anew, on the host, after each seeding. Put nn.Dropout between layers, or set seed=None or cuda_graph=False"
        )


def _rates(optimizer: Optimizer) -> list[Any]:
    """The learning rate of each group. ValueError where there is none: what an optimizer finds in Python would stay as it is."""
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError("cuda_graph=True needs an optimizer with a learning rate, lr, in every group; one of them has none")
    return [group["lr"] for group in optimizer.param_groups]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an update reads of each group of parameters and a tensor does not hold, without the rate."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr") and not isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]


def _check_settings(recorded: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Raise ValueError for a setting that has changed since the update was recorded: it would stay as it was."""
    if recorded == now:
        return
    changed = sorted({key for old, new in zip(recorded, now, strict=True) for key in old | new if old.get(key) != new.get(key)})
    raise ValueError(
        f"cuda_graph=True: {', '.join(changed)} of the optimizer changed, but of its settings only the learning rate can follow. "
        "OneCycleLR and CyclicLR need cycle_momentum=False"
    )
