"""The epilogue of narrow tiles: from accumulator registers straight to y.

A tile of few tokens has little to store, and waits for staging buffers and their barriers longer
than for the stores: `movmatrix` turns 8 channels by 8 tokens around in registers, four lanes store
the 8 channels of a token. With split K the CTAs of a cluster first add up their partial sums
(`device.cluster_fragments`); each stores what it added up.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from halfbyte.device.cluster_fragments import FragmentSum
from halfbyte.device.float_arithmetic import cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32
from halfbyte.device.memory_access import st_global_b16, st_global_b32
from halfbyte.device.traced_record import TracedRecord
from halfbyte.device.warp_product import movmatrix_trans
from halfbyte.kernels.gemm_w4_wgmma.config import (
    CHANNELS,
    WARPGROUP_CHANNELS,
    WgmmaGemmConfig,
)
from halfbyte.kernels.gemm_w4_wgmma.epilogue import Factors
from halfbyte.kernels.gemm_w4_wgmma.work import Work

UNIT_TOKENS = 8


def count_units(config: WgmmaGemmConfig) -> int:
    """Return the pieces of 8 tokens of a warp's accumulator."""
    return config.tokens // UNIT_TOKENS


class NarrowFactors(NamedTuple):
    """A thread's factors of one narrow tile, in registers.

    Attributes:
        scales, biases: of channels g and g + 8 of the warp; biases are zeros without a bias.
        tokens: of each 8 tokens, scales of the thread's two; empty without.
    """

    scales: tuple[Float32, Float32]
    biases: tuple[Float32, Float32]
    tokens: tuple[Float32, ...]


@dataclass(frozen=True)
class FewTokensEpilogue(TracedRecord):
    """Stores the tiles of one consumer warpgroup.

    Attributes:
        config: of the kernel. work: of this CTA. factors: in global memory. y: [M, N] likewise.
        exchange: sums of the cluster, None where one CTA has all of K.
        turn: Int32 [1] in registers, tiles stored so far.
        warpgroup: 0 or 1. thread: of the warpgroup.
    """

    config: cutlass.Constexpr
    work: Work
    factors: Factors
    y: Any
    exchange: FragmentSum | None
    turn: Any
    warpgroup: Int32
    thread: Int32

    def first_channel(self, group: Int32) -> Int32:
        """Return the first channel of this warp in a tile."""
        within = self.warpgroup * WARPGROUP_CHANNELS + self.thread // 32 * 16
        return self.work.loaded_channel_tile(group) * CHANNELS + within

    @cute.jit
    def load_factors(self, token_tile: Int32, group: Int32) -> NarrowFactors:
        """Start reading a tile's factors; they arrive while it is multiplied."""
        factors, lane = self.factors, self.thread % 32
        channel = self.first_channel(group) + lane // 4
        scales = factors.channel_scale[channel], factors.channel_scale[channel + 8]
        if cutlass.const_expr(factors.alpha is not None):
            alpha = factors.alpha[0]
            scales = scales[0] * alpha, scales[1] * alpha
        biases = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(factors.bias is not None):
            biases = factors.bias[channel], factors.bias[channel + 8]
        tokens: tuple[Float32, ...] = ()
        if cutlass.const_expr(factors.token_scale is not None):
            first = token_tile * self.config.tokens + lane % 4 * 2
            for unit in cutlass.range_constexpr(count_units(self.config)):
                for index in cutlass.range_constexpr(2):
                    token = first + (UNIT_TOKENS * unit + index)
                    scale = Float32(0.0)
                    if token < self.y.shape[0]:
                        scale = factors.token_scale[token]
                    tokens = (*tokens, scale)
        return NarrowFactors(scales, biases, tokens)

    @cute.jit
    def store_tile(
        self, accumulator: Any, factors: NarrowFactors, token_tile: Int32, group: Int32
    ) -> None:
        """Add up with the other CTAs, scale, round and store."""
        first_token = token_tile * self.config.tokens
        if cutlass.const_expr(self.exchange is not None):
            turn = self.turn[0]
            if turn > 0:
                self.exchange.release()  # of the tile before: a last one has nobody to wait for
            self.exchange.send(accumulator, turn)
            self.exchange.wait(turn)
            self.turn[0] = turn + 1
        for unit in cutlass.range_constexpr(count_units(self.config)):
            token = first_token + UNIT_TOKENS * unit
            if cutlass.const_expr(self.exchange is None):
                self.store_unit(accumulator, factors, unit, (token, group))
            else:
                if self.exchange.owns(unit):
                    self.exchange.add_up(accumulator, unit)
                    self.store_unit(accumulator, factors, unit, (token, group))

    @cute.jit
    def store_unit(
        self, accumulator: Any, factors: NarrowFactors, unit: cutlass.Constexpr, place: Any
    ) -> None:
        """Scale, round and store 16 channels of 8 tokens; a whole warp calls it."""
        first_token, group = place
        lane = self.thread % 32
        token = first_token + lane // 4
        convert = cvt_rn_bf16x2_f32
        if cutlass.const_expr(self.config.out_dtype == "float16"):
            convert = cvt_rn_f16x2_f32
        for half in cutlass.range_constexpr(2):
            pair = []
            for index in cutlass.range_constexpr(2):
                value = accumulator[4 * unit + 2 * half + index] * factors.scales[half]
                if cutlass.const_expr(self.factors.token_scale is not None):
                    value = value * factors.tokens[2 * unit + index]
                if cutlass.const_expr(self.factors.bias is not None):
                    value = value + factors.biases[half]
                pair.append(value)
            word = movmatrix_trans(convert(*pair))
            channel = self.first_channel(group) + (8 * half + lane % 4 * 2)
            if token < self.y.shape[0]:
                self.store_pair(token, channel, word)

    @cute.jit
    def store_pair(self, token: Int32, channel: Int32, word: Uint32) -> None:
        """Store channels `channel` and the next of a token, as far as there are any."""
        num_channels = self.y.shape[1]
        offset = Int64(token) * self.y.stride[0] + channel
        address = self.y.iterator.toint() + offset * 2
        if channel + 1 < num_channels:
            st_global_b32(address, word)
        elif channel < num_channels:
            st_global_b16(address, Uint16(word & Uint32(0xFFFF)))

    def finish_role(self) -> None:
        """Nothing is left to wait for."""
