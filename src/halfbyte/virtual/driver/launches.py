"""A captured kernel launch: how it is read from the runtime's arguments, run and logged."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.ptx.syntax import Module
from halfbyte.virtual.report import Finding

# cudaLaunchAttributeID, public enumeration of the CUDA runtime
ATTRIBUTE_COOPERATIVE = 2
ATTRIBUTE_CLUSTER_DIMENSION = 4
_ATTRIBUTE_BYTES = 72  # u32 id, 4 bytes of padding, 64 bytes of value

Dimensions = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchRequest:
    """One kernel launch as the program asked for it.

    Attributes:
        kernel: name of the kernel in its PTX.
        grid, block: blocks per grid, threads per block.
        cluster: blocks per cluster, None where the launch names none.
        dynamic_shared: bytes of dynamic shared memory.
        attributes: (cudaLaunchAttributeID, three words of its value), as given.
        parameters: the bytes of each kernel parameter.
    """

    kernel: str
    grid: Dimensions
    block: Dimensions
    cluster: Dimensions | None
    dynamic_shared: int
    attributes: tuple[tuple[int, Dimensions], ...]
    parameters: tuple[bytes, ...]

    @property
    def is_cooperative(self) -> bool:
        """Whether all blocks must be resident at once."""
        return any(kind == ATTRIBUTE_COOPERATIVE and value[0] for kind, value in self.attributes)


class LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t: grid, block, dynamic shared memory, stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


def read_attributes(config: LaunchConfig) -> tuple[tuple[int, Dimensions], ...]:
    """Return (id, first three words of the value) of each attribute of a launch."""
    found = []
    for index in range(config.attribute_count):
        address = config.attributes + _ATTRIBUTE_BYTES * index
        value = (ctypes.c_uint32 * 3).from_address(address + 8)
        kind = ctypes.c_uint32.from_address(address).value
        found.append((kind, (value[0], value[1], value[2])))
    return tuple(found)


def read_parameters(arguments: int, sizes: Sequence[int]) -> tuple[bytes, ...]:
    """Return the bytes of each parameter behind the array of pointers `arguments`."""
    found = []
    for index, size in enumerate(sizes):
        pointer = ctypes.c_void_p.from_address(arguments + 8 * index).value
        found.append(ctypes.string_at(pointer or 0, size))
    return tuple(found)


def find_cluster(attributes: Sequence[tuple[int, Dimensions]]) -> Dimensions | None:
    """Return the cluster dimensions that a launch names; those it would prefer do not count."""
    for kind, value in attributes:
        if kind == ATTRIBUTE_CLUSTER_DIMENSION:
            return value
    return None


def make_parameter_block(program: Any, parameters: Sequence[bytes]) -> bytes:
    """Return the parameter block of a lowered kernel: each parameter at its offset."""
    block = bytearray(program.parameter_bytes)
    for place, value in zip(program.parameters, parameters, strict=True):
        block[place.offset : place.offset + place.size] = value
    return bytes(block)


@dataclass(frozen=True)
class LaunchRecord:
    """What one launch did.

    Attributes:
        index: 0 for the program's first launch.
        request: what was asked for.
        instructions: warp instructions run; 0 where the launch failed or was interrupted.
        cycles: of the clock that orders events, not calibrated and no prediction; None where the
            launch did not begin or was interrupted.
        seconds: time on this computer.
        findings: what was found, notes included.
        fault: the error that ended the launch, KeyboardInterrupt for Ctrl-C, or None.
        syntax: the PTX module that the kernel is in.
    """

    index: int
    request: LaunchRequest
    instructions: int
    cycles: int | None
    seconds: float
    findings: tuple[Finding, ...] = ()
    fault: BaseException | None = None
    syntax: Module | None = field(default=None, repr=False, compare=False)


@dataclass
class LaunchLog:
    """The launches of a session, in order.

    Attributes:
        records: one entry per launch.
        substitutions: operations computed by a reference instead of a kernel, with their counts.
        listener: called with each record when its launch has ended.
    """

    records: list[LaunchRecord] = field(default_factory=list)
    substitutions: dict[str, int] = field(default_factory=dict)
    listener: Callable[[LaunchRecord], None] | None = None

    def add(self, record: LaunchRecord) -> None:
        """Append a record and tell the listener."""
        self.records.append(record)
        if self.listener is not None:
            self.listener(record)

    def add_substitution(self, name: str) -> None:
        """Count one use of a reference in place of a library kernel."""
        self.substitutions[name] = self.substitutions.get(name, 0) + 1

    def __iter__(self) -> Iterator[LaunchRecord]:
        """Iterate over the records."""
        return iter(self.records)

    def __len__(self) -> int:
        """Return the number of launches."""
        return len(self.records)


def run_launch(device: Any, module: Any, request: LaunchRequest, options: Any) -> LaunchRecord:
    """Run one launch on `device` and return its record, index 0.

    A fault is in the record, not raised: the caller logs it before it is raised.
    """
    keywords: dict[str, Any] = {"grid": request.grid, "block": request.block}
    cluster = request.cluster or _find_required_cluster(module, request.kernel)
    if cluster is not None:
        keywords["cluster"] = cluster
    if options is not None:
        keywords["options"] = options
    syntax = module.syntax
    start = time.perf_counter()
    try:
        report = module.launch(
            request.kernel,
            dynamic_shared=request.dynamic_shared,
            parameters=make_parameter_block(
                module.find_program(request.kernel).program, request.parameters
            ),
            **keywords,
        )
    except KeyboardInterrupt as stop:
        seconds = time.perf_counter() - start
        return LaunchRecord(0, request, 0, None, seconds, (), stop, syntax)
    except Exception as fault:
        report = getattr(fault, "report", None)
        if report is None:
            seconds = time.perf_counter() - start
            return LaunchRecord(0, request, 0, None, seconds, (), fault, syntax)
        return _make_record(request, report, fault, syntax)
    return _make_record(request, report, None, syntax)


def _make_record(
    request: LaunchRequest, report: Any, fault: BaseException | None, syntax: Module
) -> LaunchRecord:
    return LaunchRecord(
        index=0,
        request=request,
        instructions=report.instructions,
        cycles=report.cycles,
        seconds=report.seconds,
        findings=tuple(report.findings),
        fault=fault,
        syntax=syntax,
    )


def _find_required_cluster(module: Any, name: str) -> Dimensions | None:
    """Return the cluster that the kernel's own directive asks for."""
    for kernel in module.syntax.kernels:
        if kernel.name == name:
            sizes = [*(kernel.find_directive("reqnctapercluster") or ()), 1, 1]
            return (sizes[0], sizes[1], sizes[2]) if len(sizes) > 2 else None
    return None
