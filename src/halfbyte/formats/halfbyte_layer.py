"""How one QuantizedLinear is spread over the tensors and metadata of a halfbyte file.

The field names are this format's own: no other family calls its tensors `weight_codes`, so that a
file cannot be read under another family's conventions (a reciprocal global scale is off by 1e7).
`docs/formats.md` specifies all of this for a reader that does not have this code.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import ACTIVATION_FORMATS, ActivationFormat
from halfbyte.formats.block_format import FORMATS, BlockFormat
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.elements import get_element
from halfbyte.formats.packing import unpack_codes
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import MAX_DIMENSION, quoted

CODES = "weight_codes"
BLOCK_SCALE = "weight_block_scale"
GLOBAL_SCALE = "weight_global_scale"
# Parts whose tensor is a field of QuantizedLinear under the same name, in the order of the docs.
OPTIONAL_PARTS = (
    "activation_global_scale",
    "channel_scale",
    "smooth",
    "lora_down",
    "lora_up",
    "bias",
)
ALL_PARTS = (CODES, BLOCK_SCALE, GLOBAL_SCALE, *OPTIONAL_PARTS)
NIBBLE_ORDER = "low_first"
SCALE_LAYOUT = "linear"

# A weight above float16's largest number came from no half-precision model; a global scale that
# was stored as its reciprocal gives 7.2e6 / amax, which this catches for every amax below 110.
MAX_WEIGHT_MAGNITUDE = 65504.0
MIN_WEIGHT_MAGNITUDE = 2.0**-40  # of a tensor that is not all zero; the same mistake, other way

# The byte of the largest finite positive number of each byte-wide scale.
# Of x, whose calibrated scale is its largest number / 2688. Real activations pass float16's range
# in a few models only; a scale stored as its reciprocal says more than this for every x below 27.
MAX_ACTIVATION_MAGNITUDE = 2.0**18
NVFP4_RANGE = 6 * 448.0  # largest E2M1 times largest E4M3

_LAST_SOUND_BYTES = {torch.float8_e4m3fn: 0x7E, torch.float8_e8m0fnu: 0xFE}
_PAYLOAD_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class LayerRecord:
    """The JSON record of one layer in `halfbyte_layers`.

    Attributes:
        format: name of the weight's block format.
        activation: name of the activation format, None for weight-only.
        in_features: K, before padding.
        out_features: N.
        rank: R; 0 where there is no low-rank branch.
        nibble_order: always "low_first" in version 1.
        scale_layout: always "linear" in version 1.
        parts: names of all tensors of the layer, in the order of `ALL_PARTS`.
    """

    format: str
    activation: str | None
    in_features: int
    out_features: int
    rank: int
    nibble_order: str
    scale_layout: str
    parts: tuple[str, ...]

    @property
    def block_format(self) -> BlockFormat:
        """The weight's block format."""
        return FORMATS[self.format]

    @property
    def activation_format(self) -> ActivationFormat | None:
        """The activation format, None for weight-only."""
        return None if self.activation is None else ACTIVATION_FORMATS[self.activation]

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {**asdict(self), "parts": list(self.parts)}


def split_linear(linear: QuantizedLinear) -> tuple[LayerRecord, dict[str, torch.Tensor]]:
    """Return the record of `linear` and its tensors by part name."""
    tensors = {CODES: linear.weight.data, BLOCK_SCALE: linear.weight.scales}
    if linear.weight.global_scale is not None:
        tensors[GLOBAL_SCALE] = linear.weight.global_scale
    for part in OPTIONAL_PARTS:
        value = getattr(linear, part)
        if value is not None:
            tensors[part] = value
    record = LayerRecord(
        format=linear.weight.format.name,
        activation=linear.activation.name if linear.activation else None,
        in_features=linear.in_features,
        out_features=linear.out_features,
        rank=linear.rank,
        nibble_order=NIBBLE_ORDER,
        scale_layout=SCALE_LAYOUT,
        parts=tuple(part for part in ALL_PARTS if part in tensors),
    )
    return record, tensors


def join_linear(
    where: str, record: LayerRecord, tensors: Mapping[str, torch.Tensor]
) -> QuantizedLinear:
    """Return the linear that `split_linear` took apart, with every value checked.

    Args:
        where: file and layer, named in errors.
        record: from `parse_layer_record`.
        tensors: by part name, exactly `record.parts`.

    Raises:
        CheckpointError: shapes, dtypes or values that contradict the record.
    """
    linear = join_parts(where, record, tensors)
    check_linear_values(where, linear)
    return linear


def join_parts(
    where: str, record: LayerRecord, tensors: Mapping[str, torch.Tensor]
) -> QuantizedLinear:
    """Return the linear of `tensors`, its values not looked at (they may be on device "meta").

    Raises CheckpointError for shapes or dtypes that contradict the record.
    """
    try:
        weight = BlockScaledTensor(
            record.block_format,
            tensors[CODES],
            tensors[BLOCK_SCALE],
            tensors.get(GLOBAL_SCALE),
            record.in_features,
        )
        linear = QuantizedLinear(
            weight,
            record.activation_format,
            **{part: tensors[part] for part in OPTIONAL_PARTS if part in tensors},
        )
    except FormatError as error:
        raise CheckpointError(f"{where}: {error}; the file contradicts its own record") from error
    if (linear.out_features, linear.rank) != (record.out_features, record.rank):
        _fail(
            where,
            f"tensors of {linear.out_features} rows and rank {linear.rank}",
            f"the record's {record.out_features} and {record.rank}",
        )
    return linear


def parse_layer_record(where: str, value: Any) -> LayerRecord:
    """Return the checked record of one layer.

    Raises:
        CheckpointError: a key too many or too few, an unknown name, parts that do not belong
            together.
    """
    keys = set(LayerRecord.__dataclass_fields__)
    if not isinstance(value, dict) or set(value) != keys:
        came = sorted(value) if isinstance(value, dict) else value
        _fail(where, f"a record of {quoted(came)}", f"exactly the keys {sorted(keys)}")
    if not isinstance(value["format"], str) or value["format"] not in FORMATS:
        _fail(where, f"format {quoted(value['format'])}", "one of " + ", ".join(FORMATS))
    activation = value["activation"]
    if activation is not None and not (
        isinstance(activation, str) and activation in ACTIVATION_FORMATS
    ):
        known = ", ".join(ACTIVATION_FORMATS)
        _fail(where, f"activation {quoted(activation)}", f"null or one of {known}")
    for key in ("in_features", "out_features", "rank"):
        number = value[key]
        if type(number) is not int or not 0 <= number <= MAX_DIMENSION:
            _fail(where, f"{key} {quoted(number)}", "a whole number")
    for key, only in (("nibble_order", NIBBLE_ORDER), ("scale_layout", SCALE_LAYOUT)):
        if value[key] != only:
            _fail(where, f"{key} {quoted(value[key])}", f"{only!r}, the only one of version 1")
    parts = value["parts"]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        _fail(where, f"parts {quoted(parts)}", "a list of part names")
    record = LayerRecord(**{**value, "parts": tuple(parts)})
    _check_parts(where, record)
    return record


def check_linear_values(where: str, linear: QuantizedLinear) -> None:
    """Raise CheckpointError for values that no sound quantizer writes.

    NaN or infinite numbers, negative block scales, global scales or smoothing factors that are
    not positive, padding that is not zero, and magnitudes that betray an inverted global scale.
    """
    weight = linear.weight
    for part in ("channel_scale", "lora_down", "lora_up", "bias"):
        value = getattr(linear, part)
        if value is not None:
            _check_finite(f"{where}.{part}", value)
    positive = {
        GLOBAL_SCALE: weight.global_scale,
        "activation_global_scale": linear.activation_global_scale,
        "smooth": linear.smooth,
    }
    for part, value in positive.items():
        if value is not None:
            _check_finite(f"{where}.{part}", value)
            if value.numel() and not bool((value.float() > 0).all()):
                _fail(f"{where}.{part}", f"{float(value.float().min())}", "positive numbers")
    _check_codes(where, weight)
    _check_magnitude(where, weight)
    _check_activation_magnitude(where, linear)


def _check_codes(where: str, weight: BlockScaledTensor) -> None:
    payload = _PAYLOAD_DTYPES.get(weight.format.element)
    if payload is not None:
        _check_finite(f"{where}.{CODES}", weight.data.view(payload))
    used = weight.columns % weight.format.block_size
    if used:
        tail = weight.data[:, -weight.format.row_bytes(1) :]  # the last block of every row
        codes = unpack_codes(tail.contiguous(), weight.format.element_bits)
        if bool(codes[:, used:].any()):
            _fail(f"{where}.{CODES}", "padding columns with codes", "zero codes in the padding")


def _check_magnitude(where: str, weight: BlockScaledTensor) -> None:
    if weight.scales.numel() == 0:
        return
    highest = _find_highest_scale(weight.scales)
    if highest is None:
        scales = weight.scales.float()
        _check_finite(f"{where}.{BLOCK_SCALE}", scales)
        if not weight.format.has_signed_scale and bool(torch.signbit(scales).any()):
            _fail(f"{where}.{BLOCK_SCALE}", "negative block scales", "scales of at least 0")
        highest = float(scales.abs().max())
    largest = highest * get_element(weight.format.element).max_value
    if weight.global_scale is not None:
        largest *= float(weight.global_scale)
    if largest > MAX_WEIGHT_MAGNITUDE or 0 < largest < MIN_WEIGHT_MAGNITUDE:
        _fail(
            f"{where}.{GLOBAL_SCALE if weight.global_scale is not None else BLOCK_SCALE}",
            f"scales that let the weight reach {largest:.3g}",
            f"{MIN_WEIGHT_MAGNITUDE:.3g} to {MAX_WEIGHT_MAGNITUDE:g}; the global scale multiplies "
            "here, a file that stores its reciprocal must be converted",
        )


def _check_activation_magnitude(where: str, linear: QuantizedLinear) -> None:
    scale = linear.activation_global_scale
    if scale is None or linear.activation is None:
        return
    largest = float(scale) * NVFP4_RANGE
    if not MIN_WEIGHT_MAGNITUDE <= largest <= MAX_ACTIVATION_MAGNITUDE:
        _fail(
            f"{where}.activation_global_scale",
            f"a scale that lets x reach {largest:.3g}",
            f"{MIN_WEIGHT_MAGNITUDE:.3g} to {MAX_ACTIVATION_MAGNITUDE:g}; it multiplies here, a "
            "file that stores its reciprocal must be converted",
        )


def _find_highest_scale(scales: torch.Tensor) -> float | None:
    """Return the largest of byte-wide scales that are all sound, None where a look is needed.

    Bytes of such scales are in the order of their numbers; NaN and the sign are above all others.
    """
    last = _LAST_SOUND_BYTES.get(scales.dtype)
    if last is None:
        return None
    highest = scales.view(torch.uint8).amax()
    return float(highest.view(scales.dtype).float()) if int(highest) <= last else None


def has_only_finite(value: torch.Tensor) -> bool:
    """Return whether no number of a float tensor is NaN or infinite."""
    if value.numel() == 0:
        return True
    numbers = value.float()
    # NaN and infinities spread through a sum; a sum that is finite has none, and costs 1 % of a
    # look at each number
    return bool(numbers.sum().isfinite()) or bool(torch.isfinite(numbers).all())


def _check_parts(where: str, record: LayerRecord) -> None:
    ordered = tuple(part for part in ALL_PARTS if part in record.parts)
    if record.parts != ordered:
        _fail(where, f"parts {quoted(list(record.parts))}", f"some of {list(ALL_PARTS)} in order")
    activation = record.activation_format
    wanted = {
        CODES: True,
        BLOCK_SCALE: True,
        GLOBAL_SCALE: record.block_format.has_global_scale,
        "activation_global_scale": activation is not None and activation.global_scale == "static",
        "lora_down": "lora_up" in record.parts,
        "lora_up": "lora_down" in record.parts,
    }
    for part, is_wanted in wanted.items():
        if is_wanted != (part in record.parts):
            state = "missing" if is_wanted else "not part of such a layer"
            name = f"{record.format} with activation {record.activation}"
            _fail(f"{where}.{part}", f"a layer where it is {state}", f"the parts of {name}")
    if (record.rank > 0) and "lora_down" not in record.parts:
        _fail(f"{where}.lora_down", f"no tensor at rank {record.rank}", "lora_down and lora_up")


def _check_finite(where: str, value: torch.Tensor) -> None:
    if has_only_finite(value):
        return
    count = int((~torch.isfinite(value.float())).sum())
    _fail(where, f"{count} NaN or infinite values of {value.numel()}", "finite numbers")


def _fail(where: str, came: str, wanted: str) -> NoReturn:
    raise CheckpointError(f"{where}: got {came}, wanted {wanted}; write the file again")
