"""Block-scaled MMAs of a kernel and the way of their operands: global, shared, tensor memory.

Each link is read from the text or the launch: the tensor map that a TMA load reads and the shared
bytes that it fills; the descriptor with which the MMA (or tcgen05.cp, for scales) reads these
bytes; the columns of tensor memory that tcgen05.cp fills and the MMA reads scales from.

Several loads may fill the same bytes one after the other (a ring whose slots carry more than one
kind of block): then all of them are listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.checks.instruction_descriptor import ScaledMmaForm, read_scaled_form
from halfbyte.checks.known_bits import KnownBits
from halfbyte.checks.register_values import RegisterValues
from halfbyte.checks.tma_loads import TmaLoad, list_tma_loads
from halfbyte.ptx.syntax import Address

_COLUMN_BITS = 16  # of a tensor memory address; the lane stands above
# Columns of 32 bits that each tcgen05.cp shape writes (PTX ISA, "tcgen05.cp").
_COPY_COLUMNS = {"32x128b": 4, "64x128b": 4, "128x128b": 4, "128x256b": 8, "4x256b": 8}


@dataclass(frozen=True, slots=True)
class ScaleCopy:
    """One tcgen05.cp: `columns` of tensor memory from `source` on in shared memory.

    `shape` is e.g. "32x128b.warpx4"; `swizzle_code` the layout field of the shared descriptor
    (0: rows of 16 bytes, not swizzled). None stands for what cannot be traced.
    """

    index: int
    shape: str
    first_column: int | None
    num_columns: int
    source: int | None
    swizzle_code: int | None

    def covers(self, column: int) -> bool:
        """Return whether the copy writes a column of tensor memory."""
        first = self.first_column
        return first is not None and first <= column < first + self.num_columns


@dataclass(frozen=True, slots=True)
class ScaleSource:
    """Where the scales of one operand come from.

    Attributes:
        column: first column of tensor memory that the MMA reads, None where not known.
        copies: the tcgen05.cp that write the columns it reads.
        missing: columns it reads that none of the copies writes.
        loads: TMA loads that fill what the first copy reads.
    """

    column: int | None
    copies: tuple[ScaleCopy, ...] = ()
    missing: tuple[int, ...] = ()
    loads: tuple[TmaLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaledMma:
    """One block-scaled MMA.

    Attributes:
        index: of the instruction in the kernel's control flow.
        form: what opcode and instruction descriptor say.
        descriptor: the instruction descriptor, as far as it can be traced.
        starts: offsets in shared memory of A and B in the first pass; None where not known.
        loads: TMA loads that fill A and B.
        scales: the way of the scales of A and B.
    """

    index: int
    form: ScaledMmaForm
    descriptor: KnownBits
    starts: tuple[int | None, int | None]
    loads: tuple[tuple[TmaLoad, ...], tuple[TmaLoad, ...]]
    scales: tuple[ScaleSource, ScaleSource]


def list_scaled_mma(
    values: RegisterValues, parameters: Sequence[bytes] | None = None
) -> tuple[ScaledMma, ...]:
    """Return the block-scaled MMAs of a kernel, in the order of its text."""
    loads = list_tma_loads(values, parameters)
    copies = list_scale_copies(values)
    found = []
    for index, instruction in values.kernel.list_instructions("tcgen05.mma"):
        if "block_scale" not in instruction.opcode.split("."):
            continue
        _, left, right, descriptor, *scales = instruction.operands[:6]
        bits = values.read(index, descriptor)
        form = read_scaled_form(instruction.opcode, bits)
        # A in tensor memory is an address in brackets and has no shared bytes
        left_start = None if isinstance(left, Address) else read_start(values.read(index, left, 64))
        starts = (left_start, read_start(values.read(index, right, 64)))
        first, second = (
            _find_scales(values.read(index, operand), words, copies, loads)
            for operand, words in zip(scales, _count_scale_columns(form), strict=True)
        )
        found.append(
            ScaledMma(
                index=index,
                form=form,
                descriptor=bits,
                starts=starts,
                loads=(find_loads(loads, starts[0]), find_loads(loads, starts[1])),
                scales=(first, second),
            )
        )
    return tuple(found)


def _count_scale_columns(form: ScaledMmaForm) -> tuple[int, int]:
    """Return the columns of scales that the MMA reads: a word per row, 32 rows in a column.

    A CTA holds the scales of its own rows of A and of all rows of B (PTX ISA, "Scale factor
    layouts"); K = 96 takes two words per row. Where the shape is not known, one column counts.
    """
    rows, columns, depth = form.shape
    words = 2 if depth == 96 else 1
    own_rows = None if rows is None else min(rows, 128)
    first, second = (words * -(-n // 32) if n else 1 for n in (own_rows, columns))
    return first, second


def list_scale_copies(values: RegisterValues) -> tuple[ScaleCopy, ...]:
    """Return the copies from shared to tensor memory."""
    copies = []
    for index, instruction in values.kernel.list_instructions("tcgen05.cp."):
        words = instruction.opcode.split(".")
        size = next(word for word in words if word in _COPY_COLUMNS)
        target = values.read(index, instruction.operands[0])
        descriptor = values.read(index, instruction.operands[1], 64)
        copies.append(
            ScaleCopy(
                index=index,
                shape=".".join(words[words.index(size) :]),
                first_column=target.read_field(0, _COLUMN_BITS),
                num_columns=_COPY_COLUMNS[size],
                source=read_start(descriptor),
                swizzle_code=descriptor.read_field(61, 3),
            )
        )
    return tuple(copies)


def read_start(descriptor: KnownBits) -> int | None:
    """Return the start address in a shared memory descriptor, bits 0 to 13 in units of 16 bytes."""
    start = descriptor.read_field(0, 14)
    return None if start is None else start * 16


def find_loads(loads: Sequence[TmaLoad], offset: int | None) -> tuple[TmaLoad, ...]:
    """Return the TMA loads whose first box has this byte of shared memory."""
    if offset is None:
        return ()
    return tuple(load for load in loads if load.covers(offset))


def _find_scales(
    address: KnownBits, num_columns: int, copies: Sequence[ScaleCopy], loads: Sequence[TmaLoad]
) -> ScaleSource:
    column = address.read_field(0, _COLUMN_BITS)
    if column is None:
        return ScaleSource(None)
    read = range(column, column + num_columns)
    used = tuple(copy for copy in copies if any(copy.covers(c) for c in read))
    missing = tuple(c for c in read if not any(copy.covers(c) for copy in used))
    return ScaleSource(column, used, missing, find_loads(loads, used[0].source) if used else ())
