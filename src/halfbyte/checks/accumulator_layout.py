"""Check: two MMAs put element (m, n) of their accumulator into the same cell of tensor memory.

Each way to find a cell is independent of the other: from the layouts that CuTe writes for an MMA,
and from the PTX ISA's rule ("Data path layouts", D of tcgen05.mma).
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.errors import UsageError

CHECK = "accumulator-layout"
_LANE_SHIFT, _LANES, _COLUMN_MASK = 16, 128, 0xFFFF  # of a tensor memory address
_LAYOUT = re.compile(r"\s*([0-9(),_ ]+):([0-9(),_ ]+)\s*")


@dataclass(frozen=True, eq=False)
class AccumulatorCells:
    """Where each element is: int32 `[M, N]` arrays of the CTA in its pair, the lane, the column."""

    source: str
    cta: NDArray[np.int32]
    lane: NDArray[np.int32]
    column: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, int]:
        """M and N, of both CTAs together."""
        return self.cta.shape[0], self.cta.shape[1]

    def name_cell(self, m: int, n: int) -> str:
        """Return e.g. "cta 1 lane 5 column 17"."""
        return f"cta {self.cta[m, n]} lane {self.lane[m, n]} column {self.column[m, n]}"


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A CuTe layout "shape:stride" as flat modes, first mode fastest."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many indices it takes."""
        return int(np.prod(self.extents, dtype=np.int64))

    def list_offsets(self) -> NDArray[np.int64]:
        """Return the offset of each index."""
        offsets = np.zeros(1, np.int64)
        for extent, stride in zip(self.extents, self.strides, strict=True):
            steps = np.arange(extent, dtype=np.int64) * stride
            offsets = (offsets[None, :] + steps[:, None]).reshape(-1)
        return offsets


def read_layout(text: str) -> FlatLayout:
    """Return the modes of a static CuTe layout, e.g. "(2,(128,256)):(128,(1,256))".

    Raises UsageError for a layout with dynamic or unequal parts.
    """
    match = _LAYOUT.fullmatch(text)
    parts = [re.findall(r"\d+", side) for side in match.groups()] if match else [[], []]
    if not parts[0] or len(parts[0]) != len(parts[1]):
        raise UsageError(f"{text!r} is no static CuTe layout, shape:stride")
    extents, strides = (tuple(map(int, side)) for side in parts)
    return FlatLayout(extents, strides)


def find_cells_by_layouts(
    source: str, value_layout: str, fragment_layout: str, shape: tuple[int, int]
) -> AccumulatorCells:
    """Return the cells that an MMA's layouts say.

    Args:
        source: whose layouts they are, for messages.
        value_layout: (CTA, value) -> m + M * n, CuTe's `tv_layout_C`, e.g.
            "(2,(128,256)):(128,(1,256))".
        fragment_layout: value -> tensor memory address of 32-bit cells, the layout of
            `make_fragment_C`, e.g. "((128,256),1,1):((65536,1),0,0)".
        shape: M, N.
    """
    rows, columns = shape
    values, fragment = read_layout(value_layout), read_layout(fragment_layout)
    num_ctas = values.extents[0]
    per_cta = values.size // num_ctas
    if fragment.size != per_cta or values.size != rows * columns:
        raise UsageError(
            f"{source}: layouts of {values.size} elements on {num_ctas} CTAs and fragments of "
            f"{fragment.size}; {rows * columns} elements are wanted"
        )
    elements = values.list_offsets().reshape(per_cta, num_ctas)
    addresses = fragment.list_offsets()
    arrays = [np.full(rows * columns, -1, np.int32) for _ in range(3)]
    for cta in range(num_ctas):
        arrays[0][elements[:, cta]] = cta
        arrays[1][elements[:, cta]] = addresses >> _LANE_SHIFT
        arrays[2][elements[:, cta]] = addresses & _COLUMN_MASK
    if any((array < 0).any() for array in arrays):
        raise UsageError(f"{source}: {value_layout} leaves elements of {rows} x {columns} out")
    cta_array, lanes, column_array = (array.reshape(columns, rows).T for array in arrays)
    return AccumulatorCells(source, cta_array, lanes, column_array)


def find_cells_by_isa(num_ctas: int, shape: tuple[int, int]) -> AccumulatorCells:
    """Return the cells by the PTX ISA's rule for D in float32.

    One CTA, M = 128: row m in lane m. M = 64: 16 rows in the first half of each warp's lanes. Two
    CTAs, M = 256: rows 128 r to 128 r + 127 in CTA r. M = 128: 64 rows in each, columns of the
    second half in lanes 64 to 127.
    """
    rows, columns = shape
    m, n = np.indices(shape, dtype=np.int32)
    zero = np.zeros(shape, np.int32)
    if (num_ctas, rows) == (1, 128):
        cells = (zero, m, n)
    elif (num_ctas, rows) == (1, 64):
        cells = (zero, m % 16 + 32 * (m // 16), n)
    elif (num_ctas, rows) == (2, 256):
        cells = (m // 128, m % 128, n)
    elif (num_ctas, rows) == (2, 128):
        half = columns // 2
        cells = (m // 64, m % 64 + 64 * (n // half), n % half)
    else:
        raise UsageError(f"no tcgen05.mma of {num_ctas} CTAs has M = {rows}")
    cta, lane, column = (array.astype(np.int32) for array in cells)
    return AccumulatorCells("PTX ISA", cta, lane, column)


def compare_cells(*layouts: AccumulatorCells) -> CheckReport:
    """Return the cells in which a layout differs from the first one, and where two are the same.

    An element of one layout that has no cell of its own is an error too: another element would
    overwrite it.
    """
    first = layouts[0]
    rows, columns = first.shape
    findings = []
    for other in layouts[1:]:
        differ = (
            (first.cta != other.cta) | (first.lane != other.lane) | (first.column != other.column)
        )
        if differ.any():
            m, n = (int(index) for index in np.argwhere(differ)[0])
            message = (
                f"{int(differ.sum())} of {rows * columns} cells differ; first ({m}, {n}): "
                f"{first.source} {first.name_cell(m, n)}, {other.source} {other.name_cell(m, n)}"
            )
            place = f"accumulator {rows}x{columns}"
            findings.append(CheckFinding(f"{CHECK}/differs", Severity.ERROR, place, message))
    for one in layouts:
        cells = (one.cta.astype(np.int64) * _LANES + one.lane) << _LANE_SHIFT | one.column
        distinct = np.unique(cells).size
        if distinct < rows * columns:
            message = f"{one.source}: {rows * columns} elements in {distinct} cells"
            place = f"accumulator {rows}x{columns}"
            findings.append(CheckFinding(f"{CHECK}/shared-cell", Severity.ERROR, place, message))
    corners = ((0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1))
    evidence = tuple(
        Evidence(
            f"({m}, {n}) is in {first.name_cell(m, n)}",
            ", ".join(one.source for one in layouts),
        )
        for m, n in corners
    )
    return CheckReport(CHECK, tuple(findings), evidence, rows * columns)
