"""torchao's NVFP4Tensor and MXTensor (FP4): its safetensors form, and `torch.save` archives.

    _weight_qdata                 uint8 [N, K/2]      low nibble = even column
    _weight_scale                 E4M3 [N, K/16]      NVFP4; E8M0 [N, K/32] for MX; row-major, or
                                                      swizzled 128x4 by is_swizzled_scales
    _weight_per_tensor_scale      float32 []          multiplies; absent: one-level NVFP4
    _weight_act_per_tensor_scale  float32 []          calibrated multiplier of x
    bias                          float [N]

The metadata entry LAYER.weight is JSON: class, attributes, names of the parts; `tensor_names` lists
all. `act_quant_kwargs` says how x is quantized: null leaves it as it is.
Source: torchao 0.18.0, prototype/safetensors, prototype/mx_formats/{nvfp4,mx}_tensor.py and
inference_workflow.py. It reads `torch.save` archives through `torch_archive`, without torchao.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NoReturn

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
from halfbyte.checkpoints.scale_padding import find_used_padding
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted
from halfbyte.formats.scale_layout import pack_scales, padded_scale_shape, unpack_scales

CLASSES: Final = ("NVFP4Tensor", "MXTensor")
NAMES_KEY: Final = "tensor_names"
_JSON: Final = "json"
_DATA_ENDING: Final = "._weight_qdata"
_DTYPES: Final = {
    "qdata": ("U8",),
    "scale": ("F8_E4M3", "F8_E8M0"),
    "per_tensor_scale": ("F32",),
    "act_per_tensor_scale": ("F32",),
    "bias": ("F16", "BF16", "F32"),
}
_ACTIVATIONS: Final = {
    "nvfp4": ("nvfp4_static", "nvfp4_dynamic", "nvfp4_one_level"),
    "nvfp4_one_level": ("nvfp4_static", "nvfp4_dynamic", "nvfp4_one_level"),
    "mxfp4": ("mxfp4",),
}
_FP4: Final = "float4_e2m1fn_x2"


class TorchAO(Family):
    """torchao's FP4 tensors."""

    name: ClassVar[str] = "torchao"
    title: ClassVar[str] = "torchao NVFP4Tensor, MXTensor"

    def claim(self, source: TensorSource) -> Claim:
        """Claim what the metadata calls NVFP4Tensor or MXTensor; certain, nothing else does."""
        layers = {}
        for name, description in read_descriptions(source).items():
            plan = _plan_layer(source, name, description)
            layers[plan.name] = plan
        used = {tensor for plan in layers.values() for tensor in plan.tensors.values()}
        for name in source.specs:
            if name.endswith(_DATA_ENDING) and name not in used:
                stated = _DATA_ENDING.removesuffix("_qdata").removeprefix(".")
                _fail(
                    source,
                    name,
                    f"no description of its tensor ({stated} of its layer) in {NAMES_KEY}",
                    "torchao's metadata as it was saved",
                )
        if not layers:
            return NO_CLAIM
        return Claim(layers, True, "torchao's NVFP4Tensor or MXTensor in the metadata")

    def tensor_name(self, layer: str, part: str) -> str:
        """Return the name that torchao gives a part of LAYER.weight."""
        return f"{layer}.bias" if part == "bias" else f"{layer}._weight_{part}"

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; swizzled scales become row-major."""
        data = parts["qdata"]
        if data.ndim != 2:
            raise FormatError(f"qdata: shape {list(data.shape)}, wanted [N, K/2]")
        settings = json.loads(facts[_JSON])["_data"]
        is_mx = parts["scale"].dtype == torch.float8_e8m0fnu
        global_scale = parts.get("per_tensor_scale")
        name = "mxfp4" if is_mx else "nvfp4_one_level" if global_scale is None else "nvfp4"
        rows, columns = data.shape[0], 2 * data.shape[1]
        wanted = stored_scale_shape(name, (rows, columns), settings)
        scales = parts["scale"]
        if columns % get_format(name).block_size or tuple(scales.shape) != wanted:
            raise FormatError(f"scale: shape {list(scales.shape)}, wanted {list(wanted)}")
        if settings.get("is_swizzled_scales"):
            blocks = columns // get_format(name).block_size
            scales = unpack_scales(scales, "swizzled_128x4", rows, blocks)
        activation = find_activation(settings, "act_per_tensor_scale" in parts)
        is_static = activation == "nvfp4_static"
        return QuantizedLinear(
            weight=BlockScaledTensor(get_format(name), data, scales, global_scale, columns),
            activation=None if activation is None else get_activation_format(activation),
            activation_global_scale=parts["act_per_tensor_scale"] if is_static else None,
            bias=parts.get("bias"),
        )

    def find_bad_value(self, parts: Parts, facts: Facts) -> str | None:
        """Return scales in the padding of swizzled ones."""
        data, scales = parts["qdata"], parts["scale"]
        if data.ndim != 2 or not json.loads(facts[_JSON])["_data"].get("is_swizzled_scales"):
            return None
        block_size = 32 if scales.dtype == torch.float8_e8m0fnu else 16
        return find_used_padding("scale", scales, data.shape[0], 2 * data.shape[1] // block_size)

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why torchao's tensors cannot hold a layer."""
        name, activation = linear.weight.format.name, linear.activation
        if name not in _ACTIVATIONS:
            return f"{name} weights: this family has NVFP4 (one or two levels) and MXFP4"
        if activation is not None and activation.name not in _ACTIVATIONS[name]:
            wanted = ", ".join(_ACTIVATIONS[name])
            return f"activation {activation.name}: wanted {wanted}, or weight-only"
        for part in ("channel_scale", "smooth", "lora_down"):
            if getattr(linear, part) is not None:
                return f"{part}: torchao's tensors have none; halfbyte or modelopt keep it"
        if linear.in_features % linear.weight.format.block_size:
            return f"in_features {linear.in_features}: torchao has whole blocks"
        return None

    def list_metadata(self, source: TensorSource) -> frozenset[str]:
        """Return the list of tensors and their descriptions."""
        names = _parse(source, NAMES_KEY) if NAMES_KEY in source.metadata else ()
        listed = names if isinstance(names, list) else ()
        return frozenset({NAMES_KEY, *(name for name in listed if isinstance(name, str))})

    def make_facts(self, layer: str, linear: QuantizedLinear) -> Facts:
        """Return the description that torchao's own workflow gives such a tensor."""
        return {_JSON: json.dumps(describe(linear))}

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return torchao's tensors; scales swizzled where the description says so."""
        settings = json.loads(facts[_JSON])["_data"] if facts else describe(linear)["_data"]
        weight = linear.weight
        scales = weight.scales
        if settings.get("is_swizzled_scales"):
            shape = stored_scale_shape(weight.format.name, weight.shape, settings)
            scales = pack_scales(scales, "swizzled_128x4").reshape(shape)
        parts = {"qdata": weight.data, "scale": scales}
        if weight.global_scale is not None:
            parts["per_tensor_scale"] = weight.global_scale
        if linear.activation_global_scale is not None:
            parts["act_per_tensor_scale"] = linear.activation_global_scale
        if linear.bias is not None:
            parts["bias"] = linear.bias
        return parts

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return swizzled scales with padding, and a calibrated scale that x does not use."""
        kept = {}
        settings = json.loads(facts[_JSON])["_data"]
        block_size = 32 if parts["scale"].dtype == torch.float8_e8m0fnu else 16
        if parts["scale"].numel() * block_size != 2 * parts["qdata"].numel():
            kept["scale"] = parts["scale"]
        if "act_per_tensor_scale" in parts and find_activation(settings, True) != "nvfp4_static":
            kept["act_per_tensor_scale"] = parts["act_per_tensor_scale"]
        return LayerOrigin(self.name, kept, facts)

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return the descriptions of all tensors, the plain ones too, as torchao's loader wants."""
        metadata = {}
        for name, layer in layers.items():
            origin = layer.origin
            is_own = origin is not None and origin.family == self.name
            facts = origin.facts if is_own and origin else self.make_facts(name, layer.linear)
            metadata[f"{name}.weight"] = facts[_JSON]
            if layer.linear.bias is not None:
                metadata[f"{name}.bias"] = _PLAIN
        for name in source.specs if source is not None else ():
            parent, _, _ = name.rpartition(".")
            if parent and not any(layer in layers for layer in _list_parents(name)):
                metadata[name] = _PLAIN
        names = json.dumps(sorted(metadata))
        return SideContent({**metadata, NAMES_KEY: names})


_PLAIN: Final = json.dumps({"_type": "Tensor"})


def read_descriptions(source: TensorSource) -> dict[str, dict[str, Any]]:
    """Return the JSON of every NVFP4Tensor and MXTensor by tensor name.

    Raises CheckpointError for a description that is none, and for torchao's other quantized
    classes, which would be lost among the unquantized tensors.
    """
    if NAMES_KEY not in source.metadata:
        return {}
    names = _parse(source, NAMES_KEY)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return {}  # another program's key of the same name
    found = {}
    for name in names:
        if name not in source.metadata:
            return {}
        value = _parse(source, name)
        kind = value.get("_type") if isinstance(value, dict) else None
        if kind == "Tensor":
            continue
        if kind not in CLASSES:
            _fail(source, name, f"a {quoted(kind)}", " or ".join(CLASSES) + " of 4-bit elements")
        layer, _, attribute = name.rpartition(".")
        prefix = f"{layer}._{attribute}_" if layer else f"_{attribute}_"
        if not any(tensor.startswith(prefix) for tensor in source.specs):
            continue  # what our own format keeps of a file that it came from
        if not isinstance(value.get("_data"), dict):
            _fail(source, name, quoted(value), "attributes under _data")
        found[name] = value
    return found


def describe(linear: QuantizedLinear) -> dict[str, Any]:
    """Return torchao's JSON of a tensor, with the settings of its own workflow."""
    name, activation = linear.weight.format.name, linear.activation
    dtype = torch.bfloat16 if linear.bias is None else linear.bias.dtype
    stated = {"_type": "torch.dtype", "_data": str(dtype).rpartition(".")[2]}
    is_swizzled = activation is not None  # what its GEMM takes; weight-only ones are dequantized
    kwargs: dict[str, Any] | None = None
    if name == "mxfp4":
        fp4 = {"_type": "torch.dtype", "_data": _FP4}
        kernel = {"_type": "KernelPreference", "_data": "AUTO"}
        if activation is not None:
            settings = {
                "elem_dtype": fp4,
                "block_size": 32,
                "scaling_mode": {"_type": "ScaleCalculationMode", "_data": "FLOOR"},
                "kernel_preference": kernel,
                "is_swizzled_scales": True,
            }
            kwargs = {"_type": "QuantizeTensorToMXKwargs", "_data": settings}
        data = {
            "elem_dtype": fp4,
            "block_size": 32,
            "orig_dtype": stated,
            "kernel_preference": kernel,
            "act_quant_kwargs": kwargs,
            "is_swizzled_scales": is_swizzled,
        }
        return {"_type": "MXTensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}
    if activation is not None:
        settings = {
            "block_size": 16,
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "use_dynamic_per_tensor_scale": activation.name == "nvfp4_dynamic",
        }
        kwargs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": settings}
    data = {
        "is_swizzled_scales": is_swizzled,
        "use_triton_kernel": False,
        "act_quant_kwargs": kwargs,
        "block_size": 16,
        "orig_dtype": stated,
    }
    parts = ["per_tensor_scale"] if linear.weight.global_scale is not None else []
    if linear.activation_global_scale is not None:
        parts.append("act_per_tensor_scale")
    names = [*parts, "qdata", "scale"]
    return {"_type": "NVFP4Tensor", "_data": data, "_tensor_data_names": names}


def find_activation(settings: Mapping[str, Any], has_scale: bool) -> str | None:
    """Return the name of the activation format that `act_quant_kwargs` stands for."""
    kwargs = settings.get("act_quant_kwargs")
    if kwargs is None:
        return None
    if kwargs["_type"] == "QuantizeTensorToMXKwargs":
        return "mxfp4"
    if kwargs["_data"].get("use_dynamic_per_tensor_scale"):
        return "nvfp4_dynamic"
    return "nvfp4_static" if has_scale else "nvfp4_one_level"


def stored_scale_shape(
    name: str, shape: tuple[int, int], settings: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the shape of torchao's scale tensor for a [N, K] weight of format `name`."""
    blocks = get_format(name).num_blocks(shape[1])
    if not settings.get("is_swizzled_scales"):
        return shape[0], blocks
    rows, columns = padded_scale_shape(shape[0], blocks, "swizzled_128x4")
    return rows // 4, columns * 4  # it calls each 128x4 tile 32x16


def _plan_layer(source: TensorSource, name: str, description: Mapping[str, Any]) -> LayerPlan:
    layer, _, attribute = name.rpartition(".")
    if attribute != "weight" or not layer:
        _fail(source, name, "a quantized tensor of that name", "LAYER.weight of a linear layer")
    _check_settings(source, name, description)
    stated = description.get("_tensor_data_names")
    if not isinstance(stated, list) or not {"qdata", "scale"} <= set(map(str, stated)):
        _fail(source, name, f"parts {quoted(stated)}", "qdata, scale and optional scales")
    tensors = {str(part): f"{layer}._weight_{part}" for part in stated}
    if f"{layer}.bias" in source.specs:
        tensors["bias"] = f"{layer}.bias"
    for part, tensor in tensors.items():
        dtypes = _DTYPES.get(part)
        if tensor not in source.specs:
            _fail(source, tensor, "no such tensor", f"the {part} that its description names")
        spec = source.specs[tensor]
        if dtypes is None or spec.dtype.name not in dtypes:
            _fail(source, tensor, f"{spec.dtype.name}", f"{' or '.join(dtypes or ('no part',))}")
    is_mx = description["_type"] == "MXTensor"
    scale = source.specs[tensors["scale"]].dtype.name
    if (scale == "F8_E8M0") != is_mx:
        _fail(source, tensors["scale"], f"{scale} in a {description['_type']}", "its scale dtype")
    facts = source.metadata[name]
    return LayerPlan(layer, tensors, {_JSON: facts})


def _check_settings(source: TensorSource, name: str, description: Mapping[str, Any]) -> None:
    data = description["_data"]
    is_mx = description["_type"] == "MXTensor"
    block_size = 32 if is_mx else 16
    if data.get("block_size") != block_size:
        _fail(source, name, f"block_size {quoted(data.get('block_size'))}", str(block_size))
    if not isinstance(data.get("is_swizzled_scales"), bool):
        _fail(source, name, "no is_swizzled_scales", "true or false: it decides the layout")
    if is_mx and not _is_fp4(data.get("elem_dtype")):
        _fail(source, name, f"MX elements {quoted(data.get('elem_dtype'))}", f"{_FP4}: 4 bits")
    kwargs = data.get("act_quant_kwargs")
    if kwargs is None:
        return
    wanted = "QuantizeTensorToMXKwargs" if is_mx else "QuantizeTensorToNVFP4Kwargs"
    settings = kwargs.get("_data") if isinstance(kwargs, dict) else None
    if not isinstance(settings, dict) or kwargs.get("_type") != wanted:
        _fail(source, name, f"act_quant_kwargs {quoted(kwargs)}", f"null or {wanted}")
    if type(settings.get("use_dynamic_per_tensor_scale", False)) is not bool:
        _fail(
            source, name, f"activations {quoted(settings)}", "use_dynamic_per_tensor_scale a bool"
        )
    if settings.get("block_size", block_size) != block_size or (
        is_mx and not _is_fp4(settings.get("elem_dtype"))
    ):
        _fail(source, name, f"activations {quoted(settings)}", "the 4-bit format of the weight")


def _is_fp4(value: Any) -> bool:
    return isinstance(value, dict) and value.get("_data") == _FP4


def _list_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _parse(source: TensorSource, key: str) -> Any:
    try:
        return json.loads(source.metadata[key])
    except (ValueError, RecursionError):
        return None


def _fail(source: TensorSource, name: str, came: str, wanted: str) -> NoReturn:
    raise CheckpointError(f"{source.path}: {quoted(name)}: got {came}, wanted {wanted}")
