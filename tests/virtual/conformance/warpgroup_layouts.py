"""Where wgmma looks for its operands: shared-memory images, descriptors, register fragments.

Facts: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor".
Everything counts bytes; a K step of one instruction is 32 bytes.
"""

from dataclasses import dataclass

import numpy as np

MODES = {0: 0, 128: 1, 64: 2, 32: 3}  # swizzle span -> descriptor bits 62-63


@dataclass(frozen=True)
class Layout:
    """The layout of one operand of `rows` x `steps` K steps.

    `span` is the swizzle in bytes (0: none). `is_mn_major` says that rows, not K, lie next to each
    other. Only 16-bit elements can be MN-major.
    """

    rows: int
    steps: int
    span: int
    is_mn_major: bool = False

    @property
    def size(self) -> int:
        """Bytes of the image, whole swizzle atoms, a multiple of 1024."""
        count = self.rows * self.steps * 32
        if self.span and not self.is_mn_major:
            count = self.rows * -(-self.steps * 32 // self.span) * self.span
        elif self.span:
            count = -(-self.rows * 2 // self.span) * self.span * self.steps * 16
        return -(-count // 1024) * 1024

    @property
    def strides(self) -> tuple[int, int]:
        """Leading and stride byte offsets."""
        if not self.is_mn_major:
            if self.span == 0:
                return self.rows * 16, 128  # between core matrices along K, along rows
            return 16, 8 * self.span  # the leading one is not used
        if self.span == 0:
            return self.rows * 16, 128
        atoms = -(-self.rows * 2 // self.span)
        return 8 * self.span, 8 * self.span * atoms

    def step_offset(self, step: int) -> int:
        """Return how far the start of K step `step` lies from that of step 0."""
        leading, stride = self.strides
        if self.is_mn_major:
            return 2 * step * (leading if self.span == 0 else stride)
        if self.span == 0:
            return 2 * step * leading
        steps_per_atom = self.span // 32
        atom = self.rows * self.span
        return step // steps_per_atom * atom + step % steps_per_atom * 32

    def descriptor(self) -> int:
        """Return the descriptor without its start address."""
        leading, stride = self.strides
        return (leading >> 4) << 16 | (stride >> 4) << 32 | MODES[self.span] << 62

    def place(self, row: np.ndarray, byte: np.ndarray, element: int) -> np.ndarray:
        """Return the offset of the byte `byte` of K in `row`, before the swizzle."""
        leading, stride = self.strides
        if not self.is_mn_major:
            if self.span == 0:
                return row % 8 * 16 + row // 8 * stride + byte // 16 * leading + byte % 16
            step, within = byte // 32, byte % 32
            start = np.vectorize(self.step_offset)(step)
            return row % 8 * self.span + row // 8 * stride + start + within
        k, part = byte // element, byte % element
        position = row * element  # along MN
        chunk, inside = position // 16, position % 16 + part
        if self.span == 0:
            return chunk * stride + k % 8 * 16 + k // 8 * leading + inside
        per_atom = self.span // 16
        return (
            chunk % per_atom * 16
            + chunk // per_atom * leading
            + k % 8 * self.span
            + k // 8 * stride
            + inside
        )

    def image(self, operand: np.ndarray) -> np.ndarray:
        """Return the bytes of shared memory for `operand`, (rows, K) of an unsigned type."""
        element = operand.dtype.itemsize
        data = np.ascontiguousarray(operand).view(np.uint8).reshape(self.rows, -1)
        row, byte = np.meshgrid(np.arange(self.rows), np.arange(data.shape[1]), indexing="ij")
        place = self.place(row, byte, element)
        if self.span:
            place = place ^ ((place >> 7) % (self.span // 16) << 4)
        image = np.zeros(self.size, np.uint8)
        image[place.reshape(-1)] = data.reshape(-1)
        assert len(np.unique(place)) == place.size, "two elements in one place"
        return image


def fragment(operand: np.ndarray) -> np.ndarray:
    """Return (K step, thread, register) words of an A operand (64 rows) kept in registers."""
    data = np.ascontiguousarray(operand).view(np.uint32).reshape(64, -1, 8)
    thread = np.arange(128)
    words = np.empty((data.shape[1], 128, 4), np.uint32)
    for register in range(4):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
        words[:, :, register] = data[row, :, thread % 4 + 4 * (register // 2)].T
    return words


def accumulator_matrix(registers: np.ndarray, columns: int) -> np.ndarray:
    """Return the (64, columns) matrix held in (thread, register) accumulators of 32 bits."""
    matrix = np.empty((64, columns), registers.dtype)
    thread = np.arange(128)
    for register in range(columns // 2):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
        column = thread % 4 * 2 + register % 2 + register // 4 * 8
        matrix[row, column] = registers[:, register]
    return matrix
