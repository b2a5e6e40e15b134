"""nunchaku's SVDQuant linears, INT4 and NVFP4, under both generations of key names.

    qweight                      int8 [N, K/2]      fragment order, low nibble = even column
    wscales                      E4M3 [K/16, N] or fp16/bf16 [K/64, N], fragment order
    wtscale     (NVFP4)          [1]                multiplies: amax / 2688
    wcscales    (NVFP4)          [N]                multiplies output channels, fragment order
    smooth_factor / smooth       [K]                divides x, fragment order
    smooth_factor_orig / smooth_orig  [K]           not read by any kernel
    proj_down / lora_down        [K, R]             acts on the RAW x, fragment order
    proj_up / lora_up            [N, R]             fragment order
    bias                         [N]                fragment order

The dtype of wscales says which precision a layer has; the file's own metadata must not say another.
N and K are padded to 128 by the writer and no file says by how much: the stored size is the size.
The second linear behind a GELU takes unsigned INT4 activations, x shifted by 0.171875
(`UNSIGNED_LAYERS`); the shift's correction is in the bias. Linears of adaptive norms are AWQ W4A16
layers (`nunchaku_awq`).
Source: nunchaku 3a3cc3d, models/linear.py, merge_safetensors.py, models/transformers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from halfbyte.checkpoints import nunchaku_awq as awq
from halfbyte.checkpoints import nunchaku_fragments as fragments
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
from halfbyte.checkpoints.split_files import SPLIT_FILES, SplitFilesSource
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

_FLOATS: Final = ("F16", "BF16", "F32")
# Our word for a part -> its key in files of today ("proj"); older ones ("lora") use our words.
PROJ_KEYS: Final = {
    "lora_down": "proj_down",
    "lora_up": "proj_up",
    "smooth": "smooth_factor",
    "smooth_orig": "smooth_factor_orig",
}
LORA_KEYS: Final = {name: name for name in PROJ_KEYS}
KEYS_BY_NAME: Final = {"proj": PROJ_KEYS, "lora": LORA_KEYS}
# FLUX's and Qwen-Image's feed-forwards; those of SDXL's U-Net (GEGLU) stay signed.
UNSIGNED_LAYERS: Final = re.compile(
    r"^(?!.*(^|\.)(down_blocks|mid_block|up_blocks)\.)"
    r"(.*\.)?(mlp_(context_)?fc2|(ff(_context)?|(img|txt)_mlp)\.net\.2)$"
)
_PRECISION_WORDS: Final = {"int4": "int4", "fp4_e2m1_all": "nvfp4"}
_NAMES, _PRECISION, _ACTIVATION, _SPLITS = "keys", "precision", "activation", "splits"
AWQ: Final = "awq"  # as a precision: the layer is W4A16


def make_key_set(names: str, precision: str) -> KeySet:
    """Return the keys of a layer by generation of names ("proj" or "lora") and precision."""
    keys = KEYS_BY_NAME[names]
    scale = {"nvfp4": ("F8_E4M3",), "int4": ("F16", "BF16")}[precision]
    optional = dict.fromkeys([*keys.values(), "bias"], _FLOATS)
    if precision == "nvfp4":
        optional |= {"wtscale": _FLOATS, "wcscales": _FLOATS}
    return KeySet({"qweight": ("I8", "U8"), "wscales": scale}, optional)


class Nunchaku(Family):
    """Files of nunchaku, merged or as its linears save themselves."""

    name: ClassVar[str] = "nunchaku"
    title: ClassVar[str] = "nunchaku"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("qweight", "wscales", "wtscale", "wcscales", "wzeros"), ()
    )
    reads_as: ClassVar[Mapping[str, str]] = {"nvfp4_one_level": "nvfp4_nunchaku"}
    rank_step: ClassVar[int] = fragments.FRAGMENT
    has_one_rank: ClassVar[bool] = True  # its models are built with the rank of the configuration
    # smooth_orig is read by nobody; wtscale and wcscales are 16-bit in some files.
    origin_parts: ClassVar[tuple[str, ...]] = (
        "smooth_factor_orig",
        "smooth_orig",
        "wtscale",
        "wcscales",
    )

    def claim(self, source: TensorSource) -> Claim:
        """Claim W4A4 layers in fragment order, of one generation of names, and AWQ layers."""
        found = {
            layer: LayerPlan(layer, plan.tensors, make_awq_facts(layer))
            for layer, plan in find_layers(source, awq.AWQ_KEYS).items()
        }
        for names in KEYS_BY_NAME:
            for precision in ("nvfp4", "int4"):
                for layer, plan in find_layers(source, make_key_set(names, precision)).items():
                    if layer in found and not _is_better(plan, found[layer]):
                        continue
                    found[layer] = _add_facts(plan, names, precision)
        if not found:
            return NO_CLAIM
        stated = read_precision(source)
        for layer, plan in found.items():
            if stated is not None and plan.facts[_PRECISION] not in (stated, AWQ):
                raise CheckpointError(
                    f"{source.path}: {layer}.wscales is {plan.facts[_PRECISION]}, the file's "
                    f"quantization_config says {stated}; one of them is of another file"
                )
        if stated is not None:
            return Claim(found, True, f"quantization_config of svdquant {stated} in its metadata")
        if isinstance(source, SplitFilesSource):
            return Claim(
                found, True, f"the two files of older releases, {' and '.join(SPLIT_FILES)}"
            )
        return Claim(found, False, "qweight and wscales, without a quantization_config")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record, all fragments put into plain order."""
        if facts[_PRECISION] == AWQ:
            return awq.decode_awq(parts, int(facts[_SPLITS]))
        keys, precision = KEYS_BY_NAME[facts[_NAMES]], facts[_PRECISION]
        codes = fragments.unpack_codes(_matrix(parts, "qweight"))
        unpack = (
            fragments.unpack_byte_scales if precision == "nvfp4" else fragments.unpack_float_scales
        )
        scales = unpack(_matrix(parts, "wscales"))
        factors = [parts[keys[name]] for name in ("lora_down", "lora_up") if keys[name] in parts]
        has_rank = any(factor.numel() > 0 for factor in factors)
        if (keys["lora_down"] in parts) != (keys["lora_up"] in parts):
            raise FormatError(f"{keys['lora_down']} and {keys['lora_up']} come together")
        global_scale = channel_scale = None
        if precision == "nvfp4":
            scale = parts.get("wtscale")
            global_scale = torch.ones(()) if scale is None else as_scalar("wtscale", scale).float()
            if "wcscales" in parts:
                channel_scale = unpack_vector("wcscales", parts["wcscales"]).float()
        return QuantizedLinear(
            weight=BlockScaledTensor(
                get_format(precision), codes, scales, global_scale, 2 * codes.shape[1]
            ),
            activation=get_activation_format(facts[_ACTIVATION]),
            channel_scale=channel_scale,
            smooth=_unpack_vector(parts, keys["smooth"]),
            lora_down=fragments.unpack_lora_down(_matrix(parts, keys["lora_down"]))
            if has_rank
            else None,
            lora_up=fragments.unpack_lora_up(_matrix(parts, keys["lora_up"])) if has_rank else None,
            bias=_unpack_vector(parts, "bias"),
        )

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why nunchaku's kernels or keys cannot hold a layer."""
        if linear.weight.format.name == awq.FORMAT:
            return awq.find_awq_obstacle(linear)
        weight, activation = linear.weight.format.name, linear.activation
        # x is quantized by the reader: a record made for stored divisors runs with unrounded ones.
        pairs = {"nvfp4": ("nvfp4_nunchaku", "nvfp4_one_level"), "int4": ("int4", "uint4_shifted")}
        if weight not in pairs:
            return f"{weight} weights: nunchaku has NVFP4 and INT4 with groups of 64"
        if activation is None or activation.name not in pairs[weight]:
            name = "none" if activation is None else activation.name
            return f"activation {name}: nunchaku quantizes x as {' or '.join(pairs[weight])}"
        if weight == "int4" and linear.channel_scale is not None:
            return "channel_scale: nunchaku's INT4 layers have none"
        for name, size, multiple in (
            ("out_features", linear.out_features, fragments.TILE_ROWS),
            ("in_features", linear.in_features, fragments.TILE_ROWS),
            ("rank", linear.rank, fragments.FRAGMENT),
        ):
            if size % multiple:
                return (
                    f"{name} {size} is no multiple of {multiple}, and the padded size would be the "
                    "layer's; pad the model's layer first"
                )
        return self._find_dtype_obstacle(linear)

    @staticmethod
    def _find_dtype_obstacle(linear: QuantizedLinear) -> str | None:
        if linear.weight.format.name == "int4" and linear.weight.scales.dtype == torch.float32:
            return "float32 block scales: nunchaku's are fp16 or bf16; quantize with 16-bit scales"
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the tensors in fragment order, under today's key names unless `facts` say else."""
        if linear.weight.format.name == awq.FORMAT:
            return awq.encode_awq(linear, int(facts.get(_SPLITS, "1")))
        keys = KEYS_BY_NAME[facts.get(_NAMES, "proj")]
        weight = linear.weight
        parts = {"qweight": fragments.pack_codes(weight.data)}
        if weight.format.name == "nvfp4":
            assert weight.global_scale is not None
            parts["wscales"] = fragments.pack_byte_scales(weight.scales)
            parts["wtscale"] = weight.global_scale.reshape(1)
            if linear.channel_scale is not None:
                parts["wcscales"] = fragments.pack_vector(linear.channel_scale)
        else:
            parts["wscales"] = fragments.pack_float_scales(weight.scales)
        if linear.smooth is not None:
            parts[keys["smooth"]] = fragments.pack_vector(linear.smooth)
        if linear.lora_down is not None and linear.lora_up is not None:
            parts[keys["lora_down"]] = fragments.pack_lora_down(linear.lora_down)
            parts[keys["lora_up"]] = fragments.pack_lora_up(linear.lora_up)
        if linear.bias is not None:
            parts["bias"] = fragments.pack_vector(linear.bias)
        return parts

    def make_facts(self, layer: str, linear: QuantizedLinear) -> Facts:
        """Return how nunchaku reads a layer of that name."""
        weight, activation = linear.weight.format.name, linear.activation
        if weight == awq.FORMAT:
            return make_awq_facts(layer)
        if weight == "int4" and activation is not None:
            wanted = find_activation(layer, weight)
            if activation.name != wanted:
                raise CheckpointError(
                    f"{layer}: activation {activation.name}, but nunchaku gives a layer of this "
                    f"name {wanted}; quantize it so, or write nunchaku_lite, which has int4 alone"
                )
        return {}

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return what the record lacks; of an AWQ layer the bias that has a one added."""
        if facts[_PRECISION] != AWQ:
            return super().find_origin(parts, facts)
        is_moved = facts[_SPLITS] != "1" and "bias" in parts
        return LayerOrigin(self.name, {"bias": parts["bias"]} if is_moved else {}, facts)

    def find_bad_value(self, parts: Parts, facts: Facts) -> str | None:
        """Return a zero point that is no number: the record shows it as a low-rank branch."""
        return find_bad_zeros(parts)

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return the metadata with quantization_config; a nunchaku source's own is kept."""
        kept = dict(source.metadata) if source is not None else {}
        if read_precision_of(kept) is not None:
            return SideContent(kept)
        linears = [layer.linear for layer in layers.values()]
        linears = [linear for linear in linears if linear.weight.format.name != awq.FORMAT]
        formats = {linear.weight.format.name for linear in linears} or {"int4"}
        if len(formats) != 1:
            raise CheckpointError(
                f"layers in {sorted(formats)}: a nunchaku file has one precision; split the model"
            )
        rank = max((linear.rank for linear in linears), default=0)
        config = make_quantization_config(formats.pop(), rank)
        metadata = {"quantization_config": json.dumps(config)}
        if isinstance(source, SplitFilesSource):
            metadata = {**source.metadata, **metadata}
            if "config.json" in source.configs:
                metadata.setdefault("config", json.dumps(source.configs["config.json"]))
        return SideContent(metadata)


def make_quantization_config(precision: str, rank: int) -> dict[str, Any]:
    """Return the quantization_config that nunchaku's merged files carry."""
    is_float = precision == "nvfp4"
    word = "fp4_e2m1_all" if is_float else "int4"
    group = get_format(precision).block_size
    scale = [None, "fp8_e4m3_nan"] if is_float else None
    activation_scale = "fp8_e4m3_nan" if is_float else None
    return {
        "method": "svdquant",
        "weight": {"dtype": word, "scale_dtype": scale, "group_size": group},
        "activation": {"dtype": word, "scale_dtype": activation_scale, "group_size": group},
        "rank": rank,
    }


def read_precision(source: TensorSource) -> str | None:
    """Return "int4" or "nvfp4" where the file's metadata says so; CheckpointError for another."""
    try:
        return read_precision_of(source.metadata)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: quantization_config: {error}") from error


def read_precision_of(metadata: Mapping[str, str]) -> str | None:
    """Return the precision in `quantization_config`; ValueError for text that is none."""
    text = metadata.get("quantization_config")
    if text is None:
        return None
    try:
        config = json.loads(text)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(config, dict) or config.get("method") != "svdquant":
        return None
    weight = config.get("weight")
    word = weight.get("dtype") if isinstance(weight, dict) else None
    if word not in _PRECISION_WORDS:
        raise ValueError(f"weight dtype {quoted(word)}, wanted one of {list(_PRECISION_WORDS)}")
    return _PRECISION_WORDS[word]


def make_awq_facts(layer: str) -> Facts:
    """Return the facts of an AWQ layer of that name."""
    return {_PRECISION: AWQ, _SPLITS: str(awq.find_splits(layer))}


def make_w4a4_facts(names: str, precision: str, activation: str) -> Facts:
    """Return the facts of a W4A4 layer: generation of names, precision, activation format."""
    return {_NAMES: names, _PRECISION: precision, _ACTIVATION: activation}


def find_activation(layer: str, precision: str) -> str:
    """Return the activation format that nunchaku gives a layer of that name."""
    if precision == "nvfp4":
        return "nvfp4_nunchaku"
    return "uint4_shifted" if UNSIGNED_LAYERS.search(layer) else "int4"


def find_bad_zeros(parts: Parts) -> str | None:
    """Return what is wrong with the zero points of an AWQ layer; None for other layers too."""
    zeros = parts.get("wzeros")
    if zeros is None or bool(torch.isfinite(zeros).all()):
        return None
    return "wzeros: got NaN or infinite values, wanted finite numbers; write the file again"


def _add_facts(plan: LayerPlan, names: str, precision: str) -> LayerPlan:
    facts = make_w4a4_facts(names, precision, find_activation(plan.name, precision))
    return LayerPlan(plan.name, plan.tensors, facts)


def _is_better(plan: LayerPlan, other: LayerPlan) -> bool:
    """Return whether `plan` knows more of a layer's tensors: the right generation of names."""
    return len(plan.tensors) > len(other.tensors)


def _matrix(parts: Parts, name: str) -> torch.Tensor:
    if parts[name].ndim != 2 or parts[name].numel() == 0:
        raise FormatError(f"{name}: shape {list(parts[name].shape)}, wanted a matrix")
    return parts[name]


def unpack_vector(name: str, packed: torch.Tensor) -> torch.Tensor:
    """Return a plain vector of one in fragment order; FormatError for another shape."""
    if packed.ndim != 1:
        raise FormatError(f"{name}: shape {list(packed.shape)}, wanted a vector")
    return fragments.unpack_vector(packed)


def _unpack_vector(parts: Parts, name: str) -> torch.Tensor | None:
    return unpack_vector(name, parts[name]) if name in parts else None
