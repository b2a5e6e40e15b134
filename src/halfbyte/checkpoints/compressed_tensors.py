"""compressed-tensors' `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.

    weight_packed        uint8 [N, K/2]     low nibble = even column
    weight_scale         E4M3 [N, K/16]     NVFP4; row-major
                         uint8 [N, K/32]    MXFP4: E8M0
    weight_global_scale  float32 [1]        NVFP4: DIVIDES, 2688 / amax
    input_global_scale   float32 [1]        NVFP4: DIVIDES, calibrated; absent: x stays 16-bit
    bias                 float [N]

Whether MXFP4 layers quantize x too is said by `input_activations` of the configuration alone.
Source: compressed-tensors 0.20.1, compressors/nvfp4, compressors/mxfp4, quantization/quant_scheme.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from halfbyte.checkpoints.family import (
    NO_CLAIM,
    Claim,
    Facts,
    Family,
    Layer,
    LayerPlan,
    Parts,
    SideContent,
)
from halfbyte.checkpoints.layer_keys import KeySet, find_layers
from halfbyte.checkpoints.scalar_parts import as_scalar
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

_FLOATS: Final = ("F16", "BF16", "F32")
KEYS: Final = {
    "nvfp4": KeySet(
        {"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",), "weight_global_scale": ("F32",)},
        {"input_global_scale": ("F32",), "bias": _FLOATS},
    ),
    "mxfp4": KeySet(
        {"weight_packed": ("U8",), "weight_scale": ("U8", "F8_E8M0")},
        {"bias": _FLOATS},
        foreign=("weight_global_scale", "weight_zero_point"),
    ),
}
FILE_FORMATS: Final = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_FORMAT, _ACTIVATION, _SCALE_DTYPE = "format", "activation", "scale_dtype"
_NONE: Final = "none"


class CompressedTensors(Family):
    """Pack-quantized files of llm-compressor and others that write compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    title: ClassVar[str] = "compressed-tensors NVFP4, MXFP4"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("weight_packed", "weight_global_scale", "input_global_scale"), ()),
        "weight_scale": ("U8", "F8_E8M0", "F8_E4M3"),
    }
    origin_parts: ClassVar[tuple[str, ...]] = ("weight_global_scale", "input_global_scale")

    def claim(self, source: TensorSource) -> Claim:
        """Claim layers with weight_packed; nothing else has such keys."""
        layers: dict[str, LayerPlan] = {}
        for name, keys in KEYS.items():
            for layer, plan in find_layers(source, keys).items():
                layers[layer] = _add_facts(source, plan, name)
        if not layers:
            return NO_CLAIM
        _check_stated_format(source, layers)
        return Claim(layers, True, "weight_packed tensors")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; global scales become multipliers, rounded once."""
        name = facts.get(_FORMAT, "nvfp4" if "weight_global_scale" in parts else "mxfp4")
        packed = parts["weight_packed"]
        if packed.ndim != 2:
            raise FormatError(f"weight_packed: shape {list(packed.shape)}, wanted [N, K/2]")
        scales = parts["weight_scale"]
        if name == "mxfp4":
            scales = scales.view(torch.float8_e8m0fnu)
        activation = facts.get(_ACTIVATION, _NONE)
        if name == "nvfp4":
            activation = "nvfp4_static" if "input_global_scale" in parts else _NONE
        return QuantizedLinear(
            weight=BlockScaledTensor(
                get_format(name),
                packed,
                scales,
                _reciprocal(parts, "weight_global_scale"),
                2 * packed.shape[1],
            ),
            activation=None if activation == _NONE else get_activation_format(activation),
            activation_global_scale=_reciprocal(parts, "input_global_scale"),
            bias=parts.get("bias"),
        )

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why the family cannot hold a layer."""
        name, activation = linear.weight.format.name, linear.activation
        wanted = {"nvfp4": "nvfp4_static", "mxfp4": "mxfp4"}
        if name not in wanted:
            return f"{name} weights: pack-quantized FP4 files are NVFP4 (two-level) or MXFP4"
        if activation is not None and activation.name != wanted[name]:
            return (
                f"activation {activation.name}: its x is quantized as {wanted[name]}, or not at "
                "all; quantize with those activations, or weight-only"
            )
        for part in ("channel_scale", "smooth", "lora_down"):
            if getattr(linear, part) is not None:
                return f"{part}: the family has no tensor for it; halfbyte or modelopt keep it"
        if linear.in_features % linear.weight.format.block_size:
            return f"in_features {linear.in_features}: wanted whole blocks"
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the family's tensors; global scales become divisors, rounded once."""
        weight = linear.weight
        scales = weight.scales
        if weight.format.name == "mxfp4" and facts.get(_SCALE_DTYPE, "U8") == "U8":
            scales = scales.view(torch.uint8)
        parts = {"weight_packed": weight.data, "weight_scale": scales}
        if weight.global_scale is not None:
            parts["weight_global_scale"] = weight.global_scale.reciprocal().reshape(1)
        if linear.activation_global_scale is not None:
            scale = linear.activation_global_scale
            parts["input_global_scale"] = scale.reciprocal().reshape(1)
        if linear.bias is not None:
            parts["bias"] = linear.bias
        return parts

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return config.json with the quantization_config that loaders of the family want."""
        kinds = {
            (layer.linear.weight.format.name, layer.linear.activation is not None)
            for layer in layers.values()
        }
        if len(kinds) != 1:
            raise CheckpointError(
                f"layers of {len(kinds)} kinds {sorted(kinds)}: this writer makes files of one "
                "format, with or without quantized activations; split the model"
            )
        name, is_w4a4 = kinds.pop()
        config = dict(source.configs.get("config.json", {})) if source is not None else {}
        config["quantization_config"] = make_quantization_config(name, is_w4a4)
        return SideContent(files={"config.json": json.dumps(config, indent=2).encode()})


def make_quantization_config(name: str, is_w4a4: bool) -> dict[str, Any]:
    """Return the quantization_config of a file whose linears are all in format `name`."""
    is_nvfp4 = name == "nvfp4"
    group: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if is_nvfp4 else "group",
        "symmetric": True,
        "group_size": get_format(name).block_size,
    }
    scheme = {
        "targets": ["Linear"],
        "weights": {**group, "dynamic": False},
        "input_activations": {**group, "dynamic": "local" if is_nvfp4 else True}
        if is_w4a4
        else None,
        "output_activations": None,
        "format": f"{name}-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{name}-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def read_config(source: TensorSource) -> Mapping[str, Any]:
    """Return the quantization_config of compressed-tensors, {} where there is none."""
    config = source.configs.get("config.json", {}).get("quantization_config")
    is_ours = isinstance(config, dict) and config.get("quant_method") == "compressed-tensors"
    return config if is_ours else {}


def _add_facts(source: TensorSource, plan: LayerPlan, name: str) -> LayerPlan:
    scale = source.specs[plan.tensors["weight_scale"]].dtype.name
    facts = {_FORMAT: name, _SCALE_DTYPE: scale, _ACTIVATION: _NONE}
    has_activations = _has_input_activations(source)
    if name == "mxfp4" and has_activations:
        facts[_ACTIVATION] = "mxfp4"
    if name == "nvfp4" and has_activations and "input_global_scale" not in plan.tensors:
        raise CheckpointError(
            f"{source.path}: {plan.name} has no input_global_scale, but input_activations in "
            "config.json say that x is quantized; one of them is of another checkpoint"
        )
    return LayerPlan(plan.name, plan.tensors, facts)


def _has_input_activations(source: TensorSource) -> bool:
    groups = read_config(source).get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    stated = [scheme.get("input_activations") for scheme in schemes if isinstance(scheme, dict)]
    for value in stated:
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(
                f"{source.path}: config.json: input_activations {quoted(value)}, wanted null or an "
                "object"
            )
    return any(stated)


def _check_stated_format(source: TensorSource, layers: Mapping[str, LayerPlan]) -> None:
    """Raise CheckpointError where the configuration names another format than the tensors have."""
    stated = read_config(source).get("format")
    if stated is None or stated == "mixed-precision":
        return
    for layer, plan in layers.items():
        if FILE_FORMATS.get(stated) != plan.facts[_FORMAT]:
            raise CheckpointError(
                f"{source.path}: {layer} has the tensors of {plan.facts[_FORMAT]}, config.json "
                f"says format {quoted(stated)}; one of them is of another checkpoint"
            )


def _reciprocal(parts: Parts, name: str) -> torch.Tensor | None:
    return as_scalar(name, parts[name]).reciprocal() if name in parts else None
