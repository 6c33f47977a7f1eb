"""`cuda_graph`: the same training from recordings. On the CPU, so a recorder of the operations stands in for CUDA's."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset

from callbacks import Checkpoint
from tests.helpers import Ranks, Recorder
from trainer import Callback, DDPTrainer, Mean, TrainerConfig, cuda_graph

WARM_UP = cuda_graph._WARM_UP


class Tape(TorchDispatchMode):
    """What a CUDA graph is, on the CPU: the operations that a function sent, on the tensors that it used.

    A replay sends them again, and writes what they give where it went the first time. As a graph's recording does nothing yet,
    what was overwritten on the way is put back. An operation that a stream under capture refuses (.item()) is refused here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.replays = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id(tensor) not in self.before:
                self.before[id(tensor)] = tensor, tensor.clone()
        result = operation(*args, **kwargs)
        self.operations.append((operation, args, kwargs, result))
        return result

    def undo(self) -> None:
        for tensor, value in self.before.values():
            if not torch.equal(tensor, value):
                tensor.copy_(value)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for operation, args, kwargs, held in self.operations:
                if operation.is_view:
                    continue
                result = operation(*args, **kwargs)
                pairs = zip(*(item if isinstance(item, (list, tuple)) else [item] for item in (held, result)), strict=True)
                for old, new in pairs:
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)


class Tapes:
    """In place of CUDA's recorder; holds what it has recorded."""

    def __init__(self) -> None:
        self.all: list[Tape] = []

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        tape, generator = Tape(), torch.get_rng_state()
        with tape:
            output = function()
        with torch.no_grad():
            tape.undo()
        torch.set_rng_state(generator)  # a graph draws its numbers when it is replayed
        self.all.append(tape)
        return tape.replay, output

    @property
    def replays(self) -> int:
        return sum(tape.replays for tape in self.all)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    recorder = Tapes()
    monkeypatch.setattr(cuda_graph, "_recorder", lambda world: recorder)
    return recorder


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.drop(self.norm(self.inner(inputs)).relu()))
        return outputs


def points(samples: int = 54) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


RATES = [0.125, 0.0625, 0.25]  # exact in float32, in which a recording reads them


def train(
    kind: type[DDPTrainer] = DDPTrainer,
    data: Dataset[Any] | None = None,
    make: Callable[[Any], Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, fused=True),
    resume: Path | None = None,
    callbacks: Sequence[Callback] = (),
    **config: Any,
) -> tuple[DDPTrainer, list[dict[str, float]]]:
    """The trainer after `fit`, and what it reported, without the speed."""
    torch.manual_seed(1)
    model = Network().double()
    recorder = Recorder()
    trainer = kind(
        model,
        make(model.parameters()),
        points() if data is None else data,
        loss_fn=nn.functional.cross_entropy,
        config=TrainerConfig(**{"epochs": 3, "global_batch_size": 8, "batch_size": 4, "log_every": 3, **config}),
        callbacks=[recorder, *callbacks],
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: RATES[step % 3]),
    )
    trainer.fit(resume_from=resume)
    speeds = ("samples_per_second", "items_per_second")
    return trainer, [{key: call.metrics[key] for key in call.metrics if key not in speeds} for call in recorder.reports]


def assert_same(one: tuple[DDPTrainer, Any], other: tuple[DDPTrainer, Any]) -> None:
    torch.testing.assert_close(one[0].model.state_dict(), other[0].model.state_dict(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(one[0].optimizer.state_dict(), other[0].optimizer.state_dict(), rtol=1e-12, atol=1e-13)
    assert one[1] == [pytest.approx(report, rel=1e-11) for report in other[1]]
    assert len(one[1]) > 3


class ByItems(DDPTrainer):
    """Classes weigh as many items as their number, so that windows differ in what they hold."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        return {"loss": Mean((losses * targets).sum(), targets.sum()), "largest": losses.max()}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"batch_size": 8},
        {"batch_size": 3},  # 3 + 3 + 2
        {"max_grad_norm": 0.3},
        {"precision": "bf16", "max_grad_norm": 1.0},
        {"kind": ByItems},
        {"drop_last": True, "log_every": 1},
    ],
    ids=str,
)
def test_recordings_train_as_eager_steps_do(tapes: Tapes, config: dict[str, Any]) -> None:
    """Dropout, BatchNorm, momentum, a schedule, accumulation, a last window of 6 of 8 samples."""
    eager = train(**config)
    assert tapes.all == []
    captured = train(cuda_graph=True, **config)
    assert tapes.replays > 20
    assert_same(captured, eager)


def test_what_is_replayed_is_every_whole_window_after_the_first_few(tapes: Tapes) -> None:
    """18 whole windows of two passes and an update; the first pass of a kind stays eager."""
    train(cuda_graph=True)
    replays = [tape.replays for tape in tapes.all]
    assert sorted(replays) == [18 - WARM_UP, 2 * (18 - WARM_UP) - 1]


class Backward(Callback):
    """Looks at gradients of its own; `clears` them, as one usually does, before and after."""

    def __init__(self, clears: bool) -> None:
        self.clears = clears

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        for parameter in trainer.model.parameters():
            if self.clears:
                parameter.grad = None if trainer.state.step % 2 else torch.ones_like(parameter)
            elif parameter.grad is not None:
                parameter.grad += 1.0


@pytest.mark.parametrize("clears", [False, True])
def test_what_a_hook_does_to_the_gradients_goes_into_no_update(tapes: Tapes, clears: bool) -> None:
    assert_same(train(cuda_graph=True, callbacks=[Backward(clears)]), train())
    assert tapes.replays


def test_gradients_and_recordings_are_gone_after_fit(tapes: Tapes) -> None:
    trainer, _ = train(cuda_graph=True)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer._graphs._passes
    assert trainer._graphs._update is None


def test_the_optimizer_keeps_its_rates_as_numbers(tapes: Tapes) -> None:
    trainer, reports = train(cuda_graph=True, log_every=1)
    assert [type(group["lr"]) for group in trainer.optimizer.param_groups] == [float]
    assert [report["lr"] for report in reports] == [RATES[step % 3] for step in range(21)]


def test_a_run_resumes_in_the_middle_of_an_epoch(tapes: Tapes, tmp_path: Path) -> None:
    whole = train(cuda_graph=True, log_every=1)
    train(cuda_graph=True, max_steps=11, callbacks=[Checkpoint(tmp_path)])
    resumed = train(cuda_graph=True, log_every=1, resume=tmp_path, callbacks=[Checkpoint(tmp_path)])
    assert_same(resumed, (whole[0], whole[1][11:]))


class Thawing(DDPTrainer):
    """One layer trains from the second epoch on; its dropout stops in the third."""

    def before_epoch(self) -> None:
        self.model.inner.requires_grad_(self.state.epoch > 0)
        self.model.drop.train(self.state.epoch < 2)


def test_what_before_epoch_changes_is_recorded_anew(tapes: Tapes) -> None:
    def make(parameters: Any) -> Optimizer:  # fused momentum, for one, takes no new parameters
        return torch.optim.SGD(parameters, lr=1.0, fused=True)

    eager = train(Thawing, make=make)
    captured = train(Thawing, make=make, cuda_graph=True)
    assert len(tapes.all) == 6
    assert_same(captured, eager)


class Shapes(Dataset[Any]):
    """Samples of as many features as their batch's number says, so that every batch has another shape."""

    def __init__(self, kinds: int) -> None:
        self.kinds = kinds

    def __len__(self) -> int:
        return 160

    def __getitems__(self, indices: list[int]) -> list[Any]:
        width = 1 + (indices[0] // 8) % self.kinds
        return [(torch.ones(5, width, dtype=torch.float64).mul(index), torch.tensor(index % 3)) for index in indices]


class OfShapes(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0].mean(2)), batch[1])


def test_every_shape_of_batch_has_a_recording(tapes: Tapes) -> None:
    config: dict[str, Any] = {"kind": OfShapes, "data": Shapes(3), "shuffle": False, "batch_size": 8}
    eager = train(**config)
    captured = train(cuda_graph=True, **config)
    assert len(tapes.all) == 4
    assert_same(captured, eager)


class OfSums(DDPTrainer):
    def prepare_batch(self, batch: Any) -> Any:
        return batch[0].sum(0, keepdim=True).repeat(2, 1), batch[1][:2]


def test_batches_of_one_shape_may_stand_for_different_numbers_of_samples(tapes: Tapes) -> None:
    """3 + 3 + 2 of a window's 8."""
    eager = train(OfSums, batch_size=3, drop_last=True)
    captured = train(OfSums, batch_size=3, drop_last=True, cuda_graph=True)
    assert_same(captured, eager)


def test_more_shapes_than_can_be_held_run_eagerly_with_one_warning(tapes: Tapes) -> None:
    config: dict[str, Any] = {"kind": OfShapes, "data": Shapes(20), "shuffle": False, "batch_size": 8}
    eager = train(**config)
    with pytest.warns(RuntimeWarning, match="more than 8 shapes") as warned:
        captured = train(cuda_graph=True, **config)
    assert len(warned) == 1
    assert_same(captured, eager)


class Waiting(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        loss = model(batch[0]).square().mean()
        return {"loss": loss, "value": torch.tensor(loss.item())}


class Counting(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).square().mean(), "step": self.state.step}


class Odd(DDPTrainer):
    def prepare_batch(self, batch: Any) -> Any:
        return [*batch, object()]

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().mean()


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1.0)


class Cycling(DDPTrainer):
    def optimizer_step(self) -> None:
        super().optimizer_step()

    def prepare_batch(self, batch: Any) -> Any:
        self.optimizer.param_groups[0]["momentum"] = 0.9 if self.state.step < 8 else 0.8
        return batch


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": Waiting}, RuntimeError, "training_step cannot be captured.*not permitted.*must not wait for the device"),
        ({"make": adam}, RuntimeError, "the optimizer's step cannot be captured.*fused=True"),
        ({"kind": Counting}, TypeError, "all that training_step returns must be tensors; 'step' holds a plain number"),
        ({"kind": Odd}, TypeError, "needs batches of tensors.*found object"),
        ({"kind": Cycling}, ValueError, "momentum of the optimizer changed.*cycle_momentum=False"),
    ],
    ids=["host sync", "optimizer", "number", "batch", "momentum"],
)
def test_what_cannot_be_captured_is_an_error_that_says_why(
    tapes: Tapes, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    train(**options)
    with pytest.raises(error, match=f"(?s){words}"):
        train(cuda_graph=True, **options)


@pytest.mark.parametrize("other", [{"precision": "fp16"}, {"ddp_options": {"find_unused_parameters": True}}], ids=str)
def test_what_a_recording_cannot_do_is_refused_beforehand(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cuda_graph=True excludes"):
        TrainerConfig(cuda_graph=True, **other)


def test_on_the_cpu_steps_run_eagerly_after_one_sentence() -> None:
    eager = train()
    with pytest.warns(RuntimeWarning, match="cuda_graph=True has no effect: .* runs on cpu. Steps run eagerly") as warned:
        captured = train(cuda_graph=True)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    for name, value in eager[0].model.state_dict().items():
        assert torch.equal(captured[0].model.state_dict()[name], value)
    assert captured[1] == eager[1]


def split_job(captured: bool) -> tuple[Any, Any, int]:
    recorder = Tapes()
    kept, cuda_graph._recorder = cuda_graph._recorder, lambda world: recorder
    try:
        trainer, reports = train(cuda_graph=captured, batch_size=2, drop_last=True)
    finally:
        cuda_graph._recorder = kept
    return trainer.model.state_dict(), reports, recorder.replays


def test_two_processes_replay_all_but_what_reduces(ranks: Ranks) -> None:
    """Of two passes a window the first, and the update."""
    eager, captured = ranks(2, split_job, False), ranks(2, split_job, True)
    assert [result[2] for result in eager] == [0, 0]
    assert [result[2] for result in captured] == [2 * (18 - WARM_UP) - 1] * 2
    for one, other in zip(captured, eager, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=1e-13)
    assert captured[0][1] == [pytest.approx(report, rel=1e-11) for report in eager[0][1]]


class Exchanging(DDPTrainer):
    """From the second epoch on another layer, of the same shape."""

    def before_epoch(self) -> None:
        if self.state.epoch == 1:
            torch.manual_seed(5)
            new = nn.Linear(5, 7).double()
            self.model.inner = new
            self.optimizer.param_groups[0]["params"][:2] = new.parameters()


def test_a_layer_that_is_exchanged_is_recorded_anew(tapes: Tapes) -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, fused=True)

    assert_same(train(Exchanging, make=make, cuda_graph=True), train(Exchanging, make=make))
    assert tapes.replays


class Averaging(Network):
    """Keeps an average in a buffer, which every forward exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(7))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        self.average = 0.9 * self.average + 0.1 * self.inner(inputs).mean(0).detach()
        return outputs


class CountingSGD(torch.optim.SGD):
    """Takes smaller steps as it goes, by a count in Python."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.add_(parameter.grad, alpha=-0.1 / state["count"])


def test_what_a_step_counts_or_exchanges_in_python_is_an_error(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RuntimeError, match=r"the optimizer's step cannot be captured.*optimizer's count of inner.weight.*in place"
    ):
        train(make=CountingSGD, cuda_graph=True)
    monkeypatch.setitem(globals(), "Network", Averaging)
    with pytest.raises(RuntimeError, match=r"training_step cannot be captured.* is: average. Write into tensors in place"):
        train(cuda_graph=True)


def test_a_fused_optimizer_is_recorded_as_capturable_and_left_as_it_was(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to record any other, though the fused one has its state on the device."""
    optimizers: list[Optimizer] = []

    def make(parameters: Any) -> Optimizer:
        optimizers.append(torch.optim.AdamW(parameters, lr=1.0, fused=True))
        return optimizers[-1]

    def record(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        seen.append(optimizers[-1].param_groups[0]["capturable"])
        return tapes(function)

    eager, seen = train(make=make), list[bool]()
    monkeypatch.setattr(cuda_graph, "_recorder", lambda world: record)
    captured = train(make=make, cuda_graph=True)
    assert seen == [False, True]  # the pass, the update
    assert captured[0].optimizer.param_groups[0]["capturable"] is False
    assert_same(captured, eager)


def test_values_that_are_not_on_the_device_tell_batches_apart() -> None:
    """Such as the lengths of a packed sequence: a replay would compute with the first batch's."""
    device = torch.device("meta")
    one, other = (cuda_graph._kind(torch.tensor(lengths), device) for lengths in ([1, 2], [2, 1]))
    assert one != other
    for same in (torch.tensor(math.nan), torch.zeros(0), torch.ones(2, 3).T, torch.tensor([True])):
        assert cuda_graph._kind(same, device) == cuda_graph._kind(same.clone(), device)
    assert cuda_graph._kind(torch.ones(2, device=device), device) == cuda_graph._kind(torch.zeros(2, device=device), device)


def test_results_that_are_not_on_the_device_are_refused() -> None:
    device = torch.device("meta")
    cuda_graph._check_output({"loss": torch.ones((), device=device)}, device)
    for value in (torch.tensor(1.0), Mean(torch.ones((), device=device), torch.tensor(3))):
        with pytest.raises(TypeError, match="'value' holds a plain number, or a tensor that is not on meta"):
            cuda_graph._check_output({"loss": torch.ones((), device=device), "value": value}, device)


class Recurrent(Network):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(5, 5, num_layers=2, dropout=0.5)


def test_recurrent_layers_with_dropout_are_refused_with_a_seed(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Network", Recurrent)
    with pytest.raises(ValueError, match="memory cannot be recorded with dropout and a seed"):
        train(cuda_graph=True)
    cuda_graph._check_recurrent(Recurrent().eval())  # draws nothing


class Gpu:
    """What is asked of torch.cuda, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.current = ["outer"]
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("own"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream(self.current[-1]))
        monkeypatch.setattr(torch.cuda, "stream", self.within)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {self.note('pool')}")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def note(self, text: str) -> int:
        self.asked.append(text)
        return len(self.asked)

    def stream(self, name: str) -> Any:
        return types.SimpleNamespace(name=name, wait_stream=lambda other: self.note(f"{name} waits for {other.name}"))

    @contextlib.contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        self.current.append(stream.name)
        yield
        self.current.pop()

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: str, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.note(f"records on {stream.name} into {pool}, {capture_error_mode}")
        yield


def test_on_a_gpu_all_of_a_fit_is_on_one_stream_and_recordings_have_a_new_pool_after_each_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd's nodes keep the stream they were made on; and torch takes no pool again whose graphs are gone."""
    gpu = Gpu(monkeypatch)
    world: Any = types.SimpleNamespace(device=torch.device("cuda", 0), size=1, is_main=True)
    graphs = cuda_graph.CudaGraphs(world, TrainerConfig(cuda_graph=True), 8)
    pools: list[str] = []
    for _ in range(2):
        gpu.asked.clear()
        with graphs.on_stream():
            assert graphs._record is not None
            graphs._record(lambda: None)
        waits, recorded, back = gpu.asked
        assert (waits, back) == ("own waits for outer", "outer waits for own")
        assert recorded.startswith("records on own into pool")
        assert recorded.endswith("thread_local")
        pools.append(recorded)
        graphs.release()
    assert pools[0] != pools[1]
    gpu.asked.clear()
    with pytest.raises(ZeroDivisionError), graphs.on_stream():
        raise ZeroDivisionError
    assert gpu.asked == ["own waits for outer", "outer waits for own"]
