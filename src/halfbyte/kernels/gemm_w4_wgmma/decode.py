"""From packed 4-bit weights to operand registers.

A word holds eight codes of one row: the 3-bit magnitude indices of the first four in bits 4i of the
low half, of the next four in the high half; signs at bits 8i + 7 and 8i + 3. E2M1 magnitudes are
ordered 0, .5, 1, 2, 4, 1.5, 3, 6. So `prmt` takes four indices at once as its selector (its bit 3,
which would replicate a sign, masked away) and finds four bytes in a table of eight; one `lop3` adds
the four signs.

e4m3    The table holds E4M3(magnitude * scale). A scale's E4M3 code b is an exponent and a mantissa
        in one number, so that 8 more are twice the value: the codes of .5, 1, 2 and 4 times the
        scale are b - 8, b, b + 8 and b + 16. 1.5, 3 and 6 times are c, c + 8 and c + 16, with
        c = b + 4 + d; the packer has rounded, d is the top bit of the scale's byte. b >= 16. INT4's
        magnitudes are ordered 0, 1, 2, 4, 3, 6, 5, 7, and come with the codes of 1, 3, 5 and 7.
float16 The table holds the upper bytes of the magnitudes as float16, whose lower bytes are zeros; a
        packed product with the scale follows. q * s has six significant bits: it is exact.
"""

from typing import Any, Final

import cutlass.cute as cute
from cutlass import Int32, Uint32

from halfbyte.device.memory_access import ld_shared_b32, ld_shared_v4
from halfbyte.device.packed_words import mul_rn_f16x2, prmt_b32
from halfbyte.kernels.gemm_w4_wgmma.config import HALF_BYTES, WgmmaGemmConfig

STEP_WORDS: Final = 16  # operand registers of four instructions
INDEX_BITS: Final = 0x77777777
SIGN_BITS: Final = 0x80808080
# Upper bytes of 0, .5, 1, 2 and 4, 1.5, 3, 6 in float16.
FLOAT16_LOW: Final = 0x403C3800
FLOAT16_HIGH: Final = 0x46423E44
FLOAT16_256: Final = 0x5C005C00  # twice 256


class Decoder:
    """What one step of four instructions decodes: a block of 128 columns, or half of one."""

    columns: int
    num_words: int

    def load(self, words: Any, block: Int32, scales: Int32, thread: Int32, half: int) -> None:
        """Read a thread's packed weights of a step into registers.

        Args:
            words: Uint32 [num_words] in registers.
            block: shared address of the warpgroup's codes in this step.
            scales: shared address of the warpgroup's scales of the block.
            thread: of the warpgroup.
            half: which half of the block the step is, where it is one.
        """
        raise NotImplementedError

    def decode(self, words: Any, operand: Any, half: int) -> None:
        """Fill `operand`, Uint32 [16] in registers: word 4i + j is word j of instruction i's A."""
        raise NotImplementedError


class TableDecoder(Decoder):
    """Codes whose table holds E4M3, a whole block: one instruction takes 32 columns."""

    columns = 128

    def load_codes(self, words: Any, block: Int32, thread: Int32) -> None:
        """Read 16 bytes of each half into the first eight words."""
        for part in range(2):
            codes = ld_shared_v4(block + part * HALF_BYTES + thread * 16)
            for index in range(4):
                words[4 * part + index] = codes[index]

    def look_up_all(self, words: Any, operand: Any, tables: Any) -> None:
        """Decode 64 codes: rows g and g + 8 of both halves have a table each."""
        for part in range(2):
            for row in range(2):
                low, high = tables[2 * part + row]
                for pair in range(2):  # 32 columns
                    code = words[4 * part + 2 * row + pair]
                    first = 4 * (2 * part + pair) + row
                    operand[first], operand[first + 2] = look_up(code, low, high)


class E2m1TableDecoder(TableDecoder):
    """E2M1 codes with folded scales."""

    num_words = 9

    def load(self, words: Any, block: Int32, scales: Int32, thread: Int32, half: int) -> None:
        """Read the codes and the four scales."""
        self.load_codes(words, block, thread)
        words[8] = ld_shared_b32(scales + thread * 4)

    def decode(self, words: Any, operand: Any, half: int) -> None:
        """Make the tables and look all codes up."""
        scales = words[8]
        one = scales & Uint32(0x7F7F7F7F)
        rounded_up = (scales >> 7) & Uint32(0x01010101)
        three_halves = one + rounded_up + Uint32(0x04040404)
        tables = [self.make_table(one, three_halves, scale) for scale in range(4)]
        self.look_up_all(words, operand, tables)

    def make_table(self, one: Uint32, three_halves: Uint32, scale: int) -> tuple[Uint32, Uint32]:
        """Return E4M3 of the magnitudes times scale number `scale`, in the order of indices."""
        repeat = scale * 0x1110 + 4  # byte 4 is zero
        # Bytes 0, b - 8, b, b + 8: the sum's carries run from byte to byte.
        low = prmt_b32(one, Uint32(0), Uint32(repeat)) + Uint32(0x07FFF800)
        high = prmt_b32(one, three_halves, Uint32(scale * 0x1111 + 0x4440)) + Uint32(0x10080010)
        return low, high


class Int4TableDecoder(TableDecoder):
    """INT4 codes with folded scales: the packer has rounded the odd magnitudes' products."""

    num_words = 12

    def load(self, words: Any, block: Int32, scales: Int32, thread: Int32, half: int) -> None:
        """Read the codes and four words, which rows g and g + 8 of four threads share."""
        self.load_codes(words, block, thread)
        odd = ld_shared_v4(scales + thread // 4 * 16)
        for index in range(4):
            words[8 + index] = odd[index]

    def decode(self, words: Any, operand: Any, half: int) -> None:
        """Make the tables and look all codes up."""
        self.look_up_all(words, operand, [self.make_table(words[8 + index]) for index in range(4)])

    def make_table(self, odd: Uint32) -> tuple[Uint32, Uint32]:
        """Return E4M3 of 0, 1, 2, 4 and 3, 6, 5, 7 times a scale from those of 1, 3, 5, 7."""
        low = prmt_b32(odd, Uint32(0), Uint32(0x0004)) + Uint32(0x10080000)
        high = prmt_b32(odd, Uint32(0), Uint32(0x3211)) + Uint32(0x00000800)
        return low, high


class Float16Decoder(Decoder):
    """E2M1 codes to float16, half a block: one instruction takes 16 columns."""

    columns = 64
    num_words = 5

    def load(self, words: Any, block: Int32, scales: Int32, thread: Int32, half: int) -> None:
        """Read 16 bytes of codes and the four scales of the block."""
        codes = ld_shared_v4(block + thread * 16)
        for index in range(4):
            words[index] = codes[index]
        words[4] = ld_shared_b32(scales + thread * 4)

    def decode(self, words: Any, operand: Any, half: int) -> None:
        """Decode 32 codes: rows g and g + 8."""
        scales = words[4] & Uint32(0x7F7F7F7F)
        for row in range(2):
            # E4M3's bits, seven places up, are a float16 2^8 too small.
            byte = 2 * half + row
            pair = prmt_b32(scales, Uint32(0), Uint32(byte * 0x1010 + 0x0404)) >> 1
            scale = mul_rn_f16x2(pair, Uint32(FLOAT16_256))
            for word in range(2):  # 8 columns of the thread: two instructions
                low, high = look_up(
                    words[2 * row + word], Uint32(FLOAT16_LOW), Uint32(FLOAT16_HIGH)
                )
                for index, four in enumerate((low, high)):
                    first = 4 * (2 * word + index) + row
                    for quad in range(2):
                        # Bytes (2 * quad, 2 * quad + 1) as upper bytes of two float16.
                        selector = Uint32(0x0404 + quad * 0x2020 + 0x1000)
                        value = prmt_b32(four, Uint32(0), selector)
                        operand[first + 2 * quad] = mul_rn_f16x2(value, scale)


def look_up(code: Uint32, low: Uint32, high: Uint32) -> tuple[Uint32, Uint32]:
    """Return the signed table bytes of the first and the last four codes of a word."""
    indices = code & Uint32(INDEX_BITS)
    first = prmt_b32(low, high, indices) | (code & Uint32(SIGN_BITS))
    last = prmt_b32(low, high, indices >> 16) | ((code << 4) & Uint32(SIGN_BITS))
    return first, last


def make_decoder(config: WgmmaGemmConfig) -> Decoder:
    """Return how a configuration's weights become operands."""
    if config.mode == "fp8":
        return E2m1TableDecoder() if config.weight == "e2m1" else Int4TableDecoder()
    return Float16Decoder()


def make_words(count: int) -> Any:
    """Return `count` 32-bit registers."""
    return cute.make_rmem_tensor((count,), Uint32)
