"""Layouts of the accumulators of both products, as CuTe DSL writes them; nothing is compiled."""

from dataclasses import dataclass
from typing import Any

from halfbyte.runtime.cute_compiler import check_compiler


@dataclass(frozen=True)
class AccumulatorLayouts:
    """The accumulator of one MMA, in CuTe's notation.

    Attributes:
        product: "scaled" or "low rank".
        value_layout: (CTA, value) -> m + M * n.
        fragment_layout: value -> tensor memory address, columns of 32 bits, lanes from bit 16 on.
    """

    product: str
    value_layout: str
    fragment_layout: str


def read_accumulator_layouts(
    shape: tuple[int, int], num_ctas: int, target: str = "sm_100a"
) -> tuple[AccumulatorLayouts, AccumulatorLayouts]:
    """Return the layouts of the scaled MMA and of the low-rank MMA of M x N on 1 or 2 CTAs.

    Raises MissingDependencyError where CuTe DSL is not installed.
    """
    check_compiler()
    from cutlass import cute
    from cutlass.base_dsl import compiler
    from cutlass.cutlass_dsl import CuTeDSL

    from halfbyte.device.scaled_product import MmaShape, make_low_rank_mma, make_scaled_mma

    found: list[AccumulatorLayouts] = []

    def describe(product: str, mma: Any) -> None:
        fragment = mma.make_fragment_C(mma.partition_shape_C(shape))
        layouts = str(mma.tv_layout_C), str(fragment.layout)
        found.append(AccumulatorLayouts(product, *layouts))

    def describe_both() -> None:
        mma_shape = MmaShape(*shape, num_ctas)
        describe("scaled", make_scaled_mma(mma_shape, "nvfp4"))
        describe("low rank", make_low_rank_mma(mma_shape, "float16"))

    @cute.jit  # type: ignore[untyped-decorator,unused-ignore]
    def host() -> None:
        describe_both()

    environment = CuTeDSL._get_dsl().envar
    before = environment._arch  # `arch` itself would ask the driver
    environment.arch = target
    try:
        cute.compile[compiler.GPUArch(target)](host)
    finally:
        environment._arch = before
    return found[0], found[1]
