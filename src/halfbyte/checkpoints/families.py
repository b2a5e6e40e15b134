"""Which family of quantized checkpoint a file belongs to, from its tensor names and dtypes: data.

Recognition only: it decides nothing about how bytes are read. A family is found by the parts under
one layer name (`q_proj.weight_scale_2` is part `weight_scale_2` of `q_proj`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.formats.safetensors_header import TensorSpec


@dataclass(frozen=True)
class Family:
    """How the layers of one family look.

    Attributes:
        name: shown to the user.
        format: number format of the weights.
        parts: part -> dtype words it may have; all must be there.
        absent: parts that must not be there.
        codes: the part that holds packed codes.
        values_per_byte: logical weights in one byte of `codes`.
        block_scales: parts that hold block scales.
        low_rank: parts of the low-rank branch.
        rank_axis: (part, axis) whose size is the rank, or None.
    """

    name: str
    format: str
    parts: Mapping[str, tuple[str, ...]]
    codes: str
    values_per_byte: int
    absent: tuple[str, ...] = ()
    block_scales: tuple[str, ...] = ("weight_scale",)
    low_rank: tuple[str, ...] = ()
    rank_axis: tuple[str, int] | None = None


def _make_nunchaku(
    name: str, number_format: str, scale_dtypes: tuple[str, ...], low_rank: tuple[str, ...]
) -> Family:
    return Family(
        name,
        number_format,
        {
            "qweight": ("I8", "U8"),
            "wscales": scale_dtypes,
            **dict.fromkeys(low_rank, ("F16", "BF16", "F32")),
        },
        "qweight",
        2,
        block_scales=("wscales",),
        low_rank=low_rank,
        rank_axis=(low_rank[0], 1),
    )


# Key sets: nunchaku's linear modules (both generations of names), ModelOpt's NVFP4 and NVFP4_SVD
# export, compressed-tensors' pack formats, ComfyUI's quantized layers. The first match wins, so
# that the special ones stand before the general ones.
_FLOATS = ("F16", "BF16", "F32")
_PROJ_KEYS, _LORA_KEYS = ("proj_down", "proj_up"), ("lora_down", "lora_up")
FAMILIES = (
    _make_nunchaku("nunchaku", "nvfp4", ("F8_E4M3",), _PROJ_KEYS),
    _make_nunchaku("nunchaku", "int4", ("F16", "BF16"), _PROJ_KEYS),
    _make_nunchaku("nunchaku (older key names)", "nvfp4", ("F8_E4M3",), _LORA_KEYS),
    _make_nunchaku("nunchaku (older key names)", "int4", ("F16", "BF16"), _LORA_KEYS),
    Family(
        "ComfyUI",
        "nvfp4",
        {
            "comfy_quant": ("U8",),
            "weight": ("U8",),
            "weight_scale": ("F8_E4M3",),
            "weight_scale_2": ("F32",),
        },
        "weight",
        2,
    ),
    Family("ComfyUI", "other", {"comfy_quant": ("U8",)}, "weight", 1),
    Family(
        "ModelOpt SVD",
        "nvfp4",
        {
            "weight": ("U8",),
            "weight_scale": ("F8_E4M3",),
            "weight_scale_2": ("F32",),
            "svdquant_lora_a": _FLOATS,
            "svdquant_lora_b": _FLOATS,
        },
        "weight",
        2,
        low_rank=("svdquant_lora_a", "svdquant_lora_b"),
        rank_axis=("svdquant_lora_a", 0),
    ),
    Family(
        "ModelOpt",
        "nvfp4",
        {"weight": ("U8",), "weight_scale": ("F8_E4M3",), "weight_scale_2": ("F32",)},
        "weight",
        2,
    ),
    Family(
        "compressed-tensors",
        "nvfp4",
        {
            "weight_packed": ("U8",),
            "weight_scale": ("F8_E4M3",),
            "weight_global_scale": ("F32",),
        },
        "weight_packed",
        2,
    ),
    Family(
        "compressed-tensors",
        "mxfp4",
        {"weight_packed": ("U8",), "weight_scale": ("U8", "F8_E8M0")},
        "weight_packed",
        2,
        absent=("weight_global_scale",),
    ),
    Family(
        "compressed-tensors",
        "packed integers",
        {"weight_packed": ("I32",), "weight_scale": _FLOATS},
        "weight_packed",
        2,
    ),
    Family(
        "GPTQ or AWQ",
        "packed integers",
        {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS},
        "qweight",
        2,
        block_scales=("scales", "qzeros"),
    ),
    Family(
        "FP8",
        "fp8",
        {"weight": ("F8_E4M3", "F8_E5M2")},
        "weight",
        1,
        block_scales=("weight_scale", "weight_scale_inv"),
    ),
)


def recognise_layers(tensors: Mapping[str, TensorSpec]) -> dict[str, Family]:
    """Return the family of every layer that looks quantized, by layer name.

    Args:
        tensors: all tensors of a checkpoint by name.
    """
    parts: dict[str, dict[str, str]] = {}
    for name, spec in tensors.items():
        layer, _, part = name.rpartition(".")
        parts.setdefault(layer, {})[part] = spec.dtype.name
    found = {}
    for layer, dtypes in sorted(parts.items()):
        family = next((family for family in FAMILIES if _matches(family, dtypes)), None)
        if family is not None:
            found[layer] = family
    return found


def _matches(family: Family, dtypes: Mapping[str, str]) -> bool:
    has_all = all(dtypes.get(part) in words for part, words in family.parts.items())
    return has_all and not any(part in dtypes for part in family.absent)
