"""The global memory of a virtual GPU: host buffers that kernels may touch, by address."""

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfbyte.errors import UsageError
from halfbyte.virtual.library import load_core

ALIGNMENT = 256  # of device allocations (CUDA C++ Programming Guide, "Device Memory Accesses")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A registered range: device addresses are host addresses."""

    address: int
    nbytes: int
    name: str


class DeviceMemory:
    """The buffers of one device. An access outside of them, or after their end, is a fault."""

    def __init__(self) -> None:
        """Start with no buffer. Raises MissingDependencyError where the core is not built."""
        core = load_core()
        self.pointer: int = core.hb_memory_create()
        self.buffers: dict[int, Buffer] = {}
        self._kept: dict[int, Any] = {}
        self._finalizer = weakref.finalize(self, core.hb_memory_destroy, self.pointer)

    def register(
        self,
        address: int,
        nbytes: int,
        name: str,
        *,
        keep: Any = None,
        read_only: bool = False,
    ) -> Buffer:
        """Return the record of a host range that kernels may touch from now on.

        Args:
            address: first byte, an address of this process.
            nbytes: length; an empty buffer is legal and holds no address.
            name: how reports call it.
            keep: an object to keep alive as long as the buffer is registered.
            read_only: whether a store is a fault (`.const`).
        """
        if address <= 0 or nbytes < 0 or address + nbytes >= 1 << 56:
            raise UsageError(f"buffer {name!r}: {nbytes} bytes at {address:#x} is no host range")
        buffer = Buffer(address, nbytes, name)
        self.buffers[address] = buffer
        self._kept[address] = keep
        if nbytes:
            load_core().hb_memory_register(
                self.pointer, address, nbytes, name.encode(), int(read_only)
            )
        return buffer

    def unregister(self, address: int) -> None:
        """Mark the buffer at `address` as freed: a later access is reported as a use after free."""
        if self.buffers.pop(address, None) is not None:
            self._kept.pop(address, None)
            load_core().hb_memory_mark_freed(self.pointer, address)

    def holds(self, address: int) -> bool:
        """Return whether a buffer starts at `address`."""
        return address in self.buffers

    def allocate(self, nbytes: int, name: str) -> NDArray[np.uint8]:
        """Return a registered buffer of poisoned bytes (0xAB), aligned as CUDA aligns its own."""
        array = make_aligned_bytes(nbytes)
        array.fill(0xAB)
        self.register(array.ctypes.data, nbytes, name, keep=array)
        return array


def make_aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return `nbytes` uninitialised bytes at a 256-byte boundary."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def copy_from_host(address: int, nbytes: int) -> bytes:
    """Return the bytes at a host address."""
    return ctypes.string_at(address, nbytes)
