"""Quantizer presets: what to do to a linear, as data.

The settings of the `svdquant` presets were chosen on a real language model, on text that neither
calibrated nor judged it; docs/design/0011-svdquant.md has the figures.
"""

from dataclasses import dataclass
from typing import Literal

from halfbyte.errors import FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format


@dataclass(frozen=True)
class SVDQuantPreset:
    """How the linears that share an input become 4-bit.

    Attributes:
        name: the name on the command line and in reports.
        weight_format: of the residual, a name in `formats.FORMATS`.
        activation: a name in `formats.ACTIVATION_FORMATS`, or None for a weight-only layer.
        rank: of the low-rank branch; 0 for none.
        smoothing_points: exponents tried are i / points, 0 < i < points; 0 leaves x unsmoothed.
            Smoothing needs calibration data; without any, it is left out.
        rounding: "nearest"; "optimal", block scales of least squared error; "gptq", on top of
            optimal scales each column's error is carried into the columns not yet rounded.
            Without calibration data "gptq" is "optimal".
        refinements: rounds of `low rank <- SVD(W - residual)`, `residual <- round(W - low rank)`
            after the first split; the best is kept and the first worse one ends them.
        gram_shrinkage: share of the off-diagonal Gram matrix that GPTQ ignores; a few hundred
            rows say little about the correlation of a thousand inputs.
        damping: added to the Gram matrix's diagonal, as a share of its mean (GPTQ's 1 %).
        low_rank_dtype: of lora_down and lora_up: "bfloat16" (exact in float16 too, but for
            magnitudes under 6e-5) or "float16" or "float32".
        seed: of the randomized low-rank split.
    """

    name: str
    weight_format: str
    activation: str | None
    rank: int
    smoothing_points: int = 0
    rounding: Literal["nearest", "optimal", "gptq"] = "nearest"
    refinements: int = 0
    gram_shrinkage: float = 0.3
    damping: float = 0.01
    low_rank_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings outside their range."""
        weight = get_format(self.weight_format)
        if self.activation is not None:
            get_activation_format(self.activation)
        is_sound = {
            "weight_format": weight.element != "uint4",
            "rank": isinstance(self.rank, int) and self.rank >= 0,
            "smoothing_points": self.smoothing_points >= 0,
            "rounding": self.rounding in ("nearest", "optimal")
            or (self.rounding == "gptq" and weight.element_bits == 4),
            "refinements": self.refinements >= 0,
            "gram_shrinkage": 0.0 <= self.gram_shrinkage <= 1.0,
            "damping": 0.0 <= self.damping < float("inf"),
            "low_rank_dtype": self.low_rank_dtype in ("bfloat16", "float16", "float32"),
        }
        for field, is_right in is_sound.items():
            if not is_right:
                raise FormatError(
                    f"preset {self.name!r}: {field}={getattr(self, field)!r} is not possible with "
                    f"{self.weight_format} weights; see SVDQuantPreset"
                )


def _make_family(number: str, activation: str) -> tuple[SVDQuantPreset, ...]:
    return (
        SVDQuantPreset(f"{number}_plain", number, activation, rank=0),
        SVDQuantPreset(
            f"{number}_svdquant_r32",
            number,
            activation,
            rank=32,
            smoothing_points=10,
            rounding="gptq",
        ),
        SVDQuantPreset(f"{number}_weight_only_r32", number, None, rank=32, rounding="optimal"),
    )


_PRESETS = (
    *_make_family("nvfp4", "nvfp4_one_level"),
    *_make_family("int4", "int4"),
    *_make_family("mxfp4", "mxfp4"),
)
PRESETS: dict[str, SVDQuantPreset] = {preset.name: preset for preset in _PRESETS}


def get_preset(name: str) -> SVDQuantPreset:
    """Return the preset called `name`; FormatError lists the known names."""
    try:
        return PRESETS[name]
    except (KeyError, TypeError):  # TypeError: a list, say, cannot be a key
        raise FormatError(f"preset {name!r} is unknown; use one of: {', '.join(PRESETS)}") from None
