"""Loading MMA operands from global to shared memory: TMA descriptors, and copies of one block.

An operand is made once on the host side of a launch (`TmaOperand`: descriptor and coordinates), and
partitioned once per warp (`BlockLoad`: where each block comes from and which slot it goes to).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from halfbyte.device.traced_record import TracedRecord


class TmaOperand(NamedTuple):
    """A TMA descriptor with the tensor of its coordinates; both are kernel parameters.

    Attributes:
        atom: the copy atom that holds the descriptor.
        tensor: coordinates of the operand in global memory, [rows, K].
    """

    atom: Any
    tensor: Any


@dataclass(frozen=True)
class BlockLoad(TracedRecord):
    """One operand as the load warp sees it.

    Attributes:
        atom: the copy atom.
        source: ((TMA box), tile row, block of K) in global memory.
        target: ((TMA box), slot) in shared memory.
        multicast: mask of CTAs that receive the box, None for this one.
    """

    atom: Any
    source: Any
    target: Any
    multicast: Any = None

    def copy(self, row: Any, block: Any, slot: Any, barrier: Any) -> None:
        """Start the load of block (row, block) into `slot`; `barrier` counts its bytes."""
        cute.copy(
            self.atom,
            self.source[(None, row, block)],
            self.target[(None, slot)],
            tma_bar_ptr=barrier,
            mcast_mask=self.multicast,
        )


def partition_block_load(
    operand: TmaOperand, source: Any, target: Any, place: int | Any, layout: Any
) -> BlockLoad:
    """Return the loads of an operand.

    Args:
        operand: descriptor and coordinates.
        source: (MMA, rows, K, tile row, block of K), this CTA's part of the coordinates.
        target: (MMA, rows, K, slot) in shared memory.
        place: this CTA's place among those that share the box by multicast.
        layout: their layout; `cute.make_layout(1)` for none.
    """
    target_boxes, source_boxes = cpasync.tma_partition(
        operand.atom, place, layout, cute.group_modes(target, 0, 3), cute.group_modes(source, 0, 3)
    )
    # Block scales repeat over the codes of a block with stride 0: they are loaded once.
    return BlockLoad(operand.atom, cute.filter_zeros(source_boxes), cute.filter_zeros(target_boxes))


def make_code_tensor(codes: Any, element: Any) -> Any:
    """Return packed codes, uint8 [rows, bytes] with rows apart, as [rows, 2 * bytes] elements."""
    rows, num_bytes = codes.shape
    stride = cute.assume(codes.stride[0] * 2, 32)
    layout = cute.make_layout((rows, cute.assume(num_bytes * 2, 32)), stride=(stride, 1))
    return cute.make_tensor(cute.recast_ptr(codes.iterator, dtype=element), layout)


def make_scale_tensor(scales: Any, shape: Any, block_size: int, element: Any) -> Any:
    """Return swizzled block scales, flat uint8, as a tensor of `shape` (rows, codes).

    Layout: tiles of 128 rows x 4 scales, 512 bytes each, K fastest
    (`formats.scale_layout`, "swizzled_128x4"); element (row, k) is the scale of code k.
    """
    atom = cute.make_layout(((32, 4), (block_size, 4)), stride=((16, 4), (0, 1)))
    layout = cute.tile_to_shape(atom, shape, (2, 1))
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=element), layout)


def load_bytes(operands: tuple[tuple[Any, Any], ...]) -> int:
    """Return the bytes of one slot of each (element type, layout of one slot)."""
    return sum(cute.size_in_bytes(element, layout) for element, layout in operands)
