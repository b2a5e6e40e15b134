"""The operands that published SVDQuant kernels take, saved as tensors of a layer.

    wgt        uint8 or int8 [N, K/2]   low nibble = even column; E2M1, or two's complement
    wscales    E4M3 or its bytes [K/16, N] for NVFP4; fp16 or bf16 [K/64, N] for INT4
    alpha      float32 [] or [1]        multiplies the 4-bit product (NVFP4)
    wcscales   float [N]                multiplies output columns
    smooth     float [K]                divides x
    lora_down  float [K, R]             acts on the raw x
    lora_up    float [N, R]
    bias       float [N]

The names are those of the kernels' arguments (`kernels.gemm_w4a4.published_operands`). They
disagree on what wcscales reaches: in the reference of svdquant-kernels product and low-rank branch,

    y = (product * alpha + (x @ lora_down) @ lora_up.T) * wcscales + bias,

elsewhere (nunchaku, vllm-omni, this package's kernels) the product alone. So a file with wcscales
and a low-rank branch has two readings, `svdquant-kernels` and `svdquant-kernels-product`; our own
files say which in their metadata, `svdquant_wcscales`. x is quantized without a global scale.
Source: svdquant-kernels 7885f30, baseline/kernels (gemm_w4a4/ref.py, _nvfp4.py, _int4.py).
"""

from collections.abc import Mapping
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
from halfbyte.checkpoints.layer_keys import KeySet, find_layers
from halfbyte.checkpoints.scalar_parts import as_scalar
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.quantized_linear import QuantizedLinear

MARK: Final = "svdquant_wcscales"  # our metadata entry: what wcscales multiplies
ALL, PRODUCT = "all", "product"
_FLOATS: Final = ("F16", "BF16", "F32")
_VECTORS: Final = dict.fromkeys(("wcscales", "smooth", "lora_down", "lora_up", "bias"), _FLOATS)
KEYS: Final = {
    "nvfp4": KeySet(
        {"wgt": ("U8", "I8"), "wscales": ("F8_E4M3", "U8")}, {**_VECTORS, "alpha": ("F32",)}
    ),
    "int4": KeySet({"wgt": ("U8", "I8"), "wscales": ("F16", "BF16")}, _VECTORS),
}
_ACTIVATIONS: Final = {"nvfp4": ("nvfp4_one_level", "nvfp4_nunchaku"), "int4": ("int4",)}
_PRECISION, _CODES, _SCALES, _ALPHA = "precision", "codes", "scales", "alpha"


class SvdquantKernels(Family):
    """Operand files, wcscales as in the reference of svdquant-kernels."""

    name: ClassVar[str] = "svdquant-kernels"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("wgt", "wscales", "wcscales"), ()
    )
    title: ClassVar[str] = "svdquant-kernels operands"
    reads_as: ClassVar[Mapping[str, str]] = {"nvfp4_nunchaku": "nvfp4_one_level"}
    reach: ClassVar[str] = ALL

    def claim(self, source: TensorSource) -> Claim:
        """Claim layers with wgt and wscales; certain where one reading is possible or marked.

        Raises:
            CheckpointError: the operands stand without a layer's name.
        """
        if "wgt" in source.specs and "wscales" in source.specs:
            raise CheckpointError(
                f"{source.path}: got tensors 'wgt' and 'wscales' of no layer, wanted "
                "'<layer>.wgt'; rename the file's tensors"
            )
        layers = {
            name: _add_facts(source, plan, precision)
            for precision, keys in KEYS.items()
            for name, plan in find_layers(source, keys).items()
        }
        if not layers:
            return NO_CLAIM
        mark = source.metadata.get(MARK)
        has_readings = any({"wcscales", "lora_up"} <= set(plan.tensors) for plan in layers.values())
        possible = (ALL, PRODUCT) if has_readings else (ALL,)
        is_certain = self.reach in (possible if mark is None else (mark,))
        words = {ALL: "product and low-rank branch", PRODUCT: "the product alone"}[self.reach]
        return Claim(layers, is_certain, f"wgt and wscales; wcscales multiplies {words}")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; a low-rank branch that wcscales reaches is multiplied by it."""
        precision = facts[_PRECISION]
        codes, scales = parts["wgt"].view(torch.uint8), parts["wscales"]
        if codes.ndim != 2 or scales.ndim != 2:
            raise FormatError("wgt and wscales: wanted matrices [N, K/2] and [K/block, N]")
        global_scale = None
        if precision == "nvfp4":
            scales = scales.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
            alpha = parts.get("alpha", torch.ones((), device=codes.device))
            global_scale = as_scalar("alpha", alpha)
        else:
            scales = scales.t().contiguous()
        channel_scale = parts["wcscales"].float() if "wcscales" in parts else None
        lora_down, lora_up = _read_low_rank(parts)
        if channel_scale is not None and lora_up is not None and self.reach == ALL:
            if tuple(channel_scale.shape) != (lora_up.shape[0],):
                raise FormatError(
                    f"wcscales: shape {list(channel_scale.shape)}, wanted one for each of "
                    f"lora_up's {lora_up.shape[0]} rows"
                )
            lora_up = lora_up.float() * channel_scale.unsqueeze(1)
        if lora_down is not None and lora_up is not None and lora_down.dtype != lora_up.dtype:
            lora_down, lora_up = lora_down.float(), lora_up.float()
        return QuantizedLinear(
            weight=BlockScaledTensor(
                get_format(precision), codes, scales, global_scale, 2 * codes.shape[1]
            ),
            activation=get_activation_format(_ACTIVATIONS[precision][0]),
            channel_scale=channel_scale,
            smooth=parts.get("smooth"),
            lora_down=lora_down,
            lora_up=lora_up,
            bias=parts.get("bias"),
        )

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why the kernels' operands cannot hold a layer."""
        weight, activation = linear.weight, linear.activation
        precision = weight.format.name
        if precision not in _ACTIVATIONS:
            return f"{precision} weights: svdquant-kernels have NVFP4, and INT4 in groups of 64"
        if activation is None or activation.name not in _ACTIVATIONS[precision]:
            name = "none" if activation is None else activation.name
            wanted = _ACTIVATIONS[precision][0]
            return f"activation {name}: svdquant-kernels quantize x of such weights as {wanted}"
        if linear.in_features % weight.format.block_size:
            return (
                f"in_features {linear.in_features}: svdquant-kernels have whole blocks of "
                f"{weight.format.block_size}"
            )
        if precision == "int4" and weight.scales.dtype == torch.float32:
            return "float32 block scales: svdquant-kernels' are fp16 or bf16"
        return self._find_channel_obstacle(linear)

    def _find_channel_obstacle(self, linear: QuantizedLinear) -> str | None:
        scale, lora_up = linear.channel_scale, linear.lora_up
        if self.reach == PRODUCT or scale is None or lora_up is None or scale.is_meta:
            return None
        if bool(((scale == 0).unsqueeze(1) & (lora_up != 0)).any()):
            return (
                "a channel_scale of 0: svdquant-kernels multiply the low-rank branch by it too; "
                "write svdquant-kernels-product"
            )
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the operands; a low-rank branch that wcscales reaches is divided by it."""
        weight, scales = linear.weight, linear.weight.scales
        parts = {"wgt": weight.data if facts.get(_CODES) != "I8" else weight.data.view(torch.int8)}
        if weight.format.name == "nvfp4":
            scale_bytes = scales.view(torch.uint8).t().contiguous()
            is_bytes = facts.get(_SCALES) == "U8"
            parts["wscales"] = scale_bytes if is_bytes else scale_bytes.view(scales.dtype)
            assert weight.global_scale is not None  # of the format
            if facts.get(_ALPHA) != "absent" or not _is_one(weight.global_scale):
                parts["alpha"] = weight.global_scale
        else:
            parts["wscales"] = scales.t().contiguous()
        lora_up, channel_scale = linear.lora_up, linear.channel_scale
        if lora_up is not None and channel_scale is not None and self.reach == ALL:
            divisor = torch.where(channel_scale == 0, torch.ones_like(channel_scale), channel_scale)
            lora_up = lora_up.float() / divisor.unsqueeze(1)
        lora_down = None if linear.lora_down is None else linear.lora_down.t().contiguous()
        others = {
            "wcscales": channel_scale,
            "smooth": linear.smooth,
            "lora_down": lora_down,
            "lora_up": lora_up,
            "bias": linear.bias,
        }
        return parts | {name: part for name, part in others.items() if part is not None}

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return the parts that the record holds multiplied, widened or in another shape."""
        names = ["alpha", "wcscales"]
        is_widened = "lora_up" in parts and parts["lora_down"].dtype != parts["lora_up"].dtype
        if is_widened or ("wcscales" in parts and self.reach == ALL):
            names += ["lora_down", "lora_up"]
        kept = {name: parts[name] for name in names if name in parts}
        return LayerOrigin(self.name, kept, facts)

    def list_metadata(self, source: TensorSource) -> frozenset[str]:
        """Return the mark of what wcscales multiplies."""
        return frozenset({MARK})

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return the mark of what wcscales multiplies."""
        return SideContent({MARK: self.reach})


class SvdquantKernelsProduct(SvdquantKernels):
    """Operand files in which wcscales multiplies the 4-bit product alone."""

    name: ClassVar[str] = "svdquant-kernels-product"
    title: ClassVar[str] = "svdquant-kernels operands, wcscales on the product alone"
    reach: ClassVar[str] = PRODUCT


def _read_low_rank(parts: Parts) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (lora_down [R, K], lora_up [N, R]); FormatError where one is missing."""
    if "lora_down" not in parts and "lora_up" not in parts:
        return None, None
    for name in ("lora_down", "lora_up"):
        if name not in parts:
            raise FormatError(
                f"{name} is missing: a layer needs lora_down [K, R] and lora_up [N, R], operands "
                "of one product (lora_act_in) do not make it"
            )
        if parts[name].ndim != 2:
            raise FormatError(f"{name}: shape {list(parts[name].shape)}, wanted a matrix")
    return parts["lora_down"].t().contiguous(), parts["lora_up"]


def _is_one(scale: torch.Tensor) -> bool:
    """Return whether a global scale is one, as that of a source without alpha is."""
    return scale.is_meta or float(scale) == 1.0


def _add_facts(source: TensorSource, plan: LayerPlan, precision: str) -> LayerPlan:
    facts = {
        _PRECISION: precision,
        _CODES: source.specs[plan.tensors["wgt"]].dtype.name,
        _SCALES: source.specs[plan.tensors["wscales"]].dtype.name,
        _ALPHA: "present" if "alpha" in plan.tensors else "absent",
    }
    return LayerPlan(plan.name, plan.tensors, facts)
