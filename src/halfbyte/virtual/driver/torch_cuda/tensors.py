"""Which tensors are on the device, and how a tensor gets there."""

import bisect
import ctypes
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from halfbyte.virtual.driver.runtime import VirtualRuntime
from halfbyte.virtual.memory import make_aligned_bytes

Tensor = torch.Tensor
GRANULE = 512  # bytes; torch's allocator of CUDA memory rounds to it, and keeps what is freed
MOST_KEPT_BYTES = 1 << 28  # of freed tensors
# torch's own functions, without the modes that are active
_without_modes = torch._C.DisableTorchFunction


class DeviceTensors:
    """The storages that are registered with the virtual GPU."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        """Start with none; memory that the program allocates through CUDA counts by its address."""
        self._runtime = runtime
        self._storages: set[int] = set()  # by the address of torch's StorageImpl
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._buffers: dict[int, np.ndarray[Any, Any]] = {}  # by address, rounding included
        self._freed: deque[np.ndarray[Any, Any]] = deque()
        self._freed_bytes = 0

    def is_on_device(self, value: Any) -> bool:
        """Whether `value` is a tensor whose memory the virtual GPU owns."""
        if not isinstance(value, Tensor):
            return False
        with _without_modes():
            if value.device.type != "cpu" or value.layout != torch.strided:
                return False
            if isinstance(value, torch._subclasses.FakeTensor):
                return False
            try:
                storage = value.untyped_storage()
                if storage._cdata in self._storages:
                    return True
                return storage.nbytes() > 0 and self._owns(storage.data_ptr())
            except (NotImplementedError, RuntimeError):  # wrappers of functional transforms
                return False

    def _owns(self, address: int) -> bool:
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._ends[self._starts[index]]:
            return True
        return self._runtime.owns(address)

    def adopt(self, tensors: Iterable[Tensor], kept: Iterable[Tensor] = ()) -> None:
        """Put tensors on the device; those that share memory with one of `kept` stay.

        Their memory is moved, once for all tensors that share it, to where CUDA would put it:
        aligned to 256 bytes and rounded up to 512.
        """
        with _without_modes(), torch.no_grad():
            shared = {_find_storage(tensor) for tensor in kept}
            moved: dict[int, torch.UntypedStorage] = {}
            for tensor in tensors:
                storage = _find_storage(tensor)
                if storage is not None and storage not in shared and not self.is_on_device(tensor):
                    self._adopt(tensor, moved)

    def _adopt(self, tensor: Tensor, moved: dict[int, torch.UntypedStorage]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in moved:
            _set_storage(tensor, moved[storage._cdata])
        elif storage.nbytes():
            buffer = _make_aligned_copy(storage)
            aligned = torch.from_numpy(buffer[: storage.nbytes()]).untyped_storage()
            self._buffers[aligned.data_ptr()] = buffer
            moved[storage._cdata] = aligned
            _set_storage(tensor, aligned)
        self._register(tensor)

    def _register(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        address, size = storage.data_ptr(), storage.nbytes()
        self._storages.add(storage._cdata)
        if size:
            bisect.insort(self._starts, address)
            self._ends[address] = address + size
            kind = str(tensor.dtype).removeprefix("torch.")
            name = f"torch {kind} {list(tensor.shape)}"
            self._runtime.device.memory.register(address, size, name)
            self._register_rounding(address, size, name)
        finalizer = weakref.finalize(storage, self._forget, storage._cdata, address, size)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        if len(self._finalizers) > 4096:
            self._finalizers = [one for one in self._finalizers if one.alive]

    def _forget(self, storage: int, address: int, size: int) -> None:
        self._storages.discard(storage)
        if size and self._ends.pop(address, None) is not None:
            index = bisect.bisect_left(self._starts, address)
            del self._starts[index]
            self._free(address)

    def _register_rounding(self, address: int, size: int, name: str) -> None:
        rest = self._buffers[address].size - size if address in self._buffers else 0
        if rest:
            memory = self._runtime.device.memory
            memory.register(
                address + size, rest, f"the rounding behind {name}", read_only=True, stale=True
            )

    def _free(self, address: int) -> None:
        memory = self._runtime.device.memory
        buffer = self._buffers.pop(address, None)
        if buffer is None:
            memory.unregister(address)
            return
        name = memory.buffers[address].name
        memory.register(address, buffer.size, f"{name}, which was freed", stale=True)
        self._freed.append(buffer)
        self._freed_bytes += buffer.size
        while self._freed_bytes > MOST_KEPT_BYTES:
            oldest = self._freed.popleft()
            self._freed_bytes -= oldest.size
            memory.unregister(oldest.ctypes.data)

    def close(self) -> None:
        """Forget every storage: what is left are plain CPU tensors."""
        for finalizer in self._finalizers:
            finalizer.detach()
        for address in list(self._ends):
            self._runtime.device.memory.unregister(address)
        self._finalizers.clear()
        self._storages.clear()
        self._starts.clear()
        self._ends.clear()
        self._buffers.clear()
        self._freed.clear()


def _find_storage(tensor: Tensor) -> int | None:
    """Return what identifies a plain CPU tensor's storage, or None."""
    try:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return None
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def shares_storage(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same storage."""
    with _without_modes():
        storage = _find_storage(first)
        return storage is not None and storage == _find_storage(second)


def _make_aligned_copy(storage: torch.UntypedStorage) -> "np.ndarray[Any, Any]":
    """Return a copy at CUDA's alignment; what rounding adds behind it is poisoned."""
    size = storage.nbytes()
    rounded = -(-size // GRANULE) * GRANULE
    buffer = make_aligned_bytes(rounded)
    buffer[size:] = 0xAB
    ctypes.memmove(buffer.ctypes.data, storage.data_ptr(), size)
    return buffer


def _set_storage(tensor: Tensor, storage: torch.UntypedStorage) -> None:
    """Let `tensor` keep its shape and its autograd history and live in `storage`."""
    empty: Any = torch.empty(0, dtype=tensor.dtype)
    view = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_inference():
        tensor.set_(view)
    else:
        tensor.data = view
