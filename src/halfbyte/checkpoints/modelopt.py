"""ModelOpt's `NVFP4` and `NVFP4_SVD` exports, and the FLUX.2 files that use their keys.

    weight            uint8 [N, K/2]      low nibble = even column
    weight_scale      E4M3 [N, K/16]      row-major
    weight_scale_2    float32             multiplies: amax / 2688
    input_scale       float32             calibrated multiplier of x; absent: x stays 16-bit
    pre_quant_scale   float [K]           MULTIPLIES x: smooth = 1 / pre_quant_scale
    svdquant_lora_a   float [R, K]        acts on the SCALED x: lora_down = lora_a * pre_quant_scale
    svdquant_lora_b   float [N, R]
    bias              float [N]

Source: nvidia-modelopt 0.47.0, torch/export (unified Hugging Face export) and its quant_algo names.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from halfbyte.checkpoints.family import NO_CLAIM, Claim, Facts, Family, Layer, Parts, SideContent
from halfbyte.checkpoints.layer_keys import KeySet, find_layers
from halfbyte.checkpoints.scalar_parts import as_scalar
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear

_FLOATS: Final = ("F16", "BF16", "F32")
KEYS: Final = KeySet(
    required={"weight": ("U8",), "weight_scale": ("F8_E4M3",), "weight_scale_2": ("F32",)},
    optional={
        "input_scale": ("F32",),
        "pre_quant_scale": _FLOATS,
        "svdquant_lora_a": _FLOATS,
        "svdquant_lora_b": _FLOATS,
        "bias": _FLOATS,
    },
    foreign=("comfy_quant",),
)
ALGORITHMS: Final = ("NVFP4", "NVFP4_SVD", "NVFP4_SVDQUANT", "W4A16_NVFP4")


class ModelOpt(Family):
    """ModelOpt's NVFP4 layers, with or without the low-rank branch."""

    name: ClassVar[str] = "modelopt"
    title: ClassVar[str] = "ModelOpt NVFP4, NVFP4_SVD"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": ("U8",),
        "weight_scale": ("F8_E4M3",),
        **dict.fromkeys(("weight_scale_2", "svdquant_lora_a", "svdquant_lora_b"), ()),
    }
    # Reciprocal and product are rounded; the scalars are [] in some exports and [1] in others.
    origin_parts: ClassVar[tuple[str, ...]] = (
        "weight_scale_2",
        "input_scale",
        "pre_quant_scale",
        "svdquant_lora_a",
        "svdquant_lora_b",
    )

    def claim(self, source: TensorSource) -> Claim:
        """Claim layers with ModelOpt's keys; certain where the configuration or SVD keys say so."""
        layers = find_layers(source, KEYS)
        if not layers:
            return NO_CLAIM
        algorithm = find_algorithm(source.configs)
        if algorithm is not None:
            return Claim(layers, True, f"quant_algo {algorithm} in its configuration")
        if any("svdquant_lora_a" in plan.tensors for plan in layers.values()):
            return Claim(layers, True, "svdquant_lora_a tensors")
        return Claim(layers, False, "weight, weight_scale and weight_scale_2, no configuration")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; the low-rank branch is turned to see the raw x, in float32."""
        weight = parts["weight"]
        if weight.ndim != 2:
            raise FormatError(f"weight: shape {list(weight.shape)}, wanted [N, K/2]")
        smooth = lora_down = lora_up = None
        scale = parts.get("pre_quant_scale")
        if scale is not None:
            if tuple(scale.shape) != (2 * weight.shape[1],):
                raise FormatError(
                    f"pre_quant_scale: shape {list(scale.shape)}, wanted [{2 * weight.shape[1]}]"
                )
            smooth = scale.float().reciprocal()
        if ("svdquant_lora_a" in parts) != ("svdquant_lora_b" in parts):
            raise FormatError("svdquant_lora_a and svdquant_lora_b come together: one is missing")
        if "svdquant_lora_a" in parts:
            lora_down = parts["svdquant_lora_a"].float()
            lora_down = lora_down if scale is None else lora_down * scale.float()
            lora_up = parts["svdquant_lora_b"].float()
        input_scale = parts.get("input_scale")
        activation = None if input_scale is None else get_activation_format("nvfp4_static")
        return QuantizedLinear(
            weight=BlockScaledTensor(
                get_format("nvfp4"),
                weight,
                parts["weight_scale"],
                as_scalar("weight_scale_2", parts["weight_scale_2"]),
                2 * weight.shape[1],
            ),
            activation=activation,
            activation_global_scale=None
            if input_scale is None
            else as_scalar("input_scale", input_scale),
            smooth=smooth,
            lora_down=lora_down,
            lora_up=lora_up,
            bias=parts.get("bias"),
        )

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why ModelOpt's keys cannot hold a layer."""
        if linear.weight.format.name != "nvfp4":
            return f"{linear.weight.format.name} weights: ModelOpt's NVFP4 has a global scale"
        if linear.activation is not None and linear.activation.name != "nvfp4_static":
            return (
                f"activation {linear.activation.name}: ModelOpt's x has a calibrated global scale; "
                "quantize with nvfp4_static activations, or weight-only"
            )
        if linear.channel_scale is not None:
            return "channel_scale: ModelOpt has one scale for the whole weight"
        if linear.in_features % 16:
            return f"in_features {linear.in_features}: ModelOpt has whole blocks of 16"
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return ModelOpt's tensors; vectors and low-rank factors in float32, rounded once."""
        assert linear.weight.global_scale is not None  # find_obstacle wants format nvfp4
        parts = {
            "weight": linear.weight.data,
            "weight_scale": linear.weight.scales,
            "weight_scale_2": linear.weight.global_scale,
        }
        if linear.activation_global_scale is not None:
            parts["input_scale"] = linear.activation_global_scale
        if linear.smooth is not None:
            parts["pre_quant_scale"] = linear.smooth.float().reciprocal()
        if linear.lora_down is not None and linear.lora_up is not None:
            lora_a = linear.lora_down.float()
            parts["svdquant_lora_a"] = (
                lora_a if linear.smooth is None else lora_a * linear.smooth.float()
            )
            parts["svdquant_lora_b"] = linear.lora_up.float()
        if linear.bias is not None:
            parts["bias"] = linear.bias
        return parts

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return hf_quant_config.json with the algorithm and the rank."""
        linears = [layer.linear for layer in layers.values()]
        ranks = sorted({linear.rank for linear in linears} - {0})
        is_weight_only = all(linear.activation is None for linear in linears)
        algorithm = "NVFP4_SVD" if ranks else "W4A16_NVFP4" if is_weight_only else "NVFP4"
        quantization: dict[str, Any] = {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": 16,
        }
        if len(ranks) == 1:
            quantization["lora_rank"] = ranks[0]
        config = {"producer": {"name": "modelopt"}, "quantization": quantization}
        return SideContent(files={"hf_quant_config.json": json.dumps(config, indent=2).encode()})


def find_algorithm(configs: Mapping[str, Any]) -> str | None:
    """Return the NVFP4 algorithm that a configuration names, or None."""
    own = configs.get("hf_quant_config.json", {}).get("quantization")
    general = configs.get("config.json", {}).get("quantization_config")
    for section in (own, general):
        if isinstance(section, dict) and section.get("quant_algo") in ALGORITHMS:
            return str(section["quant_algo"])
    return None
