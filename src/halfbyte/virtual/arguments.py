"""Python values to the bytes of a kernel's parameters."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.virtual.lowering.program import KernelParameter, Program
from halfbyte.virtual.memory import DeviceMemory
from halfbyte.virtual.plain_values import show

_FLOATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


def encode_arguments(program: Program, arguments: Sequence[Any]) -> bytes:
    """Return the parameter block of a launch.

    Args:
        program: the lowered kernel.
        arguments: one value per parameter: a NumPy array or torch tensor (its address), an int, a
            float, a NumPy scalar, or bytes of exactly the parameter's size (structs, tensor maps).

    Raises:
        UsageError: a count, type or size that does not fit; the message names the parameter.
    """
    if isinstance(arguments, str | bytes | Mapping) or not isinstance(arguments, Iterable):
        raise UsageError(
            f"{program.name}: arguments are {show(arguments)}; a list is wanted, of one value per "
            "parameter"
        )
    arguments = tuple(arguments)
    if len(arguments) != len(program.parameters):
        names = ", ".join(f"{p.name} ({p.size} bytes)" for p in program.parameters)
        raise UsageError(
            f"{program.name} takes {len(program.parameters)} arguments ({names}), "
            f"{len(arguments)} came"
        )
    block = bytearray(program.parameter_bytes)
    for position, (parameter, value) in enumerate(zip(program.parameters, arguments, strict=True)):
        data = _encode_value(program.name, position, parameter, value)
        block[parameter.offset : parameter.offset + parameter.size] = data
    return bytes(block)


def _encode_value(kernel: str, position: int, parameter: KernelParameter, value: Any) -> bytes:
    kind = f"{parameter.name}, .{parameter.type}, {parameter.size} bytes"
    what = f"argument {position} ({kind}) of {kernel}"
    address = find_address(value, what)
    if address is not None:
        if parameter.size != 8:
            raise UsageError(f"{what}: an array needs a 64-bit parameter")
        return struct.pack("<Q", address)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        if len(data) != parameter.size:
            raise UsageError(f"{what}: {len(data)} bytes came")
        return data
    if isinstance(value, np.generic):
        data = value.tobytes()
        if len(data) != parameter.size:
            raise UsageError(f"{what}: a {value.dtype} of {len(data)} bytes came")
        return data
    if isinstance(value, float):
        if parameter.type not in _FLOATS:
            raise UsageError(f"{what}: a float came; pass a NumPy scalar, e.g. np.float32({value})")
        return struct.pack(_FLOATS[parameter.type], value)
    if isinstance(value, int):
        bits = 8 * parameter.size
        if not -(1 << (bits - 1)) <= value < 1 << bits:
            raise UsageError(f"{what}: {value} does not fit {bits} bits")
        return (value % (1 << bits)).to_bytes(parameter.size, "little")
    raise UsageError(f"{what}: {type(value).__name__} is no array, number or bytes")


def find_address(value: Any, what: str = "an argument") -> int | None:
    """Return the address of an array's or tensor's first element, None for anything else.

    Raises UsageError, which names `what`, for arrays whose memory does not hold plain numbers of
    this machine: kernels would compute with something else than the array shows.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise UsageError(f"{what}: an array of Python objects has no numbers in its memory")
        if not value.dtype.isnative:
            raise UsageError(
                f"{what}: {value.dtype.str} is of the other byte order; pass "
                "array.astype(array.dtype.newbyteorder('='))"
            )
        return int(value.ctypes.data)
    if hasattr(value, "untyped_storage"):
        return _find_tensor_address(value, what)
    return None


def _find_tensor_address(value: Any, what: str) -> int:
    if value.is_meta or str(value.layout) != "torch.strided":
        raise UsageError(
            f"{what}: a tensor on {value.device} of layout {value.layout} has no memory that a "
            "kernel could read; a dense tensor is wanted"
        )
    if value.is_conj() or value.is_neg():
        raise UsageError(
            f"{what}: the tensor's memory holds its conjugate or negative; pass "
            "tensor.resolve_conj().resolve_neg()"
        )
    try:
        return int(value.data_ptr())
    except RuntimeError as error:
        raise UsageError(f"{what}: the tensor has no memory: {error}") from None


@dataclass(slots=True)
class _Loan:
    """A range of host memory that a launch may touch."""

    nbytes: int
    name: str
    keep: Any
    is_writable: bool


def _find_range(value: Any) -> tuple[int, int, bool]:
    """Return address, bytes and whether it may be written: of the array that owns the memory."""
    if isinstance(value, np.ndarray):
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        low, high = np.lib.array_utils.byte_bounds(root)
        return low, high - low, value.flags.writeable
    storage = value.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes()), True


@contextmanager
def lend_arrays(memory: DeviceMemory, values: Sequence[Any]) -> Iterator[None]:
    """Register the arrays among `values` for the time of the context, where they are not yet.

    A read-only array may be read alone. Buffers that lie in a lent range stay as they were.
    """
    loans: dict[int, _Loan] = {}
    for position, value in enumerate(values):
        if find_address(value) is None:
            continue
        address, nbytes, is_writable = _find_range(value)
        if address in loans:
            loans[address].is_writable |= is_writable
        elif nbytes and not memory.contains(address, nbytes):
            shape = "x".join(str(extent) for extent in value.shape)
            name = f"argument {position} ({value.dtype} {shape})"
            loans[address] = _Loan(nbytes, name, value, is_writable)
    covered = [b for start, loan in loans.items() for b in memory.find_within(start, loan.nbytes)]
    try:
        for start, loan in loans.items():
            memory.register(
                start, loan.nbytes, loan.name, keep=loan.keep, read_only=not loan.is_writable
            )
        yield
    finally:
        for start in loans:
            memory.unregister(start)
        for buffer, keep in covered:
            memory.register(
                buffer.address, buffer.nbytes, buffer.name, keep=keep, read_only=buffer.read_only
            )
