"""The warp's matrix instructions that every GPU from sm_80 on has: `ldmatrix` and `mma.sync`.

m16n8k16 fragments (PTX ISA, mma.m16n8k16): lane l holds of A rows l/4 and l/4 + 8, of B column l/4,
of C rows l/4 and l/4 + 8 with columns 2 * (l % 4) and the next.
"""

from cutlass import Float32, Int32, Uint32

from halfbyte.device.inline_ptx import emit_memory_ptx, emit_ptx

Fragment = tuple[Uint32, Uint32, Uint32, Uint32]
Accumulator = tuple[Float32, Float32, Float32, Float32]

MMA_M, MMA_N, MMA_K = 16, 8, 16

_PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def ldmatrix_x4(address: Int32) -> Fragment:
    """Return four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i+7 give the rows of matrix i."""
    fragment: Fragment = emit_memory_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        (Uint32,) * 4,
        (address,),
    )
    return fragment


def movmatrix_trans(word: Uint32) -> Uint32:
    """Return the transpose of an 8 x 8 matrix of 16-bit elements, two of them in each lane.

    Lane l gives columns 2 * (l % 4) and the next of row l / 4, and gets those of the transpose.
    """
    return emit_ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", (Uint32,), (word,))


def mma_m16n8k16(a: Fragment, b: tuple[Uint32, Uint32], c: Accumulator, dtype: str) -> Accumulator:
    """Return a [16, 16] @ b [16, 8] + c in float32; `dtype` of a and b: float16 or bfloat16."""
    ptx_type = _PTX_TYPES[dtype]
    result: Accumulator = emit_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{ptx_type}.{ptx_type}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        (Float32,) * 4,
        (*a, *b, *c),
    )
    return result


def stmatrix_x4_trans(address: Int32, fragment: Fragment) -> None:
    """Store four transposed 8 x 8 matrices of 16 bits; lanes 8i to 8i+7 give the rows of matrix i.

    Row r of a stored matrix is column r of the fragment's, 16 bytes.
    """
    emit_memory_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
        (),
        (address, *fragment),
    )


def stmatrix_x2_trans(address: Int32, fragment: tuple[Uint32, Uint32]) -> None:
    """Store two transposed 8 x 8 matrices of 16 bits; lanes 0 to 15 give their rows."""
    emit_memory_ptx(
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1, $2};", (), (address, *fragment)
    )
