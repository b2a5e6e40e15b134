"""The two tensor-core products of the linear and their layouts: scaled 4-bit, and low rank.

Both accumulate into the same tensor memory. They may, because an accumulator's layout depends on
the shape of the MMA and the number of CTAs alone, not on the operands' types; that is checked when
the kernel is traced (`check_same_accumulator`).
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import BFloat16, Boolean, Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from halfbyte.errors import FormatError

# Block format -> (element type of its scales, codes per scale).
SCALE_TYPES = {"nvfp4": (Float8E4M3FN, 16), "mxfp4": (Float8E8M0FNU, 32)}
FLOAT_TYPES = {"float16": Float16, "bfloat16": BFloat16}

K_MAJOR = OperandMajorMode.K


@dataclass(frozen=True)
class MmaShape:
    """What an MMA is made for.

    Attributes:
        m, n: of the MMA.
        num_ctas: 1 or 2.
    """

    m: int
    n: int
    num_ctas: int

    @property
    def group(self) -> Any:
        """tcgen05's CTA group."""
        return tcgen05.CtaGroup.TWO if self.num_ctas == 2 else tcgen05.CtaGroup.ONE


def make_scaled_mma(shape: MmaShape, block_format: str) -> Any:
    """Return the block-scaled E2M1 MMA: kind mxf4nvf4 with 16 codes a scale, mxf4 with 32."""
    scale_type, block_size = SCALE_TYPES[block_format]
    return sm100.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN,
        Float4E2M1FN,
        K_MAJOR,
        K_MAJOR,
        scale_type,
        block_size,
        shape.group,
        (shape.m, shape.n),
    )


def make_low_rank_mma(shape: MmaShape, dtype: str) -> Any:
    """Return the fp16 or bf16 MMA of the low-rank branch, kind f16, float32 accumulator."""
    element = FLOAT_TYPES[dtype]
    return sm100.make_trivial_tiled_mma(
        element, element, K_MAJOR, K_MAJOR, Float32, shape.group, (shape.m, shape.n)
    )


def check_same_accumulator(scaled_mma: Any, low_rank_mma: Any, tile: tuple[int, int]) -> None:
    """Raise FormatError unless both MMAs put element (m, n) into the same tensor memory cell."""
    scaled, low_rank = (
        str(mma.make_fragment_C(mma.partition_shape_C(tile)).layout)
        for mma in (scaled_mma, low_rank_mma)
    )
    if scaled != low_rank:
        raise FormatError(
            f"accumulators of tile {tile} differ: scaled {scaled}, low rank {low_rank}; one "
            "accumulator cannot hold both products"
        )


def multiply_scaled(mma: Any, accumulator: Any, a: Any, b: Any, accumulate: Boolean) -> None:
    """Issue accumulator = a * b (+ accumulator) for all K steps of one block.

    Args:
        mma: a scaled MMA.
        accumulator: in tensor memory.
        a: (descriptors, block scales in tensor memory); b likewise.
        accumulate: false for the first block of a tile. A value of the run, set here for each
            block: a flag that is decided while tracing would hold for every block.
    """
    mma.set(tcgen05.Field.ACCUMULATE, accumulate)
    cute.gemm(mma, accumulator, list(a), list(b), accumulator)


def add_low_rank(mma: Any, accumulator: Any, a: Any, b: Any) -> None:
    """Issue accumulator += a * b for all K steps of one low-rank chunk."""
    mma.set(tcgen05.Field.ACCUMULATE, True)
    cute.gemm(mma, accumulator, a, b, accumulator)


def make_operand_layouts(mma: Any, tiler: tuple[int, int, int], element: Any) -> tuple[Any, Any]:
    """Return the shared memory layouts of one slot of A and B, K-major and swizzled."""
    return (
        sm100.make_smem_layout_a(mma, tiler, element, 1),
        sm100.make_smem_layout_b(mma, tiler, element, 1),
    )


def make_scale_layouts(
    mma: Any, tiler: tuple[int, int, int], block_size: int, stages: int
) -> tuple[Any, Any]:
    """Return the shared memory layouts of A's and B's block scales, with a slot mode."""
    return (
        blockscaled.make_smem_layout_sfa(mma, tiler, block_size, stages),
        blockscaled.make_smem_layout_sfb(mma, tiler, block_size, stages),
    )


def with_slots(layout: Any, stages: int, slot_elements: int) -> Any:
    """Return a one-slot layout (..., 1) as `stages` slots that are `slot_elements` apart."""
    outer = cute.slice_(layout.outer, (None, None, None, 0))
    return cute.append(outer, cute.make_layout(stages, stride=slot_elements))
