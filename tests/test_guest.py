"""What belongs to the user is left as found; one process is an ordinary process; files run no code."""

from __future__ import annotations

import gc
import io
import os
import pdb
import random
import signal
import threading
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from callbacks import Checkpoint
from tests.helpers import Numbers, Ranks, Recorder, Toy, mean_of_outputs, toy_trainer
from trainer import CheckpointError, DDPTrainer, TrainerConfig, World


class Parts(nn.Module):
    """A body that is kept in evaluation mode inside a model in training mode, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
        self.body.eval()
        self.body[2].train()
        self.head[0].eval()
        self.seen: list[tuple[bool, ...]] = []

    def modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self.modules())

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.modes())
        outputs: Tensor = self.head(self.body(x.float().unsqueeze(1))).squeeze(1)
        return outputs


def trainer_of(model: nn.Module, samples: int = 12, kind: type[DDPTrainer] = DDPTrainer, **options: Any) -> DDPTrainer:
    config = TrainerConfig(**{"batch_size": 2, "accumulation_steps": 2, "log_every": 1, **options.pop("config", {})})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, eval_data = Numbers(samples), Numbers(5)
    return kind(model, optimizer, data, eval_data, loss_fn=mean_of_outputs, config=config, **options)


# Modes.


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_sub_module_keeps_its_mode(ranks: Ranks, world_size: int) -> None:
    """In training as the user set them; in evaluation all off; afterwards as before, also after an error there."""

    class Trainer(DDPTrainer):
        is_failing = False

        def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
            if self.is_failing:
                raise ArithmeticError
            return super().eval_step(model, batch)

    def run() -> list[Any]:
        model = Parts()
        before = model.modes()
        assert len(set(before)) == 2
        trainer = trainer_of(model, kind=Trainer)
        trainer.evaluate()
        evaluated, model.seen = set(model.seen), []
        after_evaluate = model.modes()
        trainer.fit()
        fitted = set(model.seen)
        after_fit = model.modes()
        trainer.is_failing = True  # type: ignore[attr-defined]
        with pytest.raises(ArithmeticError):
            trainer.evaluate()
        nothing_on = (False,) * len(before)
        return [evaluated == {nothing_on}, fitted == {before, nothing_on}, {after_evaluate, after_fit, model.modes()} == {before}]

    assert ranks(world_size, run) == [[True, True, True]] * world_size


def test_what_a_module_does_in_evaluation_mode_is_undone_by_its_own_train(ranks: Ranks) -> None:
    """As layers do that merge an adapter into their weight, which would no longer learn."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Merging:
            self.merged = not mode
            return super().train(mode)

    def run() -> tuple[bool, bool]:
        model = nn.Sequential(Merging(1, 1), nn.Dropout(0.5).eval(), nn.Sequential(Merging(1, 1)).eval())
        trainer = trainer_of(model)
        trainer.evaluate(TensorDataset(torch.ones(4, 1), torch.ones(4)))
        merged = [model[0].merged, model[2][0].merged]
        return merged == [False, True], [module.training for module in model.modules()] == [True, True, False, False, False]

    assert ranks(2, run) == [(True, True)] * 2


def test_a_train_that_fails_after_an_evaluation_leaves_the_modes_as_they_were() -> None:
    class Failing(nn.Linear):
        def train(self, mode: bool = True) -> Failing:
            if mode:
                raise ArithmeticError("no way back")
            return super().train(mode)

    model = nn.Sequential(nn.Dropout(0.5), Failing(1, 1), nn.Dropout(0.5))
    with pytest.raises(ArithmeticError, match="no way back"):
        trainer_of(model).evaluate(TensorDataset(torch.ones(4, 1), torch.ones(4)))
    assert all(module.training for module in model.modules())


def test_a_mode_that_changes_during_the_run_stays_changed(ranks: Ranks) -> None:
    class Trainer(DDPTrainer):
        def before_epoch(self) -> None:
            assert isinstance(self.model, Parts)
            self.model.head[0].train(self.state.epoch == 1)

    def run() -> list[bool]:
        model = Parts()
        trainer_of(model, kind=Trainer, config={"epochs": 2}).fit()
        head = list(model.modules()).index(model.head[0])
        return [*sorted({modes[head] for modes in model.seen if any(modes)}), model.head[0].training]

    assert ranks(1, run) == [[False, True, True]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_in_evaluation_mode_is_warned_of_once_and_stays_there(ranks: Ranks, world_size: int) -> None:
    def run() -> tuple[list[tuple[str, type[Warning]]], set[tuple[bool, ...]], bool]:
        model = Parts().eval()
        assert isinstance(model, Parts)
        trainer = trainer_of(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit()
        told = [(str(warning.message), warning.category) for warning in caught if "evaluation mode" in str(warning.message)]
        return told, set(model.seen), any(model.modes())

    message = (
        "the model is in evaluation mode, and fit leaves it there: call model.train() first to train with dropout and batch "
        "statistics"
    )
    nothing_on = {(False,) * 8}
    first, *others = ranks(world_size, run)
    assert first == ([(message, UserWarning)], nothing_on, False)
    assert others == [([], nothing_on, False)] * (world_size - 1)


# The process.


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_signal_handlers_and_threads_are_as_found(ranks: Ranks, world_size: int, fails: bool) -> None:
    """And a handler of the user's runs as if there were no trainer: see test_signals.py."""

    def handlers() -> dict[int, Any]:
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            if fails:
                raise ArithmeticError
            return super().training_step(model, batch)  # type: ignore[return-value]

    def run() -> list[bool]:
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        before, count = handlers(), threading.active_count()
        with suppress(ArithmeticError):
            trainer_of(Toy(), kind=Trainer).fit()
        return [handlers() == before, threading.active_count() == count, signal.set_wakeup_fd(-1) == -1]

    assert ranks(world_size, run) == [[True, True, True]] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_grad_mode_is_as_found_and_does_not_matter(ranks: Ranks, world_size: int) -> None:
    """`fit` trains under no_grad too; an evaluation has no gradients, but its tensors stay usable in training."""
    inside: list[tuple[bool, bool]] = []

    class Trainer(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
            inside.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().eval_step(model, batch)

    def run() -> tuple[list[bool], float, float, set[tuple[bool, bool]]]:
        found = []
        weights = []
        for mode in (nullcontext(), torch.no_grad()):
            with mode:
                before = torch.is_grad_enabled()
                trainer = trainer_of(Toy(), kind=Trainer, config={"shuffle": False, "batch_size": 4 // world_size})
                trainer.fit()
                trainer.evaluate()
                found.append(torch.is_grad_enabled() == before)
                weights.append(float(trainer.model.w.detach()))  # type: ignore[arg-type]
        return found, weights[0], weights[1], set(inside)

    for found, plain, without, seen in ranks(world_size, run):
        assert found == [True, True]
        assert plain == without != 0
        assert seen == {(False, False)}


def generators() -> tuple[Any, ...]:
    state = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2]  # type: ignore[union-attr,index]


class Drawing(DDPTrainer):
    """Draws from every generator in an evaluation."""

    def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
        torch.rand(3), random.random(), np.random.rand()
        return super().eval_step(model, batch)


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluate_puts_random_state_back(ranks: Ranks, world_size: int) -> None:
    """Also when it fails."""

    class Failing(Drawing):
        def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
            raise ArithmeticError

        def eval_step(self, model: nn.Module, batch: Any) -> Tensor:
            super().eval_step(model, batch)
            raise ArithmeticError

    def run() -> list[bool]:
        trainer = trainer_of(Toy(), kind=Drawing)
        before = generators()
        trainer.evaluate()
        same = [generators() == before]
        with pytest.raises(ArithmeticError):
            trainer_of(Toy(), kind=Failing).evaluate()
        return [*same, generators() == before]

    assert ranks(world_size, run) == [[True, True]] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_seed_no_random_state_is_touched(ranks: Ranks, world_size: int, workers: int) -> None:
    """What nobody draws from is as it was, after `fit` and after `evaluate`; what the user draws goes on from there."""

    def run() -> list[bool]:
        trainer = trainer_of(Toy(), config={"seed": None}, loader_options={"num_workers": workers})
        before = generators()
        trainer.fit()
        trainer.evaluate()
        untouched = generators() == before
        drawing = trainer_of(Toy(), kind=Drawing, config={"seed": None})
        drawing.evaluate()
        return [untouched, generators() != before]

    assert ranks(world_size, run) == [[True, True]] * world_size


def test_what_was_passed_in_is_not_changed(ranks: Ranks) -> None:
    def run() -> list[bool]:
        model = Parts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"num_workers": 0, "pin_memory": False}
        sets = {"one": Numbers(3), "two": Numbers(4)}
        callbacks = [Recorder()]
        given = (dict(options), dict(sets), list(callbacks))
        groups, hooks = [set(group) for group in optimizer.param_groups], set(vars(optimizer))
        trainer = DDPTrainer(
            model,
            optimizer,
            Numbers(12),
            sets,
            loss_fn=mean_of_outputs,
            loader_options=options,
            callbacks=callbacks,
            config=TrainerConfig(batch_size=2, max_grad_norm=1.0),
        )
        trainer.fit()
        trainer.close()
        return [
            (options, sets, callbacks) == given,
            [set(group) for group in optimizer.param_groups] == groups,
            set(vars(optimizer)) == hooks,
        ]

    assert ranks(2, run) == [[True, True, True]] * 2


# The model.


def fittings(model: nn.Module) -> dict[str, Any]:
    """Everything that could be hung on a model: attributes and hooks of modules, attributes and hooks of parameters."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "seen":
                continue
            hooks = attribute.endswith("hooks") or attribute.startswith(("_forward_", "_backward_"))
            found[f"{name}.{attribute}"] = dict(value) if hooks and isinstance(value, dict) else type(value)
        found[f"{name} has"] = (list(module._parameters), list(module._buffers), list(module._modules), type(module))
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        found[f"{name}:"] = (id(parameter), dict(vars(parameter)), hooks, parameter.requires_grad, parameter.is_leaf)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("closes", [True, False])
def test_nothing_is_left_on_the_model(ranks: Ranks, world_size: int, closes: bool) -> None:
    """Its keys during the run are its own; afterwards no attribute, no hook, no wrapper and no gradient is there."""

    class Keys(Recorder):
        keys: list[str]

        def on_safe_point(self, trainer: DDPTrainer) -> None:
            self.keys = list(trainer.state_dict()["model"])

    def run() -> dict[str, bool]:
        model = Parts()
        keys, before = list(model.state_dict()), fittings(model)
        callback = Keys()
        trainer = trainer_of(model, callbacks=[callback], config={"epochs": 2, "max_grad_norm": 1.0})
        trainer.fit()
        trainer.evaluate()
        is_main = trainer.world.is_main
        if closes:
            trainer.close()
        gc.collect()
        return {
            "keys": list(model.state_dict()) == keys,
            "keys in a hook": not is_main or callback.keys == keys,
            "fittings": fittings(model) == before,
            "gradients": all(parameter.grad is None for parameter in model.parameters()),
            "wrappers": not any(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects()),
            "model": trainer.model is model,
        }

    for result in ranks(world_size, run):
        assert all(result.values()), result


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_left_on_the_model_after_an_error(ranks: Ranks, world_size: int) -> None:
    class Trainer(DDPTrainer):
        def optimizer_step(self) -> None:
            raise ArithmeticError

    def run() -> list[bool]:
        model = Parts()
        before = fittings(model)
        trainer = trainer_of(model, kind=Trainer)
        with suppress(ArithmeticError):
            trainer.fit()
        gc.collect()
        return [
            fittings(model) == before,
            not any(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects()),
        ]

    assert ranks(world_size, run) == [[True, True]] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_user_s_forward_hooks_run_once_for_each_forward(ranks: Ranks, world_size: int) -> None:
    """Three windows of two micro-batches; the passes that the trainer makes for itself run no code of the model's."""

    def run() -> tuple[list[str], int, bool]:
        model = Toy()
        calls: list[str] = []
        model.register_forward_pre_hook(lambda module, inputs: calls.append("before"))
        handle = model.register_forward_hook(lambda module, inputs, outputs: calls.append("after"))
        trainer = trainer_of(model, samples=12 * world_size)
        trainer.fit()
        fitted = list(calls)
        calls.clear()
        trainer.evaluate()
        handle.remove()
        return fitted, len(calls), len(model._forward_pre_hooks) == 1 and not model._forward_hooks

    for rank, (fitted, evaluated, as_found) in enumerate(ranks(world_size, run)):
        share = len(range(rank, 5, world_size))
        evaluations = -(-share // 2)
        # an evaluation at the epoch's end belongs to fit
        assert fitted == ["before", "after"] * (6 + evaluations)
        assert evaluated == 2 * evaluations
        assert as_found


def test_the_model_can_be_trained_by_hand_after_fit(ranks: Ranks) -> None:
    """What the wrapper had hung on the parameters no longer does anything: one rank can go on alone."""

    def run() -> float | None:
        model = Toy()
        trainer = toy_trainer(8, model, batch_size=2)
        trainer.fit()
        if trainer.world.is_main:
            model(torch.full((2,), 3.0, dtype=torch.float64)).mean().backward()
        return None if model.w.grad is None else model.w.grad.item()

    assert ranks(2, run) == [3.0, None]


# One process.


@pytest.mark.parametrize("launched", [False, True])
def test_one_process_has_no_group_and_no_wrapper(ranks: Ranks, launched: bool) -> None:
    """By plain python and by torchrun with one process."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            assert model is self.model or self.state.step == 0  # whose last forward looks for what a wrapper would hide
            assert not isinstance(model, nn.parallel.DistributedDataParallel)
            assert not dist.is_initialized()
            return mean_of_outputs(model(batch[0]), batch[1])

    def run() -> tuple[float, bool]:
        with toy_trainer(8, kind=Trainer, batch_size=2, accumulation_steps=2) as trainer:
            trainer.fit()
            assert trainer.world.wrap(trainer.model) is trainer.model
        return float(trainer.model.w.detach()), dist.is_initialized()  # type: ignore[arg-type]

    assert ranks(1, run, launched=launched) == [(-7.0, False)]


def test_a_debugger_stops_inside_a_step(ranks: Ranks) -> None:
    """The step runs in the process and the thread of the script."""

    class Trainer(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            if self.state.step == 1:
                self.debugger.set_trace()
            loss = mean_of_outputs(model(batch[0]), batch[1])
            return loss

    def run() -> tuple[str, int]:
        trainer = toy_trainer(6, kind=Trainer, batch_size=2)
        answers = io.StringIO()
        debugger = pdb.Pdb(
            stdin=io.StringIO("p batch[0].tolist()\nnext\np loss.item()\ncontinue\n"), stdout=answers, nosigint=True
        )
        trainer.debugger = debugger  # type: ignore[attr-defined]
        trainer.fit()
        return answers.getvalue(), trainer.state.step

    ((answers, steps),) = ranks(1, run)
    assert "[2.0, 3.0]" in answers
    assert "-1.25" in answers  # the weight -0.5 times the mean 2.5
    assert steps == 3


# Files.


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("where", ["callbacks", "model", "the file"])
@pytest.mark.parametrize("resume_from", ["file", "folder"])
def test_resuming_runs_no_code_from_a_file(ranks: Ranks, tmp_path: Path, where: str, resume_from: str) -> None:
    """It is refused on every rank, and nothing was run."""
    target, folder = tmp_path / "it-ran", tmp_path / "run"
    folder.mkdir()
    file = folder / "step-00000002.pt"

    def write() -> None:
        toy = toy_trainer(8, batch_size=2, max_steps=2, callbacks=[Checkpoint(folder)])
        toy.fit()
        content: Any = torch.load(file, weights_only=True)
        if where == "the file":
            content = Payload(target)
        else:
            content[where]["payload"] = Payload(target)
        torch.save(content, file)

    def resume() -> None:
        toy_trainer(8, batch_size=1).fit(resume_from=file if resume_from == "file" else folder)

    ranks(1, write)
    assert not target.exists()
    for outcome in ranks.outcomes(2, resume):
        assert outcome.error == f"{CheckpointError.__module__}.CheckpointError"
    assert not target.exists()
    torch.load(file, weights_only=False)
    assert target.exists()  # it would have


def test_schedulers_are_as_found(ranks: Ranks) -> None:
    """Built by the user, on their optimizer; moved by the trainer and not replaced."""

    def run() -> tuple[bool, int]:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        trainer = DDPTrainer(
            model,
            optimizer,
            Numbers(8),
            loss_fn=mean_of_outputs,
            scheduler=scheduler,
            config=TrainerConfig(batch_size=2),
            world=World.from_env(),
        )
        trainer.fit()
        return trainer.scheduler is scheduler and trainer.optimizer is optimizer, scheduler.last_epoch

    assert ranks(1, run) == [(True, 4)]
