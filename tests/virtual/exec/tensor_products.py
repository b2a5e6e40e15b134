"""Operands, instruction descriptors and results of tcgen05.mma, by the PTX ISA's tables."""

from dataclasses import dataclass

import numpy as np

from tests.virtual.exec.number_codes import encode_float, pick_codes
from tests.virtual.exec.tensor_machine import (
    LANES,
    SharedMatrix,
    TensorProgram,
    lay_out_k_major,
    lay_out_mn_major,
)

DEPTHS = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
FORMAT_FIELDS = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "i8": {"u8": 0, "s8": 1},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
}
RESULT_FIELDS = {"f16": 0, "f32": 1, "s32": 2}
SUB_BYTE = {"e2m3": 6, "e3m2": 6, "e2m1": 4}


@dataclass(frozen=True)
class Case:
    """One product; `ctas` is the cta_group."""

    kind: str
    left: str
    right: str
    result: str = "f32"
    rows: int = 128
    columns: int = 64
    ctas: int = 1
    left_major: str = "k"
    right_major: str = "k"
    swizzle: str = "128"
    left_memory: str = "shared"
    negate: tuple[int, int] = (0, 0)
    saturate: int = 0
    stationary: bool = False
    depth: int = 0  # 0: that of the kind

    @property
    def k(self) -> int:
        """K of the product."""
        return self.depth or DEPTHS[self.kind]

    def __str__(self) -> str:
        majors = f"{self.left_major}{self.right_major}"
        words = [self.kind, self.left, self.right, self.result, f"{self.rows}x{self.columns}"]
        words += [f"cta{self.ctas}", majors, f"sw{self.swizzle}", self.left_memory]
        return "-".join([*words, *(["ws"] if self.stationary else [])])


def plain_descriptor(case: Case) -> int:
    """Return the instruction descriptor of a kind without block scaling."""
    fields = FORMAT_FIELDS[case.kind]
    return (
        case.saturate << 3 | RESULT_FIELDS[case.result] << 4
        | fields[case.left] << 7 | fields[case.right] << 10
        | case.negate[0] << 13 | case.negate[1] << 14
        | (case.left_major == "mn") << 15 | (case.right_major == "mn") << 16
        | case.columns >> 3 << 17 | case.rows >> 4 << 24
    )  # fmt: skip


def scaled_descriptor(case: Case, scale: str, ids: tuple[int, int]) -> int:
    """Return the instruction descriptor of a block-scaled kind; `ids` are those of A and B."""
    fields = FORMAT_FIELDS[case.kind]
    return (
        ids[1] << 4 | fields[case.left] << 7 | fields[case.right] << 10
        | case.negate[0] << 13 | case.negate[1] << 14
        | (case.left_major == "mn") << 15 | (case.right_major == "mn") << 16
        | case.columns >> 3 << 17 | (scale == "ue8m0") << 23
        | case.rows >> 7 << 27 | ids[0] << 29 | (case.k == 96) << 31
    )  # fmt: skip


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def _pad_sixteens(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return groups of 16 elements packed without gaps, then padding up to 16 bytes."""
    rows, depth = codes.shape
    unpacked = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(unpacked.reshape(rows, depth // 16, 16 * bits), axis=-1, bitorder="little")
    padded = np.full((rows, depth // 16, 16), 0x5A, np.uint8)
    padded[..., : 2 * bits] = packed
    return padded.reshape(rows, depth)


def shared_bytes(kind: str, element: str, codes: np.ndarray) -> np.ndarray:
    """Return the bytes [rows][bytes along K] of a K-major operand in shared memory."""
    if kind in ("mxf4", "mxf4nvf4"):
        return _pack_nibbles(codes)
    if element in SUB_BYTE:
        return _pad_sixteens(codes, SUB_BYTE[element])
    return np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)


def tensor_words(kind: str, element: str, codes: np.ndarray) -> np.ndarray:
    """Return the 32-bit words of A's rows in tensor memory: e2m1 in the middle of its byte."""
    if kind in ("mxf4", "mxf4nvf4"):
        data = _pack_nibbles(codes)
    elif element == "e2m1":
        data = (codes << 2).astype(np.uint8)
    else:
        data = np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)
    return np.ascontiguousarray(data).view(np.uint32)


def lay_out(kind: str, element: str, codes: np.ndarray, major: str, swizzle: str) -> SharedMatrix:
    """Return the shared matrix of codes [rows][K]."""
    if major == "k":
        return lay_out_k_major(shared_bytes(kind, element, codes), swizzle)
    turned = np.ascontiguousarray(codes.T)
    return lay_out_mn_major(turned.view(np.uint8).reshape(len(turned), -1), swizzle)


def result_places(case: Case, cta: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return row and column of D, and lane and column of tensor memory, of a CTA's accumulators.

    PTX ISA, "Data path layout organization": layouts A to G.
    """
    rows = case.rows // case.ctas
    row, column = np.meshgrid(np.arange(rows), np.arange(case.columns), indexing="ij")
    lane, place = row, column
    if case.ctas == 2 and case.rows == 128:  # B: two halves of N
        lane, place = row + 64 * (column // (case.columns // 2)), column % (case.columns // 2)
    elif case.stationary and rows < LANES:  # E and G: two halves or four quarters of N
        part = case.columns * rows // LANES
        lane, place = row + rows * (column // part), column % part
    elif case.ctas == 1 and case.rows == 64:  # F: half of every partition
        lane = row % 16 + row // 16 * 32
    return row + cta * rows, column, lane, place


def left_lanes(case: Case) -> np.ndarray:
    """Return, by lane of tensor memory, the row of A (within the CTA) it must hold; -1: none."""
    rows = case.rows // case.ctas
    lanes = np.arange(LANES)
    if case.ctas == 1 and case.rows == 64 and not case.stationary:
        return np.where(lanes % 32 < 16, lanes % 32 + lanes // 32 * 16, -1)
    return lanes % rows


def make_operands(case: Case, rng: np.random.Generator):
    """Return codes and values of A [M][K] and B [N][K]."""
    a_codes, a = pick_codes(rng, case.left, (case.rows, case.k), 2.0)
    b_codes, b = pick_codes(rng, case.right, (case.columns, case.k), 2.0)
    return a_codes, a, b_codes, b


def place_operands(
    program: TensorProgram, case: Case, a_codes: np.ndarray, b_codes: np.ndarray, left_column: int
) -> tuple[str, str]:
    """Put A and B where the case wants them; return the operands' texts."""
    b_parts = np.split(b_codes, case.ctas)
    b_text = program.add_shared(
        [lay_out(case.kind, case.right, part, case.right_major, case.swizzle) for part in b_parts]
    )
    a_parts = np.split(a_codes, case.ctas)
    if case.left_memory == "tensor":
        rows = left_lanes(case)
        for cta, part in enumerate(a_parts):
            words = tensor_words(case.kind, case.left, part)
            used = rows >= 0
            program.tensor[cta, used, left_column : left_column + words.shape[1]] = words[
                rows[used]
            ]
        return f"[{left_column}]", b_text
    a_text = program.add_shared(
        [lay_out(case.kind, case.left, part, case.left_major, case.swizzle) for part in a_parts]
    )
    return a_text, b_text


def encode_result(kind: str, values: np.ndarray) -> np.ndarray:
    """Return accumulator words: f16 in the low half."""
    if kind == "s32":
        return values.astype(np.int64).astype(np.uint32)
    return encode_float("f16" if kind == "f16" else "tf32", values).astype(np.uint32)


def put_accumulators(program: TensorProgram, case: Case, column: int, values: np.ndarray) -> None:
    """Write D's old values [M][N] into tensor memory."""
    for cta in range(case.ctas):
        row, n, lane, place = result_places(case, cta)
        program.tensor[cta, lane, column + place] = encode_result(case.result, values[row, n])


def expect_accumulators(
    tensor: np.ndarray, case: Case, column: int, values: np.ndarray
) -> np.ndarray:
    """Return tensor memory [cta][lane][column] with D = `values`, everything else as before."""
    expected = tensor.copy()
    for cta in range(case.ctas):
        row, n, lane, place = result_places(case, cta)
        expected[cta, lane, column + place] = encode_result(case.result, values[row, n])
    return expected
