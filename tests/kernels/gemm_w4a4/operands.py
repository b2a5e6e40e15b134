"""Operands of the W4A4 GEMM as bytes, and what they multiply to: float64, from those bytes.

Codes and block scales are drawn as bytes, so that every code of E2M1 occurs, negative zero too, and
scales come in all sizes. Where a block scale lies is written here once more, from the PTX ISA: the
kernel's operands do not come from the package that the kernel is in.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.kernels.gemm_w4a4.config import GemmConfig
from halfbyte.reference.decode import (
    Float64Array,
    make_value_table,
    read_bytes,
    read_floats,
    unpack_codes,
)

DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SCALE_NAMES: Final = {"nvfp4": "e4m3", "mxfp4": "e8m0"}
# E2M1 codes of 0, 1, 2, 3, -0, -1, -2, -3; scale bytes of 1 and 2. Sums of products of these are
# integers below 2^24 for K up to 2^18: exact in float32 in any order.
_INTEGER_CODES: Final = np.array([0, 2, 4, 5, 8, 10, 12, 13], dtype=np.uint8)
_INTEGER_SCALES: Final = {"nvfp4": (0x38, 0x40), "mxfp4": (127, 128)}
# 2^-3 to 2 in all steps, and E4M3 subnormals; E8M0 2^-3 to 2.
_SCALES: Final = {"nvfp4": (0x01, 0x04, *range(0x20, 0x41)), "mxfp4": tuple(range(124, 129))}
_ROWS_AT_ONCE: Final = 1024


@dataclass(frozen=True)
class GemmShape:
    """One product: [m, k] times [n, k] transposed, of low rank `rank`.

    `max_clusters` limits the grid of the static scheduler, so that a cluster has several tiles.
    """

    m: int
    n: int
    k: int
    max_clusters: int = 64

    def __str__(self) -> str:
        """Return e.g. `130x257x95`."""
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class GemmOperands:
    """Operands of one call, on the CPU.

    Attributes:
        config: what they are for.
        shape: the product.
        tensors: by the names of `source.list_arguments`, without y.
    """

    config: GemmConfig
    shape: GemmShape
    tensors: dict[str, torch.Tensor]


def make_operands(
    config: GemmConfig, shape: GemmShape, rank: int, is_integer: bool = False, seed: int = 0
) -> GemmOperands:
    """Return operands of `config`: random ones, or integers whose sums float32 holds exactly.

    Padding of codes, block scales and rank is zero, as the GEMM demands.
    """
    draw = _Draw(config, is_integer, np.random.default_rng([seed, shape.m, shape.n, shape.k, rank]))
    act_codes, act_sf = draw.draw_blocks(shape.m, shape.k)
    weight_codes, weight_sf = draw.draw_blocks(shape.n, shape.k)
    tensors = {
        "act_codes": act_codes,
        "act_sf": act_sf,
        "weight_codes": weight_codes,
        "weight_sf": weight_sf,
    }
    epilogue = config.epilogue
    if config.low_rank is not None:
        tensors["lora_act"] = draw.draw_low_rank(shape.m, rank)
        tensors["lora_up"] = draw.draw_low_rank(shape.n, rank)
    if epilogue.has_column_scale:
        tensors["column_scale"] = draw.draw_vector(shape.n, (1, 2, -1, 4)) + (not is_integer) * 0.3
    if epilogue.has_bias:
        tensors["bias"] = draw.draw_vector(shape.n, range(-64, 65))
    if epilogue.has_alpha:
        tensors["alpha"] = torch.tensor([0.5 if is_integer else 0.3])
    return GemmOperands(config, shape, tensors)


@dataclass(frozen=True)
class _Draw:
    config: GemmConfig
    is_integer: bool
    generator: np.random.Generator

    def draw_blocks(self, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (packed codes [rows, K_pad / 2], flat swizzled block scales)."""
        block_format = self.config.block_format
        padded = -(-k // 32) * 32
        codes = np.zeros((rows, padded), dtype=np.uint8)
        codes[:, :k] = self.generator.integers(0, 16, (rows, k), dtype=np.uint8)
        if self.is_integer:
            codes[:, :k] = _INTEGER_CODES[codes[:, :k] % len(_INTEGER_CODES)]
        blocks = -(-k // self.config.block_size)
        choices = np.array((_INTEGER_SCALES if self.is_integer else _SCALES)[block_format])
        scales = self.generator.choice(choices, (rows, blocks)).astype(np.uint8)
        sf = np.zeros(-(-rows // 128) * -(-blocks // 4) * 512, dtype=np.uint8)
        sf[list_scale_offsets(np.arange(rows), blocks)] = scales
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return torch.from_numpy(packed), torch.from_numpy(sf)

    def draw_low_rank(self, rows: int, rank: int) -> torch.Tensor:
        """Return [rows, R_pad] of the low-rank dtype; its product is about as large as the main."""
        assert self.config.low_rank is not None
        values = torch.zeros(rows, -(-rank // 8) * 8)
        if self.is_integer:
            drawn = self.generator.integers(-2, 3, (rows, rank)).astype(np.float32)
        else:
            drawn = 4 * self.generator.standard_normal((rows, rank), dtype=np.float32)
        values[:, :rank] = torch.from_numpy(drawn)
        return values.to(DTYPES[self.config.low_rank.dtype])

    def draw_vector(self, length: int, integers: Any) -> torch.Tensor:
        """Return [length] float32: some of `integers`, times a number near 1 if not integer."""
        drawn = self.generator.choice(np.array(integers, dtype=np.float32), length)
        factor = self.generator.uniform(0.5, 1.5, length)
        return torch.from_numpy(drawn if self.is_integer else drawn * factor).float()


def list_scale_offsets(rows: npt.NDArray[np.int64], blocks: int) -> npt.NDArray[np.int64]:
    """Return where the scales of `rows` lie, [rows, blocks].

    PTX ISA, tcgen05 scale factor layout: tiles of 128 rows x 4 scales, 512 bytes, along K first;
    in a tile 16 bytes for rows r, r + 32, r + 64, r + 96 with four scales each.
    """
    row, column = rows[:, None], np.arange(blocks)[None, :]
    tile = row // 128 * -(-blocks // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def decode_blocks(operands: GemmOperands, name: str, rows: npt.NDArray[np.int64]) -> Float64Array:
    """Return `rows` of operand `name` ("act" or "weight") as float64 [rows, K]."""
    config, k = operands.config, operands.shape.k
    codes = read_bytes(operands.tensors[f"{name}_codes"][torch.from_numpy(rows)])
    values = make_value_table("e2m1")[unpack_codes(codes, 4)]
    blocks = -(-k // config.block_size)
    sf = read_bytes(operands.tensors[f"{name}_sf"])[list_scale_offsets(rows, blocks)]
    scales = make_value_table(SCALE_NAMES[config.block_format])[sf]
    decoded: Float64Array = values[:, :k] * np.repeat(scales, config.block_size, axis=1)[:, :k]
    return decoded


def decode_all_blocks(operands: GemmOperands, name: str) -> Float64Array:
    """Return operand `name` as float64, some rows at a time: bits take 8 times the codes."""
    total = operands.shape.m if name == "act" else operands.shape.n
    starts = range(0, total, _ROWS_AT_ONCE)
    parts = [
        decode_blocks(operands, name, np.arange(start, min(start + _ROWS_AT_ONCE, total)))
        for start in starts
    ]
    return np.concatenate(parts) if parts else np.empty((0, operands.shape.k))


@dataclass(frozen=True)
class Truth:
    """What a GEMM should give.

    Attributes:
        wanted: [M, N] float64, not rounded.
        torch_error: relative error of the same in torch: products, factors, bias and activation in
            float32 from exact operands, and one rounding to the output's dtype. It is the least
            that a kernel with float32 accumulators can have; a torch that rounds between the steps
            has more.
    """

    wanted: Float64Array
    torch_error: float


def make_truth(operands: GemmOperands) -> Truth:
    """Return the product of the bytes in float64, and torch's error."""
    act, weight = (decode_all_blocks(operands, name) for name in ("act", "weight"))
    tensors = {
        name: torch.from_numpy(read_floats(tensor))
        for name, tensor in operands.tensors.items()
        if tensor.dtype != torch.uint8
    }
    exact = _finish(operands.config, torch.from_numpy(act @ weight.T), tensors)
    in_float32 = _finish(
        operands.config,
        torch.from_numpy(act).float() @ torch.from_numpy(weight).float().T,
        {name: tensor.float() for name, tensor in tensors.items()},
    )
    rounded = in_float32.to(DTYPES[operands.config.out_dtype])
    return Truth(exact.numpy(), measure_relative_error(rounded, exact.numpy()))


def _finish(
    config: GemmConfig, total: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return what the formula makes of the 4-bit product, in its dtype."""
    if config.low_rank is not None:
        total = total + tensors["lora_act"] @ tensors["lora_up"].T
    for name in ("column_scale", "alpha"):
        total = total * tensors[name] if name in tensors else total
    total = total + tensors["bias"] if "bias" in tensors else total
    functions: dict[str, Any] = {
        "none": lambda values: values,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda values: torch.nn.functional.gelu(values, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    result: torch.Tensor = functions[config.epilogue.activation](total)
    return result


def measure_relative_error(y: torch.Tensor, wanted: Float64Array) -> float:
    """Return the relative Frobenius error of y; the plain one where all is zero."""
    with np.errstate(invalid="ignore"):  # infinity - infinity: the error is NaN, within no bound
        difference = float(np.linalg.norm(y.double().numpy() - wanted))
    size = float(np.linalg.norm(wanted))
    return difference / size if size else difference
