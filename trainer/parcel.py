"""Objects on their way to other ranks: pickled, with every tensor sent through host memory."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def pack(value: Any) -> bytes:
    """Any picklable value as bytes. Tensors lose their device, which means nothing to another rank, and their graph."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes, device: torch.device) -> Any:
    """What `pack` packed, its tensors on `device`."""
    return _Unpickler(packed, device).load()


def sendable(error: BaseException | None) -> BaseException | None:
    """`error` if it survives pickling, else a RuntimeError with its text; None for None."""
    try:
        received = pickle.loads(pickle.dumps(error))
        if type(received) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.detach().cpu().__reduce_ex__(2) if isinstance(value, Tensor) else None  # type: ignore[no-untyped-call]


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(packed))
        self._device = device

    def persistent_load(self, reduced: Any) -> Any:
        rebuild, arguments = reduced
        return rebuild(*arguments).to(self._device)
