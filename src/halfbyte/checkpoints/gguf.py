"""GGUF's 4-bit linears: NVFP4 (type 40), MXFP4 (39), Q4_0 and Q4_1.

    LAYER.weight       rows of blocks, uint8 [N, bytes of a row]; LAYER.bias: float [N]
    LAYER.scale        float32 [1]: NVFP4's global scale, multiplies; absent: one level
    LAYER.input_scale  float32 [1]: calibrated multiplier of x; absent: x is not quantized

    block    numbers  bytes
    NVFP4    64       4 E4M3 scales, 4 x 8 bytes of 16 codes each
    MXFP4    32       E8M0 scale, 16 bytes of codes
    Q4_0     32       fp16 d, 16 bytes of codes q: (q - 8) * d
    Q4_1     32       fp16 d, fp16 m, 16 bytes of codes q: q * d + m

The low nibbles of a group's bytes are its first half, the high nibbles its second. ggml's tables of
E2M1 are doubled and its scales halved, which is the same numbers. Q4_1's m of every block is an
exact low-rank branch: lora_up [N, K/32] holds m, lora_down [K/32, K] is one on its block.
Source: ggml's ggml-common.h and ggml-quants.c; the Python package gguf 0.19, quants.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

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
from halfbyte.checkpoints.scalar_parts import as_scalar
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.gguf_header import GGUF_TYPES, KEY_VALUES_KEY, TYPES_KEY
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

_TYPE: Final = "type"
_FLOATS: Final = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class BlockLayout:
    """Bytes of a block: `scale_bytes` of scales, then codes in groups of `group` numbers."""

    format: str
    scale_bytes: int
    scale_dtype: torch.dtype
    group: int


LAYOUTS: Final = {
    "NVFP4": BlockLayout("nvfp4", 4, torch.float8_e4m3fn, 16),
    "MXFP4": BlockLayout("mxfp4", 1, torch.float8_e8m0fnu, 32),
    "Q4_0": BlockLayout("int4_block32", 2, torch.float16, 32),
    "Q4_1": BlockLayout("uint4_block32", 4, torch.float16, 32),
}
_WRITTEN: Final = {"nvfp4": "NVFP4", "nvfp4_one_level": "NVFP4", "mxfp4": "MXFP4"}


class Gguf(Family):
    """GGUF files of llama.cpp."""

    name: ClassVar[str] = "gguf"
    title: ClassVar[str] = "GGUF NVFP4, MXFP4, Q4_0, Q4_1"
    container: ClassVar[str] = "gguf"

    def claim(self, source: TensorSource) -> Claim:
        """Claim the matrices of 4-bit types; CheckpointError for other types of blocks."""
        types = read_types(source)
        layers = {}
        for name, kind in types.items():
            if GGUF_TYPES[kind].dtype is not None:
                continue
            layer, _, part = name.rpartition(".")
            if kind not in LAYOUTS or part != "weight" or len(source.specs[name].shape) != 2:
                shape = list(source.specs[name].shape)
                raise CheckpointError(
                    f"{source.path}: tensor {quoted(name)} is {kind} {shape}, wanted "
                    f"{', '.join(LAYOUTS)} matrices called "
                    "LAYER.weight, or numbers that are not quantized; convert such tensors to F16 "
                    "with llama-quantize first"
                )
            layers[layer] = _plan_layer(source, layer, kind)
        if not layers:
            return NO_CLAIM
        return Claim(layers, True, "block types of the GGUF header")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; Q4_1's smallest numbers become a low-rank branch."""
        kind = facts[_TYPE]
        layout, block = LAYOUTS[kind], GGUF_TYPES[kind]
        weight = parts["weight"]
        if weight.ndim != 2 or weight.shape[1] % block.block_bytes:
            raise FormatError(
                f"weight: shape {list(weight.shape)}, wanted [N, multiple of {block.block_bytes}]"
            )
        rows, blocks = weight.shape[0], weight.shape[1] // block.block_bytes
        blocked = weight.reshape(rows, blocks, block.block_bytes)
        codes = split_halves(blocked[..., layout.scale_bytes :], layout.group).reshape(rows, -1)
        stored = blocked[..., : layout.scale_bytes].contiguous().view(layout.scale_dtype)
        scales, zeros = stored.reshape(rows, -1), None
        if kind == "Q4_0":
            codes = codes ^ 0x88  # q - 8 as two's complement
        if kind == "Q4_1":
            scales, zeros = stored[..., 0].contiguous(), stored[..., 1].contiguous()
        scale = parts.get("scale")
        name = "nvfp4_one_level" if kind == "NVFP4" and scale is None else layout.format
        input_scale = parts.get("input_scale")
        return QuantizedLinear(
            weight=BlockScaledTensor(
                get_format(name),
                codes,
                scales,
                None if scale is None else as_scalar("scale", scale),
                blocks * block.block,
            ),
            activation=None if input_scale is None else get_activation_format("nvfp4_static"),
            activation_global_scale=None
            if input_scale is None
            else as_scalar("input_scale", input_scale),
            lora_down=None if zeros is None else make_block_sums(blocks, block.block, zeros),
            lora_up=zeros,
            bias=parts.get("bias"),
        )

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why a GGUF file of ours cannot hold a layer."""
        name, activation = linear.weight.format.name, linear.activation
        if name not in _WRITTEN:
            return f"{name} weights: GGUF files are written with NVFP4 and MXFP4 layers"
        is_nvfp4 = _WRITTEN[name] == "NVFP4"
        if activation is not None and not (is_nvfp4 and activation.name == "nvfp4_static"):
            return (
                f"activation {activation.name}: GGUF has a calibrated scale of x for NVFP4, or "
                "none; quantize with nvfp4_static activations, or weight-only"
            )
        for part in ("channel_scale", "smooth", "lora_down"):
            if getattr(linear, part) is not None:
                return f"{part}: GGUF has no tensor for it; halfbyte or nunchaku keep it"
        block = GGUF_TYPES[_WRITTEN[name]].block
        if linear.in_features % block:
            return f"in_features {linear.in_features}: GGUF's {name} blocks have {block} columns"
        return None

    def list_metadata(self, source: TensorSource) -> frozenset[str]:
        """Return the tensors' types; the key-values stay, for the way back."""
        return frozenset({TYPES_KEY})

    def make_facts(self, layer: str, linear: QuantizedLinear) -> Facts:
        """Return the type of the blocks."""
        return {_TYPE: _WRITTEN[linear.weight.format.name]}

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the tensors of a layer; Q4_0 and Q4_1 only where they came from a GGUF file."""
        weight = linear.weight
        kind = facts[_TYPE]
        layout, block = LAYOUTS[kind], GGUF_TYPES[kind]
        rows, blocks = linear.out_features, linear.in_features // block.block
        codes = weight.data ^ 0x88 if kind == "Q4_0" else weight.data
        packed = join_halves(codes.reshape(rows, blocks, -1), layout.group)
        scales = weight.scales.reshape(rows, blocks, -1)
        if kind == "Q4_1" and linear.lora_up is not None:
            scales = torch.cat((scales, linear.lora_up.unsqueeze(-1)), -1)
        stored = scales.contiguous().view(torch.uint8).reshape(rows, blocks, layout.scale_bytes)
        parts = {"weight": torch.cat((stored, packed), -1).reshape(rows, -1)}
        if weight.global_scale is not None:
            parts["scale"] = weight.global_scale.reshape(1)
        if linear.activation_global_scale is not None:
            parts["input_scale"] = linear.activation_global_scale.reshape(1)
        if linear.bias is not None:
            parts["bias"] = linear.bias
        return parts

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return the types of the layers' tensors, and the key-values of a GGUF source."""
        metadata = {} if source is None else source.metadata
        types = dict(json.loads(metadata.get(TYPES_KEY, "[]")))
        for name, layer in layers.items():
            origin = layer.origin
            is_own = origin is not None and origin.family == self.name
            kind = origin.facts[_TYPE] if is_own and origin is not None else None
            types[f"{name}.weight"] = kind or _WRITTEN[layer.linear.weight.format.name]
        content = {TYPES_KEY: json.dumps(list(types.items()))}
        if KEY_VALUES_KEY in metadata:
            content[KEY_VALUES_KEY] = metadata[KEY_VALUES_KEY]
        return SideContent(content)


def read_types(source: TensorSource) -> dict[str, str]:
    """Return the GGUF types of the tensors of a GGUF file, {} for other containers."""
    if TYPES_KEY not in source.metadata:
        return {}
    types = dict(json.loads(source.metadata[TYPES_KEY]))
    return types if set(types) == set(source.specs) else {}  # of a file that came from GGUF


def split_halves(packed: torch.Tensor, group: int) -> torch.Tensor:
    """Return codes, low nibble the even column, of groups whose halves lie in low and high nibbles.

    Args:
        packed: uint8 [..., multiple of group / 2].
        group: numbers of a group.
    """
    halves = packed.reshape(*packed.shape[:-1], -1, group // 2)
    even, odd = halves[..., 0::2], halves[..., 1::2]
    first, second = (even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return torch.cat((first, second), -1).reshape(packed.shape)


def join_halves(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Return bytes of the halves of every group; the inverse of `split_halves`."""
    groups = codes.reshape(*codes.shape[:-1], -1, group // 2)
    first, second = groups.chunk(2, -1)
    even, odd = (first & 0x0F) | (second << 4), (first >> 4) | (second & 0xF0)
    return torch.stack((even, odd), -1).reshape(codes.shape)


def make_block_sums(blocks: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Return [blocks, blocks * size] with row b one on block b: x @ it.T are the blocks' sums."""
    unit = torch.eye(blocks, dtype=like.dtype, device=like.device)
    return unit.unsqueeze(-1).expand(blocks, blocks, size).reshape(blocks, blocks * size)


def _plan_layer(source: TensorSource, layer: str, kind: str) -> LayerPlan:
    tensors = {"weight": f"{layer}.weight"}
    names = ("scale", "input_scale", "bias") if kind == "NVFP4" else ("bias",)
    for part in names:
        name = f"{layer}.{part}"
        if name not in source.specs:
            continue
        wanted = _FLOATS if part == "bias" else ("F32",)
        if source.specs[name].dtype.name not in wanted:
            raise CheckpointError(
                f"{source.path}: tensor {quoted(name)} is {source.specs[name].dtype.name}, "
                f"wanted {' or '.join(wanted)}"
            )
        tensors[part] = name
    return LayerPlan(layer, tensors, {_TYPE: kind})
