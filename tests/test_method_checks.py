"""Methods that nothing calls, and arguments that do not fit, are named when the trainer is built."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import Numbers, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, DDPTrainer


def build(kind: type[DDPTrainer], *callbacks: Callback) -> DDPTrainer:
    model = Toy()
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), Numbers(4), loss_fn=mean_of_outputs, callbacks=callbacks)


def of(base: type, name: str, *arguments: str) -> type[Any]:
    """A class with a method of that name; its arguments have no defaults."""
    namespace: dict[str, Any] = {}
    exec(f"def {name}({', '.join(('self', *arguments))}): pass", namespace)
    return type("Own", (base,), {name: namespace[name]})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("validation_step", "the trainer calls eval_step"),
        ("configure_optimizers", "pass optimizer and scheduler to the trainer"),
        ("train_step", "did you mean training_step?"),
        ("evaluation_step", "eval_step"),
        ("before_epochs", "did you mean before_epoch?"),
        ("summarise", "did you mean summarize?"),
    ],
)
def test_a_step_that_is_never_called_is_named_with_what_is(name: str, instead: str) -> None:
    with pytest.warns(UserWarning, match=f"Own.{name} is never called by the trainer: .*{instead.replace('?', '.')}"):
        build(of(DDPTrainer, name, "model", "batch"))


@pytest.mark.parametrize(
    "name", ["draw", "_train_step", "compute_loss", "compute_metrics", "accuracy_of", "log_images", "transform"]
)
def test_methods_of_the_user_s_own_are_left_alone(name: str) -> None:
    build(of(DDPTrainer, name))


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("training_step", ("batch", "model", "number"), r"\(self, model, batch\); found it with \(batch, model, number\)"),
        ("training_step", ("batch",), r"\(self, model, batch\); found it with \(batch\)"),
        ("eval_step", (), r"\(self, model, batch\)"),
        ("prepare_batch", ("batch", "device"), r"\(self, batch\)"),
        ("summarize", (), r"\(self, metrics\)"),
        ("before_epoch", ("epoch",), r"\(self\)"),
        ("optimizer_step", ("closure",), r"\(self\)"),
    ],
)
def test_a_step_with_other_arguments_is_an_error(name: str, arguments: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must take {wanted}"):
        build(of(DDPTrainer, name, *arguments))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("on_steps", "on_step"), ("on_train_end", "on_fit_end"), ("on_epoch_start", "before_epoch"), ("on_evaluate", "on_eval")],
)
def test_a_method_like_a_hook_is_named_with_the_one_that_may_be_meant(name: str, meant: str) -> None:
    with pytest.warns(UserWarning, match=f"Own.{name} is no hook, and never called: did you mean .*{meant}"):
        build(DDPTrainer, of(Callback, name, "trainer")())


def test_every_hook_and_other_methods_are_no_reason_to_warn() -> None:
    for name in ("before_fit", "on_safe_point", "on_plateau", "before_dinner", "note"):
        build(DDPTrainer, of(Callback, name, "trainer")())
    for name in ("on_step", "on_eval", "on_exception"):
        build(DDPTrainer, of(Callback, name, "trainer", "given")())


class OwnBackward(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        loss = mean_of_outputs(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        return loss


class OwnZeroing(DDPTrainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.optimizer.zero_grad()
        return mean_of_outputs(model(batch[0]), batch[1])


def test_a_backward_of_one_s_own_is_found_in_the_first_step() -> None:
    with pytest.raises(RuntimeError, match=r"training_step changed the gradients itself.*Return the loss"):
        build(OwnBackward).fit()


def test_zeroing_gradients_of_earlier_micro_batches_is_found_too() -> None:
    with pytest.raises(RuntimeError, match="training_step changed the gradients itself"):
        toy_trainer(8, kind=OwnZeroing, batch_size=2, accumulation_steps=2).fit()


class Two(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self[1](self[0](inputs).unsqueeze(-1))
        return outputs


def partly_trained(left_out: slice) -> DDPTrainer:
    model = Two(Toy(), nn.Linear(1, 1).double())
    parameters = list(model.parameters())[left_out]
    optimizer = torch.optim.SGD([{"params": parameters}] if parameters else [torch.zeros(1)], lr=0.1)
    if not parameters:
        optimizer.param_groups[0]["params"] = []
    return DDPTrainer(model, optimizer, Numbers(4), loss_fn=lambda outputs, targets: outputs.mean())


def test_parameters_that_the_optimizer_has_not_are_named_once() -> None:
    with pytest.warns(UserWarning, match=r"1\.weight, 1\.bias require gradients, but the optimizer does not have them") as warned:
        partly_trained(slice(1)).fit()
    assert len(warned) == 1


def test_an_optimizer_without_any_trainable_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient is the optimizer's"):
        partly_trained(slice(0)).fit()


def test_what_is_frozen_need_not_be_the_optimizer_s() -> None:
    trainer = partly_trained(slice(1))
    trainer.model[1].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit()


@pytest.mark.parametrize("hook", ["before_fit", "on_step"])
def test_a_hook_that_is_no_method_is_named(hook: str) -> None:
    callback = Callback()
    setattr(callback, hook, None)
    with pytest.raises(TypeError, match=rf"Callback.{hook} must be a method \(self, trainer.*; found None"):
        toy_trainer(4, callbacks=[callback])
