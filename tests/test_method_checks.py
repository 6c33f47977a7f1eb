"""Methods that nothing calls, and arguments that do not fit, are named when the trainer is built."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import Numbers, Ranks, Toy, mean_of_outputs, toy_trainer
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


@pytest.mark.parametrize("name", ["_step", "_report", "_evaluate", "_pass", "_settle", "_begin", "_update", "_fit_epoch"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_name_that_the_trainer_keeps_to_itself_is_refused(name: str, depth: int) -> None:
    """Else a helper of the script's own would run in its place."""
    kind = of(DDPTrainer, name, "batch")
    for _ in range(depth):
        kind = type("Below", (kind,), {})
    with pytest.raises(TypeError, match=rf"Own\.{name} has a name that the trainer uses itself: rename it"):
        build(kind)


@pytest.mark.parametrize("name", ["loss_fn", "model", "config", "scheduler", "world"])
def test_a_method_that_an_attribute_would_hide_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Own\.{name} would be hidden by the trainer's attribute of that name"):
        build(of(DDPTrainer, name, "outputs", "targets"))


def test_types_of_attributes_may_be_declared_more_exactly() -> None:
    class Typed(DDPTrainer):
        model: Toy

    build(Typed)


def test_a_callback_may_have_a_private_name_of_its_own() -> None:
    class Titled(Callback):
        def __init__(self) -> None:
            self._name = "a title"

    assert [callback.name for callback in build(DDPTrainer, Titled()).callbacks] == ["Titled"]


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


class Forgetful(DDPTrainer):
    def optimizer_step(self) -> None:
        self.updates = vars(self).get("updates", 0) + 1


class ByHand(DDPTrainer):
    def optimizer_step(self) -> None:
        for parameter in self.model.parameters():
            parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_the_optimizer_that_changes_nothing_is_told_once(ranks: Ranks, world_size: int) -> None:
    def run() -> list[str]:
        logged: list[str] = []
        logger = logging.getLogger("trainer")
        logger.addFilter(lambda record: logged.append(record.getMessage()) or False)
        toy_trainer(24, kind=Forgetful, batch_size=2, log_every=2).fit()
        return logged

    told = "no parameter has changed by step 2: does optimizer_step call super().optimizer_step()?"
    assert ranks(world_size, run) == [[told], []][:world_size]


class Passing(DDPTrainer):
    def optimizer_step(self) -> None:
        super().optimizer_step()


@pytest.mark.parametrize(("kind", "lr"), [(ByHand, 1.0), (DDPTrainer, 0.0), (Passing, 0.0)])
def test_updates_by_hand_and_a_rate_of_zero_are_no_reason_to_warn(
    kind: type[DDPTrainer], lr: float, caplog: pytest.LogCaptureFixture
) -> None:
    toy_trainer(8, kind=kind, batch_size=2, log_every=1, lr=lr).fit()
    assert caplog.messages == []
