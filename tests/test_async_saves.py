"""Saving behind the training: a file is of its own step, one is written at a time, and what goes wrong is heard of."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from callbacks import Checkpoint
from tests.helpers import Numbers, Outcome, Ranks, Toy, mean_of_outputs, toy_trainer
from trainer import Callback, CheckpointFolder, DDPTrainer, TrainerConfig, checkpoint
from trainer.host_copy import HostCopy

write = checkpoint.write
DEADLINE = 10.0  # seconds after which what a write waits for will not come any more


def name(step: int) -> str:
    return f"step-{step:08d}.pt"


def listing(folder: Path) -> list[str]:
    """Everything, the lock too."""
    return sorted(path.name for path in folder.iterdir())


def writing(before: Callable[[int], object] = bool, after: Callable[[int], object] = bool) -> Callable[..., None]:
    """In place of `checkpoint.write`: calls these with the step, in the thread that writes."""

    def traced(path: Path, content: Mapping[str, Any]) -> None:
        step = int(path.stem.split("-")[-1])
        before(step)
        write(path, content)
        after(step)

    return traced


def join_writer() -> None:
    """Wait until nothing is written any more."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(DEADLINE)


class OnStep(Callback):
    """Calls `function` with the step, before what is due at its safe point."""

    def __init__(self, function: Callable[[int], object]) -> None:
        self.function = function

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        self.function(trainer.state.step)


def with_log(function: Callable[[], Any]) -> Any:
    """What `function` returns; the library's log goes to stderr, as it does outside of tests."""
    logging.basicConfig(stream=sys.stderr, force=True)
    return function()


def assert_all_ended(outcomes: list[Outcome]) -> None:
    assert all(outcome.exit_code != 0 and not outcome.timed_out and outcome.seconds < 15 for outcome in outcomes), outcomes


class Rich(nn.Module):
    """Weights, one of them shared and one laid out in another order, and buffers that each step changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.conv = nn.Conv2d(2, 2, 2, bias=False)
        self.tied = self.first
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.tied(x.unsqueeze(1)))) ** 2 + self.conv.weight.sum() ** 2
        return outputs


def rich_trainer(checkpoints: Checkpoint, *callbacks: Callback, steps: int) -> DDPTrainer:
    torch.manual_seed(0)
    model = Rich()
    return DDPTrainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.1),
        Numbers(40),
        loss_fn=mean_of_outputs,
        scheduler=lambda optimizer, total: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        config=TrainerConfig(batch_size=2, max_steps=steps, shuffle=False),
        callbacks=[checkpoints, *callbacks],
    )


def difference(left: Any, right: Any, place: str = "content") -> str | None:
    """The first place where two loaded contents differ: types, values bit by bit, layouts, keys and their order."""
    if type(left) is not type(right):
        return f"{place}: {type(left)}, {type(right)}"
    if isinstance(left, Tensor):
        looks = [(t.dtype, t.shape, t.stride(), t.requires_grad, list(vars(t))) for t in (left, right)]
        return place if looks[0] != looks[1] or not torch.equal(left, right) else None
    if isinstance(left, dict):
        if list(left) != list(right) or vars(left).keys() != vars(right).keys() if hasattr(left, "__dict__") else False:
            return f"{place}: keys"
        left, right = list(left.items()), list(right.items())
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{place}: length"
        found = (difference(a, b, f"{place}[{number}]") for number, (a, b) in enumerate(zip(left, right, strict=True)))
        return next(filter(None, found), None)
    return None if left == right else f"{place}: {left!r}, {right!r}"


# What is written, while training goes on.


def test_training_goes_on_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write of step 3 cannot end before step 5 has been taken; nothing is said of when it begins."""
    taken, order = threading.Event(), list[str]()

    def wait(step: int) -> None:
        assert taken.wait(DEADLINE)

    def on_step(step: int) -> None:
        order.append(f"step {step}")
        if step == 5:
            taken.set()
            join_writer()

    monkeypatch.setattr(checkpoint, "write", writing(wait, lambda step: order.append(f"file {step}")))
    saver = Checkpoint(tmp_path, every_steps=3, every_epochs=None)
    toy_trainer(20, batch_size=2, max_steps=6, callbacks=[OnStep(on_step), saver]).fit()
    assert order == [*(f"step {step}" for step in range(1, 6)), "file 3", "step 6", "file 6"]
    assert listing(tmp_path) == [name(3), name(6)]


def test_a_file_holds_its_own_step_though_later_ones_change_all_of_it_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written only after three more steps: weights, buffers, optimizer, scheduler, counters: all as without `async_write`."""
    rich_trainer(Checkpoint(tmp_path / "sync", every_steps=4, async_write=False), steps=8).fit()
    taken = threading.Event()

    def on_step(step: int) -> None:
        if step == 7:
            taken.set()

    def wait(step: int) -> None:
        assert taken.wait(DEADLINE)

    monkeypatch.setattr(checkpoint, "write", writing(wait))
    rich_trainer(Checkpoint(tmp_path / "async", every_steps=4), OnStep(on_step), steps=8).fit()
    for step in (4, 8):
        direct, behind = (checkpoint.read(tmp_path / kind / name(step)) for kind in ("sync", "async"))
        assert direct["callbacks"].pop("OnStep", {}) == behind["callbacks"].pop("OnStep")
        assert difference(direct, behind) is None
        assert behind["state"]["step"] == behind["scheduler"]["last_epoch"] == behind["model"]["norm.num_batches_tracked"] == step
        assert all(state["step"] == step for state in behind["optimizer"]["state"].values())
    sizes = [(tmp_path / kind / name(8)).stat().st_size for kind in ("sync", "async")]
    assert abs(sizes[0] - sizes[1]) < 1000  # nothing shared is written twice


def test_one_file_is_written_at_a_time_in_the_order_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six saves, each slower than the steps between them, into the same buffers."""
    running, most, done = set[int](), list[int](), list[int]()

    def begin(step: int) -> None:
        running.add(step)
        most.append(len(running))
        time.sleep(0.05)

    def end(step: int) -> None:
        running.remove(step)
        done.append(step)

    monkeypatch.setattr(checkpoint, "write", writing(begin, end))
    toy_trainer(12, batch_size=2, callbacks=[Checkpoint(tmp_path, every_steps=1, keep_last=6)]).fit()
    assert most == [1] * 6
    assert done == [1, 2, 3, 4, 5, 6]
    for step in done:
        assert checkpoint.read(tmp_path / name(step))["model"]["w"] == -sum(2 * window + 0.5 for window in range(step))


@pytest.mark.parametrize("world_size", [1, 2])
def test_fit_returns_when_the_last_file_is_safe(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """On every rank; by then nothing is left of it but the file."""

    def run() -> tuple[list[str], list[str], int]:
        vars(checkpoint)["write"] = writing(lambda step: time.sleep(0.3))
        toy_trainer(4, batch_size=1, callbacks=[Checkpoint(tmp_path)]).fit()
        threads = [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]
        return listing(tmp_path), threads, checkpoint.read(tmp_path / name(4 // world_size))["state"]["step"]

    assert ranks(world_size, run) == [([name(4 // world_size)], [], 4 // world_size)] * world_size


def test_an_old_file_goes_only_after_the_new_one_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep_last=1, by what is there just before each new file and just after."""
    seen: list[list[int]] = []

    def look(step: int) -> None:
        time.sleep(0.02)
        seen.append(list(CheckpointFolder(tmp_path).steps()))

    monkeypatch.setattr(checkpoint, "write", writing(look, look))
    toy_trainer(6, batch_size=2, callbacks=[Checkpoint(tmp_path, every_steps=1, keep_last=1)]).fit()
    assert seen == [[], [1], [1], [1, 2], [2], [2, 3]]
    assert listing(tmp_path) == [name(3)]


# What goes wrong.


class Full(Callback):
    """At this step the folder takes nothing: what is written to /dev/full finds no space left."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == self.step:
            (self.folder / f"{name(self.step)}.tmp").symlink_to("/dev/full")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("async_write", [True, False])
def test_a_full_disk_ends_every_rank_at_the_next_safe_point(
    ranks: Ranks, tmp_path: Path, world_size: int, async_write: bool
) -> None:
    """The save of step 2 fails behind the training: step 3 is the last, though no file is due there."""

    def on_step(step: int) -> None:
        (tmp_path / "reached").write_text(str(step))
        if step == 3:
            join_writer()

    def run() -> None:
        saver = Checkpoint(tmp_path, every_steps=2, async_write=async_write)
        callbacks = [OnStep(on_step), Full(tmp_path, 2), saver]
        toy_trainer(40, batch_size=2, callbacks=callbacks).fit()

    outcomes = ranks.outcomes(world_size, run, timeout=20.0)
    assert outcomes[0].error == "OSError"
    assert_all_ended(outcomes)
    assert str(tmp_path / name(2)) in outcomes[0].message
    assert "No space left" in outcomes[0].message
    assert "bytes are free" in outcomes[0].message
    assert (tmp_path / "reached").read_text() == ("3" if async_write else "2")
    assert listing(tmp_path) == ["reached"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("async_write", [True, False])
def test_a_full_disk_is_one_line_of_log_when_asked_for_and_the_next_save_succeeds(
    ranks: Ranks, tmp_path: Path, world_size: int, async_write: bool
) -> None:
    def run() -> int:
        saver = Checkpoint(tmp_path, every_steps=2, async_write=async_write, on_error="warn")
        callbacks = [OnStep(lambda step: join_writer() if step == 3 else None), Full(tmp_path, 2), saver]
        return toy_trainer(10 * world_size, batch_size=2, callbacks=callbacks).fit().step

    outcomes = ranks.outcomes(world_size, with_log, run)
    assert [outcome.value for outcome in outcomes] == [5] * world_size, outcomes
    lines = [line for outcome in outcomes for line in outcome.stderr.splitlines() if "Checkpoint" in line]
    assert len(lines) == 1
    assert str(tmp_path / name(2)) in lines[0]
    assert "bytes are free" in lines[0]
    assert listing(tmp_path) == [name(4), name(5)]


@pytest.mark.parametrize("lasting", [1, 2])
def test_a_save_that_failed_costs_no_other_though_that_was_due_before_it_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lasting: int
) -> None:
    """A file every step: the error of step 2, slow to come, is met by the save of step 3 (in the end: by the last one)."""
    monkeypatch.setattr(checkpoint, "write", writing(lambda step: time.sleep(0.2)))
    callbacks = [Full(tmp_path, 2), Checkpoint(tmp_path, every_steps=1, keep_last=9, on_error="warn")]
    with caplog.at_level(logging.WARNING, "callbacks"):
        toy_trainer(20, batch_size=2, max_steps=2 + lasting, callbacks=callbacks).fit()
    assert [name(2) in record.getMessage() for record in caplog.records] == [True]
    assert listing(tmp_path) == [name(1), *(name(step) for step in range(3, 3 + lasting))]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_the_very_last_save_does_not_fail_in_silence(ranks: Ranks, tmp_path: Path, world_size: int, on_error: str) -> None:
    def run() -> int:
        callbacks = [Full(tmp_path, 3), Checkpoint(tmp_path, every_steps=2, on_error=on_error)]
        return toy_trainer(3 * world_size, batch_size=1, callbacks=callbacks).fit().step

    outcomes = ranks.outcomes(world_size, with_log, run, timeout=20.0)
    told = outcomes[0].message if on_error == "stop" else outcomes[0].stderr
    assert f"{name(3)}" in told
    assert "bytes are free" in told
    if on_error == "stop":
        assert outcomes[0].error == "OSError"
        assert_all_ended(outcomes)
    else:
        assert [outcome.value for outcome in outcomes] == [3] * world_size
    assert listing(tmp_path) == [name(2)]


@pytest.mark.parametrize("on_error", ["stop", "warn"])
@pytest.mark.parametrize("async_write", [True, False])
def test_a_value_that_cannot_be_saved_ends_the_run_at_the_step_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_write: bool, on_error: str
) -> None:
    """While the file before is still being written, which becomes whole all the same."""

    class Odd(Callback):
        value: Any = 0.5

        def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
            if trainer.state.step == 4:
                self.value = np.float64(0.5)

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

    monkeypatch.setattr(checkpoint, "write", writing(lambda step: time.sleep(0.2)))
    saver = Checkpoint(tmp_path, every_steps=2, async_write=async_write, on_error=on_error)
    trainer = toy_trainer(40, batch_size=2, callbacks=[saver, Odd()])
    with pytest.raises(TypeError, match=r"callbacks\['Odd'\]\['value'\] of type numpy.float64"):
        trainer.fit()
    assert trainer.state.step == 4
    assert listing(tmp_path) == [name(2)]
    assert checkpoint.read(tmp_path / name(2))["state"]["step"] == 2


@pytest.mark.parametrize(("world_size", "failing"), [(1, "a callback"), (2, "a callback"), (2, "the other rank")])
def test_a_run_that_fails_elsewhere_leaves_the_file_being_written_whole_and_no_lock(
    ranks: Ranks, tmp_path: Path, world_size: int, failing: str
) -> None:
    class Failing(DDPTrainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            if failing == "the other rank" and self.world.rank == 1 and self.state.step == 2:
                raise RuntimeError("boom")
            return super().training_step(model, batch)

    def on_step(step: int) -> None:
        if failing == "a callback" and step == 3:
            raise RuntimeError("boom")

    def run() -> None:
        vars(checkpoint)["write"] = writing(lambda step: time.sleep(0.5))
        toy_trainer(40, Toy(), kind=Failing, batch_size=2, callbacks=[OnStep(on_step), Checkpoint(tmp_path, every_steps=2)]).fit()

    outcomes = ranks.outcomes(world_size, run, timeout=20.0)
    assert_all_ended(outcomes)
    assert outcomes[-1 if failing == "the other rank" else 0].message == "boom"
    assert listing(tmp_path) == [name(2)]
    assert checkpoint.read(tmp_path / name(2))["state"]["step"] == 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"on_error": "ignore"}, ValueError, "on_error must be 'stop' or 'warn'; found 'ignore'"),
        ({"on_error": None}, ValueError, "on_error must be 'stop' or 'warn'; found None"),
        ({"async_write": 1}, TypeError, "async_write must be True or False; found 1"),
        ({"async_write": "yes"}, TypeError, "async_write must be True or False; found 'yes'"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Checkpoint(tmp_path, **options)


# The copy.


def take(copies: HostCopy, **content: Any) -> dict[str, Any]:
    copied, settle = copies.take(content)
    settle()
    return copied


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "matrix": torch.randn(3, 4),
        "turned": torch.randn(3, 4).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.randn(6, 6)[1:4],
        "column": torch.randn(6, 6)[:, 2:4],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "half": torch.randn(5).to(torch.bfloat16),
        "whole numbers": torch.arange(4),
        "yes or no": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0),
        "empty rows": torch.zeros(0, 3, dtype=torch.int16),
    }


@pytest.mark.parametrize("kind", tensors())
def test_a_copy_has_the_values_type_and_layout_and_a_memory_of_its_own(kind: str) -> None:
    """Twice, with other values the second time."""
    copies = HostCopy()
    for _ in range(2):
        tensor = tensors()[kind]
        expected = tensor.clone()
        copied = take(copies, a={"b": [tensor]})["a"]["b"][0]
        if tensor.untyped_storage().nbytes():
            tensor.untyped_storage().fill_(1)
        assert torch.equal(copied, expected)
        assert (type(copied), copied.dtype, copied.shape, copied.stride()) == (
            Tensor,
            tensor.dtype,
            tensor.shape,
            expected.stride(),
        )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11
def test_a_sparse_tensor_is_copied_too() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True).coalesce()
    copied = take(HostCopy(), a=tensor)["a"]
    tensor.values().zero_()
    assert copied.layout is torch.sparse_coo
    assert copied.to_dense().tolist() == [1.0, 0.0, 2.0]


def test_the_same_memory_is_used_again_and_new_one_where_a_shape_changed() -> None:
    copies = HostCopy()

    def places(**content: Any) -> dict[str, int]:
        return {key: value.data_ptr() for key, value in take(copies, **content).items()}

    kept = places(a=torch.zeros(50_000), b=torch.zeros(1_000))
    assert places(a=torch.ones(50_000), b=torch.ones(1_000)) == kept
    other = take(copies, a=torch.ones(50_000), b=torch.full((1_001,), 2.0))
    assert other["a"].data_ptr() == kept["a"]
    assert other["b"].tolist() == [2.0] * 1_001
    assert take(copies, b=torch.ones(1_001, dtype=torch.int32))["b"].tolist() == [1] * 1_001


def test_shared_parameters_are_saved_once(tmp_path: Path) -> None:
    weight = torch.randn(100_000)
    copied = take(HostCopy(), first=weight, second=weight, again=weight.view(-1), moved=weight[:50_000])
    assert copied["first"].data_ptr() == copied["second"].data_ptr() == copied["again"].data_ptr()
    for key, shared in (("shared", copied), ("moved", {"first": weight, "moved": weight[:50_000].clone()})):
        torch.save(shared, tmp_path / key)
    assert (tmp_path / "shared").stat().st_size < (tmp_path / "moved").stat().st_size + 1_000
    assert torch.equal(copied["moved"], weight[:50_000])


def test_what_was_shared_before_and_is_no_longer_is_copied_apart() -> None:
    copies, weight = HostCopy(), torch.zeros(3)
    take(copies, first=weight, second=weight)
    copied = take(copies, first=torch.ones(3), second=torch.full((3,), 2.0))
    assert (copied["first"].tolist(), copied["second"].tolist()) == ([1.0] * 3, [2.0] * 3)


def test_a_conjugate_is_not_taken_for_what_it_is_of() -> None:
    """It has the same address, and the same shape and type."""
    number = torch.tensor([1 + 2j])
    copied = take(HostCopy(), number=number, conjugate=number.conj())
    assert (copied["number"].tolist(), copied["conjugate"].tolist()) == ([1 + 2j], [1 - 2j])


def test_a_parameter_stays_one_with_its_attributes() -> None:
    for needed in (True, False):
        parameter = nn.Parameter(torch.ones(2), requires_grad=needed)
        parameter.origin = "here"  # type: ignore[attr-defined]
        wanting = torch.ones(2, requires_grad=needed)
        copied = take(HostCopy(), parameter=parameter, tensor=wanting)
        assert type(copied["parameter"]) is nn.Parameter
        assert type(copied["tensor"]) is Tensor
        assert vars(copied["parameter"]) == {"origin": "here"}
        assert copied["parameter"].requires_grad is copied["tensor"].requires_grad is needed
        assert copied["parameter"].is_leaf
        assert copied["tensor"].is_leaf
        with torch.no_grad():
            parameter.zero_()
        assert copied["parameter"].tolist() == [1.0, 1.0]


def test_a_models_state_keeps_its_class_and_version_numbers() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    copied = take(HostCopy(), model=state)["model"]
    assert type(copied) is OrderedDict
    assert copied._metadata == state._metadata  # type: ignore[attr-defined]
    assert copied._metadata["0"] == {"version": 2}
    assert list(copied) == list(state)


def test_containers_and_plain_values_are_copied_as_they_were_then() -> None:
    content: dict[str, Any] = {"list": [1, [2]], "pair": (1, {"a": [3]}), "set": {1}, "size": torch.Size([1])}
    copied = take(HostCopy(), **content)
    content["list"][1].append(0)
    content["pair"][1]["a"].append(0)
    content["set"].add(0)
    content["new"] = 0
    assert (copied["list"], copied["pair"], copied["set"]) == ([1, [2]], (1, {"a": [3]}), {1})
    assert type(copied["size"]) is torch.Size
    assert "new" not in copied


def test_a_tensors_attributes_are_copied_as_they_were_then() -> None:
    tensor = torch.ones(1)
    tensor.history, tensor.average = [1], torch.ones(1)  # type: ignore[attr-defined]
    copied = take(HostCopy(), tensor=tensor)["tensor"]
    tensor.history.append(0)  # type: ignore[attr-defined]
    tensor.average.zero_()  # type: ignore[attr-defined]
    assert (copied.history, copied.average.tolist()) == ([1], [1.0])


def test_a_conjugate_or_negative_view_is_copied_as_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a GPU torch would change the buffer, on the host, while the copy into it is under way."""
    sources: list[Tensor] = []
    copy_into = Tensor.copy_

    def noted(self: Tensor, source: Tensor, **options: Any) -> Tensor:
        sources.append(source)
        return copy_into(self, source, **options)

    monkeypatch.setattr(Tensor, "copy_", noted)
    values = torch.tensor([1 + 2j, 3 - 4j])
    copied, wait = HostCopy().take({"conj": values.conj(), "negative": values.conj().imag})
    wait()
    assert copied["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert copied["negative"].tolist() == [-2.0, 4.0]
    assert not any(source.is_conj() or source.is_neg() for source in sources)
