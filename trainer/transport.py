"""How things travel to other ranks: objects as bytes, their tensors through host memory; plain tensors flat."""

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


def flat(tensor: Tensor) -> Tensor:
    """A tensor's memory, to be sent or overwritten, in one dimension where it lies in order.

    torch copies a tensor with dimensions of size 1 into itself only if their strides are the usual ones, as those of
    channels_last are not. Of a type that no backend sends it is the bytes.
    """
    data = tensor.data
    if data.dtype not in _SENT and data.ndim > 1 and not data.is_contiguous():  # channels last: contiguous with them moved there
        data = data.movedim(1, -1)
    if data.is_contiguous():
        data = data.view(-1)
    return data.view(torch.uint8) if data.dtype not in _SENT and data.ndim == 1 and data.is_contiguous() else data


def sendable(error: BaseException | None) -> BaseException | None:
    """`error` if it survives pickling, else a RuntimeError with its text; None for None."""
    try:
        received = pickle.loads(pickle.dumps(error))
        if type(received) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


# torch restores other types (float8, uint16, ...) from its own files only: their bytes travel as those of integers.
_RESTORED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_SENT = {*_RESTORED, torch.complex32} - {torch.int16}  # by gloo and NCCL
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        value, dtype = value.detach().cpu(), None
        if value.layout is torch.strided and value.nbytes < value.untyped_storage().nbytes():
            value = value.clone()  # of a view the whole storage would travel
        if value.dtype not in _RESTORED:
            value, dtype = value.contiguous().view(_PLAIN[value.element_size()]), value.dtype
        return value.__reduce_ex__(2), dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(packed))
        self._device = device

    def persistent_load(self, reduced: Any) -> Any:
        (rebuild, arguments), dtype = reduced
        value = rebuild(*arguments)
        return (value if dtype is None else value.view(dtype)).to(self._device)
