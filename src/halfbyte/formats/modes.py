"""Named arithmetic for NVFP4: what each tool does where the format leaves a choice.

The format fixes what bytes mean, not how they are chosen. Tools differ in the order of the
divisions, in the smallest block scale they store, in the scale of an all-zero block and in the
code of minus zero. A mode is a record of these choices; nothing else in the quantizer names a
tool. Read from the sources of torchao 0.18.0 (prototype/mx_formats/nvfp4_tensor.py),
nvidia-modelopt 0.47.0 (torch/quantization/qtensor/nvfp4_tensor.py), compressed-tensors 0.20.1
(quantization/utils/helpers.py, lifecycle/forward_helpers.py) and nunchaku 3a3cc3d
(kernels/zgemm/gemm_w4a4.cuh). `tests/peers` holds us to their bytes.
"""

from dataclasses import dataclass
from typing import Literal

from halfbyte.errors import FormatError


@dataclass(frozen=True)
class QuantizeMode:
    """The choices one tool makes. a: amax of a block; A: of the tensor; g: global scale; s: stored.

    Attributes:
        name: the name that `quantize(mode=...)` takes.
        global_scale_order: "multiplier": g = A / 2688; "divisor": the tool keeps h = 2688 / A,
            and our record g = 1 / h.
        block_scale_order: s = e4m3 of "divide_twice": (a / 6) / g; "divide_product":
            a / (6 * g); "multiply_divisor": (a / 6) * h.
        payload_order: codes = e2m1 of "divide_product": x / (s * g); "reciprocal":
            x * ((1 / g) / s); "divide_quotient": x / (s / h); "unrounded": x / (a / 6).
        min_scale: block scales are clamped to this from below; 0.0 for no floor.
        zero_block_scale: stored for a block of zeros.
        flushed_block_scale: stored where the scale of a nonzero block rounds to zero.
        keeps_minus_zero: a scaled value that is -0.0 gets code 8, else code 0.
    """

    name: str
    global_scale_order: Literal["multiplier", "divisor"] = "multiplier"
    block_scale_order: Literal["divide_twice", "divide_product", "multiply_divisor"] = (
        "divide_twice"
    )
    payload_order: Literal["divide_product", "reciprocal", "divide_quotient", "unrounded"] = (
        "divide_product"
    )
    min_scale: float = 0.0
    zero_block_scale: float = 0.0
    flushed_block_scale: float = 0.0
    keeps_minus_zero: bool = True


_MODES = (
    QuantizeMode("halfbyte"),
    QuantizeMode("nunchaku", payload_order="unrounded"),
    QuantizeMode(
        "torchao",
        payload_order="reciprocal",
        min_scale=2.0**-6,  # torch.finfo(float8_e4m3fn).tiny: the smallest normal number
        zero_block_scale=2.0**-6,
    ),
    QuantizeMode(
        "modelopt",
        block_scale_order="divide_product",
        min_scale=2.0**-9,  # the smallest subnormal number
        zero_block_scale=1.0,
        keeps_minus_zero=False,
    ),
    QuantizeMode(
        "compressed-tensors",
        global_scale_order="divisor",
        block_scale_order="multiply_divisor",
        payload_order="divide_quotient",
        zero_block_scale=0.125,  # _get_dtype_eps(float8_e4m3fn)
        flushed_block_scale=0.125,
        keeps_minus_zero=False,
    ),
)
MODES: dict[str, QuantizeMode] = {record.name: record for record in _MODES}


def get_mode(name: str) -> QuantizeMode:
    """Return the mode called `name`; FormatError lists the known names."""
    try:
        return MODES[name]
    except (KeyError, TypeError):  # TypeError: a list, say, cannot be a key
        known = ", ".join(MODES)
        raise FormatError(f"mode {name!r} is unknown; use one of: {known}") from None
