"""How a QuantizedLinear crosses the operator schema: a spec string and a fixed-order tensor list.

Operator schemas know tensors, strings and numbers, not records. A linear therefore travels as
`LinearSpec.encode()` and as the list of `list_parts`, in the order of `PART_NAMES`. A part that is
absent is an empty tensor, shape [0]. One-byte block scales (E4M3, E8M0) travel as uint8: the spec
names the format, a dtype never does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat, get_activation_format
from halfbyte.formats.block_format import BlockFormat, get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import BYTE_SCALE_DTYPES
from halfbyte.formats.quantized_linear import QuantizedLinear

PART_NAMES: Final = (
    "weight_data",
    "weight_scales",
    "weight_global_scale",
    "activation_global_scale",
    "channel_scale",
    "smooth",
    "lora_down",
    "lora_up",
    "bias",
)
_WEIGHT_ONLY: Final = "none"
_COLUMNS: Final = re.compile(r"[0-9]{1,18}")  # int() takes other digits too, and no 5000 of them
_SHOWN_CHARACTERS: Final = 200


@dataclass(frozen=True)
class LinearSpec:
    """What the tensors of a linear mean.

    Attributes:
        weight_format: name of the weight's BlockFormat.
        activation: name of the ActivationFormat, or None for weight-only.
        columns: K, before padding.
    """

    weight_format: str
    activation: str | None
    columns: int

    def encode(self) -> str:
        """Return the one-line form used in schemas and states: `nvfp4/nvfp4_nunchaku/3420`."""
        return f"{self.weight_format}/{self.activation or _WEIGHT_ONLY}/{self.columns}"

    @property
    def block_format(self) -> BlockFormat:
        """The weight's format record."""
        return get_format(self.weight_format)

    @property
    def activation_format(self) -> ActivationFormat | None:
        """The activation's format record, None for weight-only."""
        return None if self.activation is None else get_activation_format(self.activation)


@lru_cache(maxsize=1024)
def decode_spec(text: str) -> LinearSpec:
    """Return the LinearSpec of its one-line form; FormatError for anything else."""
    fields = text.split("/")
    if len(fields) != 3 or not _COLUMNS.fullmatch(fields[2]):
        raise FormatError(
            f"linear spec {text[:_SHOWN_CHARACTERS]!r}: wanted "
            "'<weight format>/<activation or none>/<columns>'"
        )
    get_format(fields[0])
    activation = None if fields[1] == _WEIGHT_ONLY else get_activation_format(fields[1]).name
    return LinearSpec(fields[0], activation, int(fields[2]))


def make_spec(linear: QuantizedLinear) -> LinearSpec:
    """Return the spec of a record; FormatError if a format in it is not a registered one."""
    activation = linear.activation
    for record, known in (
        (linear.weight.format, get_format(linear.weight.format.name)),
        (activation, get_activation_format(activation.name) if activation else None),
    ):
        if record != known:
            raise FormatError(f"format record {record} differs from the registered {known}")
    name = None if activation is None else activation.name
    return LinearSpec(linear.weight.format.name, name, linear.in_features)


def scales_to_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Return one-byte scales viewed as uint8, float scales unchanged."""
    return scales.view(torch.uint8) if scales.dtype in BYTE_SCALE_DTYPES.values() else scales


def scales_from_bytes(scales: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """Return scales in the dtype that BlockScaledTensor wants; the inverse of scales_to_bytes."""
    dtype = BYTE_SCALE_DTYPES.get(block_format.scale)
    if dtype is None:
        return scales
    if scales.dtype != torch.uint8:
        raise FormatError(f"{block_format.name} scales: dtype {scales.dtype}, wanted torch.uint8")
    return scales.view(dtype)


def list_parts(linear: QuantizedLinear) -> list[torch.Tensor]:
    """Return the tensors of `linear` in the order of PART_NAMES, absent ones as shape [0]."""
    absent = torch.empty(0, device=linear.weight.data.device)
    parts: tuple[torch.Tensor | None, ...] = (
        linear.weight.data,
        scales_to_bytes(linear.weight.scales),
        linear.weight.global_scale,
        linear.activation_global_scale,
        linear.channel_scale,
        linear.smooth,
        linear.lora_down,
        linear.lora_up,
        linear.bias,
    )
    return [absent if part is None else part for part in parts]


def make_linear(parts: Sequence[torch.Tensor], spec: LinearSpec) -> QuantizedLinear:
    """Return the record of a tensor list; FormatError names the part that does not fit the spec."""
    check_part_count(parts)
    present = [part if is_present(part) else None for part in parts[2:]]
    weight_global, activation_global, channel_scale, smooth, lora_down, lora_up, bias = present
    block_format = spec.block_format
    _check_factors(parts[6], parts[7], (*parts[0].shape[:1], spec.columns))
    return QuantizedLinear(
        weight=BlockScaledTensor(
            format=block_format,
            data=parts[0],
            scales=scales_from_bytes(parts[1], block_format),
            global_scale=weight_global,
            columns=spec.columns,
        ),
        activation=spec.activation_format,
        activation_global_scale=activation_global,
        channel_scale=channel_scale,
        smooth=smooth,
        # An empty factor (rank 0, or K or N of 0) contributes nothing, as an absent one does.
        lora_down=None if lora_up is None else lora_down,
        lora_up=None if lora_down is None else lora_up,
        bias=bias,
    )


def check_part_count(parts: Sequence[torch.Tensor]) -> None:
    """Raise FormatError unless a tensor list has one entry for each of PART_NAMES."""
    if len(parts) != len(PART_NAMES):
        raise FormatError(f"linear: {len(parts)} tensors, wanted {len(PART_NAMES)}: {PART_NAMES}")


def _check_factors(lora_down: torch.Tensor, lora_up: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise FormatError for one low-rank factor without the other, which must not be dropped."""
    down, up = tuple(lora_down.shape), tuple(lora_up.shape)
    is_pair = down[:1] == up[1:] and up[:1] + down[1:] == shape  # [N, K]; one of them may be 0
    if is_present(lora_down) != is_present(lora_up) and not is_pair:
        raise FormatError(
            f"lora_down {list(down)} and lora_up {list(up)}: wanted [R, K] and [N, R] of one rank "
            "R, or both absent; a lost factor changes every result"
        )


def is_offloaded(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether the weight of a linear is on the CPU and all its other parts are on a GPU."""
    weights = all(part.device.type == "cpu" for part in parts[:2])
    return weights and all(part.device.type == "cuda" for part in parts[2:])


def is_present(part: torch.Tensor) -> bool:
    """Return whether an optional part is there; an empty one changes no result."""
    return part.numel() > 0


def rank_of(parts: Sequence[torch.Tensor]) -> int:
    """Return R of a tensor list, 0 where there is no low-rank branch."""
    lora_down, lora_up = parts[6], parts[7]
    return lora_down.shape[0] if is_present(lora_down) and is_present(lora_up) else 0
