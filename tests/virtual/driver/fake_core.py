"""A core that runs nothing: it parses just enough PTX to know each kernel's parameters."""

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from halfbyte.arch import find_gpu
from halfbyte.virtual.memory import make_aligned_bytes

_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^,]*?\s)?(\w+)(?:\[(\d+)\])?"
)


@dataclass
class FakeMemory:
    """Remembers what was registered and what was freed."""

    buffers: dict[int, Any] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)

    def register(
        self,
        address: int,
        nbytes: int,
        name: str,
        *,
        keep: Any = None,
        read_only: bool = False,
        stale: bool = False,
    ) -> None:
        assert address > 0
        if stale:  # rounding behind a buffer, or a buffer just freed
            if self.buffers.pop(address, None) is not None:
                self.freed.append(address)
            return
        self.buffers[address] = SimpleNamespace(nbytes=nbytes, name=name)

    def allocate(self, nbytes: int, name: str) -> Any:
        array = make_aligned_bytes(nbytes)
        array.fill(0xAB)
        self.register(array.ctypes.data, nbytes, name, keep=array)
        return array

    def unregister(self, address: int) -> None:
        assert self.buffers.pop(address, None) is not None, f"{address:#x} is not registered"
        self.freed.append(address)


@dataclass
class FakeModule:
    """One PTX text; `launches` of the device collects what is launched."""

    device: "FakeDevice"
    ptx: str
    addresses: dict[str, int] = field(default_factory=dict)

    @property
    def syntax(self) -> Any:
        names = re.findall(r"\.entry\s+(\w+)", self.ptx)
        kernels = [SimpleNamespace(name=one, find_directive=lambda _: None) for one in names]
        return SimpleNamespace(kernels=kernels)

    def find_program(self, name: str) -> Any:
        text = self.ptx.split(f".entry {name}", 1)[1].split("{", 1)[0]
        parameters, offset = [], 0
        for align, kind, parameter, count in _PARAMETER.findall(text):
            size = _BYTES.get(kind, 8)
            offset = -(-offset // int(align or size)) * int(align or size)
            size *= int(count or 1)
            parameters.append(SimpleNamespace(name=parameter, offset=offset, size=size))
            offset += size
        return SimpleNamespace(
            program=SimpleNamespace(
                parameters=parameters, parameter_bytes=offset, static_shared_end=1024
            )
        )

    def launch(self, name: str, **shape: Any) -> Any:
        self.device.launches.append((name, self.ptx, shape))
        if self.device.fault is not None:
            raise self.device.fault
        if self.device.kernel is not None:
            self.device.kernel(name, shape)
        return SimpleNamespace(instructions=7, cycles=None, seconds=0.001, findings=[])


@dataclass
class FakeDevice:
    """A device of the named product; `fault` is raised by every launch, `kernel` is run by it."""

    gpu_name: str = "b200"
    launches: list[Any] = field(default_factory=list)
    fault: BaseException | None = None
    kernel: Any = None

    def __post_init__(self) -> None:
        self.gpu = find_gpu(self.gpu_name)
        self.memory = FakeMemory()
        self.modules: dict[str, FakeModule] = {}

    def load(self, ptx: str) -> FakeModule:
        return self.modules.setdefault(ptx, FakeModule(self, ptx))
