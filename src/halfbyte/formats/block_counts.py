"""How many blocks met the ends of their scale format while a tensor was quantized."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCounts:
    """Counts of one quantized tensor; they add up over tensors with `+`.

    Attributes:
        blocks: all blocks, the padded last one of a row included.
        saturated: blocks that wanted a scale beyond the largest one the format can store.
        flushed: blocks with a nonzero element whose scale rounded to zero: they became zeros.
        zero: blocks of zeros alone.
    """

    blocks: int = 0
    saturated: int = 0
    flushed: int = 0
    zero: int = 0

    def __add__(self, other: "BlockCounts") -> "BlockCounts":
        """Return the counts of both tensors together."""
        return BlockCounts(
            self.blocks + other.blocks,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            self.zero + other.zero,
        )
