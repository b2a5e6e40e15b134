"""Block scales from shared to tensor memory, where a scaled MMA reads them.

A slot holds tiles of 128 rows x 4 scales (512 bytes). `tcgen05.cp.32x128b.warpx4` puts one into
four columns of 32-bit words: row r in lane r % 32, column r / 32, byte k; all four quarters of the
lanes get a copy (PTX ISA, scale factor layouts). Copies and MMAs of one thread run in order.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass.cute.nvgpu import tcgen05

from halfbyte.device.traced_record import TracedRecord


@dataclass(frozen=True)
class ScaleCopy(TracedRecord):
    """The copy of one operand's block scales.

    Attributes:
        copy_atom: tiled copy.
        source: shared memory descriptors, (..., slot).
        target: compact tensor memory.
        fragment: the same tensor memory as the MMA reads it.
    """

    copy_atom: Any
    source: Any
    target: Any
    fragment: Any

    def run(self, slot: Any) -> None:
        """Copy the scales of a slot."""
        cute.copy(self.copy_atom, self.source[(None, None, None, None, slot)], self.target)


@dataclass(frozen=True)
class ScaleOperands:
    """What describes the scales of an MMA.

    Attributes:
        mma: the scaled MMA.
        tiler: (m, n, k) of a block.
        block_size: codes per scale.
        element: type of a scale.
        group: tcgen05's CTA group.
    """

    mma: Any
    tiler: tuple[int, int, int]
    block_size: int
    element: Any
    group: Any


def make_scale_copies(
    scales: ScaleOperands, slots: tuple[Any, Any], columns: tuple[Any, Any]
) -> tuple[ScaleCopy, ScaleCopy]:
    """Return the copies of A's and B's scales.

    Args:
        scales: what they are.
        slots: shared memory of (A, B), (MMA, rows, K, slot).
        columns: tensor memory pointers of (A, B).
    """
    makers = (blockscaled.make_tmem_layout_sfa, blockscaled.make_tmem_layout_sfb)
    copies = []
    for make, source, column in zip(makers, slots, columns, strict=True):
        one_slot = cute.slice_(source.layout, (None, None, None, 0))
        layout = make(scales.mma, scales.tiler, scales.block_size, one_slot)
        fragment = cute.make_tensor(cute.recast_ptr(column, dtype=scales.element), layout)
        copies.append(_make_copy(scales, source, fragment))
    return copies[0], copies[1]


def _make_copy(scales: ScaleOperands, source: Any, fragment: Any) -> ScaleCopy:
    compact_source, compact_target = cute.filter_zeros(source), cute.filter_zeros(fragment)
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(scales.group), scales.element)
    copy_atom = tcgen05.make_s2t_copy(atom, compact_target)
    thread = copy_atom.get_slice(0)
    descriptors = tcgen05.get_s2t_smem_desc_tensor(copy_atom, thread.partition_S(compact_source))
    return ScaleCopy(copy_atom, descriptors, thread.partition_D(compact_target), fragment)
