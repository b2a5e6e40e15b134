"""The Hopper kernels behind the ops: output tensors, modes, configurations, launches; no math.

Layouts are those of `kernels.gemm_w4_wgmma.placement`: K_pad is K rounded up to 128, R_pad R
rounded up to 32, columns permuted in each 64. Every tensor that a kernel writes is allocated here
and written whole, padding included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from halfbyte.errors import UnsupportedHardwareError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.dense_linear import DenseLinear
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.ops.backends import Backend
from halfbyte.ops.dense import DensePlacer, multiply_dense
from halfbyte.ops.hopper_modes import list_kernel_modes
from halfbyte.ops.linear_parts import LinearSpec
from halfbyte.ops.placed_linears import find_placed

_K_MULTIPLE: Final = 128
_RANK_MULTIPLE: Final = 32
_GROUP: Final = 64  # codes that share a scale of INT4 activations
_ACT_DTYPES: Final = {"fp8": torch.uint8, "int8": torch.int8}


@dataclass(frozen=True)
class WgmmaPlacer:
    """Makes the placements of linears for a kernel mode and x of `dtype`: float16 or bfloat16."""

    mode: str
    dtype: torch.dtype

    def place(self, linear: QuantizedLinear) -> Any:
        """Return what the kernels read; raises what `place_linear` raises."""
        raise UnsupportedHardwareError(f"mode {self.mode!r} has no kernel yet")

    def replace_low_rank(self, placed: Any, linear: QuantizedLinear) -> Any:
        """Return `placed` with the low-rank branch of `linear`, its weight untouched."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class WgmmaInput:
    """What `quantize_act_lora` hands to `gemm_w4a4` on Hopper.

    Attributes:
        codes: [M, K_pad]: E4M3 bytes as uint8 (fp8), int8 (int8, and exact with INT4) or float16
            values with their block scale (exact).
        scales: [M] float32, a scale a token (fp8, int8); [M, K_pad/64] float16 (exact with INT4);
            else [0].
        global_scale: [] float32, or [0] where the format has none or it is not used.
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
    activation: ActivationFormat


def allocate_input(x: torch.Tensor, shape: WgmmaInputShape) -> WgmmaInput:
    """Return uninitialised tensors for x [M, K]; also what the fake kernel returns."""
    has_integers = shape.activation.block_format.scale == "float"
    k_pad = -(-shape.k // _K_MULTIPLE) * _K_MULTIPLE
    scales: tuple[int, ...] = (0,)
    scale_dtype, has_global = torch.float32, False
    if shape.mode in _ACT_DTYPES:
        scales = (shape.m,)
    elif has_integers:
        scales, scale_dtype = (shape.m, k_pad // _GROUP), torch.float16
    else:
        has_global = shape.activation.global_scale != "none"
    code_dtype = _ACT_DTYPES.get(shape.mode, torch.int8 if has_integers else torch.float16)
    rank_pad = -(-shape.rank // _RANK_MULTIPLE) * _RANK_MULTIPLE
    return WgmmaInput(
        codes=x.new_empty((shape.m, k_pad), dtype=code_dtype),
        scales=x.new_empty(scales, dtype=scale_dtype),
        global_scale=x.new_empty(() if has_global else (0,), dtype=torch.float32),
        lora_act=x.new_empty((shape.m, rank_pad)),
    )


def choose_placed(
    parts: Sequence[torch.Tensor], spec: LinearSpec, x: torch.Tensor, mode: str
) -> Any:
    """Return the placement that a mode runs for x [M, K]: of a kernel, or a DenseLinear.

    "auto" takes the fastest of the modes that the formats and values of the linear allow.
    """
    if mode != "auto":
        return find_placed(parts, spec, WgmmaPlacer(mode, x.dtype))
    for candidate in list_kernel_modes(spec):
        try:
            return find_placed(parts, spec, WgmmaPlacer(candidate, x.dtype))
        except UnsupportedHardwareError:  # its values fit no such operands: INT4's -8 in fp8
            continue
    return find_placed(parts, spec, DensePlacer(x.dtype))


def run_linear(x: torch.Tensor, placed: Any, backend: Backend) -> torch.Tensor:
    """Return y [M, N] in x's dtype of x [M, K]."""
    if isinstance(placed, DenseLinear):
        return multiply_dense(x, placed)
    act = quantize_input(x, placed, backend)
    return multiply_input(act, placed, x.dtype, backend)


def quantize_input(x: torch.Tensor, placed: Any, backend: Backend) -> WgmmaInput:
    """Return x [M, K] quantized for `placed`, with its low-rank projection."""
    raise NotImplementedError


def multiply_input(
    act: WgmmaInput, placed: Any, out_dtype: torch.dtype, backend: Backend
) -> torch.Tensor:
    """Return y [M, N] of `out_dtype`, contiguous."""
    raise NotImplementedError
