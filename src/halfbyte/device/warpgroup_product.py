"""The warpgroup's matrix instruction, `wgmma`, with A from registers and B from shared memory.

m64nN: D [64, N] += A [64, 32 bytes of K] * B [N, 32 bytes of K]^T, asynchronous. Fragments (PTX
ISA, wgmma register fragments): warp w of the warpgroup has rows 16w to 16w + 15; with g = lane / 4
and t = lane % 4, word 0 of A is row g, bytes 4t to 4t + 3; word 1 row g + 8; words 2 and 3 the same
rows 16 bytes on. D has four values for each 8 columns: 2t and 2t + 1 of row g, then of row g + 8.

Registers of products in flight may be neither read nor written, and no compiler is told so: it
takes an instruction's results for complete. Hence fence and wait hand registers through: what is
computed before the fence stays before it, and nothing moves ahead of the wait. Operands that are
filled while products run alternate between two sets of registers by name, step for step: one that
was copied had registers that a product in flight still read (ptxas 12.9;
`checks.wgmma_operands` looks at the machine code).
"""

from typing import Any, Final

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from halfbyte.device.inline_ptx import emit_memory_ptx, update_by_ptx

# kind -> (columns of K of one instruction, PTX types of D, A and B, further immediates)
KINDS: Final = {
    "e4m3": (32, "f32.e4m3.e4m3", ", 1, 1"),
    "float16": (16, "f32.f16.f16", ", 1, 1, 0"),
    "bfloat16": (16, "f32.bf16.bf16", ", 1, 1, 0"),
    "int8": (32, "s32.s8.s8", ""),
}
# Swizzle span in bytes -> layout type of a shared memory descriptor (bits 62 and 63).
_LAYOUT_TYPES: Final = {128: 1, 64: 2, 32: 3}
STEP_UNITS: Final = 2  # descriptor units of 16 bytes from one 32-byte step of K to the next


def make_descriptor(address: Int32, span: int) -> Int64:
    """Return the descriptor of a K-major B tile whose rows are one swizzle span of bytes long.

    Groups of 8 rows follow one another (PTX ISA, matrix descriptor: stride byte offset); `address`
    is a multiple of 8 * span.
    """
    constant = (1 << 16) | ((8 * span >> 4) << 32) | (_LAYOUT_TYPES[span] << 62)
    return (Int64(address) >> 4) + Int64(constant if constant < 1 << 63 else constant - (1 << 64))


def fence_products(words: Any) -> None:
    """Order all writes of the registers in `words`, a tensor, before the products that follow."""
    update_by_ptx("wgmma.fence.sync.aligned;", words)


def commit_products() -> None:
    """Make all products since the last commit one group."""
    emit_memory_ptx("wgmma.commit_group.sync.aligned;", (), ())


def wait_for_products(pending: int, values: Any) -> None:
    """Wait until at most `pending` groups are in flight.

    `values`, a tensor of registers, is not read or overwritten before.
    """
    update_by_ptx(f"wgmma.wait_group.sync.aligned {pending};", values)


def multiply_from_registers(
    accumulator: Any, a: tuple[Uint32, ...], descriptor: Int64, accumulate: Int32, kind: str
) -> None:
    """Issue accumulator = a * b (+ accumulator where `accumulate` is not 0), 32 bytes of K.

    Args:
        accumulator: float32, for integers int32, [columns / 2] in registers.
        a: four words, complete before the last `fence_products`.
        descriptor: of B's 32 bytes.
        accumulate: 0 or 1.
        kind: of KINDS.
    """
    size = cute.size(accumulator)
    columns, types, immediates = KINDS[kind]
    values = ", ".join(f"${index}" for index in range(size))
    first = 2 * size  # results, then the same registers as operands
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${first + 5}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * size}k{columns}.{types} {{{values}}}, "
        f"{{${first}, ${first + 1}, ${first + 2}, ${first + 3}}}, ${first + 4}, p{immediates}; }}"
    )
    update_by_ptx(text, accumulator, (*a, descriptor, accumulate))


def multiply_from_shared(accumulator: Any, a: Int64, b: Int64, kind: str) -> None:
    """Issue accumulator += a * b, 32 bytes of K, both operands K-major in shared memory.

    Args:
        accumulator: float32 [columns / 2] in registers.
        a, b: descriptors of 32 bytes of K of 64 rows of A, and of B.
        kind: "float16" or "bfloat16".
    """
    size = cute.size(accumulator)
    columns, types, _ = KINDS[kind]
    values = ", ".join(f"${index}" for index in range(size))
    text = (
        f"wgmma.mma_async.sync.aligned.m64n{2 * size}k{columns}.{types} {{{values}}}, "
        f"${2 * size}, ${2 * size + 1}, 1, 1, 1, 0, 0;"
    )
    update_by_ptx(text, accumulator, (a, b))


def count_accumulators(tokens: int) -> int:
    """Return the registers of a thread that hold a [64, tokens] accumulator."""
    return tokens // 2


def make_accumulator(tokens: int) -> Any:
    """Return registers for a [64, tokens] accumulator."""
    return cute.make_rmem_tensor((count_accumulators(tokens),), Float32)
