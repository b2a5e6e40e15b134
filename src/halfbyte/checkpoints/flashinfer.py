"""The operands of FlashInfer's `svdquant_linear` and `mm_nvfp4_svdquant`, under its argument names.

    weight_fp4       uint8 [N, K/2]  low nibble = even column
    weight_sf        uint8 flat      E4M3 bytes, SWIZZLED 128x4 over [N, K/16], zero padding
    alpha            float32 [1]     scale of x times scale of the weight
    global_scale     float32 [1]     DIVIDES: 2688 / amax(x * pre_quant_scale), calibrated
    pre_quant_scale  bfloat16 [K]    MULTIPLIES x: smooth = 1 / pre_quant_scale
    l2t_smoothed     bfloat16 [K, R] lora_down transposed; sees the raw x
    l1_scaled        bfloat16 [N, R] lora_up / alpha; R a multiple of 32
    bias             bfloat16 [N]

y = alpha * (x_q @ w_q.T + (x @ l2t_smoothed) @ l1_scaled.T) + bias. `decode` and `encode` work on
such operands in memory too. FlashInfer has no file format: as safetensors they are LAYER.ARGUMENT.
Source: flashinfer 0.7.4, gemm/gemm_svdquant.py.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch

from halfbyte.checkpoints.family import NO_CLAIM, Claim, Facts, Family, Parts
from halfbyte.checkpoints.layer_keys import KeySet, find_layers
from halfbyte.checkpoints.scalar_parts import as_scalar
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.scale_layout import pack_scales, unpack_scales

RANK_MULTIPLE: Final = 32
BLOCK: Final = 16
KEYS: Final = KeySet(
    required={
        "weight_fp4": ("U8",),
        "weight_sf": ("U8",),
        "alpha": ("F32",),
        "global_scale": ("F32",),
        "pre_quant_scale": ("BF16",),
        "l2t_smoothed": ("BF16",),
        "l1_scaled": ("BF16",),
    },
    optional={"bias": ("BF16", "F16", "F32")},
)


class FlashInfer(Family):
    """Operands of FlashInfer's SVDQuant linear."""

    name: ClassVar[str] = "flashinfer"
    title: ClassVar[str] = "FlashInfer svdquant_linear operands"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("weight_fp4", "weight_sf", "l2t_smoothed", "l1_scaled"), ()
    )
    origin_parts: ClassVar[tuple[str, ...]] = (
        "alpha",
        "global_scale",
        "pre_quant_scale",
        "l2t_smoothed",
        "l1_scaled",
    )
    rounding: ClassVar[float] = 2.0**-8  # bfloat16 vectors and factors

    def claim(self, source: TensorSource) -> Claim:
        """Claim layers with all the operands; certain, the names are FlashInfer's own."""
        layers = find_layers(source, KEYS)
        return Claim(layers, True, "weight_fp4, weight_sf and l1_scaled") if layers else NO_CLAIM

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; the scale of the weight is alpha without that of x."""
        weight, scales = parts["weight_fp4"], parts["weight_sf"]
        if weight.ndim != 2 or 2 * weight.shape[1] % BLOCK:
            raise FormatError(
                f"weight_fp4: shape {list(weight.shape)}, wanted [N, K/2], K a multiple of 16"
            )
        if scales.ndim != 1:
            raise FormatError(f"weight_sf: shape {list(scales.shape)}, wanted one dimension")
        rows, blocks = weight.shape[0], 2 * weight.shape[1] // BLOCK
        plain = unpack_scales(scales.contiguous(), "swizzled_128x4", rows, blocks)
        alpha = as_scalar("alpha", parts["alpha"])
        divisor = as_scalar("global_scale", parts["global_scale"])
        factors = parts["l2t_smoothed"], parts["l1_scaled"]
        if any(factor.ndim != 2 for factor in factors) or factors[0].shape[1] % RANK_MULTIPLE:
            raise FormatError(
                f"l2t_smoothed, l1_scaled: shapes {[list(factor.shape) for factor in factors]}, "
                f"wanted [K, R] and [N, R] with R a multiple of {RANK_MULTIPLE}"
            )
        return QuantizedLinear(
            weight=BlockScaledTensor(
                get_format("nvfp4"),
                weight,
                plain.view(torch.float8_e4m3fn),
                alpha * divisor,
                2 * weight.shape[1],
            ),
            activation=get_activation_format("nvfp4_static"),
            activation_global_scale=divisor.reciprocal(),
            smooth=parts["pre_quant_scale"].float().reciprocal(),
            lora_down=factors[0].t().float().contiguous(),
            lora_up=factors[1].float() * alpha,
            bias=parts.get("bias"),
        )

    def find_bad_value(self, parts: Parts, facts: Facts) -> str | None:
        """Return a scale that is no positive number; a product of two such would look sound."""
        for name in ("alpha", "global_scale", "pre_quant_scale"):
            values = parts[name].float()
            if not bool((torch.isfinite(values) & (values > 0)).all()):
                return f"{name}: got {float(values.min())}, wanted finite positive numbers"
        return None

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why the operands cannot hold a layer."""
        if linear.weight.format.name != "nvfp4":
            return f"{linear.weight.format.name} weights: the operands are two-level NVFP4"
        if linear.activation is None or linear.activation.name != "nvfp4_static":
            name = "none" if linear.activation is None else linear.activation.name
            return (
                f"activation {name}: alpha and l1_scaled hold a calibrated scale of x; quantize "
                "with nvfp4_static activations"
            )
        if linear.channel_scale is not None:
            return "channel_scale: the operands have one scale for the whole product"
        if linear.rank == 0:
            return "no low-rank branch: the kernel wants a rank of at least 32; modelopt holds it"
        if linear.in_features % BLOCK:
            return f"in_features {linear.in_features}: wanted whole blocks of 16"
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the operands; the rank padded with zeros, vectors and factors in bfloat16."""
        weight, scale = linear.weight, linear.activation_global_scale
        down, up = linear.lora_down, linear.lora_up
        assert weight.global_scale is not None
        assert scale is not None
        assert down is not None
        assert up is not None  # all by find_obstacle
        alpha = weight.global_scale * scale
        missing = -linear.rank % RANK_MULTIPLE
        smooth = torch.ones(linear.in_features, device=weight.data.device)
        smooth = smooth if linear.smooth is None else linear.smooth.float()
        scales = weight.scales.view(torch.uint8)
        up = torch.nn.functional.pad(up.float() / alpha, (0, missing))
        down = torch.nn.functional.pad(down.float().t(), (0, missing))
        parts = {
            "weight_fp4": weight.data,
            "weight_sf": pack_scales(scales, "swizzled_128x4").reshape(-1),
            "alpha": alpha.reshape(1),
            "global_scale": scale.reciprocal().reshape(1),
            "pre_quant_scale": smooth.reciprocal().bfloat16(),
            "l2t_smoothed": down.bfloat16().contiguous(),
            "l1_scaled": up.bfloat16(),
        }
        if linear.bias is not None:
            parts["bias"] = linear.bias
        return parts

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return what was rounded, and the swizzled scales where they are padded."""
        kept = {name: parts[name] for name in self.origin_parts}
        if parts["weight_sf"].numel() * BLOCK != 2 * parts["weight_fp4"].numel():
            kept["weight_sf"] = parts["weight_sf"]
        return LayerOrigin(self.name, kept, facts)
