"""What quantizing a file cost: one record for each layer, and the JSON report of a run."""

from dataclasses import asdict, dataclass
from typing import Any

REPORT_VERSION = 1


@dataclass(frozen=True)
class LayerReport:
    """One quantized linear.

    Attributes:
        name: of the layer.
        out_features: N.
        in_features: K.
        format: of the weight.
        rank: R.
        group: layers that share its lora_down, itself among them.
        relative_error: Frobenius norm of (stored weight - original) over that of the original.
        snr_db: -20 log10 of it; None where nothing was lost.
        blocks: blocks of the weight.
        saturated: blocks that wanted a scale beyond the largest of the format.
        flushed: blocks with a nonzero element whose scale rounded to zero.
        zero: blocks of zeros alone.
        bytes_before: of weight and bias in the input.
        bytes_after: of everything stored for the layer.
    """

    name: str
    out_features: int
    in_features: int
    format: str
    rank: int
    group: tuple[str, ...]
    relative_error: float
    snr_db: float | None
    blocks: int
    saturated: int
    flushed: int
    zero: int
    bytes_before: int
    bytes_after: int


def make_report(
    settings: dict[str, Any], layers: list[LayerReport], others: dict[str, Any]
) -> dict[str, Any]:
    """Return the report of a run as JSON values, the same for the same input and settings."""
    elements = sum(layer.out_features * layer.in_features for layer in layers)
    after = sum(layer.bytes_after for layer in layers)
    return {
        "report": "halfbyte quantize",
        "report_version": REPORT_VERSION,
        **settings,
        "totals": {
            "layers": len(layers),
            "linear_bytes_before": sum(layer.bytes_before for layer in layers),
            "linear_bytes_after": after,
            "bits_per_weight": after * 8 / elements if elements else 0.0,
            "worst_relative_error": max((layer.relative_error for layer in layers), default=0.0),
            "mean_relative_error": sum(layer.relative_error for layer in layers)
            / max(len(layers), 1),
            "blocks": sum(layer.blocks for layer in layers),
            "saturated": sum(layer.saturated for layer in layers),
            "flushed": sum(layer.flushed for layer in layers),
            "zero": sum(layer.zero for layer in layers),
        },
        "layers": [asdict(layer) for layer in sorted(layers, key=lambda layer: layer.name)],
        **others,
    }
