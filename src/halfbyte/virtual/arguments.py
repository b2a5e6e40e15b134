"""Python values to the bytes of a kernel's parameters."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.virtual.lowering.program import KernelParameter, Program
from halfbyte.virtual.memory import DeviceMemory

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
    address = find_address(value)
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


def find_address(value: Any) -> int | None:
    """Return the address of an array's or tensor's first element, None for anything else."""
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if hasattr(value, "untyped_storage"):
        return int(value.data_ptr())
    return None


def _find_range(value: Any) -> tuple[int, int]:
    if isinstance(value, np.ndarray):
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        low, high = np.lib.array_utils.byte_bounds(root)
        return low, high - low
    storage = value.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes())


@contextmanager
def lend_arrays(memory: DeviceMemory, values: Sequence[Any]) -> Iterator[None]:
    """Register the arrays among `values` for the time of the context, where they are not yet."""
    lent = []
    try:
        for position, value in enumerate(values):
            if find_address(value) is None:
                continue
            address, nbytes = _find_range(value)
            if nbytes and not memory.holds(address):
                shape = "x".join(str(extent) for extent in value.shape)
                name = f"argument {position} ({value.dtype} {shape})"
                memory.register(address, nbytes, name, keep=value)
                lent.append(address)
        yield
    finally:
        for address in lent:
            memory.unregister(address)
