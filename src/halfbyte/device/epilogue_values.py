"""From an accumulator row to output values: per-column factors, bias, activation."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from halfbyte.device.traced_record import TracedRecord

# Order of the staged vectors; the first three are those of VectorTensors.
SCALE, BIAS, SMOOTH, RECIPROCAL = range(4)


class VectorTensors(NamedTuple):
    """Factors in global memory, float32; None where the kernel has none.

    Attributes:
        scale, bias, smooth: [N]. alpha: [1].
    """

    scale: Any
    bias: Any
    smooth: Any
    alpha: Any


@dataclass(frozen=True)
class ColumnVectors(TracedRecord):
    """Per-column factors: where they come from, and the part of this tile in shared memory.

    Attributes:
        tensors: in global memory.
        staged: (n, 3 or 4) float32 in shared memory: scale (times alpha), bias, smooth, and what
            `invert` makes of smooth.
        num_columns: N.
        invert: function of a factor of smooth; None without smooth.
    """

    tensors: VectorTensors
    staged: Any
    num_columns: Int32
    invert: Any = None

    @cute.jit
    def stage(self, first: Int32, thread: Int32, threads: cutlass.Constexpr) -> None:
        """Copy the factors of columns from `first` on to shared memory; `threads` threads call it.

        Columns beyond N get factors 0, bias 0 and smooth 1: what the padding of an output holds
        must not depend on memory behind the vectors, and 0 / 0 would be NaN.
        """
        width = self.staged.shape[0]
        for start in cutlass.range_constexpr(0, width, threads):
            column = start + thread
            if column < width:
                inside = first + column < self.num_columns
                for index, vector in enumerate(self.tensors[:3]):
                    if cutlass.const_expr(vector is not None):
                        value = Float32(1.0 if index == SMOOTH else 0.0)
                        if inside:
                            value = vector[first + column]
                        self.staged[column, index] = value
                        if cutlass.const_expr(index == SMOOTH):
                            self.staged[column, RECIPROCAL] = self.invert(value)
                if cutlass.const_expr(self.tensors.alpha is not None):
                    scale = self.tensors.alpha[0]
                    if cutlass.const_expr(self.tensors.scale is not None):
                        scale = scale * self.staged[column, SCALE]
                    self.staged[column, SCALE] = scale

    def row(self, index: int, column: Int32, columns: int) -> Any:
        """Return factors `index` of `columns` columns from `column` of the tile on, as a vector."""
        tiles = cute.flat_divide(self.staged[(None, index)], (columns,))
        return tiles[(None, column // columns)].load()

    def apply(self, values: Any, column: Int32, columns: int) -> Any:
        """Return values * scale * alpha + bias for one row's `columns` columns."""
        if self.tensors.scale is not None or self.tensors.alpha is not None:
            values = values * self.row(SCALE, column, columns)
        if self.tensors.bias is not None:
            values = values + self.row(BIAS, column, columns)
        return values


def apply_activation(values: Any, name: str) -> Any:
    """Return the activation of a float32 vector; formulas as in torch.nn.functional."""
    if name == "gelu":
        return values * 0.5 * (cute.math.erf(values * 0.7071067811865476) + 1.0)
    if name == "gelu_tanh":
        inner = (values + values * values * values * 0.044715) * 0.7978845608028654
        return values * 0.5 * (cute.math.tanh(inner) + 1.0)
    if name == "silu":
        return values / (cute.math.exp(-values) + 1.0)
    return values
