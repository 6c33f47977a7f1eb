"""A whole run on tensors that only pretend to be on a GPU: operations on tensors of two devices fail, and each number that the
host reads from the device is seen. What they hold is not computed, and nothing is differentiated: gradients are zeros."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset

from callbacks import Checkpoint, EarlyStopping, JSONLines, Summary
from tests.helpers import Ranks
from trainer import DDPTrainer, Mean, TrainerConfig, World, checkpoint
from trainer import world as world_room
from trainer.launch import Launch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STEPS, REPORTS, EVALUATIONS, SAVES = 14, 5, 3, 4  # two epochs of 7 steps, a report every third; the last evaluation by hand


class Stream:
    def __init__(self, *_: Any) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Stream) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> Stream:
        return self


@contextlib.contextmanager
def within(stream: Stream) -> Iterator[None]:
    yield


def pretend(waits: Counter[str]) -> None:
    """In a process of its own: what is asked of a GPU is answered. `waits` counts where the host would wait, by file."""
    answers: dict[str, Any] = {
        **{"Stream": Stream, "Event": Stream, "stream": within, "current_stream": lambda device=None: Stream()},
        **{"default_generators": (torch.Generator(),), "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8)},
        **{"set_rng_state": lambda state, device=None: None, "get_device_name": lambda device=None: "none"},
        **{"is_bf16_supported": lambda *_: True, "max_memory_allocated": lambda device=None: 0},
        **{"reset_peak_memory_stats": lambda device=None: None, "is_current_stream_capturing": lambda: False},
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.amp.grad_scaler.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.tensor = through_the_cpu(torch.tensor)  # type: ignore[assignment]  # which would look for a driver
    own: Any = Tensor
    item = Tensor.item

    def counted(tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return item(tensor)
        if tensor.device.type == "cuda":
            waits[caller()] += 1
        return 0.0

    own.item, own.__float__, own.__bool__ = counted, counted, lambda tensor: bool(counted(tensor)) or True
    own.record_stream, own.pin_memory, own.is_pinned = lambda *_: None, lambda tensor: tensor, lambda tensor: True
    nn.Module.to = lambda module, *_, **__: module  # type: ignore[assignment,method-assign,return-value]
    world_room.pack = lambda value: tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)  # type: ignore[assignment]
    world_room.unpack = lambda value, device: tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
    checkpoint.check_plain = lambda content: None
    warnings.simplefilter("ignore")  # of ranks without a GPU


def through_the_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(values: Any, device: torch.device | None = None, **options: Any) -> Tensor:
        return make(values, **options).to(device if device is not None else CPU)

    return made


def caller() -> str:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and Path(frame.f_code.co_filename).parent.name not in ("trainer", "callbacks"):
        frame = frame.f_back
    return "" if frame is None else Path(frame.f_code.co_filename).stem


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.drop(self.norm(self.convolution(images)).relu()).flatten(1))
        return outputs


class Classifier(DDPTrainer):
    def eval_step(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        outputs = model(inputs)
        return {"loss": nn.functional.cross_entropy(outputs, targets), "accuracy": (outputs.argmax(1) == targets).float().mean()}


class ByItems(Classifier):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": Mean(losses.sum(), torch.ones((), device=losses.device)), "largest": losses.max(), "plain": 1.0}


class Own(Classifier):
    def prepare_batch(self, batch: Any) -> Any:
        return [tensor.to(GPU) for tensor in batch]


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def run(
    folder: Path,
    kind: type[DDPTrainer] = Classifier,
    data_on: torch.device = CPU,
    make: Callable[[Any], Optimizer] = momentum,
    **config: Any,
) -> tuple[dict[str, int], list[str]]:
    """Where the host would wait for the device in `fit`, `evaluate` and `predict`; and the files that were written."""
    waits: Counter[str] = Counter()
    pretend(waits)
    written: list[str] = []

    def write(path: Path, content: Any) -> None:
        written.append(path.name)
        path.write_bytes(b"")

    checkpoint.write = write
    with FakeTensorMode(allow_non_fake_inputs=True):
        with GPU:
            model = Network()

        def backward(loss: Tensor) -> None:
            assert loss.device == GPU
            for parameter in model.parameters():
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros if parameter.grad is None else parameter.grad + zeros

        Tensor.backward = backward  # type: ignore[assignment,method-assign]
        data = TensorDataset(torch.empty(50, 1, 8, 8, device=data_on), torch.zeros(50, dtype=torch.long, device=data_on))
        trainer = kind(
            model,
            make(model.parameters()),
            data,
            {"set": data},
            loss_fn=nn.functional.cross_entropy,
            config=TrainerConfig(**{"batch_size": 4, "accumulation_steps": 2, "epochs": 2, "log_every": 3, **config}),
            callbacks=[Checkpoint(folder, every_steps=5), JSONLines(folder / "log"), Summary(), EarlyStopping("set/loss", 9)],
            world=World(Launch(0, 1, 0), GPU, owns_group=False),
        )
        trainer.fit()
        assert trainer.state.step == STEPS
        trainer.evaluate()
        trainer.predict(data)  # values are moved to the CPU, of which this sees nothing
    return dict(waits), written


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "plain": ({}, {}),
    "data on the GPU": ({"data_on": GPU}, {}),
    "items": ({"kind": ByItems}, {}),
    "own transfer": ({"kind": Own}, {}),
    "bf16, channels last": ({"precision": "bf16", "channels_last": True}, {}),
    "clipping": ({"max_grad_norm": 1.0}, {"reports": REPORTS}),  # the norm, at each report
    "AdamW": ({"make": lambda parameters: AdamW(parameters, fused=True)}, {}),
    "Adagrad": ({"make": Adagrad}, {}),
    "fp16": ({"precision": "fp16"}, {"precision": STEPS + 2 * (SAVES + 1)}),  # and where it is looked at what could be saved
}


@pytest.mark.parametrize("case", CASES)
def test_no_two_devices_meet_and_the_host_waits_at_reports_and_evaluations_alone(ranks: Ranks, tmp_path: Path, case: str) -> None:
    options, more = CASES[case]
    ((waits, written),) = ranks(1, run, tmp_path, **options)
    keys = 3 if case == "items" else 1
    reductions = REPORTS + 1 if STEPS % 3 else REPORTS  # one at each epoch's end that is no report
    expected = Counter(more) + Counter(reports=reductions * (2 + 2 * keys), evaluation=EVALUATIONS * 4)  # a number each
    assert waits.pop("checkpoint", 0) <= SAVES  # whether parameters are finite
    assert waits == dict(expected)
    assert written == [f"step-{step:08d}.pt" for step in (5, 7, 10, 14)]
