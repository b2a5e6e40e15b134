"""halfbyte::quantize_act_lora: x to 4-bit codes, block scales and the low-rank down projection."""

from collections.abc import Sequence

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import FLOAT_BY_NAME
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.ops import blackwell, hopper
from halfbyte.ops.backends import check_backend, find_layout, see_session
from halfbyte.ops.checks import check_device, check_input, check_same_device, refuse_gradients
from halfbyte.ops.hopper_modes import check_mode, choose_split_mode
from halfbyte.ops.kernel_tensors import check_kernel_dtype
from halfbyte.ops.linear_parts import (
    LinearSpec,
    check_part_count,
    decode_spec,
    make_linear,
    rank_of,
    scales_to_bytes,
)
from halfbyte.ops.placed_linears import find_placed


@torch.library.custom_op(
    "halfbyte::quantize_act_lora",
    mutates_args=(),
    schema='(Tensor x, Tensor[] linear, str spec, str backend="auto", str mode="auto") '
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def quantize_act_lora(
    x: torch.Tensor,
    linear: Sequence[torch.Tensor],
    spec: str,
    backend: str = "auto",
    mode: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, scales, global_scale, lora_act) of x for a linear; see `halfbyte.reference`.

    Args:
        x: [M, K] float16, bfloat16 or (on the CPU) float32, any strides.
        linear: the tensor list of `linear_parts.list_parts`.
        spec: `LinearSpec.encode()` of the linear; it must have an activation format.
        backend: one of `backends.BACKENDS`.
        mode: one of `hopper_modes.MODES` but "bf16"; "auto" is the same for every M here.

    Returns on the CPU:
        codes: [M, row_bytes(K)] uint8, packed low nibble first, padding zero.
        scales: [M, num_blocks(K)] uint8 (E4M3, E8M0) or the activation's float scale dtype.
        global_scale: [] float32, or [0] where the format has none.
        lora_act: [M, R] float32, [M, 0] without a low-rank branch.

    Returns on Blackwell the layouts of `blackwell.QuantizedInput`, on Hopper those of
    `hopper.WgmmaInput`. lora_act is scaled for this linear there: only linears that share smooth,
    low-rank factors and scales can share it.

    A block with a NaN or an infinity has a NaN scale and zero codes.

    Raises FormatError for shapes and dtypes, or a weight-only linear;
    UnsupportedHardwareError where no kernel exists for x's device.
    """
    with see_session():
        parsed, _ = _check(x, linear, spec)
        check_mode(mode)
        chosen = check_device("quantize_act_lora", x.device, linear, backend)
        if chosen.target is None:
            return _quantize_on_cpu(x, make_linear(linear, parsed))
        check_kernel_dtype("x", x.dtype)
        if chosen.layout == "hopper":
            placer = hopper.WgmmaPlacer(choose_split_mode(parsed, mode), x.dtype)
            act = hopper.quantize_input(x, find_placed(linear, parsed, placer), chosen)
            return act.codes, act.scales, act.global_scale, act.lora_act
        placed = find_placed(linear, parsed, blackwell.BlackwellPlacer(x.dtype))
        out = blackwell.quantize_input(x, placed, chosen)
        return out.codes, out.sf, out.global_scale, out.lora_act


def _quantize_on_cpu(
    x: torch.Tensor, linear: QuantizedLinear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from halfbyte import cpu

    result = cpu.quantize_act_lora(x, linear)
    return list_cpu_outputs(result.values, result.lora_act)


def list_cpu_outputs(
    values: BlockScaledTensor, lora_act: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a quantized activation of the cpu backend as the four tensors of this op."""
    # values may hold the record's own static scale; an output must not alias an input.
    global_scale = values.data.new_empty(0, dtype=torch.float32)
    if values.format.has_global_scale and values.global_scale is not None:
        global_scale = values.global_scale.clone()
    if lora_act is None:
        lora_act = values.data.new_empty((values.data.shape[0], 0), dtype=torch.float32)
    return values.data, scales_to_bytes(values.scales), global_scale, lora_act


refuse_gradients(quantize_act_lora)


@quantize_act_lora.register_fake
def _(
    x: torch.Tensor,
    linear: Sequence[torch.Tensor],
    spec: str,
    backend: str = "auto",
    mode: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_backend(backend)
    check_mode(mode)
    parsed, activation = _check(x, linear, spec)
    check_same_device(x.device, linear)
    m, k, rank = x.shape[0], parsed.columns, rank_of(linear)
    layout = find_layout("quantize_act_lora", x.device, backend)
    if layout != "cpu":
        check_kernel_dtype("x", x.dtype)
    if layout == "hopper":
        wanted = hopper.WgmmaInputShape(m, k, rank, choose_split_mode(parsed, mode), activation)
        act = hopper.allocate_input(x, wanted)
        return act.codes, act.scales, act.global_scale, act.lora_act
    if layout == "blackwell":
        block_format = activation.block_format
        out = blackwell.allocate_input(
            x,
            blackwell.InputShape(
                m, k, rank, block_format.block_size, block_format.has_global_scale
            ),
        )
        return out.codes, out.sf, out.global_scale, out.lora_act
    return allocate_cpu_outputs(x, (m, k, rank), activation)


def allocate_cpu_outputs(
    like: torch.Tensor, sizes: tuple[int, int, int], activation: ActivationFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors as this op's on the cpu backend, for `sizes` (M, K, R); M may be symbolic."""
    m, k, rank = sizes
    block_format = activation.block_format
    scale_dtype = torch.uint8
    if block_format.scale == "float":
        scale_dtype = FLOAT_BY_NAME[activation.scale_dtype or "float16"]
    global_shape = () if block_format.has_global_scale else (0,)
    return (
        like.new_empty((m, block_format.row_bytes(k)), dtype=torch.uint8),
        like.new_empty((m, block_format.num_blocks(k)), dtype=scale_dtype),
        like.new_empty(global_shape, dtype=torch.float32),
        like.new_empty((m, rank), dtype=torch.float32),
    )


def _check(
    x: torch.Tensor, linear: Sequence[torch.Tensor], spec: str
) -> tuple[LinearSpec, ActivationFormat]:
    parsed = decode_spec(spec)
    check_part_count(linear)
    activation = parsed.activation_format
    if activation is None:
        raise FormatError(f"linear spec {spec!r} is weight-only: x is not quantized for it")
    check_input(x, parsed)
    return parsed, activation
