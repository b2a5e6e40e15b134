"""Instructions on packed 32-bit words: four bytes, or two float16; named after PTX's."""

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
