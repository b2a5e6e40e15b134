"""TMA loads of a kernel: which tensor map each reads and where in shared memory it writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.checks.register_values import RegisterValues, find_first_pass
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
        slices: offsets of all boxes that a CTA gets by this instruction: its own and, of a
            multicast, those that the other CTAs load.
        copies: how many CTAs load a box for each CTA; None where the mask is not known.
        barrier: offset of the mbarrier of the first box.
    """

    index: int
    parameter: int | None
    tensor_map: TensorMap | None
    encoded: bytes | None
    problem: str
    first: int | None
    slices: tuple[int, ...]
    copies: int | None
    barrier: int | None

    @property
    def box_bytes(self) -> int | None:
        """Bytes of one box, None where the tensor map is not known."""
        return None if self.tensor_map is None else self.tensor_map.box_bytes

    def covers(self, offset: int) -> bool:
        """Return whether a byte of shared memory is in one of the first boxes."""
        size = self.box_bytes
        return size is not None and any(start <= offset < start + size for start in self.slices)


def list_tma_loads(
    values: RegisterValues, parameters: Sequence[bytes] | None = None
) -> tuple[TmaLoad, ...]:
    """Return the tensor loads of a kernel, in the order of its text.

    `parameters` are the bytes of each parameter of a launch; without them boxes are not known.
    """
    loads = []
    peers: dict[int, RegisterValues] = {}
    for index, instruction in values.kernel.list_instructions(_PREFIX):
        # the destination stands first: `.shared::cluster.global` loads, `.global.shared` stores
        if not instruction.opcode.split(".")[5].startswith("shared"):
            continue
        source = instruction.operands[1]
        if not isinstance(source, TensorAddress):
            continue
        found = values.find_parameter(index, source.tensor_map)
        encoded, tensor_map, problem = _read_map(found, parameters)
        copies = _count_copies(values, index)
        first = values.read_shared_offset(index, instruction.operands[0])
        offsets = [first]
        for rank in range(1, copies or 1):
            if rank not in peers:
                peers[rank] = find_first_pass(values.kernel, parameters, rank)
            offsets.append(peers[rank].read_shared_offset(index, instruction.operands[0]))
        loads.append(
            TmaLoad(
                index=index,
                parameter=None if found is None else found[0],
                tensor_map=tensor_map,
                encoded=encoded,
                problem=problem,
                first=first,
                slices=tuple(sorted({offset for offset in offsets if offset is not None})),
                copies=copies,
                barrier=values.read_shared_offset(index, instruction.operands[2]),
            )
        )
    return tuple(loads)


def _count_copies(values: RegisterValues, index: int) -> int | None:
    """Return how many boxes arrive in each CTA: one, or one from each CTA of a multicast."""
    instruction = values.kernel.flow.instructions[index]
    if ".multicast::cluster" not in instruction.opcode:
        return 1
    mask = values.read(index, instruction.operands[3], 16).constant
    return None if mask is None else mask.bit_count()


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
