"""Block-scaled number formats as frozen records; adding a format is adding data.

Invariant: a format is always passed by name or record, never inferred from a tensor's dtype
(an E4M3 payload and an E8M0 scale are both one byte).
"""

from dataclasses import dataclass
from typing import Literal

from halfbyte.errors import FormatError

ElementName = Literal["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int4", "uint4"]
ScaleName = Literal["e4m3", "e8m0", "float"]


@dataclass(frozen=True)
class BlockFormat:
    """How a row of numbers is stored: elements, block length and scale levels.

    Attributes:
        name: the name used in files, on the command line and in every record.
        element: the element codec (`formats.elements`).
        element_bits: bits of one stored element: 4, 6 or 8.
        block_size: elements along K that share one block scale.
        scale: what a block scale is: one E4M3 byte, one E8M0 byte, or a 16/32-bit float.
        has_global_scale: a float32 multiplier for the whole tensor exists beside block scales.
        has_signed_scale: a block scale may be negative.
    """

    name: str
    element: ElementName
    element_bits: int
    block_size: int
    scale: ScaleName
    has_global_scale: bool
    has_signed_scale: bool = False

    def padded_columns(self, columns: int) -> int:
        """Return `columns` rounded up to whole blocks; the tail is stored as zeros."""
        return -(-columns // self.block_size) * self.block_size

    def row_bytes(self, columns: int) -> int:
        """Return the packed bytes of one row of `columns` logical elements."""
        return self.padded_columns(columns) * self.element_bits // 8

    def num_blocks(self, columns: int) -> int:
        """Return the number of block scales of one row."""
        return self.padded_columns(columns) // self.block_size


# Block lengths and scale types: NVFP4 is E2M1 with one E4M3 scale per 16 (PTX ISA, mxf4nvf4
# .scale_vec::4X); MX formats are E8M0 per 32 (OCP MX v1.0, table 1); INT4 group 64 is SVDQuant's,
# INT4 block 32 with a scale of either sign is ggml's Q4_0 and Q4_1 (their largest number is -8 d).
_FORMATS = (
    BlockFormat("nvfp4", "e2m1", 4, 16, "e4m3", True),
    BlockFormat("nvfp4_one_level", "e2m1", 4, 16, "e4m3", False),
    BlockFormat("mxfp4", "e2m1", 4, 32, "e8m0", False),
    BlockFormat("mxfp6_e2m3", "e2m3", 6, 32, "e8m0", False),
    BlockFormat("mxfp6_e3m2", "e3m2", 6, 32, "e8m0", False),
    BlockFormat("mxfp8_e4m3", "e4m3", 8, 32, "e8m0", False),
    BlockFormat("mxfp8_e5m2", "e5m2", 8, 32, "e8m0", False),
    BlockFormat("int4", "int4", 4, 64, "float", False),
    BlockFormat("uint4", "uint4", 4, 64, "float", False),
    BlockFormat("int4_block32", "int4", 4, 32, "float", False, has_signed_scale=True),
    BlockFormat("uint4_block32", "uint4", 4, 32, "float", False, has_signed_scale=True),
)
FORMATS: dict[str, BlockFormat] = {record.name: record for record in _FORMATS}


def get_format(name: str) -> BlockFormat:
    """Return the format called `name`; FormatError lists the known names."""
    try:
        return FORMATS[name]
    except (KeyError, TypeError):  # TypeError: a list, say, cannot be a key
        known = ", ".join(FORMATS)
        raise FormatError(f"format {name!r} is unknown; use one of: {known}") from None
