"""ComfyUI's `nvfp4` layers: a `.comfy_quant` tensor, or the layer table of the file's metadata.

    comfy_quant      uint8 [bytes]        JSON: {"format": "nvfp4", "full_precision_matrix_mult": ?}
    weight           uint8 [N16, K16/2]   HIGH nibble = even column; N16, K16: rounded up to 16
    weight_scale     E4M3 (or its bytes)  SWIZZLED 128x4 over [N16, K16/16], zero padding
    weight_scale_2   float32              multiplies
    input_scale      float32              calibrated multiplier of x; absent: amax(x) / 2688
    pre_quant_scale  float [K]            MULTIPLIES x: smooth = 1 / pre_quant_scale
    bias             float [N]

`full_precision_matrix_mult` leaves x unquantized. The file does not say N and K: N is the length of
the bias, K (and N without a bias) is taken as stored, unless `orig_shape` stands in the JSON, which
our writer adds where it pads and ComfyUI does not read.

Sources: comfy-kitchen 0.2.40, tensor/nvfp4.py and backends/eager/quantization.py (layout, padding);
ComfyUI, comfy/ops.py and comfy/quant_ops.py of 2026 (keys, JSON, what is multiplied).
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
from halfbyte.checkpoints.layer_keys import KeySet
from halfbyte.checkpoints.scalar_parts import as_scalar
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

_FLOATS: Final = ("F16", "BF16", "F32")
KEYS: Final = KeySet(
    required={"weight": ("U8",), "weight_scale": ("F8_E4M3", "U8"), "weight_scale_2": ("F32",)},
    optional={
        "comfy_quant": ("U8",),
        "input_scale": ("F32",),
        "pre_quant_scale": _FLOATS,
        "bias": _FLOATS,
    },
)
LAYER_TABLE: Final = "_quantization_metadata"  # metadata entry of files without comfy_quant tensors
MULTIPLE: Final = 16  # rows and columns are rounded up to it
MAX_MARK_BYTES: Final = 65536
DEFAULT_MARK: Final = '{"format": "nvfp4"}'
# Facts: the JSON of the layer and where it stood, the dtype word of weight_scale.
_JSON, _PLACE, _SCALE_DTYPE = "json", "place", "scale_dtype"
_ACTIVATIONS: Final = ("nvfp4_static", "nvfp4_dynamic")


class ComfyUI(Family):
    """ComfyUI's NVFP4 layers."""

    name: ClassVar[str] = "comfyui"
    title: ClassVar[str] = "ComfyUI NVFP4"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": ("U8",),
        "weight_scale": ("F8_E4M3",),
        "weight_scale_2": (),
    }
    # The reciprocal is rounded, scalars are [] or [1], and input_scale may stand there unused.
    origin_parts: ClassVar[tuple[str, ...]] = ("weight_scale_2", "input_scale", "pre_quant_scale")

    def claim(self, source: TensorSource) -> Claim:
        """Claim every marked layer; CheckpointError for one in another of ComfyUI's formats."""
        marks = read_marks(source)
        if not marks:
            return NO_CLAIM
        layers = {name: _plan_layer(source, name, *mark) for name, mark in marks.items()}
        return Claim(layers, True, "comfy_quant tensors or ComfyUI's table of layers")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; nibbles swapped, scales unswizzled, padding cut off."""
        weight, scales = parts["weight"], parts["weight_scale"]
        if weight.ndim != 2 or weight.shape[0] % MULTIPLE or weight.shape[1] * 2 % MULTIPLE:
            raise FormatError(
                f"weight: shape {list(weight.shape)}, wanted [N, K/2] with N and K multiples of 16"
            )
        rows, blocks = weight.shape[0], weight.shape[1] // 8
        wanted = padded_scale_shape(rows, blocks, "swizzled_128x4")
        if tuple(scales.shape) != wanted:
            raise FormatError(
                f"weight_scale: shape {list(scales.shape)}, wanted {list(wanted)} (swizzled 128x4)"
            )
        mark = json.loads(facts.get(_JSON, DEFAULT_MARK))
        n, k = find_logical_shape(weight, parts.get("bias"), mark)
        plain = unpack_scales(scales.view(torch.float8_e4m3fn), "swizzled_128x4", rows, blocks)
        activation, input_scale = None, None
        if not is_full_precision(mark):
            input_scale = parts.get("input_scale")
            activation = get_activation_format(_ACTIVATIONS[input_scale is None])
        pre_quant_scale = parts.get("pre_quant_scale")
        nvfp4 = get_format("nvfp4")
        return QuantizedLinear(
            weight=BlockScaledTensor(
                nvfp4,
                swap_nibbles(weight[:n, : nvfp4.row_bytes(k)]),
                plain[:n, : nvfp4.num_blocks(k)].contiguous(),
                as_scalar("weight_scale_2", parts["weight_scale_2"]),
                k,
            ),
            activation=activation,
            activation_global_scale=None
            if input_scale is None
            else as_scalar("input_scale", input_scale),
            smooth=None if pre_quant_scale is None else pre_quant_scale.float().reciprocal(),
            bias=parts.get("bias"),
        )

    def find_bad_value(self, parts: Parts, facts: Facts) -> str | None:
        """Return scales in the padding."""
        weight = parts["weight"]
        if weight.ndim != 2 or weight.shape[0] % MULTIPLE or 2 * weight.shape[1] % MULTIPLE:
            return None  # decode names the shape
        blocks = 2 * weight.shape[1] // MULTIPLE
        return find_used_padding("weight_scale", parts["weight_scale"], weight.shape[0], blocks)

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why ComfyUI's keys cannot hold a layer."""
        if linear.weight.format.name != "nvfp4":
            return f"{linear.weight.format.name} weights: ComfyUI's nvfp4 has a global scale"
        if linear.activation is not None and linear.activation.name not in _ACTIVATIONS:
            return (
                f"activation {linear.activation.name}: ComfyUI quantizes x with a global scale; "
                "quantize with nvfp4_static or nvfp4_dynamic activations, or weight-only"
            )
        for part in ("channel_scale", "lora_down"):
            if getattr(linear, part) is not None:
                return f"{part}: ComfyUI's nvfp4 has no tensor for it; halfbyte or nunchaku keep it"
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return ComfyUI's tensors, rows and columns padded with zeros to multiples of 16."""
        assert linear.weight.global_scale is not None  # find_obstacle wants format nvfp4
        rows = round_up(linear.out_features)
        weight = _pad_rows(swap_nibbles(linear.weight.data), rows)
        scales = _pad_rows(linear.weight.scales.view(torch.uint8), rows)
        swizzled = pack_scales(scales, "swizzled_128x4")
        if facts.get(_SCALE_DTYPE, "F8_E4M3") == "F8_E4M3":
            swizzled = swizzled.view(torch.float8_e4m3fn)
        parts = {
            "weight": weight,
            "weight_scale": swizzled,
            "weight_scale_2": linear.weight.global_scale,
        }
        if linear.activation_global_scale is not None:
            parts["input_scale"] = linear.activation_global_scale
        if linear.smooth is not None:
            parts["pre_quant_scale"] = linear.smooth.float().reciprocal()
        if linear.bias is not None:
            parts["bias"] = linear.bias
        if facts.get(_PLACE) != LAYER_TABLE:
            text = facts.get(_JSON, "")
            if not text or is_full_precision(json.loads(text)) != (linear.activation is None):
                text = make_mark(linear)
            mark = torch.tensor(list(text.encode()), dtype=torch.uint8)
            parts["comfy_quant"] = mark.to(weight.device)
        return parts

    def list_metadata(self, source: TensorSource) -> frozenset[str]:
        """Return the table of layers."""
        return frozenset({LAYER_TABLE})

    def make_facts(self, layer: str, linear: QuantizedLinear) -> Facts:
        """Return the JSON that says whether x is quantized, and the shape where it is padded."""
        return {_JSON: make_mark(linear), _PLACE: "comfy_quant"}

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return what the record does not hold, with tensors whose padding it has cut off."""
        kept = {name: parts[name] for name in self.origin_parts if name in parts}
        weight, scales = parts["weight"], parts["weight_scale"]
        n, k = find_logical_shape(weight, parts.get("bias"), json.loads(facts[_JSON]))
        if (n, k) != (weight.shape[0], 2 * weight.shape[1]):
            kept["weight"] = weight
        if scales.numel() * MULTIPLE != n * k:
            kept["weight_scale"] = scales
        return LayerOrigin(self.name, kept, facts)

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return the table of the layers that had no comfy_quant tensor."""
        origins = {name: layer.origin for name, layer in layers.items()}
        table = {
            name: json.loads(origin.facts[_JSON])
            for name, origin in sorted(origins.items())
            if origin is not None
            and origin.family == self.name
            and origin.facts.get(_PLACE) == LAYER_TABLE
        }
        if not table:
            return SideContent()
        return SideContent({LAYER_TABLE: json.dumps({"format_version": "1.0", "layers": table})})


def read_marks(source: TensorSource) -> dict[str, tuple[dict[str, Any], str, str]]:
    """Return JSON object, its text, and where it stood, by layer name."""
    marks = {}
    for name, spec in source.specs.items():
        layer, _, part = name.rpartition(".")
        if part != "comfy_quant" or not layer:
            continue
        if spec.dtype.name != "U8" or len(spec.shape) != 1 or spec.num_bytes > MAX_MARK_BYTES:
            _fail(source, name, f"{spec.dtype.name} {list(spec.shape)}", "JSON in U8 [bytes]")
        raw = bytes(source.read(name).tolist())
        marks[layer] = (*_parse_mark(source, name, raw), part)
    if LAYER_TABLE in source.metadata:
        table, _ = _parse_mark(source, LAYER_TABLE, source.metadata[LAYER_TABLE].encode())
        layers = table.get("layers")
        if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
            _fail(source, LAYER_TABLE, quoted(layers), "objects by layer name under 'layers'")
        for name, mark in layers.items():
            marks.setdefault(name, (mark, json.dumps(mark), LAYER_TABLE))
    return marks


def find_logical_shape(
    weight: torch.Tensor, bias: torch.Tensor | None, mark: Mapping[str, Any]
) -> tuple[int, int]:
    """Return (N, K) of a stored weight; FormatError for a stated shape that it does not pad.

    Args:
        weight: [N16, K16/2].
        bias: [N] or None.
        mark: the layer's JSON.
    """
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    stated = mark.get("orig_shape")
    if stated is not None:
        is_shape = isinstance(stated, list) and [type(size) for size in stated] == [int, int]
        if not is_shape or [round_up(size) for size in stated] != [rows, columns]:
            raise FormatError(
                f"comfy_quant: orig_shape {quoted(stated)}, the weight is [{rows}, {columns}]"
            )
        return stated[0], stated[1]
    if bias is not None and bias.ndim == 1 and 0 < rows - bias.shape[0] < MULTIPLE:
        return bias.shape[0], columns
    return rows, columns


def make_mark(linear: QuantizedLinear) -> str:
    """Return the comfy_quant JSON of a layer, with its shape where rows or columns are padded."""
    mark: dict[str, Any] = {"format": "nvfp4"}
    if linear.activation is None:
        mark["full_precision_matrix_mult"] = True
    if any(size % MULTIPLE for size in linear.weight.shape):
        mark["orig_shape"] = list(linear.weight.shape)
    return json.dumps(mark)


def is_full_precision(mark: Mapping[str, Any]) -> bool:
    """Return whether a layer's x stays unquantized."""
    return bool(mark.get("full_precision_matrix_mult", False))


def round_up(size: int) -> int:
    """Return `size` as ComfyUI stores it."""
    return -(-size // MULTIPLE) * MULTIPLE


def swap_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return uint8 bytes with their halves exchanged: high nibble first <-> low nibble first."""
    return (data << 4) | (data >> 4)


def _plan_layer(
    source: TensorSource, layer: str, mark: Mapping[str, Any], text: str, place: str
) -> LayerPlan:
    stated = mark.get("format")
    if stated != "nvfp4":
        _fail(
            source,
            layer,
            f"ComfyUI format {quoted(stated)}",
            "nvfp4, the 4-bit one that this reader knows; keep such layers in ComfyUI, or convert "
            "a file whose other layers are not quantized",
        )
    known = {**KEYS.required, **KEYS.optional}
    names = {part: f"{layer}.{part}" for part in known if f"{layer}.{part}" in source.specs}
    dtypes = {part: source.specs[name].dtype.name for part, name in names.items()}
    if not KEYS.match(dtypes):
        wanted = ", ".join(f"{part} {' or '.join(words)}" for part, words in KEYS.required.items())
        _fail(source, layer, f"an nvfp4 layer with {quoted(dtypes)}", wanted)
    facts = {_JSON: text, _PLACE: place, _SCALE_DTYPE: dtypes["weight_scale"]}
    return LayerPlan(layer, names, facts)


def _parse_mark(source: TensorSource, name: str, raw: bytes) -> tuple[dict[str, Any], str]:
    try:
        text = raw.decode()
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        _fail(source, name, f"{quoted(raw)} ({error})", "a JSON object")
    if not isinstance(value, dict):
        _fail(source, name, quoted(value), "a JSON object")
    return value, text


def _pad_rows(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - matrix.shape[0]
    return torch.nn.functional.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def _fail(source: TensorSource, name: str, came: str, wanted: str) -> NoReturn:
    raise CheckpointError(f"{source.path}: {name}: got {came}, wanted {wanted}")
