"""The Blackwell kernels behind the ops: output tensors, configurations, launches; no math.

Layouts are those of `kernels.gemm_w4a4.placement`: K_pad is K rounded up to 32, R_pad R rounded up
to 8. Every tensor that a kernel writes is allocated here and written whole, padding included.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.scale_layout import padded_scale_shape
from halfbyte.kernels.gemm_w4a4.choose import GemmRequest, check_request, count_resident_clusters
from halfbyte.kernels.gemm_w4a4.choose import choose_config as choose_gemm_config
from halfbyte.kernels.gemm_w4a4.config import EpilogueConfig
from halfbyte.kernels.gemm_w4a4.placement import (
    K_MULTIPLE,
    LORA_DTYPES,
    RANK_MULTIPLE,
    SF_LAYOUT,
    GemmOperands,
    PlacedLinear,
    align,
    place_linear,
    replace_low_rank,
    round_up,
)
from halfbyte.ops.backends import Backend
from halfbyte.ops.kernel_tensors import (
    allocate_rows,
    check_kernel_dtype,
    has_aligned_rows,
    name_dtype,
    on_device,
)

GEMM: Final = "gemm_w4a4"
_SMALLEST_BLOCK: Final = 16  # codes of an NVFP4 block; both formats' scales of K = 32 fit a tile


@dataclass(frozen=True)
class BlackwellPlacer:
    """Makes the placements of linears for x of `dtype`: float16 or bfloat16."""

    dtype: torch.dtype

    def place(self, linear: QuantizedLinear) -> PlacedLinear:
        """Return what the kernels read; raises what `place_linear` raises."""
        return place_linear(linear, self.dtype)

    def replace_low_rank(self, placed: PlacedLinear, linear: QuantizedLinear) -> PlacedLinear:
        """Return `placed` with the low-rank branch of `linear`, its weight untouched."""
        return replace_low_rank(placed, linear, self.dtype)


@dataclass(frozen=True, eq=False)
class QuantizedInput:
    """What `quantize_act_lora` hands to `gemm_w4a4` on Blackwell.

    Attributes:
        codes: [M, K_pad/2] uint8. sf: flat uint8, block scales as "swizzled_128x4".
        global_scale: [] float32, or [0] where the format has none.
        lora_act: [M, R_pad] in x's dtype, already times `lora_act_scale` and divided by a dynamic
            global scale; [M, 0] for rank 0.
    """

    codes: torch.Tensor
    sf: torch.Tensor
    global_scale: torch.Tensor
    lora_act: torch.Tensor


@dataclass(frozen=True)
class InputShape:
    """Sizes that decide the shapes of a QuantizedInput; `m` may be symbolic."""

    m: int
    k: int
    rank: int
    block_size: int
    has_global_scale: bool


def allocate_input(x: torch.Tensor, shape: InputShape) -> QuantizedInput:
    """Return uninitialised tensors for x [M, K]; also what the fake kernel returns."""
    sf_shape = padded_scale_shape(shape.m, -(-shape.k // shape.block_size), SF_LAYOUT)
    return QuantizedInput(
        codes=x.new_empty((shape.m, round_up(shape.k, K_MULTIPLE) // 2), dtype=torch.uint8),
        sf=x.new_empty(sf_shape[0] * sf_shape[1], dtype=torch.uint8),
        global_scale=x.new_empty(() if shape.has_global_scale else (0,), dtype=torch.float32),
        lora_act=x.new_empty((shape.m, round_up_rank(shape.rank))),
    )


def round_up_rank(rank: int) -> int:
    """Return R_pad."""
    return round_up(rank, RANK_MULTIPLE)


def project_input(x: torch.Tensor, placed: PlacedLinear) -> torch.Tensor:
    """Return x [M, K] @ lora_down^T times `lora_act_scale`: [M, R_pad] in x's dtype.

    The factor is applied to torch's float32 sums: a product that fits no float16 may fit with it.
    """
    if placed.lora_down is None:
        return x.new_empty((x.shape[0], 0))
    down = placed.lora_down[:, : placed.columns].t()
    return torch.addmm(x.new_zeros((1, 1)), x, down, beta=0, alpha=placed.lora_act_scale)


def describe_shape(m: int, placed: PlacedLinear) -> InputShape:
    """Return the sizes of an input of `m` rows for a placed linear."""
    block_format = placed.activation.block_format
    return InputShape(
        m, placed.columns, placed.rank, block_format.block_size, block_format.has_global_scale
    )


def quantize_input(x: torch.Tensor, placed: PlacedLinear, backend: Backend) -> QuantizedInput:
    """Return x [M, K] quantized for `placed`, with its low-rank projection.

    x may have any strides; one whose columns are not adjacent is copied.
    """
    check_kernel_dtype("x", x.dtype)
    out = allocate_input(x, describe_shape(x.shape[0], placed))
    rule = placed.activation.global_scale
    if placed.activation_global_scale is not None:
        out.global_scale.copy_(placed.activation_global_scale.reshape(()))
    if x.numel() == 0:  # nothing to launch; an amax of nothing gives the scale 1
        for part in (out.codes, out.sf, out.lora_act):
            part.zero_()
        if rule == "dynamic":
            out.global_scale.fill_(1.0)
        return out
    _launch_quantize(x if x.stride(1) == 1 else x.contiguous(), placed, out, backend)
    return out


def _launch_quantize(
    x: torch.Tensor, placed: PlacedLinear, out: QuantizedInput, backend: Backend
) -> None:
    from halfbyte.kernels.quantize_act_lora import config as quantize
    from halfbyte.kernels.quantize_act_lora.source import make_source
    from halfbyte.runtime.run_kernel import run_kernel

    m, k = x.shape
    assert backend.target is not None
    request = quantize.QuantizeRequest(
        mode=placed.activation.name,
        dtype=name_dtype(x.dtype),
        m=m,
        k=k,
        rank=out.lora_act.shape[1],
        target=backend.target,
        lora_dtype=name_dtype(x.dtype),
        has_smooth=placed.smooth is not None,
        x_is_aligned=has_aligned_rows(x),
    )
    rule = placed.activation.global_scale
    scales: list[torch.Tensor | float | None] = [None, None, None, 1.0, placed.lora_act_scale]
    if rule != "none":
        scales[0] = out.global_scale.reshape(1)
    if rule == "dynamic":  # alpha is g: placement keeps the weight's scale
        scales[1] = x.new_empty(1, dtype=torch.float32)
        num_ctas = quantize.count_amax_ctas(m, k, backend.target)
        scales[2] = x.new_empty(num_ctas, dtype=torch.float32)
    sf_shape = quantize.act_scale_shape(placed.activation.name, m, k)
    arguments = (
        x,
        placed.smooth,
        placed.lora_down[:, :k] if placed.lora_down is not None else None,
        out.codes,
        out.sf.reshape(sf_shape),
        out.lora_act if placed.lora_down is not None else None,
        tuple(scales),
    )
    source = make_source(quantize.choose_config(request))
    with on_device(x):
        run_kernel(source, *arguments, virtual_gpu=backend.virtual_gpu)


def multiply_input(
    act: QuantizedInput,
    placed: PlacedLinear,
    out_dtype: torch.dtype,
    backend: Backend,
    activation: str = "none",
) -> torch.Tensor:
    """Return y [M, N] of `out_dtype`, contiguous.

    Raises FormatError for an activation that is not laid out for this linear.
    """
    check_kernel_dtype("out_dtype", out_dtype)
    return multiply_operands(make_operands(act, placed), out_dtype, backend, activation)


def make_operands(act: QuantizedInput, placed: PlacedLinear) -> GemmOperands:
    """Return what the GEMM reads; FormatError for an `act` that is not laid out for this linear."""
    _check_input_fits(act, placed)
    is_dynamic = placed.activation.global_scale == "dynamic"
    return GemmOperands(
        block_format=placed.block_format,
        act_codes=align(act.codes),
        act_sf=align(act.sf),
        weight_codes=placed.weight_codes,
        weight_sf=placed.weight_sf,
        lora_act=None if placed.lora_up is None else align(act.lora_act),
        lora_up=placed.lora_up,
        column_scale=placed.column_scale,
        alpha=act.global_scale.reshape(1) if is_dynamic else None,
        bias=placed.bias,
        columns=placed.columns,
        rank=placed.rank,
    )


def multiply_operands(
    operands: GemmOperands, out_dtype: torch.dtype, backend: Backend, activation: str = "none"
) -> torch.Tensor:
    """Return y [M, N] of `out_dtype`, contiguous, of operands as the GEMM reads them."""
    m, n = operands.act_codes.shape[0], operands.weight_codes.shape[0]
    like = operands.act_codes
    if m == 0 or n == 0:
        return like.new_empty((m, n), dtype=out_dtype)
    if operands.columns == 0 and activation == "none":  # no products: the bias alone, or zeros
        y = like.new_zeros((m, n), dtype=out_dtype)
        return y if operands.bias is None else y.copy_(operands.bias)
    y = allocate_rows(like, (m, n), out_dtype)
    epilogue = EpilogueConfig(activation=activation)
    launch_gemm(operands, {"y": y}, epilogue, out_dtype, backend)
    return y.contiguous()


def launch_gemm(
    operands: GemmOperands,
    outputs: Mapping[str, torch.Tensor],
    epilogue: EpilogueConfig,
    out_dtype: torch.dtype,
    backend: Backend,
) -> None:
    """Launch the GEMM of operands with M and N of at least 1.

    Args:
        operands: what is multiplied; K = 0 is computed as a block of zeros.
        outputs: tensors by the names of `list_arguments` for what `epilogue` writes, with the
            factors of the next layer.
        epilogue: what follows the sum; which factors the operands have is filled in here.
        out_dtype: of y, also where it is quantized alone.
        backend: who runs it.
    """
    from halfbyte.kernels.gemm_w4a4.source import list_arguments, make_source
    from halfbyte.runtime.run_kernel import run_kernel

    assert backend.target is not None
    if operands.columns == 0:
        operands = _widen_to_zeros(operands)
    lora_up = operands.lora_up
    request = GemmRequest(
        m=operands.act_codes.shape[0],
        n=operands.weight_codes.shape[0],
        k=operands.columns,
        rank=0 if lora_up is None else lora_up.shape[1],
        block_format=operands.block_format,
        out_dtype=name_dtype(out_dtype),
        lora_dtype=name_dtype(out_dtype if lora_up is None else lora_up.dtype),
        epilogue=replace(
            epilogue,
            has_column_scale=operands.column_scale is not None,
            has_alpha=operands.alpha is not None,
            has_bias=operands.bias is not None,
        ),
    )
    config = choose_gemm_config(request, backend.target)
    check_request(config, request)
    tensors = tuple(
        outputs[name] if name in outputs else getattr(operands, name)
        for name in list_arguments(config)
    )
    clusters = count_resident_clusters(config)
    with on_device(operands.act_codes):
        run_kernel(make_source(config), tensors, clusters, virtual_gpu=backend.virtual_gpu)


def _widen_to_zeros(operands: GemmOperands) -> GemmOperands:
    """Return a product of K = 0 as one of K = 32 with zero codes, which the kernel has."""
    act_codes, act_sf = _make_zeros(operands.act_codes)
    weight_codes, weight_sf = _make_zeros(operands.weight_codes)
    return replace(
        operands,
        columns=K_MULTIPLE,
        act_codes=act_codes,
        act_sf=act_sf,
        weight_codes=weight_codes,
        weight_sf=weight_sf,
    )


def _make_zeros(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zero codes and scales of K = 32 for the rows of `codes`."""
    rows = codes.shape[0]
    sf_shape = padded_scale_shape(rows, K_MULTIPLE // _SMALLEST_BLOCK, SF_LAYOUT)
    return codes.new_zeros((rows, K_MULTIPLE // 2)), codes.new_zeros(sf_shape[0] * sf_shape[1])


def run_linear(
    x: torch.Tensor, placed: PlacedLinear, backend: Backend, activation: str = "none"
) -> torch.Tensor:
    """Return y [M, N] in x's dtype of x [M, K]: both kernels."""
    if placed.out_features == 0:
        return x.new_empty((x.shape[0], 0))
    act = quantize_input(x, placed, backend)
    return multiply_input(act, placed, x.dtype, backend, activation)


def describe_tile(placed: PlacedLinear, m: int, dtype: torch.dtype, backend: Backend) -> str:
    """Return the tile that the GEMM takes for `m` rows of `dtype`, in words."""
    assert backend.target is not None
    request = GemmRequest(
        m=max(m, 1),
        n=max(placed.out_features, 1),
        k=max(placed.columns, 1),
        rank=round_up_rank(placed.rank),
        block_format=placed.block_format,
        out_dtype=name_dtype(dtype),
        lora_dtype=name_dtype(dtype),
        epilogue=EpilogueConfig(
            has_column_scale=placed.column_scale is not None,
            has_alpha=placed.activation.global_scale == "dynamic",
            has_bias=placed.bias is not None,
        ),
    )
    return str(choose_gemm_config(request, backend.target).tile)


def _check_input_fits(act: QuantizedInput, placed: PlacedLinear) -> None:
    if act.codes.ndim != 2:
        raise FormatError(f"act codes: shape {tuple(act.codes.shape)}, wanted [M, K_pad/2]")
    m = act.codes.shape[0]
    wanted = allocate_input(act.codes.new_empty(0, device="meta"), describe_shape(m, placed))
    dtypes = {"lora_act": LORA_DTYPES, "global_scale": (torch.float32,)}
    for name in ("codes", "sf", "global_scale", "lora_act"):
        part, like = getattr(act, name), getattr(wanted, name)
        allowed = dtypes.get(name, (torch.uint8,))
        if part.shape != like.shape or part.dtype not in allowed or not part.is_contiguous():
            raise FormatError(
                f"act {name}: {part.dtype} {tuple(part.shape)}, wanted contiguous "
                f"{' or '.join(map(str, allowed))} "
                f"{tuple(like.shape)}: what quantize_act_lora returns for this linear on this "
                "backend"
            )
