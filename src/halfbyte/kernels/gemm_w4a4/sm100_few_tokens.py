"""The epilogue of swapped tiles: 128 output features by at most 64 tokens.

The accumulator holds y transposed: a thread's row is one output feature, its columns are tokens. So
a thread needs one column scale and one bias a tile, and 32 lanes store 32 neighbouring features of
a token: 64 bytes at once, for any N, without staging. With split K the cluster's CTAs first add up
their partial sums (`device.cluster_sum`), each for its share of the tokens, and each stores those.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from halfbyte.device.accumulator_pair import AccumulatorPair, load_columns, wait_for_columns
from halfbyte.device.cluster_sum import ClusterSum
from halfbyte.device.epilogue_values import VectorTensors, apply_activation
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.gemm_w4a4.config import ROWS_PER_CTA, GemmConfig
from halfbyte.kernels.gemm_w4a4.work import Work


class FeatureFactors(NamedTuple):
    """What one output feature is multiplied with and what is added; None for 1 and 0."""

    scale: Any
    bias: Any


class FewTokensEpilogue(TracedRecord):
    """The four epilogue warps of a swapped tile: from accumulator to output."""

    def __init__(
        self,
        config: GemmConfig,
        work: Work,
        accumulators: AccumulatorPair,
        vectors: VectorTensors,
        output: Any,
        cluster_sum: ClusterSum | None,
    ) -> None:
        """Keep what a tile's epilogue needs.

        Args:
            config: of the kernel.
            work: of this CTA.
            accumulators: float32, rows are features and columns tokens.
            vectors: factors in global memory.
            output: y [M, N] in global memory.
            cluster_sum: None where one CTA has all of K.
        """
        self.config = config
        self.work = work
        self.accumulators = accumulators
        self.vectors = vectors
        self.output = output
        self.cluster_sum = cluster_sum

    @cute.jit
    def epilogue_role(self) -> None:
        """Store every tile."""
        work, num_tokens = self.work, self.config.tile.n // self.config.tile.num_splits
        thread = cute.arch.thread_idx()[0]
        accumulator = RingPosition.consumer(self.accumulators.stages)
        sent, received = RingPosition.producer(1), RingPosition.consumer(1)
        tile = work.scheduler.start()
        while tile.is_valid:
            feature = tile.place[0] * ROWS_PER_CTA + thread
            factors = self.load_factors(feature)  # on their way while the products are made
            work.rings.accumulators.wait_full(accumulator)
            total = self.take_accumulator(accumulator, thread)
            first_token = Int32(0)
            if cutlass.const_expr(self.cluster_sum is not None):
                if work.k.is_empty:
                    total.fill(0.0)  # without a block nobody wrote the accumulator
                self.cluster_sum.send(total, sent, work.rank, thread)
                total = self.cluster_sum.add_up(received, thread)
                first_token = work.rank * num_tokens
            self.store(self.apply(total, factors), first_token, feature)
            if cutlass.const_expr(self.cluster_sum is not None):
                self.cluster_sum.release(received)
            sent, received = sent.next(), received.next()
            accumulator = accumulator.next()
            tile = tile.next()

    @cute.jit
    def load_factors(self, feature: Int32) -> FeatureFactors:
        """Return the factors of a feature; those beyond N are not stored and get zeros."""
        vectors = self.vectors
        scale = bias = None
        is_inside = feature < self.output.shape[1]
        if cutlass.const_expr(vectors.scale is not None):
            scale = Float32(0.0)
            if is_inside:
                scale = vectors.scale[feature]
        if cutlass.const_expr(vectors.alpha is not None):
            alpha = vectors.alpha[0]
            scale = alpha if cutlass.const_expr(scale is None) else alpha * scale
        if cutlass.const_expr(vectors.bias is not None):
            bias = Float32(0.0)
            if is_inside:
                bias = vectors.bias[feature]
        return FeatureFactors(scale, bias)

    @cute.jit
    def take_accumulator(self, position: RingPosition, thread: Int32) -> Any:
        """Return this thread's row of the accumulator, float32 [n], and give the buffer back."""
        tensor = self.accumulators.tensor(self.accumulators.read_by(position))
        tokens = self.config.tile.n
        row = cute.make_tensor(
            load_columns(tensor, Int32(0), tokens, thread).iterator, cute.make_layout(tokens)
        )
        wait_for_columns()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.work.rings.accumulators.empty(position))
        return row

    def apply(self, total: Any, factors: FeatureFactors) -> Any:
        """Return total * scale + bias and the activation of it, in the output's dtype."""
        values = total.load()
        if factors.scale is not None:
            values = values * factors.scale
        if factors.bias is not None:
            values = values + factors.bias
        values = apply_activation(values, self.config.epilogue.activation)
        row = cute.make_rmem_tensor(total.shape, self.output.element_type)
        row.store(values.to(self.output.element_type))
        return row

    @cute.jit
    def store(self, row: Any, first_token: Int32, feature: Int32) -> None:
        """Store one feature of the tokens from `first_token` on, as far as there are any."""
        num_tokens, num_features = self.output.shape
        if feature < num_features:
            for index in cutlass.range(cute.size(row), unroll_full=True):
                token = first_token + index
                if token < num_tokens:
                    self.output[token, feature] = row[index]
