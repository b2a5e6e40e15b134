"""TMA loads of a kernel: which tensor map each reads and where in shared memory it writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.checks.register_values import RegisterValues
from halfbyte.errors import TensorMapError
from halfbyte.ptx.syntax import TensorAddress
from halfbyte.virtual.tensor_map_decode import TensorMap, decode_tensor_map

_PREFIX = "cp.async.bulk.tensor."


@dataclass(frozen=True, slots=True)
class TmaLoad:
    """One `cp.async.bulk.tensor` from global to shared memory.

    Attributes:
        index: of the instruction in the kernel's control flow.
        parameter: number of the kernel parameter that holds the tensor map; None where it is not
            known.
        tensor_map: decoded, where the bytes of the parameters are at hand.
        encoded: its bytes.
        problem: why the tensor map is not known, "" where it is.
        first: offset in shared memory of the first box, None where it is not known. Of a multicast
            in slices it is the slice that CTA rank 0 loads.
        barrier: offset of the mbarrier of the first box.
    """

    index: int
    parameter: int | None
    tensor_map: TensorMap | None
    encoded: bytes | None
    problem: str
    first: int | None
    barrier: int | None

    @property
    def box_bytes(self) -> int | None:
        """Bytes of one box, None where the tensor map is not known."""
        return None if self.tensor_map is None else self.tensor_map.box_bytes

    def covers(self, offset: int) -> bool:
        """Return whether a byte of shared memory is in the first box."""
        if self.first is None or self.box_bytes is None:
            return False
        return self.first <= offset < self.first + self.box_bytes


def list_tma_loads(
    values: RegisterValues, parameters: Sequence[bytes] | None = None
) -> tuple[TmaLoad, ...]:
    """Return the tensor loads of a kernel, in the order of its text.

    `parameters` are the bytes of each parameter of a launch; without them boxes are not known.
    """
    loads = []
    for index, instruction in values.kernel.list_instructions(_PREFIX):
        # the destination stands first: `.shared::cluster.global` loads, `.global.shared` stores
        if not instruction.opcode.split(".")[5].startswith("shared"):
            continue
        source = instruction.operands[1]
        if not isinstance(source, TensorAddress):
            continue
        found = values.find_parameter(index, source.tensor_map)
        encoded, tensor_map, problem = _read_map(found, parameters)
        loads.append(
            TmaLoad(
                index=index,
                parameter=None if found is None else found[0],
                tensor_map=tensor_map,
                encoded=encoded,
                problem=problem,
                first=values.read_shared_offset(index, instruction.operands[0]),
                barrier=values.read_shared_offset(index, instruction.operands[2]),
            )
        )
    return tuple(loads)


def _read_map(
    found: tuple[int, int] | None, parameters: Sequence[bytes] | None
) -> tuple[bytes | None, TensorMap | None, str]:
    if found is None:
        problem = "its tensor map is no kernel parameter, or its address cannot be traced"
        return None, None, problem
    if parameters is None:
        return None, None, "the bytes of its tensor map are known in a launch alone"
    number, offset = found
    encoded = parameters[number][offset:]
    try:
        return encoded, decode_tensor_map(encoded), ""
    except TensorMapError as error:
        return encoded, None, f"parameter {number}: {error}"
