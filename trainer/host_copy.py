"""A copy of a checkpoint's content in host memory, so that training goes on while the copy is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Path = tuple[Any, ...]
"""Where in the nested content a tensor is: keys and indices from the outside in."""


class HostCopy:
    """Copies contents that hold the same tensors each time into the same buffers: new memory costs more than the copy.

    From a CUDA device the buffers are pinned and the copies queued behind the training so far, which nobody waits for.
    """

    def __init__(self) -> None:
        self._buffers: dict[Path, Tensor] = {}

    def take(self, content: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], object]]:
        """The copy, and what to call before it is read. The one taken before must no longer be in use."""
        self._used: dict[Path, Tensor] = {}
        self._shared: dict[tuple[Any, ...], Tensor] = {}
        self._given: set[int] = set()
        self._streams: set[torch.cuda.Stream] = set()
        copied = self._copy(dict(content), ())
        self._buffers = self._used
        events = [stream.record_event() for stream in self._streams]
        return copied, lambda: [event.synchronize() for event in events]

    def _copy(self, value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, path)
        if isinstance(value, dict):
            copied = copy.copy(value)  # with its class and attributes, such as the version numbers of a model's state
            for key, item in value.items():
                copied[key] = self._copy(item, (*path, key))
            return copied
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item, (*path, index)) for index, item in enumerate(value))
        return copy.copy(value)

    def _copy_tensor(self, tensor: Tensor, path: Path) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().cpu().clone()
        layout = (tensor.shape, tensor.dtype, tensor.stride())
        # shared parameters are saved once
        same = (tensor.data_ptr() or path, tensor.device, tensor.is_conj(), tensor.is_neg(), *layout)
        buffer = self._shared.get(same)
        if buffer is None:
            buffer = self._buffers.get(path)
            if buffer is None or id(buffer) in self._given or (buffer.shape, buffer.dtype, buffer.stride()) != layout:
                buffer = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
            self._given.add(id(buffer))  # once per copy: tensors that shared it the last time may differ now
            buffer.copy_(tensor.detach().resolve_conj().resolve_neg(), non_blocking=True)
            if tensor.is_cuda:
                self._streams.add(torch.cuda.current_stream(tensor.device))
        self._used[path] = self._shared[same] = buffer
        copied = buffer.detach().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(buffer, tensor.requires_grad)
        vars(copied).update(self._copy(vars(tensor), (*path, vars)))
        return copied
