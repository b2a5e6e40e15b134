"""The Hopper kernels behind the ops: output tensors, modes, configurations, launches; no math.

Layouts are those of `kernels.gemm_w4_wgmma.placement`: K_pad is K rounded up to 128, R_pad R
rounded up to 32, columns permuted in each 64. Every tensor that a kernel writes is allocated here
and written whole, padding included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.dense_linear import DenseLinear
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4_wgmma.choose import (
    choose_config,
    choose_mode,
    count_resident_clusters,
)
from halfbyte.kernels.gemm_w4_wgmma.config import CHANNELS, WgmmaGemmConfig, WgmmaGemmRequest
from halfbyte.kernels.gemm_w4_wgmma.placement import (
    PlacedWgmmaLinear,
    place_linear,
    replace_low_rank,
)
from halfbyte.kernels.gemm_w4_wgmma.weight_layout import INT4_GROUP, pack_act
from halfbyte.kernels.gemm_w4a4.placement import align
from halfbyte.kernels.quantize_act_lora.config import count_amax_ctas
from halfbyte.kernels.quantize_act_wgmma import config as quantize
from halfbyte.ops.backends import Backend
from halfbyte.ops.dense import DensePlacer, multiply_dense
from halfbyte.ops.hopper_modes import DENSE, list_kernel_modes
from halfbyte.ops.kernel_tensors import (
    KERNEL_DTYPES,
    allocate_rows,
    check_kernel_dtype,
    has_aligned_rows,
    name_dtype,
    on_device,
)
from halfbyte.ops.linear_parts import LinearSpec, is_present, rank_of
from halfbyte.ops.placed_linears import find_placed

GEMM: Final = "gemm_w4_wgmma"
_CODE_DTYPES: Final = {"fp8": torch.uint8, "int8": torch.int8}


@dataclass(frozen=True)
class WgmmaPlacer:
    """Makes the placements of linears for a kernel mode and x of `dtype`: float16 or bfloat16."""

    mode: str
    dtype: torch.dtype

    def place(self, linear: QuantizedLinear) -> PlacedWgmmaLinear:
        """Return what the kernels read; raises what `place_linear` raises."""
        return _finish(place_linear(linear, self.dtype, self.mode))

    def replace_low_rank(
        self, placed: PlacedWgmmaLinear, linear: QuantizedLinear
    ) -> PlacedWgmmaLinear:
        """Return `placed` with the low-rank branch of `linear`, its weight untouched."""
        return _finish(replace_low_rank(placed, linear, self.dtype))


@lru_cache(maxsize=64)
def _make_placer(mode: str, dtype: torch.dtype) -> WgmmaPlacer:
    return WgmmaPlacer(mode, dtype)


def _finish(placed: PlacedWgmmaLinear) -> PlacedWgmmaLinear:
    """Return `placed` when its tensors are written.

    The kernels read weights before those ahead of them in the stream have ended (programmatic
    dependent launch).
    """
    if placed.weight_blocks.is_cuda:
        torch.cuda.current_stream(placed.weight_blocks.device).synchronize()
    return placed


@dataclass(frozen=True, eq=False)
class WgmmaInput:
    """What `quantize_act_lora` hands to `gemm_w4a4` on Hopper.

    Attributes:
        codes: [M, K_pad]: E4M3 bytes as uint8 (fp8), int8 (int8, and exact with INT4) or float16
            values with their block scale (exact; x / smooth itself for a weight-only linear).
        scales: [M] float32, a scale a token (fp8, int8); [M, K_pad/64] float16 (exact with INT4);
            else [0].
        global_scale: [] float32 (exact, where the format has one), else [0].
        lora_act: [M, R_pad] in x's dtype, in the scale of its token; [M, 0] for rank 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    lora_act: torch.Tensor


@dataclass(frozen=True)
class WgmmaInputShape:
    """What decides the shapes of a WgmmaInput; `m` may be symbolic."""

    m: int
    k: int
    rank: int
    mode: str
    activation: ActivationFormat | None


def allocate_input(x: torch.Tensor, shape: WgmmaInputShape) -> WgmmaInput:
    """Return uninitialised tensors for x [M, K]; also what the fake kernel returns."""
    k_pad = quantize.padded_k(shape.k)
    code_dtype = _CODE_DTYPES.get(shape.mode)
    scales: tuple[int, ...] = (shape.m,)
    scale_dtype, has_global_scale = torch.float32, False
    if code_dtype is None and shape.activation is None:
        code_dtype, scales = torch.float16, (0,)
    elif code_dtype is None:
        assert shape.activation is not None
        block_format = shape.activation.block_format
        has_global_scale = block_format.has_global_scale
        code_dtype, scales = torch.float16, (0,)
        if block_format.scale == "float":
            code_dtype, scale_dtype = torch.int8, torch.float16
            scales = (shape.m, k_pad // INT4_GROUP)
    return WgmmaInput(
        codes=x.new_empty((shape.m, k_pad), dtype=code_dtype),
        scales=x.new_empty(scales, dtype=scale_dtype),
        global_scale=x.new_empty(() if has_global_scale else (0,), dtype=torch.float32),
        lora_act=x.new_empty((shape.m, quantize.padded_rank(shape.rank))),
    )


def describe_shape(m: int, placed: PlacedWgmmaLinear) -> WgmmaInputShape:
    """Return the sizes of an input of `m` rows for a placed linear."""
    return WgmmaInputShape(m, placed.columns, placed.rank, placed.mode, placed.activation)


def choose_placed(
    parts: Sequence[torch.Tensor], spec: LinearSpec, call: tuple[int, torch.dtype], mode: str
) -> PlacedWgmmaLinear | DenseLinear:
    """Return the placement that a mode runs for (M, dtype of x): of a kernel, or a dense weight.

    "auto" takes the fastest of the modes that the formats and values of the linear allow; not one
    in which blocks of the weight would lose their scale, which can cost more than 4-bit activations
    do. (What was placed to find that out stays beside the other; no block of the layers that were
    measured is such a one.) A linear without products (an N or K of 0) is dense; an x without rows
    reads what one with a row does, so that it costs no second weight.
    """
    m, dtype = max(call[0], 1), call[1]
    is_empty = not (spec.columns and parts[0].shape[0])
    if mode != "auto" and not is_empty:
        return find_placed(parts, spec, _make_placer(mode, dtype))
    modes = () if is_empty else list_kernel_modes(spec)
    while modes:
        fastest = choose_mode(_describe_parts(parts, spec, m, dtype), modes)
        if fastest == DENSE:
            break
        try:
            placed = find_placed(parts, spec, _make_placer(fastest, dtype))
            if not placed.requantized:
                return placed
        except UnsupportedHardwareError:  # its values fit no such operands: INT4's -8 in fp8
            pass
        modes = tuple(one for one in modes if one != fastest)
    return find_placed(parts, spec, DensePlacer(dtype))


def _describe_parts(
    parts: Sequence[torch.Tensor], spec: LinearSpec, m: int, dtype: torch.dtype
) -> WgmmaGemmRequest:
    """Return the product of a linear before it is placed; its mode is open."""
    rank = rank_of(parts)
    return WgmmaGemmRequest(
        m=m,
        n=parts[0].shape[0],
        k=spec.columns,
        rank=rank,
        mode="fp8",
        weight="int4" if spec.block_format.element == "int4" else "e2m1",
        out_dtype=name_dtype(dtype),
        lora_dtype=name_dtype(dtype) if rank else None,
        has_bias=is_present(parts[8]),
        use_pdl=True,
    )


def run_linear(
    x: torch.Tensor, placed: PlacedWgmmaLinear | DenseLinear, backend: Backend
) -> torch.Tensor:
    """Return y [M, N] in x's dtype of x [M, K]."""
    if isinstance(placed, DenseLinear):
        return multiply_dense(x, placed)
    if placed.mode == "exact" or x.numel() == 0:
        act = quantize_input(x, placed, backend)
    else:
        check_kernel_dtype("x", x.dtype)
        act = _allocate_operands(x, placed)
        _launch_quantize(x if x.stride(1) == 1 else x.contiguous(), placed, act, backend)
    return _multiply(act, placed, x.dtype, backend)


def _allocate_operands(x: torch.Tensor, placed: PlacedWgmmaLinear) -> WgmmaInput:
    """Return the uninitialised input of a product of mode "fp8" or "int8" that no op hands out.

    What `allocate_input` returns, less what is not read there, each tensor as the kernels take it.
    """
    m, has_rank = x.shape[0], placed.lora_down is not None
    codes = torch.float8_e4m3fn if placed.mode == "fp8" else torch.int8
    scales = x.new_empty(m, dtype=torch.float32)
    return WgmmaInput(
        codes=x.new_empty((m, quantize.padded_k(placed.columns)), dtype=codes),
        scales=scales,
        global_scale=scales,  # these modes have none
        lora_act=x.new_empty((m, quantize.padded_rank(placed.rank))) if has_rank else scales,
    )


def quantize_input(x: torch.Tensor, placed: PlacedWgmmaLinear, backend: Backend) -> WgmmaInput:
    """Return x [M, K] quantized for `placed`, with its low-rank projection.

    x may have any strides; one whose columns are not adjacent is copied. For a weight-only linear
    in mode "exact" it is not quantized: x / smooth in float16.
    """
    check_kernel_dtype("x", x.dtype)
    out = allocate_input(x, describe_shape(x.shape[0], placed))
    if placed.mode == "exact" and placed.activation is None:
        _cast_input(x, placed, out)
        return out
    if placed.activation_global_scale is not None:
        out.global_scale.copy_(placed.activation_global_scale.reshape(()))
    if x.numel() == 0:  # nothing to launch; an amax of nothing gives the scale 1
        for part in (out.codes, out.lora_act):
            part.zero_()
        out.scales.fill_(1.0)
        if placed.has_alpha:
            out.global_scale.fill_(1.0)
        return out
    _launch_quantize(x if x.stride(1) == 1 else x.contiguous(), placed, out, backend)
    return out


def _cast_input(x: torch.Tensor, placed: PlacedWgmmaLinear, out: WgmmaInput) -> None:
    """Write x / smooth as float16 and its low-rank projection, by torch's own products."""
    k = placed.columns
    smoothed = x if placed.smooth is None else x.float() / placed.smooth
    padded = torch.zeros_like(out.codes)
    padded[:, :k] = smoothed
    out.codes.copy_(pack_act(padded))
    if placed.lora_down is not None:  # the factor is applied to torch's float32 sums
        down = placed.lora_down[:, :k].t()
        zero = x.new_zeros((1, 1))
        out.lora_act.copy_(torch.addmm(zero, x, down, beta=0, alpha=placed.lora_factor))


def _launch_quantize(
    x: torch.Tensor, placed: PlacedWgmmaLinear, out: WgmmaInput, backend: Backend
) -> None:
    from halfbyte.runtime.run_kernel import run_kernel

    m, k = x.shape
    is_exact = placed.mode == "exact"
    activation = placed.activation
    smooth = placed.smooth if is_exact else placed.inverse_smooth
    source, config = _make_quantize_source(
        activation.name if is_exact and activation is not None else placed.mode,
        name_dtype(x.dtype),
        m,
        k,
        placed.rank,
        smooth is not None,
        0.0 if is_exact or activation is None else activation.shift,
        has_aligned_rows(x),
        True,  # use_pdl
    )
    scales: list[torch.Tensor | float | None] = [None, None, None, 1.0, placed.lora_factor]
    if out.global_scale.ndim == 0:
        scales[0] = out.global_scale.reshape(1)
    if placed.has_alpha:
        scales[1] = x.new_empty(1, dtype=torch.float32)
        num_ctas = count_amax_ctas(m, k, quantize.TARGET)
        scales[2] = x.new_empty(num_ctas, dtype=torch.float32)
    has_rank = placed.lora_down is not None
    tensors = (
        x,
        smooth,
        placed.lora_down,
        view_codes(out.codes, placed.mode),
        out.scales if config.has_token_scale else None,
        out.scales if config.has_group_scales else None,
        out.lora_act if has_rank else None,
    )
    clusters = quantize.GPU.count_resident_clusters(config.cluster_k)
    with on_device(x):
        run_kernel(source, tensors, tuple(scales), clusters, virtual_gpu=backend.virtual_gpu)


@lru_cache(maxsize=4096)
def _make_quantize_source(*fields: Any) -> tuple[KernelSource, quantize.WgmmaQuantizeConfig]:
    """Return what quantizes for the fields of a request, found faster than the record."""
    from halfbyte.kernels.quantize_act_wgmma.source import make_source

    request = quantize.WgmmaQuantizeRequest(*fields)
    config = quantize.choose_config(request)
    return make_source(config), config


def multiply_input(
    act: WgmmaInput, placed: PlacedWgmmaLinear, out_dtype: torch.dtype, backend: Backend
) -> torch.Tensor:
    """Return y [M, N] of `out_dtype`, contiguous.

    Raises FormatError for an activation that is not laid out for this linear.
    """
    check_kernel_dtype("out_dtype", out_dtype)
    _check_input_fits(act, placed)
    return _multiply(act, placed, out_dtype, backend)


def _multiply(
    act: WgmmaInput, placed: PlacedWgmmaLinear, out_dtype: torch.dtype, backend: Backend
) -> torch.Tensor:
    m, n = act.codes.shape[0], placed.out_features
    if m == 0 or n == 0:
        return act.codes.new_empty((m, n), dtype=out_dtype)
    if placed.columns == 0:  # no products: the bias alone, or zeros
        y = act.codes.new_zeros((m, n), dtype=out_dtype)
        return y if placed.bias is None else y.copy_(placed.bias[:n])
    y = allocate_rows(act.codes, (m, n), out_dtype)
    _launch_gemm(act, placed, y, backend)
    return y if y.is_contiguous() else y.contiguous()


def _launch_gemm(
    act: WgmmaInput, placed: PlacedWgmmaLinear, y: torch.Tensor, backend: Backend
) -> None:
    from halfbyte.runtime.run_kernel import run_kernel

    lora_dtype = None if placed.lora_blocks is None else act.lora_act.dtype
    source, config = _find_gemm(placed, y.shape[0], y.dtype, lora_dtype)
    # In the order of `gemm_w4_wgmma.source.list_arguments`, and none that is not asked for: views
    # are a good part of what a call costs the host.
    arguments = [align(view_codes(act.codes, placed.mode)), placed.weight_blocks]
    if config.has_token_scale:
        arguments.append(act.scales)
    if config.has_act_group_scale:
        arguments.append(align(act.scales))
    arguments.append(placed.channel_scale)
    if placed.lora_blocks is not None:
        arguments += [align(act.lora_act), placed.lora_blocks]
    if placed.bias is not None:
        arguments.append(placed.bias)
    if placed.has_alpha:
        arguments.append(act.global_scale.reshape(-1))
    arguments.append(y)
    with on_device(y):
        clusters = count_resident_clusters(config)
        run_kernel(source, tuple(arguments), clusters, virtual_gpu=backend.virtual_gpu)


def view_codes(codes: torch.Tensor, mode: str) -> torch.Tensor:
    """Return activation codes in the dtype that the kernels of a mode take."""
    if mode != "fp8" or codes.dtype == torch.float8_e4m3fn:
        return codes
    return codes.view(torch.float8_e4m3fn)


def _find_gemm(
    placed: PlacedWgmmaLinear, m: int, out_dtype: torch.dtype, lora_dtype: torch.dtype | None
) -> tuple[KernelSource, WgmmaGemmConfig]:
    return _make_gemm_source(
        m,
        placed.out_features,
        placed.columns,
        placed.rank,
        placed.mode,
        placed.weight,
        name_dtype(out_dtype),
        None if lora_dtype is None else name_dtype(lora_dtype),
        placed.bias is not None,
        placed.has_alpha,
        True,  # use_pdl
    )


@lru_cache(maxsize=4096)
def _make_gemm_source(*fields: Any) -> tuple[KernelSource, WgmmaGemmConfig]:
    """Return what multiplies for the fields of a request, found faster than the record."""
    from halfbyte.kernels.gemm_w4_wgmma.source import make_source

    config = choose_config(WgmmaGemmRequest(*fields))
    return make_source(config), config


def describe_tile(placed: PlacedWgmmaLinear, m: int, dtype: torch.dtype) -> str:
    """Return the GEMM's configuration for `m` rows in words; "" for none, which need no launch."""
    if m == 0:
        return ""
    lora_dtype = None if placed.lora_blocks is None else dtype
    _, config = _find_gemm(placed, m, dtype, lora_dtype)
    shared = f", {config.cluster} CTAs share x" if config.cluster > 1 else ""
    splits = f", K in {config.splits}" if config.splits > 1 else ""
    return f"{CHANNELS} channels x {config.tokens} tokens, {config.stages} stages{shared}{splits}"


def _check_input_fits(act: WgmmaInput, placed: PlacedWgmmaLinear) -> None:
    if act.codes.ndim != 2:
        raise FormatError(f"act codes: shape {tuple(act.codes.shape)}, wanted [M, K_pad]")
    m = act.codes.shape[0]
    wanted = allocate_input(act.lora_act.new_empty(0, device="meta"), describe_shape(m, placed))
    for name in ("codes", "scales", "global_scale", "lora_act"):
        part, like = getattr(act, name), getattr(wanted, name)
        allowed = KERNEL_DTYPES if name == "lora_act" else (like.dtype,)
        if part.shape != like.shape or part.dtype not in allowed or not part.is_contiguous():
            raise FormatError(
                f"act {name}: {part.dtype} {tuple(part.shape)}, wanted contiguous "
                f"{' or '.join(map(str, allowed))} {tuple(like.shape)}: what quantize_act_lora "
                f"returns for this linear on this backend in mode {placed.mode!r}"
            )
