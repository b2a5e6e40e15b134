"""What one thread holds of a block of x: sixteen neighbouring columns of two rows, in registers.

Thread i = 32 * warp + 4 * g + t of a warpgroup has rows 16 * warp + g and eight further on, of each
64 columns those from 16 * t on: eight words a row, two 16-bit numbers each. Words 2j and 2j + 1 of
both rows are the A operand of step j of the product (`placement.arrange_lora_down`).

Four lanes t hold a row's 64 columns in order; act wants word p of all four beside each other
(kernels/gemm_w4_wgmma/weight_layout.py). `transpose_words` exchanges them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import cvt_f32_bf16x2, cvt_f32_f16x2
from halfbyte.device.memory_access import ld_shared_v4, ld_shared_v4_f32, st_global_v4
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_wgmma.config import BLOCK_K

WIDTH = 16  # columns of a thread in a block
WORDS = 8  # of a row
ROW_STEP = 8  # from the first row of a thread to the second
ROW_BYTES = 128  # of a row of a block in shared memory


@dataclass(frozen=True)
class FragmentPlace(TracedRecord):
    """Where a thread of a consumer warpgroup stands.

    Attributes:
        warp: of the warpgroup, 0 to 3.
        group: g, 0 to 7.
        quad: t, 0 to 3.
    """

    warp: Int32
    group: Int32
    quad: Int32

    @property
    def row(self) -> Int32:
        """The thread's first row of the tile."""
        return self.warp * 16 + self.group


def make_fragment_place(thread: Int32) -> FragmentPlace:
    """Return the place of thread 0 to 127 of a warpgroup."""
    lane = thread % 32
    return FragmentPlace(cute.arch.make_warp_uniform(thread // 32), lane // 4, lane % 4)


@cute.jit
def read_rows(words: Any, slot: Int32, place: FragmentPlace) -> None:
    """Load a block's words of both rows, Uint32 [2 * WORDS], from the slot at a shared address.

    Rows are swizzled as TMA and `wgmma` have it: piece c of 16 bytes of row r lies at c ^ (r % 8).
    """
    for half in cutlass.range_constexpr(2):
        row = slot + (place.row + half * ROW_STEP) * ROW_BYTES
        for piece in cutlass.range_constexpr(2):
            place_of_piece = (2 * place.quad + piece) ^ place.group  # g is the row modulo 8
            loaded = ld_shared_v4(row + place_of_piece * 16)
            for index in cutlass.range_constexpr(4):
                words[half * WORDS + piece * 4 + index] = loaded[index]


def read_factors(smooth: Int32, block: Any, quad: Int32) -> list[Any]:
    """Return the float32 factors of a thread's columns of a block, from shared memory."""
    address = smooth + block * (BLOCK_K * 4) + quad * (WIDTH * 4)
    return [value for four in range(4) for value in ld_shared_v4_f32(address + 16 * four)]


def unpack_row(words: Any, half: int, dtype: str) -> list[Any]:
    """Return the sixteen float32 values of one of the two rows."""
    convert = cvt_f32_f16x2 if dtype == "float16" else cvt_f32_bf16x2
    return [value for index in range(WORDS) for value in convert(words[half * WORDS + index])]


def transpose_words(words: list[Any], quad: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Return word `t` of each of four neighbouring lanes, in their order.

    Args:
        words: four.
        quad: t of this lane; all lanes of the warp take part.
    """
    moved = list(words)
    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        is_upper = (quad & bit) != 0
        for low, high in pairs:
            sent = cutlass.select_(is_upper, moved[low], moved[high])
            received = Uint32(cute.arch.shuffle_sync_bfly(sent, bit))
            moved[low] = cutlass.select_(is_upper, received, moved[low])
            moved[high] = cutlass.select_(is_upper, moved[high], received)
    return Uint32(moved[0]), Uint32(moved[1]), Uint32(moved[2]), Uint32(moved[3])


@dataclass(frozen=True)
class ActOutput(TracedRecord):
    """Where act [M, K_pad] goes.

    Attributes:
        address: of this thread's first 16 bytes in row 0 of the team and in the CTA's slice.
        pitch: bytes from one row to the next.
        blocks: blocks of 64 columns of this CTA that act has; at most those it computes.
    """

    address: Int64
    pitch: Int64
    blocks: Int32


@cute.jit
def store_words(
    output: ActOutput, row: Int32, offset: Int32, words: list[Any], is_stored: cutlass.Boolean
) -> None:
    """Store 16 bytes of a row, `offset` bytes behind the thread's first ones."""
    if is_stored:
        st_global_v4(
            output.address + Int64(row) * output.pitch + Int64(offset),
            (words[0], words[1], words[2], words[3]),
        )
