"""Instructions on packed 32-bit words: four bytes, or two float16; named after PTX's."""

from typing import Any

from cutlass import Uint32

from halfbyte.device.inline_ptx import emit_ptx


def prmt_b32(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Return four of the eight bytes (low, high); digit i of the selector names byte i.

    A digit of 8 or more replicates the sign of its byte.
    """
    return emit_ptx("prmt.b32 $0, $1, $2, $3;", (Uint32,), (low, high, selector))


def mul_rn_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """Return two float16 products, rounded to nearest even; subnormals count."""
    return emit_ptx("mul.rn.f16x2 $0, $1, $2;", (Uint32,), (a, b))


def pack_low_bytes(words: list[Any]) -> Uint32:
    """Return the lowest bytes of four words in one, the first in the lowest place."""
    low = prmt_b32(words[0], words[1], Uint32(0x0040))
    high = prmt_b32(words[2], words[3], Uint32(0x0040))
    return prmt_b32(low, high, Uint32(0x5410))
