"""Batches copied ahead of their step, on a device without data: what would be asked of a GPU's streams is noted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from tests.helpers import Numbers, Toy, mean_of_outputs
from trainer import DDPTrainer, TrainerConfig, prefetch, train_data

DEVICE = torch.device("meta")


class Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def record_event(self) -> str:
        self.notes.append(f"{self.name} records")
        return f"event {self.notes.count(f'{self.name} records')}"

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the streams, in order."""
    noted: list[str] = []
    current = [Stream("computing", noted)]

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def pinned(batch: Any) -> Any:
        noted.append("pinned")
        return batch

    def moved(batch: Any, device: torch.device, channels_last: bool) -> Any:
        noted.append(f"sent by {current[-1].name}")
        return to_device(batch, device, channels_last)

    to_device = prefetch.to_device
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copying", noted))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(prefetch, "pin_memory", pinned)
    monkeypatch.setattr(prefetch, "to_device", moved)
    monkeypatch.setattr(Tensor, "record_stream", lambda own, by: noted.append(f"{tuple(own.shape)} used by {by.name}"))
    return noted


def test_the_next_batch_is_sent_before_one_is_given_out(notes: list[str]) -> None:
    batches = prefetch.Prefetcher(DEVICE, channels_last=False)(
        [torch.ones(size), {"more": torch.ones(size, 2)}] for size in (3, 4, 5)
    )
    sending = ["pinned", "sent by copying", "copying records"]

    def receiving(size: int) -> list[str]:
        waits = f"computing waits for event {size - 2}"
        return [waits, f"({size},) used by computing", f"({size}, 2) used by computing"]

    expected: list[str] = []
    for size, before in ((3, [*sending, *sending]), (4, sending), (5, [])):
        batch = next(batches)
        expected += [*before, *receiving(size)]
        assert notes == expected
        assert batch[0].shape == (size,)
        assert {batch[0].device, batch[1]["more"].device} == {DEVICE}
    assert list(batches) == []


def test_no_batch_is_no_batch(notes: list[str]) -> None:
    assert list(prefetch.Prefetcher(DEVICE, channels_last=False)([])) == []


@dataclass
class Hidden:
    tensor: Tensor


def test_what_stays_on_the_cpu_is_not_marked(notes: list[str]) -> None:
    (given,) = prefetch.Prefetcher(DEVICE, channels_last=False)([pack_sequence([torch.ones(2)])])
    assert given.batch_sizes.device.type == "cpu"
    assert [note for note in notes if "used by" in note] == ["(2,) used by computing"]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(2), Hidden(torch.ones(2))],
        [torch.ones(2, device=DEVICE)],
        [torch.ones(2), torch.ones(2, device=DEVICE)],
        [torch.ones(2).to_sparse()],
        ["text", 3, None],
        [torch.ones(2), object()],
    ],
    ids=["dataclass", "there already", "half of it", "sparse", "no tensor", "object"],
)
def test_what_may_hide_its_tensors_or_is_there_already_is_left_to_the_step(notes: list[str], batch: Any) -> None:
    (given,) = prefetch.Prefetcher(DEVICE, channels_last=False)([batch])
    assert given is batch
    assert notes == []


def test_an_error_in_the_data_comes_after_the_batches_before_it_were_given_out_or_not_at_all(notes: list[str]) -> None:
    def failing() -> Iterator[Any]:
        yield [torch.ones(1)]
        yield [torch.ones(2)]
        raise ArithmeticError("of the third")

    batches = prefetch.Prefetcher(DEVICE, channels_last=False)(failing())
    assert next(batches)[0].shape == (1,)
    with pytest.raises(ArithmeticError, match="of the third"):
        next(batches)


class Own(DDPTrainer):
    def prepare_batch(self, batch: Any) -> Any:
        return batch


CASES = [(DDPTrainer, "cuda", True), (Own, "cuda", False), (DDPTrainer, "cpu", False)]


@pytest.mark.parametrize(("kind", "device", "is_used"), CASES)
def test_it_is_used_on_a_gpu_where_the_script_does_not_prepare_batches_itself(
    monkeypatch: pytest.MonkeyPatch, kind: type[DDPTrainer], device: str, is_used: bool
) -> None:
    used: list[int] = []

    class Counting:
        def __init__(self, device: torch.device, channels_last: bool) -> None:
            pass

        def __call__(self, batches: Any) -> Any:
            for batch in batches:
                used.append(len(batch[0]))
                yield batch

    monkeypatch.setattr(train_data, "Prefetcher", Counting)
    monkeypatch.setattr(train_data, "_is_gpu", lambda given: device == "cuda")
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind(model, optimizer, Numbers(6), loss_fn=mean_of_outputs, config=TrainerConfig(batch_size=4)).fit()
    assert used == ([4, 2] if is_used else [])
