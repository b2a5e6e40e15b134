"""Instruction descriptors of block-scaled tcgen05.mma, of which some bits are known.

Bits: PTX ISA, "Instruction descriptor" (table for .kind::mxf8f6f4, mxf4 and mxf4nvf4), the same as
CUTLASS cute/arch/mma_sm100_desc.hpp, InstrDescriptorBlockScaled.
"""

from dataclasses import dataclass

from halfbyte.checks.known_bits import KnownBits

SCALE_TYPE_BIT = 23
_SCALE_DTYPES = {0: "e4m3", 1: "e8m0"}
_PACKED_ELEMENTS = {1: "e2m1"}  # kind::mxf4, kind::mxf4nvf4
_MIXED_ELEMENTS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}  # kind::mxf8f6f4
_DEPTHS = {"mxf4": (64, 96), "mxf4nvf4": (64, 96), "mxf8f6f4": (32, 32)}  # by bit 31
# Scale factors per row and instruction step of K where the opcode says `scale_vec::NX`.
_SCALE_VECTORS = {"scale_vec::1X": 32, "scale_vec::2X": 32, "scale_vec::4X": 16}
_BLOCKS = {"block16": 16, "block32": 32, **_SCALE_VECTORS}
_DEFAULT_BLOCKS = {"mxf4": 32, "mxf8f6f4": 32}


@dataclass(frozen=True, slots=True)
class ScaledMmaForm:
    """What opcode and descriptor say; None for what cannot be traced.

    Attributes:
        kind: "mxf4nvf4", "mxf4" or "mxf8f6f4", of the opcode.
        num_ctas: 1 or 2, of the opcode.
        block: elements along K that share a scale, of the opcode.
        scale_dtype: "e4m3" (UE4M3) or "e8m0" (UE8M0), descriptor bit 23.
        elements: of A and of B.
        shape: M, N and K of one instruction; M counts the rows of both CTAs of a pair.
    """

    kind: str
    num_ctas: int
    block: int
    scale_dtype: str | None
    elements: tuple[str | None, str | None]
    shape: tuple[int | None, int | None, int | None]


def read_scaled_form(opcode: str, descriptor: KnownBits) -> ScaledMmaForm:
    """Return what a `tcgen05.mma...block_scale` opcode and its instruction descriptor say."""
    words = opcode.split(".")
    kind = next(w.removeprefix("kind::") for w in words if w.startswith("kind::"))
    block = next((_BLOCKS[word] for word in words if word in _BLOCKS), _DEFAULT_BLOCKS.get(kind, 0))
    is_mixed = kind == "mxf8f6f4"
    elements = _MIXED_ELEMENTS if is_mixed else _PACKED_ELEMENTS
    depth = descriptor.read_field(31, 1)
    return ScaledMmaForm(
        kind=kind,
        num_ctas=2 if "cta_group::2" in words else 1,
        block=block,
        scale_dtype=_name(_SCALE_DTYPES, descriptor.read_field(SCALE_TYPE_BIT, 1)),
        elements=(
            _name(elements, descriptor.read_field(7, 3)),
            _name(elements, descriptor.read_field(10, 3 if is_mixed else 2)),
        ),
        shape=(
            _scale(descriptor.read_field(27, 2), 128),
            _scale(descriptor.read_field(17, 6), 8),
            None if depth is None else _DEPTHS[kind][depth],
        ),
    )


def _name(names: dict[int, str], number: int | None) -> str | None:
    return None if number is None else names.get(number, f"code {number}")


def _scale(number: int | None, unit: int) -> int | None:
    return None if number is None else number * unit
