"""Where a kernel's variables and parameters lie in the memories of the machine."""

from collections.abc import Iterable
from dataclasses import dataclass

from halfbyte.errors import PtxError
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import Module, Variable
from halfbyte.virtual.lowering.program import KernelParameter

MAX_PARAMETER_BYTES = 32764  # of a kernel, on sm_70 and later (PTX ISA, ".entry")


@dataclass(frozen=True, slots=True)
class KernelLayout:
    """Addresses by variable name, each in its own space; `parameters` in the order of the entry."""

    shared: dict[str, int]
    local: dict[str, int]
    parameter: dict[str, int]
    parameters: tuple[KernelParameter, ...]
    parameter_bytes: int
    static_shared_end: int  # where dynamic shared memory starts
    local_bytes: int  # per thread


def make_layout(module: Module, body: FlatBody, reserved_shared_bytes: int) -> KernelLayout:
    """Return where the variables of a kernel lie; shared ones behind the system's part.

    Raises PtxError for an alignment that is no power of two, and for more parameters than a kernel
    may have.
    """
    parameters, parameter_bytes = _place_parameters(body.parameters)
    if parameter_bytes > MAX_PARAMETER_BYTES:
        raise PtxError(
            f"{body.name} has {parameter_bytes} bytes of parameters, {MAX_PARAMETER_BYTES} are "
            "allowed"
        )
    shared, dynamic_start = _place_shared(
        [v for v in (*module.globals, *body.variables.values()) if v.space == "shared"],
        reserved_shared_bytes,
    )
    # `.param` variables inside a body hold the arguments of calls: each thread has its own.
    local, local_bytes = _place(
        [v for v in body.variables.values() if v.space in ("local", "param")], 0
    )
    return KernelLayout(
        shared,
        local,
        {parameter.name: parameter.offset for parameter in parameters},
        parameters,
        parameter_bytes,
        dynamic_start,
        _round_up(local_bytes, 16),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _place(variables: Iterable[Variable], start: int) -> tuple[dict[str, int], int]:
    offsets: dict[str, int] = {}
    end = start
    for variable in variables:
        alignment = variable.alignment_bytes
        if alignment <= 0 or alignment & (alignment - 1):
            raise PtxError(
                f"line {variable.line}: {variable.name} is aligned to {alignment} bytes: "
                "a power of two is wanted",
                variable.line,
            )
        offset = _round_up(end, alignment)
        offsets[variable.name] = offset
        end = offset + variable.size_bytes
    return offsets, end


def _place_shared(variables: list[Variable], reserved: int) -> tuple[dict[str, int], int]:
    def is_dynamic(variable: Variable) -> bool:
        return variable.linkage == "extern" or None in variable.dimensions

    static = [variable for variable in variables if not is_dynamic(variable)]
    dynamic = [variable for variable in variables if is_dynamic(variable)]
    offsets, end = _place(static, reserved)
    # Every dynamic array starts at the same place, aligned to the largest demand.
    start = _round_up(end, max((v.alignment_bytes for v in dynamic), default=16))
    offsets.update({variable.name: start for variable in dynamic})
    return offsets, start


def _place_parameters(variables: Iterable[Variable]) -> tuple[tuple[KernelParameter, ...], int]:
    offsets, end = _place(variables, 0)
    parameters = tuple(
        KernelParameter(v.name, offsets[v.name], v.size_bytes, v.type) for v in variables
    )
    return parameters, end
