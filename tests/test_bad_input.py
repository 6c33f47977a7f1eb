"""Every way to go wrong is an error that says what was found, what was expected and the way out: on every rank, and the same
at one process as at two; nothing is trained, nothing written, and the process can go on to build a right trainer.

One fork per world size tries all of them, one after another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, SequentialSampler

from callbacks import Checkpoint, EarlyStopping, JSONLines, ProgressBar, TensorBoard
from tests.helpers import Numbers, Outcome, Ranks, Recorder, Toy, mean_of_outputs
from trainer import Callback, CheckpointError, DDPTrainer, Mean, TrainerConfig, World

# ------------------------------------------------------------------------------------------------------ what people pass


class WithoutLength(Dataset[float]):
    def __getitem__(self, index: int) -> float:
        return 1.0


class OddLength(Numbers):
    """`length`: what __len__ returns, or raises."""

    def __init__(self, length: Any) -> None:
        super().__init__(8)
        self.length = length

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


class Items(Dataset[Any]):
    """Eight times the same sample."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item


class Giving(Sampler[Any]):
    """A sampler of whatever it is given, with a length that may be another."""

    def __init__(self, indices: Any, length: int | None = None) -> None:
        self.indices = indices
        self.length = len(indices) if length is None else length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.length


class WithoutSamplerLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(1)


class Wide(nn.Module):
    """A model with the keys of `Toy`, in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))


class Watcher(Callback):
    def __repr__(self) -> str:
        return "Watcher()"


def named(name: Any) -> Watcher:
    watcher = Watcher()
    watcher.name = name
    return watcher


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def raising(error: Exception) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise error

    return function


# --------------------------------------------------------------------------------------------------- trainers to go wrong

OTHER = Toy()
built: list[tuple[DDPTrainer, str]] = []
"""Every trainer that was built, with what it was then."""


def content(trainer: DDPTrainer) -> str:
    """All that a `fit` may change."""
    scheduler = None if trainer.scheduler is None else trainer.scheduler.state_dict()
    return repr((asdict(trainer.state), trainer.model.state_dict(), trainer.optimizer.state_dict(), scheduler))


def build(kind: type[DDPTrainer] = DDPTrainer, **changed: Any) -> DDPTrainer:
    """A right trainer with some arguments `changed`; `on_model` makes the optimizer, `on_optimizer` the scheduler."""
    model = changed.pop("model", None)
    model = Toy() if model is None else Lazy() if model is Lazy else model
    on_model, on_optimizer = changed.pop("on_model", lambda m: SGD(m.parameters(), lr=1.0)), changed.pop("on_optimizer", None)
    optimizer = changed.pop("optimizer") if "optimizer" in changed else on_model(model)
    if on_optimizer is not None:
        changed["scheduler"] = on_optimizer(optimizer)
    data = [changed.pop("train_data", Numbers(8)), changed.pop("eval_data", None)]
    config = TrainerConfig(shuffle=False, log_every=1, global_batch_size=4)
    trainer = kind(model, optimizer, *data, **{"loss_fn": mean_of_outputs, "config": config, **changed})
    built.append((trainer, content(trainer)))
    return trainer


def healthy() -> float:
    """Minus the sum of the means of two windows, 1.5 and 5.5, if a trainer can be built and used."""
    with build() as trainer:
        trainer.fit()
    return trainer.model.w.item()  # type: ignore[union-attr, operator]


@dataclass(frozen=True)
class Bad:
    """`attempt(folder)` raises an `error` that `says` this (a regular expression for the whole of it), after `steps`."""

    error: type[BaseException]
    says: str
    attempt: Callable[[Path], Any]
    steps: int = 0
    writes: bool = False
    """Whether the attempt has a right run first, whose files stay."""


def given(error: type[BaseException], says: str, **changed: Any) -> Bad:
    """Wrong already for the constructor."""
    return Bad(error, says, lambda folder: build(**changed))


def fitted(error: type[BaseException], says: str, resume_from: Any = None, steps: int = 0, **changed: Any) -> Bad:
    """Wrong when `fit` is called."""

    def attempt(folder: Path) -> None:
        build(**{"callbacks": [Checkpoint(folder)], **changed}).fit(resume_from)

    return Bad(error, says, attempt, steps)


def evaluated(error: type[BaseException], says: str, data: Any = None, **changed: Any) -> Bad:
    return Bad(error, says, lambda folder: build(**changed).evaluate(data))


def step_of(function: Callable[[DDPTrainer, nn.Module, Any], Any]) -> type[DDPTrainer]:
    class Stepping(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return function(self, model, batch)

    return Stepping


def summary_of(function: Callable[[dict[str, float]], Any]) -> type[DDPTrainer]:
    class Summarizing(DDPTrainer):
        def summarize(self, metrics: dict[str, float]) -> Any:
            return function(metrics)

    return Summarizing


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return mean_of_outputs(model(batch[0]), batch[1])


def returning(error: type[BaseException], says: str, function: Callable[[Tensor], Any]) -> Bad:
    """A `training_step` that returns this of its model's outputs. Found at once: nothing is trained."""
    return fitted(error, says, kind=step_of(lambda trainer, model, batch: function(model(batch[0]))))


def reporting(error: type[BaseException], says: str, value: Any) -> Bad:
    """A `training_step` that reports `value` besides a right loss."""
    return returning(error, says, lambda outputs: {"loss": outputs.mean(), "acc": value})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resumed(error: type[BaseException], says: str, run_with: Any = None, **changed: Any) -> Bad:
    """A run with momentum, and a scheduler if `run_with` one, resumed by a trainer in which something is `changed`."""

    def momentum(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1.0, momentum=0.5)

    def attempt(folder: Path) -> None:
        build(on_model=momentum, on_optimizer=run_with, callbacks=[Checkpoint(folder)]).fit()
        before = files(folder)
        try:
            build(**{"on_model": momentum, "callbacks": [JSONLines(folder / "log"), Checkpoint(folder)], **changed}).fit(folder)
        finally:
            World.from_env().barrier()
            assert files(folder) == before

    return Bad(error, says, attempt, writes=True)


def from_weights_alone(folder: Path) -> None:
    file = folder.with_suffix(".pt")
    World.from_env().run_on_main(lambda: torch.save(Toy().state_dict(), file))
    build().fit(file)


def afresh(folder: Path) -> None:
    """A second run, not resumed, into the folder of a first one."""

    def callbacks() -> list[Callback]:
        return [TensorBoard(folder), JSONLines(folder / "log"), Checkpoint(folder)]

    build(callbacks=callbacks()).fit()
    before = files(folder)
    try:
        build(callbacks=callbacks()).fit()
    finally:
        World.from_env().barrier()
        assert files(folder) == before


def quoted(text: str) -> str:
    """As it stands."""
    return re.escape(text)


MAP_STYLE = "NAME must be a map-style Dataset, with __getitem__ and __len__; found"
LOADER = (
    "NAME must be a Dataset, not a DataLoader: the trainer makes the batches. Pass loader.dataset, set batch_size in "
    "TrainerConfig, and give num_workers, collate_fn, ... as loader_options"
)
SCHEDULER = quoted("scheduler must be an LRScheduler, or a callable (optimizer, total_steps) that returns one; found ")
PAIRS = quoted("the default training_step takes batches (inputs, targets); found ")
PAIRS_WAY_OUT = ": override training_step, or let each sample of the dataset be such a pair"
RETURNED = quoted("training_step must return the loss, a tensor, or a mapping such as {'loss': loss, ...}; it returned ")
SCALAR = quoted("'acc' must be a real scalar (0-dim tensor or number)")
CONFIG = quoted("config must be a TrainerConfig, as in config=TrainerConfig(epochs=3); found ")
WORLD = quoted("world must be a World, as World.from_env() returns it; found ")
NO_CALL = quoted(
    "training_step did not call the model it was given in the window's last micro-batch, so the ranks' gradients would not be "
    "averaged. Compute the loss from model(...), the argument, not from self.model or model.module"
)
A_CLASS = "itself, no instance of it"

ARGUMENTS = {
    # model
    "the class of a model": given(
        TypeError, rf"model must be a torch.nn.Module; found the class tests.helpers.Toy {A_CLASS}", model=Toy, optimizer=0
    ),
    "a function for a model": given(
        TypeError, "model must be a torch.nn.Module; found function", model=mean_of_outputs, optimizer=0
    ),
    "a model in DataParallel": given(
        TypeError,
        r"model must be the bare module, the trainer wraps it itself; found torch.nn.parallel.\S+DataParallel: pass model.module",
        model=nn.DataParallel(Toy()),
    ),
    "a model with parameters that have no shape yet": given(
        ValueError,
        quoted(
            "the model is not built yet: layer.weight, layer.bias have no shape before the first forward. Call model(...) on one "
            "batch, then build the optimizer"
        ),
        model=Lazy,
    ),
    # optimizer
    "None for an optimizer": given(TypeError, "optimizer must be a torch.optim.Optimizer; found None", optimizer=None),
    "the class of an optimizer": given(
        TypeError, rf"optimizer must be a torch.optim.Optimizer; found the class torch.optim.sgd.SGD {A_CLASS}", optimizer=SGD
    ),
    "a list of optimizers": given(
        TypeError, "optimizer must be a torch.optim.Optimizer; found list", optimizer=[SGD(OTHER.parameters())]
    ),
    "an optimizer on another model": given(
        ValueError,
        quoted(
            "1 of the optimizer's parameters are not the model's (the first has shape ()): build it on model.parameters() of the "
            "model you pass"
        ),
        optimizer=SGD(OTHER.parameters()),
    ),
    # scheduler
    "the name of a scheduler": given(TypeError, f"{SCHEDULER}str", scheduler="cosine"),
    "False for a scheduler": given(TypeError, f"{SCHEDULER}bool", scheduler=False),
    "a mapping for a scheduler": given(TypeError, f"{SCHEDULER}dict", scheduler={"scheduler": None}),
    "a scheduler factory that returns nothing": given(
        TypeError,
        quoted("scheduler: the callable (optimizer, total_steps) must return an LRScheduler; it returned None"),
        scheduler=lambda optimizer, total_steps: None,
    ),
    "a scheduler factory without total_steps": given(
        TypeError,
        quoted("scheduler: a callable must take (optimizer, total_steps); found it with (optimizer)"),
        scheduler=lambda optimizer: StepLR(optimizer, 1),
    ),
    "a part of a scheduler's class whose second argument is another": given(
        TypeError,
        quoted("scheduler: a callable must take (optimizer, total_steps); found it with (optimizer, max_lr, total_steps, ")
        + ".*",
        scheduler=partial(OneCycleLR, max_lr=0.1),
    ),
    "a scheduler factory that raises": given(KeyError, "'warmup'", scheduler=raising(KeyError("warmup"))),
    "a scheduler factory without train_data": given(
        ValueError,
        "scheduler: a callable needs the total number of steps, which is unknown without train_data: pass that too, .*",
        scheduler=lambda optimizer, total_steps: StepLR(optimizer, 1),
        train_data=None,
    ),
    "a scheduler on another optimizer": given(
        ValueError,
        r"the scheduler was built on another optimizer than the one passed to the trainer: build it on that one, or .*",
        scheduler=StepLR(SGD(OTHER.parameters()), 1),
    ),
    "ReduceLROnPlateau without schedule='eval'": given(
        ValueError,
        "ReduceLROnPlateau follows an evaluation: set schedule='eval'; found schedule='step'",
        on_optimizer=ReduceLROnPlateau,
        eval_data=Numbers(4),
    ),
    "schedule='eval' without eval_data": given(
        ValueError,
        "schedule='eval' needs eval_data, which is None: the scheduler moves after each evaluation",
        on_optimizer=ReduceLROnPlateau,
        config=TrainerConfig(schedule="eval"),
    ),
    "an optimizer whose step needs a closure": given(
        TypeError,
        quoted(
            "optimizer: LBFGS.step takes (closure), a function that computes the loss anew, which no micro-batch of a window "
            "can: take another optimizer, or override optimizer_step"
        ),
        on_model=lambda model: LBFGS(model.parameters()),
    ),
    # loss_fn
    "the name of a loss": given(TypeError, r"loss_fn must be callable as loss_fn\(outputs, targets\); found str", loss_fn="mse"),
    "the class of a loss": given(
        TypeError,
        rf"loss_fn must be callable as loss_fn\(outputs, targets\); found the class torch.nn.modules.loss.MSELoss {A_CLASS}",
        loss_fn=nn.MSELoss,
    ),
    "a loss_fn that sums": given(
        ValueError,
        quoted(
            "loss_fn: CrossEntropyLoss has reduction='sum', but the default training_step takes means over the batch's samples: "
            "use reduction='mean', or override training_step and return Mean(total, count)"
        ),
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
    ),
    "neither loss_fn nor a training_step": given(
        ValueError,
        "the default training_step needs loss_fn: pass loss_fn=... to DDPTrainer, or override training_step",
        loss_fn=None,
    ),
    # config
    "a dict for config": given(TypeError, f"{CONFIG}dict", config={"epochs": 1}),
    "an empty dict for config": given(TypeError, f"{CONFIG}dict", config={}),
    "the class TrainerConfig": given(
        TypeError, f"{CONFIG}the class trainer.config.TrainerConfig {A_CLASS}", config=TrainerConfig
    ),
    "an option that DDP has not": given(
        ValueError,
        "ddp_options: DistributedDataParallel has no option 'find_unused'; there are .*find_unused_parameters, .*",
        config=TrainerConfig(ddp_options={"find_unused": True}),
    ),
    "an option of DDP that is no text": given(
        ValueError, "ddp_options: DistributedDataParallel has no option 3; .*", config=TrainerConfig(ddp_options={3: True})
    ),
    "an option of DDP that the trainer settles": given(
        ValueError,
        "ddp_options: 'device_ids' is settled by the trainer, from model and world: leave it out",
        config=TrainerConfig(ddp_options={"device_ids": [0]}),
    ),
    # callbacks
    "one callback instead of a list": given(
        TypeError,
        r"callbacks must be a list of trainer.Callback instances, as in \[ProgressBar\(\)\]; found Watcher\(\)",
        callbacks=Watcher(),
    ),
    "None for callbacks": given(TypeError, "callbacks must be a list of .*; found None", callbacks=None),
    "a mapping of callbacks": given(
        TypeError, "callbacks must be a list of .*; found {'w': Watcher.*", callbacks={"w": Watcher()}
    ),
    "the class of a callback": given(
        TypeError,
        "callbacks must be instances of trainer.Callback; found <class 'callbacks.progress.ProgressBar'>",
        callbacks=[ProgressBar],
    ),
    "a function for a callback": given(
        TypeError, "callbacks must be instances of trainer.Callback; found <built-in function print>", callbacks=[print]
    ),
    "a callback name used twice": given(
        ValueError,
        r"two callbacks are named 'Watcher': give one another name, as in callback.name = 'Watcher 2' \(the name is the .*",
        callbacks=[Watcher(), Watcher()],
    ),
    "a number for a callback's name": given(
        TypeError, r"the name of a callback must be a non-empty text; found 3 \(Watcher\(\)\)", callbacks=[named(3)]
    ),
    # world
    "a device for a world": given(TypeError, f"{WORLD}str", world="cpu"),
    "a number for a world": given(TypeError, f"{WORLD}int", world=0),
    "the class World": given(TypeError, f"{WORLD}the class trainer.world.World {A_CLASS}", world=World),
}

NO_DATASETS: dict[str, tuple[type[BaseException], str, Any]] = {
    "a number": (TypeError, f"{MAP_STYLE} int, which has no __getitem__ and __len__", 3),
    "a path": (TypeError, f"{MAP_STYLE} str", "data/train"),
    "the class of a dataset": (TypeError, f"{MAP_STYLE} the class tests.helpers.Numbers {A_CLASS}", Numbers),
    "a pair of tensors": (
        TypeError,
        f"{MAP_STYLE} tuple: tensors go into a torch.utils.data.TensorDataset",
        (torch.zeros(8), torch.zeros(8)),
    ),
    "a list of datasets": (
        TypeError,
        r"NAME must be one Dataset; found a list of them: join them in a torch.utils.data.ConcatDataset \(for several .*",
        [Numbers(8), Numbers(8)],
    ),
    "a DataLoader": (TypeError, quoted(LOADER), DataLoader(Numbers(8))),
    "a dataset without a length": (TypeError, f"{MAP_STYLE} {__name__}.WithoutLength, which has no __len__", WithoutLength()),
    "an empty dataset": (ValueError, "NAME is empty: tests.helpers.Numbers of length 0", Numbers(0)),
    "an empty list": (ValueError, "NAME is empty: list of length 0", []),
    "a negative length": (ValueError, f"NAME: the length of {__name__}.OddLength cannot be used: .* >= 0", OddLength(-3)),
    "a length that is no int": (
        TypeError,
        f"NAME: the length of {__name__}.OddLength cannot be used: 'float' .*",
        OddLength(3.5),
    ),
    "a length that raises": (OSError, "the index is gone", OddLength(OSError("the index is gone"))),
}


def no_datasets(name: str, make: Callable[[type[BaseException], str, Any], Bad]) -> dict[str, Bad]:
    cases = NO_DATASETS.items()
    return {f"{what} for {name}": make(error, says.replace("NAME", quoted(name)), data) for what, (error, says, data) in cases}


DATA = {
    **no_datasets("train_data", lambda error, says, data: given(error, says, train_data=data)),
    **no_datasets("eval_data", lambda error, says, data: given(error, says, eval_data=data)),
    **no_datasets("eval_data['test']", lambda error, says, data: given(error, says, eval_data={"test": data})),
    **no_datasets("data", lambda error, says, data: evaluated(error, says, data)),
    "a mapping for train_data": given(
        TypeError, f"{MAP_STYLE} dict".replace("NAME", "train_data"), train_data={"train": Numbers(8)}
    ),
    "None in eval_data": given(
        TypeError, r"eval_data\['test'\] must be a map-style .* found None, which .*", eval_data={"test": None}
    ),
    "an empty mapping for eval_data": given(
        ValueError, "eval_data is a mapping without datasets: pass some, or None", eval_data={}
    ),
    "an empty mapping for data": evaluated(ValueError, "data is a mapping without datasets: pass some, or None", {}),
    "an empty name in eval_data": given(
        TypeError, "the names in eval_data must be non-empty strings; found ''", eval_data={"": Numbers(8)}
    ),
    "a number for a name in eval_data": given(
        TypeError, "the names in eval_data must be non-empty strings; found 3", eval_data={3: Numbers(8)}
    ),
    "nothing to evaluate": evaluated(
        ValueError, r"nothing to evaluate: pass eval_data to DDPTrainer, or a dataset to evaluate\(\)"
    ),
    "nothing to train on": fitted(ValueError, "nothing to train on: pass train_data to DDPTrainer", train_data=None),
    "no loss_fn where only evaluated": evaluated(
        ValueError,
        "the default training_step needs loss_fn: pass loss_fn=... to DDPTrainer, or override training_step",
        Numbers(8),
        train_data=None,
        loss_fn=None,
    ),
    # sampler
    "a DistributedSampler": given(
        ValueError,
        "sampler: a DistributedSampler splits the data itself, and pads it; leave it out, the trainer splits exactly",
        sampler=DistributedSampler(Numbers(8), 2, 0),
    ),
    "a BatchSampler": given(
        ValueError,
        "sampler: a BatchSampler gives batches, not samples; pass its inner sampler and set TrainerConfig.batch_size",
        sampler=BatchSampler(SequentialSampler(Numbers(8)), 2, False),
    ),
    "a number for a sampler": given(TypeError, "sampler must be a torch.utils.data.Sampler with a length; found int", sampler=3),
    "the class of a sampler": given(
        TypeError,
        f"sampler must be a torch.utils.data.Sampler with a length; found the class {__name__}.Giving {A_CLASS}",
        sampler=Giving,
    ),
    "a sampler without a length": given(
        TypeError,
        f"sampler must have a length, __len__: {__name__}.WithoutSamplerLength has none",
        sampler=WithoutSamplerLength(),
    ),
    "an empty sampler": given(ValueError, f"sampler is empty: {__name__}.Giving of length 0", sampler=Giving([])),
    "a sampler without train_data": given(
        ValueError, "a sampler gives the order of train_data: pass train_data too", sampler=Giving([0]), train_data=None
    ),
    "a sampler of batches": fitted(
        TypeError,
        r"the sampler must give indices of single samples, ints; found \[0, 1\] \(list\)",
        sampler=Giving([[0, 1], [2, 3]]),
    ),
    "a sampler of fractions": fitted(
        TypeError, r"the sampler must give .* ints; found 0.5 \(float\)", sampler=Giving([0.5, 1.5])
    ),
    "a sampler of another dataset": fitted(
        ValueError, "the sampler gave the index 8, but train_data holds 8 samples: 0 to 7", sampler=Giving([0, 8])
    ),
    "a sampler from the end": fitted(
        ValueError, "the sampler gave the index -1, but train_data holds 8 samples: 0 to 7", sampler=Giving([0, -1])
    ),
    "a sampler that gives less than it says": fitted(
        ValueError, r"the sampler announced 4 samples with len\(\), but gave 2", sampler=Giving([0, 1], 4)
    ),
}

OPTIONS = {
    "batch_size": ({"batch_size": 3}, ValueError, "'batch_size' is settled by the trainer: set TrainerConfig.batch_size"),
    "shuffle": ({"shuffle": True}, ValueError, "'shuffle' is settled by the trainer: set TrainerConfig.shuffle"),
    "drop_last": ({"drop_last": True}, ValueError, "'drop_last' is settled by the trainer: set TrainerConfig.drop_last"),
    "sampler": ({"sampler": [1]}, ValueError, "'sampler' is settled by the trainer: pass sampler= to DDPTrainer"),
    "batch_sampler": ({"batch_sampler": [[1]]}, ValueError, "'batch_sampler' is settled by the trainer: pass sampler= .*"),
    "dataset": ({"dataset": Numbers(8)}, ValueError, "'dataset' is settled by the trainer: pass train_data and eval_data"),
    "in_order": ({"in_order": False}, ValueError, "'in_order' is settled by the trainer: .*"),
    "an unknown one": ({"num_worker": 1}, ValueError, "there is no option 'num_worker'; there are .* num_workers, .*"),
    "negative workers": ({"num_workers": -1}, ValueError, "DataLoader refuses them: num_workers option should be non-negative.*"),
    "a text for workers": ({"num_workers": "2"}, TypeError, r"num_workers must be a Python int; found '2' \(str\)"),
    "a bool for workers": ({"num_workers": True}, TypeError, r"num_workers must be a Python int; found True \(bool\)"),
    "a text for collate_fn": ({"collate_fn": "stack"}, TypeError, "collate_fn must be callable; found str"),
    "a seed for generator": ({"generator": 3}, TypeError, "generator must be a torch.Generator; found int"),
    "a timeout without workers": ({"timeout": 3}, ValueError, "timeout=3 needs num_workers of 1 or more"),
    "persistent_workers without workers": (
        {"persistent_workers": True},
        ValueError,
        "DataLoader refuses them: persistent_workers option needs num_workers > 0",
    ),
}
LOADER_OPTIONS = {
    **{
        f"{what} in loader_options": given(error, f"loader_options: {says}", loader_options=options)
        for what, (options, error, says) in OPTIONS.items()
    },
    "a list for loader_options": given(
        TypeError, "loader_options must be a mapping of DataLoader's keyword arguments; found list", loader_options=[]
    ),
}

STEPS = {
    "a step that returns nothing": returning(TypeError, rf"{RETURNED}None \(is a return missing\?\)", lambda outputs: None),
    "a step that returns a python float": returning(
        TypeError, rf"{RETURNED}float \(a number has no graph: leave out .item\(\)\)", lambda outputs: outputs.mean().item()
    ),
    "a step that returns a tuple": returning(TypeError, f"{RETURNED}tuple", lambda outputs: (outputs.mean(), outputs)),
    "a step that returns a text": returning(TypeError, f"{RETURNED}str", lambda outputs: "loss"),
    "a mapping without loss": returning(
        ValueError,
        quoted("training_step must return a mapping with the key 'loss'; its keys are ['Loss', 3]"),
        lambda outputs: {"Loss": outputs.mean(), 3: 0.0},
    ),
    "an empty mapping": returning(ValueError, r".* with the key 'loss'; its keys are \[\]", lambda outputs: {}),
    "a number for the loss in a mapping": returning(
        TypeError,
        r"training_step must return the loss as a 0-dim tensor, as the loss function gave it \(without .item\(\)\), or as a Mean "
        r"of such a sum; found float",
        lambda outputs: {"loss": outputs.mean().item()},
    ),
    "None for the loss in a mapping": returning(
        TypeError, ".* the loss as a 0-dim tensor, .* found None", lambda _: {"loss": None}
    ),
    "a loss of one number a sample": returning(
        ValueError,
        r"the loss must be a scalar, the mean over the batch's samples; found a tensor of shape \(3,\). With reduction='none', "
        r"take .mean\(\)",
        lambda outputs: outputs.sum().repeat(3),
    ),
    "a loss without an element": returning(ValueError, r"the loss must be a scalar, .* shape \(0,\)\. .*", lambda y: y[:0]),
    "a loss without a graph": returning(
        ValueError,
        quoted(
            "the loss has no graph: nothing to differentiate. It must be computed from model(...) without .detach(), .item() or "
            "torch.no_grad()"
        ),
        lambda outputs: outputs.mean().detach(),
    ),
    "a complex loss": returning(
        ValueError, r"the loss must be a real number; found torch.complex128: .*", lambda outputs: outputs.mean() * 1j
    ),
    "a key that is no text": returning(
        TypeError,
        r"the keys that a step returns must be strings; found 3 \(int\)",
        lambda outputs: {"loss": outputs.mean(), 3: 0.0},
    ),
    "a key of the trainer's own": returning(
        ValueError,
        "training_step returned the key 'lr', under which the trainer reports its own: rename it",
        lambda outputs: {"loss": outputs.mean(), "lr": 0.1},
    ),
    "a metric of several elements": reporting(
        ValueError, rf"{SCALAR}; found a torch.float32 tensor of shape \(3,\): take its .mean\(\), say", torch.zeros(3)
    ),
    "a metric of several bools": reporting(
        ValueError,
        rf"{SCALAR}; found a torch.bool tensor of shape \(2,\): take its .float\(\).mean\(\), say",
        torch.tensor([True, False]),
    ),
    "a text for a metric": reporting(TypeError, rf"{SCALAR}, or a Mean; found 'high' \(str\)", "high"),
    "None for a metric": reporting(TypeError, rf"{SCALAR}, or a Mean; found None \(NoneType\)", None),
    "a list for a metric": reporting(TypeError, rf"{SCALAR}, or a Mean; found \[1.0\] \(list\)", [1.0]),
    "a pair for a Mean": reporting(TypeError, rf"{SCALAR}, or a Mean; found \(1.0, 2\) \(tuple\)", (1.0, 2)),
    "an array for a metric": reporting(TypeError, rf"{SCALAR}, or a Mean; found array\(.*\) \(ndarray\)", np.zeros(1)),
    "a complex metric": reporting(ValueError, rf"{SCALAR}; found a torch.complex64 tensor .*", torch.tensor(1j)),
    "a Mean of several elements": reporting(ValueError, rf"{SCALAR}; found a .* \(3,\): .*", Mean(torch.zeros(3), 3)),
    "a text for the count of a Mean": reporting(TypeError, rf"{SCALAR}, .* found '3' \(str\)", Mean(torch.tensor(1.0), "3")),
    "keys that change between steps": fitted(
        ValueError,
        quoted(
            "a step must return the same keys every time: they were ['loss'], now ['loss', 'acc'] (where there is no value, "
            "return a Mean with count 0)"
        ),
        steps=1,
        callbacks=[],
        kind=step_of(
            lambda trainer, model, batch: {"loss": loss_of(model, batch), **({"acc": 1.0} if trainer.state.step else {})}
        ),
    ),
    "keys that change within an evaluation": evaluated(
        ValueError,
        r"a step must return the same keys every time: they were \['a'\], now \['b'\] .*",
        Numbers([0, 0, 1, 1]),
        kind=step_of(lambda trainer, model, batch: {"b" if batch[0][0] else "a": 1.0}),
        config=TrainerConfig(eval_batch_size=1),
    ),
    "a step that calls no model": fitted(
        RuntimeError, NO_CALL, kind=step_of(lambda trainer, model, batch: (trainer.model.w * batch[0]).mean())
    ),
    "a step that calls no model in a window's last micro-batch": fitted(
        RuntimeError,
        NO_CALL,
        config=TrainerConfig(shuffle=False, batch_size=1, global_batch_size=4),
        kind=step_of(
            lambda trainer, model, batch: loss_of(model, batch) if batch[0] < 2 else (trainer.model.w * batch[0]).mean()
        ),
    ),
    "a summary that returns nothing": fitted(
        TypeError,
        r"summarize must return the metrics, a dict of numbers by name; it returned None \(is a return missing\?\)",
        steps=1,
        callbacks=[],
        kind=summary_of(lambda metrics: None),
    ),
    "a summary of tensors": evaluated(
        TypeError,
        r"summarize must return numbers by name; found 'exp': tensor\(1.\) \(torch.Tensor\); float\(...\) makes one",
        Numbers(8),
        kind=summary_of(lambda metrics: {**metrics, "exp": torch.tensor(1.0)}),
    ),
    "an evaluation that returns nothing": evaluated(
        TypeError, RETURNED.replace("training", "eval") + ".*", Numbers(8), kind=step_of(lambda trainer, model, batch: None)
    ),
    "None for the reason to stop": fitted(
        TypeError,
        r"stop needs a reason, a text; found None \(NoneType\)",
        kind=step_of(lambda trainer, model, batch: trainer.stop(None)),
    ),
    "an empty reason to stop": fitted(
        ValueError,
        "stop needs a reason; found an empty text",
        kind=step_of(lambda trainer, model, batch: trainer.stop("")),
    ),
    # batches
    "batches of one tensor": fitted(TypeError, f"{PAIRS}torch.Tensor{PAIRS_WAY_OUT}", train_data=Items(torch.zeros(3))),
    "batches of one tensor that has two rows": fitted(
        TypeError, f"{PAIRS}torch.Tensor{PAIRS_WAY_OUT}", train_data=Items(0.0), config=TrainerConfig(batch_size=2)
    ),
    "batches of three tensors": fitted(TypeError, f"{PAIRS}list of length 3{PAIRS_WAY_OUT}", train_data=Items((0.0, 1.0, 2.0))),
    "batches that are mappings": fitted(TypeError, f"{PAIRS}dict{PAIRS_WAY_OUT}", train_data=Items({"x": 0.0, "y": 1.0})),
    "a collate_fn that returns nothing": fitted(
        TypeError, f"{PAIRS}None{PAIRS_WAY_OUT}", loader_options={"collate_fn": lambda samples: None}
    ),
    # what a run needs besides
    "no parameter to train": fitted(
        ValueError,
        quoted(
            "no parameter of the model requires a gradient, so there is nothing to train: call requires_grad_() on those that "
            "shall learn, before fit or in before_epoch"
        ),
        model=frozen(Toy()),
    ),
    "a monitor of the scheduler that is no key": fitted(
        ValueError,
        "schedule='eval': monitor='acc' is not a key of the evaluation; set it to one of 'loss'",
        steps=2,
        callbacks=[],
        on_optimizer=ReduceLROnPlateau,
        config=TrainerConfig(schedule="eval", monitor="acc", shuffle=False, global_batch_size=4),
        eval_data=Numbers(8),
    ),
    "EarlyStopping without eval_data": fitted(
        ValueError,
        "EarlyStopping monitors 'loss' of an evaluation: pass eval_data to the trainer",
        callbacks=[EarlyStopping("loss", 1)],
    ),
    "a Checkpoint with a monitor without eval_data": Bad(
        ValueError,
        "Checkpoint monitors 'loss' of an evaluation: pass eval_data to the trainer",
        lambda folder: build(callbacks=[JSONLines(folder / "log"), Checkpoint(folder, monitor="loss")]).fit(),
    ),
}

OTHER_RUN = {
    "seed": ({"seed": 1}, "had seed=0, this trainer has seed=1: .*; set the checkpoint's seed"),
    "shuffle": ({"shuffle": True}, "had shuffle=False, this trainer has shuffle=True: the order would be another one; .*"),
    "drop_last": ({"drop_last": True}, "had drop_last=False, this trainer has drop_last=True: an epoch would end elsewhere; .*"),
    "global batch": (
        {"global_batch_size": 2},
        r"had global_batch=4, this trainer has global_batch=2: .* set global_batch_size to the checkpoint's \(at any world .*",
    ),
}
RESUMED = {
    **{
        f"a checkpoint of another {what}": resumed(
            ValueError,
            f"the checkpoint's run {says}",
            config=TrainerConfig(**{"shuffle": False, "log_every": 1, "global_batch_size": 4, **changed}),
        )
        for what, (changed, says) in OTHER_RUN.items()
    },
    "a checkpoint of a dataset of another length": resumed(
        ValueError,
        "the checkpoint's run had samples=8, this trainer has samples=9: .*; pass the dataset of the run",
        train_data=Numbers(9),
    ),
    "a checkpoint of another model": resumed(
        ValueError,
        "the checkpoint is of another model; not in the file: bias, weight; only in the file: w. Build the model it was .*",
        model=nn.Linear(1, 1),
    ),
    "a checkpoint of a model of another shape": resumed(
        ValueError, r"the checkpoint is of another model; other shapes: w: \(\) in the file, \(3,\) here\. .*", model=Wide()
    ),
    "a checkpoint of another class of optimizer": resumed(
        ValueError,
        "the checkpoint's optimizer is of another kind than Adam: it has dampening, momentum, nesterov, and no amsgrad, .*",
        on_model=lambda model: Adam(model.parameters()),
    ),
    "a checkpoint of other parameter groups": resumed(
        ValueError,
        r"the checkpoint's optimizer has parameter groups of \[1\] parameters, this one of \[1, 0\]: build it as it was, .*",
        on_model=lambda model: SGD([{"params": list(model.parameters())}, {"params": []}], lr=1.0),
    ),
    "a checkpoint without the scheduler": resumed(
        ValueError,
        "this trainer has a scheduler and the checkpoint's run has none: .*",
        on_optimizer=lambda optimizer: StepLR(optimizer, 1),
    ),
    "a checkpoint of another class of scheduler": resumed(
        ValueError,
        "the checkpoint's scheduler is of another kind than LambdaLR: it has gamma, step_size, and no lr_lambdas. .*",
        run_with=lambda optimizer: StepLR(optimizer, 1),
        on_optimizer=lambda optimizer: LambdaLR(optimizer, lambda epoch: 1.0),
    ),
    "a state without its parts": Bad(
        ValueError,
        quoted("this is not what DDPTrainer.state_dict() gave: config, optimizer, scheduler, callbacks missing; found ['model', ")
        + ".*",
        lambda folder: build().load_state_dict({"model": Toy().state_dict(), "state": {}}),
    ),
    "a fresh run into a folder with checkpoints": Bad(
        FileExistsError,
        r"FOLDER already holds checkpoints of a run \(up to step 2\), and this is a new run: continue that one with "
        r"fit\(resume_from='FOLDER'\), or give this one another folder",
        afresh,
        writes=True,
    ),
    "a checkpoint that does not exist": fitted(
        FileNotFoundError,
        "resume_from='nowhere/step-00000003.pt' does not exist: name a checkpoint file, or a folder of them",
        "nowhere/step-00000003.pt",
    ),
    "a number for resume_from": fitted(
        TypeError, "resume_from must be the path of a checkpoint or of a folder of them; found 3", 3
    ),
    "an empty text for resume_from": fitted(ValueError, "resume_from is an empty text: .*, or pass None to start afresh", ""),
    "a file of weights alone": Bad(
        CheckpointError, "FOLDER.pt was not written by DDPTrainer: it holds no 'format'", from_weights_alone
    ),
    "a file that is no checkpoint": fitted(CheckpointError, f"{quoted(__file__)} is no whole checkpoint: .*", __file__),
}

# ------------------------------------------------------------------------------------------- at one process or at two alone


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def differing(error: type[BaseException], says: str, name: str, *values: Any) -> Bad:
    """Another value of the argument `name` on each rank."""
    return Bad(error, says, lambda folder: build(**{name: values[rank()]}))


def different(what: str, left: str, right: str) -> str:
    return quoted(
        f"the ranks were given different things: {what} is {left} on rank 0, {right} on rank 1. Give every rank the same"
    )


ON_ONE = "on rank 1 alone"  # with the cause "raised on rank 1" on rank 0
AT_TWO = {
    "a model in DistributedDataParallel": Bad(
        TypeError,
        r"model must be the bare module, the trainer wraps it itself; found .*.DistributedDataParallel: pass model.module",
        lambda folder: build(model=World.from_env().wrap(Toy())),
    ),
    "a step that calls trainer.model": fitted(
        RuntimeError, NO_CALL, kind=step_of(lambda trainer, model, batch: loss_of(trainer.model, batch))
    ),
    "a step that calls model.module": fitted(
        RuntimeError, NO_CALL, kind=step_of(lambda trainer, model, batch: loss_of(model.module, batch))
    ),
    "a step whose keys differ between ranks": fitted(
        ValueError,
        quoted(
            "training_step returned other keys on other ranks: ['loss', 'of 0'] on rank 0, ['loss', 'of 1'] on rank 1. Return "
            "the same keys on every rank (where there is no value, a Mean with count 0)"
        ),
        steps=1,
        callbacks=[],
        kind=step_of(lambda trainer, model, batch: {"loss": loss_of(model, batch), f"of {trainer.world.rank}": 1.0}),
    ),
    "an evaluation whose keys differ between ranks": evaluated(
        ValueError,
        r"eval_step returned other keys on other ranks: \['of 0'\] on rank 0, \['of 1'\] on rank 1. .*",
        Numbers(8),
        kind=step_of(lambda trainer, model, batch: {f"of {trainer.world.rank}": 1.0}),
    ),
    "an evaluation of datasets of different lengths": Bad(
        RuntimeError,
        r"7 samples were evaluated, but the ranks' datasets hold \[6, 8\]: pass the same one on every rank",
        lambda folder: build().evaluate(Numbers(8 - 2 * rank())),
    ),
    "different configs": differing(
        ValueError,
        different("config.batch_size", "4", "8"),
        "config",
        TrainerConfig(batch_size=4),
        TrainerConfig(batch_size=8),
    ),
    "different lengths of the data": differing(
        ValueError, different("the length of train_data", "8", "7"), "train_data", Numbers(8), Numbers(7)
    ),
    "no data on one rank": differing(
        ValueError, different("the length of train_data", "8", "None"), "train_data", Numbers(8), None
    ),
    "different lengths of an evaluation set": differing(
        ValueError, different("the length of eval_data test", "3", "4"), "eval_data", {"test": Numbers(3)}, {"test": Numbers(4)}
    ),
    "different evaluation sets": differing(
        ValueError, different("the length of eval_data", "3", "None"), "eval_data", Numbers(3), {"test": Numbers(3)}
    ),
    "different models": differing(
        ValueError,
        different("the model", "['w () torch.float64 requires_grad=True']", "['w () torch.float32 requires_grad=True']"),
        "model",
        Toy(),
        Toy(torch.float32),
    ),
    f"an empty dataset {ON_ONE}": differing(
        ValueError, "train_data is empty: tests.helpers.Numbers of length 0", "train_data", Numbers(8), Numbers(0)
    ),
    f"a factory that raises {ON_ONE}": differing(
        KeyError, "'warmup'", "scheduler", lambda optimizer, total: StepLR(optimizer, 1), raising(KeyError("warmup"))
    ),
    f"no loss_fn {ON_ONE}": differing(
        ValueError, "the default training_step needs loss_fn: .*", "loss_fn", mean_of_outputs, None
    ),
    "an epoch that drop_last leaves empty, of two ranks": given(
        ValueError,
        r"drop_last=True leaves nothing to train on: 5 samples are fewer than one global batch of 16 \(world size 2 x batch_size "
        r"8\). Lower it, or set drop_last=False",
        train_data=Numbers(5),
        config=TrainerConfig(batch_size=8, drop_last=True),
    ),
}
AT_ONE = {
    "an epoch that drop_last leaves empty": given(
        ValueError,
        r"drop_last=True .*: 5 samples .* global batch of 6 \(world size 1 x batch_size 2 x accumulation_steps 3\). .*",
        train_data=Numbers(5),
        config=TrainerConfig(batch_size=2, accumulation_steps=3, drop_last=True),
    ),
    "an epoch that drop_last leaves empty, by its global batch": given(
        ValueError,
        r"drop_last=True .*: 5 samples .* global batch of 6 \(global_batch_size=6; world size 1\). .*",
        train_data=Numbers(5),
        config=TrainerConfig(global_batch_size=6, drop_last=True),
    ),
    "a monitor of EarlyStopping that is no key": fitted(
        ValueError,
        "EarlyStopping monitors 'acc', which is no key of the evaluation: it has 'loss'",
        steps=2,
        eval_data=Numbers(8),
        callbacks=[EarlyStopping("acc", 1)],
    ),
    "a monitor of Checkpoint that is no key": Bad(
        ValueError,
        "Checkpoint monitors 'acc', which is no key of the evaluation: it has 'loss'",
        lambda folder: build(eval_data=Numbers(8), callbacks=[Checkpoint(folder, monitor="acc")]).fit(),
        steps=2,
    ),
}

# ------------------------------------------------------------------------------------------------------------- the attempts

EVERYWHERE = {**ARGUMENTS, **DATA, **LOADER_OPTIONS, **STEPS, **RESUMED}
assert len(EVERYWHERE) == sum(map(len, (ARGUMENTS, DATA, LOADER_OPTIONS, STEPS, RESUMED)))


@dataclass(frozen=True)
class Tried:
    """What became of an attempt on one rank."""

    error: str
    message: str
    cause: str
    steps: int
    unchanged: bool
    """Whether the last trainer that was built is as it was then."""
    files: list[str]
    afterwards: float
    """What a right trainer made of its model in the same process afterwards."""


def try_all(cases: dict[str, Bad], folder: Path) -> dict[str, Tried]:
    """Everything that is wrong, one after another; on every rank."""
    return {name: tried(bad, folder / f"{number}") for number, (name, bad) in enumerate(cases.items())}


def tried(bad: Bad, folder: Path) -> Tried:
    built.clear()
    error: BaseException | None = None
    try:
        bad.attempt(folder)
    except BaseException as raised:
        error = raised
    trainer, before = built[-1] if built else (None, "")
    afterwards = healthy()  # on all ranks: from here on rank 0's callbacks are through
    return Tried(
        error=type(error).__name__,
        message=str(error).replace(str(folder), "FOLDER"),
        cause=str(error.__cause__ if error else None),
        steps=trainer.state.step if trainer else 0,
        unchanged=trainer is None or content(trainer) == before,
        files=[] if bad.writes else sorted(files(folder)),
        afterwards=afterwards,
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Outcome]]:
    """By world size: every attempt, made by one set of ranks."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {1: {**EVERYWHERE, **AT_ONE}, 2: {**EVERYWHERE, **AT_TWO}}
    return {size: Ranks().outcomes(size, try_all, cases[size], folder / f"{size}") for size in (1, 2)}


def test_no_attempt_ends_a_rank_or_prints_anything(outcomes: dict[int, list[Outcome]]) -> None:
    ranks = [outcome for size in (1, 2) for outcome in outcomes[size]]
    assert [(outcome.error, outcome.exit_code, outcome.stdout, outcome.stderr) for outcome in ranks] == [(None, 0, "", "")] * 3


def check(bad: Bad, found: list[Tried]) -> None:
    for attempt in found:
        assert (attempt.error, attempt.message) == (bad.error.__name__, found[0].message)
        assert re.fullmatch(bad.says, attempt.message, re.DOTALL)
        assert attempt.steps == bad.steps
        assert attempt.unchanged or bad.steps
        assert attempt.files == []
        assert attempt.afterwards == -7.0


@pytest.mark.parametrize("name", EVERYWHERE)
def test_it_is_the_same_clear_error_on_every_rank_at_any_world_size(name: str, outcomes: dict[int, list[Outcome]]) -> None:
    check(EVERYWHERE[name], [outcome.value[name] for size in (1, 2) for outcome in outcomes[size]])


@pytest.mark.parametrize("name", AT_ONE)
def test_it_is_a_clear_error_at_one_process(name: str, outcomes: dict[int, list[Outcome]]) -> None:
    check(AT_ONE[name], [outcome.value[name] for outcome in outcomes[1]])


@pytest.mark.parametrize("name", AT_TWO)
def test_it_is_the_same_clear_error_on_both_ranks(name: str, outcomes: dict[int, list[Outcome]]) -> None:
    found = [outcome.value[name] for outcome in outcomes[2]]
    check(AT_TWO[name], found)
    if name.endswith(ON_ONE):
        assert [attempt.cause for attempt in found] == ["raised on rank 1", "None"]


def test_callbacks_may_come_from_any_iterable(ranks: Ranks) -> None:
    def run() -> int:
        recorder = Recorder()
        build(callbacks=(callback for callback in [recorder])).fit()
        return len(recorder.reports)

    assert ranks(1, run) == [2]


def test_fewer_samples_than_ranks_with_drop_last_end_every_rank_with_the_numbers(ranks: Ranks) -> None:
    config = TrainerConfig(batch_size=1, drop_last=True)
    outcomes = ranks.outcomes(4, lambda: build(train_data=Numbers(3), config=config))
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [
        (
            "ValueError",
            "drop_last=True leaves nothing to train on: 3 samples are fewer than one global batch of 4 (world size 4 x "
            "batch_size 1). Lower it, or set drop_last=False",
        )
    ] * 4
    assert [outcome.exit_code for outcome in outcomes] == [1] * 4


@pytest.mark.parametrize("name", ["a loss of one number a sample", f"an empty dataset {ON_ONE}"])
def test_an_uncaught_error_ends_each_rank_with_its_traceback_and_nothing_else(name: str, ranks: Ranks, tmp_path: Path) -> None:
    bad = {**EVERYWHERE, **AT_TWO}[name]
    for outcome in ranks.outcomes(2, bad.attempt, tmp_path):
        assert outcome.error == bad.error.__name__
        assert re.fullmatch(bad.says, outcome.message)
        assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (1, "", outcome.traceback)


def test_a_monitor_that_is_no_key_ends_all_ranks(ranks: Ranks) -> None:
    """Found in a hook, on rank 0, the others end because it has gone."""
    outcomes = ranks.outcomes(2, lambda: build(eval_data=Numbers(8), callbacks=[EarlyStopping("acc", 1)]).fit(), timeout=30)
    assert "EarlyStopping monitors 'acc', which is no key of the evaluation: it has 'loss'" in outcomes[0].message
    assert [(outcome.exit_code, outcome.timed_out) for outcome in outcomes] == [(1, False)] * 2


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Checkpoint(3), TypeError, "folder must be the path of a folder; found 3"),
        (lambda: Checkpoint(None), TypeError, "folder must be the path of a folder; found None"),
        (lambda: Checkpoint("runs", True), TypeError, "every_steps must be an int; found True (bool)"),
        (lambda: Checkpoint("runs", 1.0), TypeError, "every_steps must be an int; found 1.0 (float)"),
        (lambda: Checkpoint("runs", 0), ValueError, "every_steps must be 1 or more; found 0"),
        (lambda: Checkpoint("runs", every_epochs="1"), TypeError, "every_epochs must be an int; found '1' (str)"),
        (lambda: Checkpoint("runs", every_epochs=-1), ValueError, "every_epochs must be 1 or more; found -1"),
        (lambda: Checkpoint("runs", keep_last=None), TypeError, "keep_last must be an int; found None (NoneType)"),
        (lambda: Checkpoint("runs", keep_last=0), ValueError, "keep_last must be 1 or more; found 0"),
        (lambda: Checkpoint("runs", monitor=3), TypeError, "monitor must be a key of the evaluation or None; found 3"),
        (lambda: Checkpoint("runs", mode="Min"), ValueError, "mode must be 'min' or 'max'; found 'Min'"),
        (lambda: EarlyStopping(None, 1), TypeError, "monitor must be a key of the evaluation; found None"),
        (lambda: EarlyStopping("loss", 1.0), TypeError, "patience must be an int, a number of evaluations; found 1.0"),
        (lambda: EarlyStopping("loss", 0), ValueError, "patience must be 1 or more; found 0"),
        (lambda: EarlyStopping("loss", 1, "lower"), ValueError, "mode must be 'min' or 'max'; found 'lower'"),
        (lambda: EarlyStopping("loss", 1, min_delta="1"), TypeError, "min_delta must be a number; found '1'"),
        (lambda: EarlyStopping("loss", 1, min_delta=-1), ValueError, "min_delta must be finite and 0 or more; found -1"),
        (lambda: TensorBoard(None), TypeError, "folder must be the path of a folder; found None"),
        (lambda: JSONLines(3), TypeError, "path must be the path of a file; found 3"),
        (lambda: ProgressBar(10), TypeError, "ProgressBar.__init__() takes 1 positional argument but 2 were given"),
    ],
    ids=lambda value: None if callable(value) else value,
)
def test_wrong_arguments_of_a_callback_are_named(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(says)}$"):
        make()
