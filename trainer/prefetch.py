"""Batches on their way to the GPU while the step before them computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils.pin_memory import pin_memory

from .data import to_device

_Sent = tuple[Any, Any, torch.cuda.Event | None]


class Prefetcher:
    """Gives batches one by one, on the device; the next one's copy is under way by then, on a stream of its own.

    A copy to the GPU goes on by itself from pinned memory only, so batches that are not in it are put there. What is copied
    from is kept until what it was copied to is given out; that, in turn, is marked as used by the stream that computes with
    it, or its memory could be written again too early. Batches with objects that hide their tensors are given out as they are.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        under_way: _Sent | None = None
        for batch in batches:
            sent = self._send(batch)
            if under_way is not None:
                yield self._received(*under_way)
            under_way = sent
        if under_way is not None:
            yield self._received(*under_way)

    def _send(self, batch: Any) -> _Sent:
        leaves = tree_leaves(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
        plain = [leaf for leaf in leaves if leaf is None or isinstance(leaf, (bool, int, float, str))]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        if len(tensors) + len(plain) < len(leaves) or on_device or not tensors:
            return batch, batch, None
        if not all(tensor.is_pinned() for tensor in tensors):
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            return batch, to_device(batch, self._device, self._channels_last), self._stream.record_event()

    def _received(self, batch: Any, moved: Any, sent: torch.cuda.Event | None) -> Any:
        if sent is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(sent)
            for leaf in tree_leaves(moved):
                if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                    leaf.record_stream(computing)
        return moved
