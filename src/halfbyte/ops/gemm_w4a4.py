"""halfbyte::gemm_w4a4: the 4-bit product with channel scale, bias and low-rank up projection."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.kernels.gemm_w4a4.placement import PlacedLinear
from halfbyte.ops import hopper
from halfbyte.ops.backends import check_backend, find_layout, see_session
from halfbyte.ops.blackwell import BlackwellPlacer, QuantizedInput, multiply_input
from halfbyte.ops.checks import (
    check_dense_on,
    check_device,
    check_float_dtype,
    check_same_device,
    refuse_gradients,
)
from halfbyte.ops.dense import check_no_function
from halfbyte.ops.hopper_modes import check_mode, choose_split_mode
from halfbyte.ops.kernel_tensors import check_kernel_dtype
from halfbyte.ops.linear_parts import (
    LinearSpec,
    check_part_count,
    decode_spec,
    is_present,
    make_linear,
    rank_of,
    scales_from_bytes,
)
from halfbyte.ops.next_input import check_function
from halfbyte.ops.placed_linears import find_placed

if TYPE_CHECKING:
    from halfbyte.cpu import QuantizedActivation

_ACT_PARTS = ("codes", "scales", "global_scale", "lora_act")


@torch.library.custom_op(
    "halfbyte::gemm_w4a4",
    mutates_args=(),
    schema="(Tensor[] act, Tensor[] linear, str spec, ScalarType out_dtype, "
    'str backend="auto", str activation="none", str mode="auto") -> Tensor',
)
def gemm_w4a4(
    act: Sequence[torch.Tensor],
    linear: Sequence[torch.Tensor],
    spec: str,
    out_dtype: torch.dtype,
    backend: str = "auto",
    activation: str = "none",
    mode: str = "auto",
) -> torch.Tensor:
    """Return y [M, N] in `out_dtype`, rounded once; see `halfbyte.reference.gemm_w4a4`.

    Args:
        act: the four tensors that `quantize_act_lora` returned for the same linear.
        linear: the tensor list of `linear_parts.list_parts`.
        spec: `LinearSpec.encode()` of the linear.
        out_dtype: float16, bfloat16 or (on the CPU) float32.
        backend: one of `backends.BACKENDS`, that of `quantize_act_lora`.
        activation: function of the float32 sums: "none", "gelu", "gelu_tanh" or "silu"; on Hopper
            "none".
        mode: one of `hopper_modes.MODES`, that of `quantize_act_lora`.

    Raises FormatError for shapes, dtypes or a weight-only spec, UsageError for an unknown backend;
    UnsupportedHardwareError where no kernel exists for the device or the formats.
    """
    from halfbyte import cpu

    with see_session():
        parsed = check_product(act, linear, spec, out_dtype)
        check_function(activation)
        check_mode(mode)
        chosen = check_device("gemm_w4a4", act[0].device, linear, backend)
        if chosen.target is None:
            quantized = make_cpu_input(act, parsed, rank_of(linear))
            return cpu.gemm_w4a4(quantized, make_linear(linear, parsed), out_dtype, activation)
        if chosen.layout == "hopper":
            check_no_function(activation, "Hopper's kernel")
            lora_dtype = find_lora_dtype(act, linear, out_dtype)
            placer = hopper.WgmmaPlacer(choose_split_mode(parsed, mode), lora_dtype)
            quantized_input = hopper.WgmmaInput(*act)
            placed_wgmma = find_placed(linear, parsed, placer)
            return hopper.multiply_input(quantized_input, placed_wgmma, out_dtype, chosen)
        placed = find_placed_for(act, linear, parsed, out_dtype)
        return multiply_input(QuantizedInput(*act), placed, out_dtype, chosen, activation)


def find_placed_for(
    act: Sequence[torch.Tensor],
    linear: Sequence[torch.Tensor],
    spec: LinearSpec,
    out_dtype: torch.dtype,
) -> PlacedLinear:
    """Return the placement of a linear for an activation; FormatError for a dtype without one."""
    lora_dtype = find_lora_dtype(act, linear, out_dtype)
    return find_placed(linear, spec, BlackwellPlacer(lora_dtype))


def find_lora_dtype(
    act: Sequence[torch.Tensor], linear: Sequence[torch.Tensor], out_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype of the low-rank operands; FormatError where a kernel has none such."""
    check_kernel_dtype("out_dtype", out_dtype)
    lora_dtype = act[3].dtype if rank_of(linear) > 0 else out_dtype
    check_kernel_dtype("act lora_act", lora_dtype)
    return lora_dtype


def make_cpu_input(
    act: Sequence[torch.Tensor], spec: LinearSpec, rank: int
) -> "QuantizedActivation":
    """Return the four tensors of an activation as the cpu backend's record."""
    from halfbyte import cpu

    lora_act = act[3] if rank > 0 else None
    values = _make_values(act, spec)
    return cpu.QuantizedActivation(values=values, lora_act=lora_act, counts=BlockCounts())


refuse_gradients(gemm_w4a4)


@gemm_w4a4.register_fake
def _(
    act: Sequence[torch.Tensor],
    linear: Sequence[torch.Tensor],
    spec: str,
    out_dtype: torch.dtype,
    backend: str = "auto",
    activation: str = "none",
    mode: str = "auto",
) -> torch.Tensor:
    check_backend(backend)
    check_mode(mode)
    check_product(act, linear, spec, out_dtype)
    check_function(activation)
    check_same_device(act[0].device, linear)
    if find_layout("gemm_w4a4", act[0].device, backend) != "cpu":
        check_kernel_dtype("out_dtype", out_dtype)
    return act[0].new_empty((act[0].shape[0], linear[0].shape[0]), dtype=out_dtype)


def check_product(
    act: Sequence[torch.Tensor], linear: Sequence[torch.Tensor], spec: str, out_dtype: torch.dtype
) -> LinearSpec:
    """Return the decoded spec; FormatError for what no product of these can have."""
    parsed = decode_spec(spec)
    check_part_count(linear)
    check_float_dtype("out_dtype", out_dtype)
    if parsed.activation is None:
        raise FormatError(f"linear spec {spec!r} is weight-only: it takes no quantized activation")
    if len(act) != len(_ACT_PARTS):
        raise FormatError(f"act: {len(act)} tensors, wanted {', '.join(_ACT_PARTS)}")
    for name, part in zip(_ACT_PARTS, act, strict=True):
        check_dense_on(f"act {name}", part, ("act codes", act[0].device))
    return parsed


def _make_values(act: Sequence[torch.Tensor], spec: LinearSpec) -> BlockScaledTensor:
    activation = spec.activation_format
    assert activation is not None  # check_product refused weight-only
    block_format = activation.block_format
    return BlockScaledTensor(
        format=block_format,
        data=act[0].contiguous(),
        scales=scales_from_bytes(act[1].contiguous(), block_format),
        global_scale=act[2] if is_present(act[2]) else None,
        columns=spec.columns,
    )
