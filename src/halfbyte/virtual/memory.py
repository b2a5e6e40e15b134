"""The global memory of a virtual GPU: host buffers that kernels may touch, by address."""

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfbyte.errors import UsageError
from halfbyte.virtual.library import load_core
from halfbyte.virtual.plain_values import read_integer, show

ALIGNMENT = 256  # of device allocations (CUDA C++ Programming Guide, "Device Memory Accesses")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A registered range: device addresses are host addresses."""

    address: int
    nbytes: int
    name: str
    read_only: bool = False


class DeviceMemory:
    """The buffers of one device. An access outside of them, or after their end, is a fault.

    Attributes:
        lock: held by a launch from its first instruction to its last: launches of several threads
            run one after the other, and no buffer comes or goes meanwhile.
    """

    def __init__(self) -> None:
        """Start with no buffer. Raises MissingDependencyError where the core is not built."""
        core = load_core()
        self.pointer: int = core.hb_memory_create()
        self.lock = threading.RLock()
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
        stale: bool = False,
    ) -> Buffer:
        """Return the record of a host range that kernels may touch from now on.

        Args:
            address: first byte, an address of this process.
            nbytes: length; an empty buffer is legal and holds no address.
            name: how reports call it.
            keep: an object to keep alive as long as the buffer is registered.
            read_only: whether a store is a fault (`.const`).
            stale: whether any access is a finding: memory that exists and is nobody's.
        """
        address = read_integer(address, f"the address of buffer {name!r}")
        nbytes = read_integer(nbytes, f"the size of buffer {name!r}")
        if address <= 0 or nbytes < 0 or address + nbytes >= 1 << 56:
            raise UsageError(f"buffer {name!r}: {nbytes} bytes at {address:#x} is no host range")
        if not isinstance(name, str):
            raise UsageError(f"the name of a buffer is {show(name)}; a str is wanted")
        buffer = Buffer(address, nbytes, name, read_only)
        with self.lock:
            self.buffers[address] = buffer
            self._kept[address] = keep
            if nbytes:
                text = name.replace("\0", "").encode("utf-8", "replace")
                flags = int(read_only) | int(stale) << 1
                load_core().hb_memory_register(self.pointer, address, nbytes, text, flags)
        return buffer

    def unregister(self, address: int) -> None:
        """Mark the buffer at `address` as freed: a later access is reported as a use after free."""
        with self.lock:
            if self.buffers.pop(address, None) is not None:
                self._kept.pop(address, None)
                load_core().hb_memory_mark_freed(self.pointer, address)

    def contains(self, address: int, nbytes: int) -> bool:
        """Return whether `nbytes` bytes from `address` on lie in one buffer."""
        buffer = self.buffers.get(address)
        if buffer is not None and nbytes <= buffer.nbytes:
            return True
        end = address + nbytes
        return any(b.address <= address and end <= b.address + b.nbytes for b in self._list())

    def find_within(self, address: int, nbytes: int) -> list[tuple[Buffer, Any]]:
        """Return the buffers that share bytes with a range, each with what it keeps alive."""
        end = address + nbytes
        return [
            (b, self._kept.get(b.address))
            for b in self._list()
            if b.nbytes and b.address < end and address < b.address + b.nbytes
        ]

    def _list(self) -> list[Buffer]:
        with self.lock:
            return list(self.buffers.values())

    def holds(self, address: int) -> bool:
        """Return whether a buffer starts at `address`."""
        return address in self.buffers

    def allocate(self, nbytes: int, name: str) -> NDArray[np.uint8]:
        """Return a registered buffer of poisoned bytes (0xAB), aligned as CUDA aligns its own."""
        nbytes = read_integer(nbytes, f"the size of buffer {name!r}")
        if not 0 <= nbytes < 1 << 56:
            raise UsageError(f"buffer {name!r}: {nbytes} bytes cannot be allocated")
        try:
            array = make_aligned_bytes(nbytes)
        except MemoryError:
            raise UsageError(
                f"buffer {name!r}: this computer has no memory for {nbytes} bytes"
            ) from None
        array.fill(0xAB)
        self.register(array.ctypes.data, nbytes, name, keep=array)
        return array


def make_aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return `nbytes` uninitialised bytes at a 256-byte boundary."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]
