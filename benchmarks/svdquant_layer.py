"""SVDQuant of one 4096x4096 linear, weight-only, rank 32: seconds and weight error.

Bar: at most 3 s on two cores. First checked: the 4-bit layer is closer to the weight than its
plain rounding, which the low-rank branch and the scale search exist for.
"""

import sys

import torch

from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant import PRESETS, quantize_linear_group
from timing import check_first, make_parser, measure_interleaved, print_report

BAR_S = 3.0
NAMES = ("nvfp4_weight_only_r32", "int4_weight_only_r32")


def make_weight(size: int) -> torch.Tensor:
    """Return [size, size] bfloat16: Gaussian with a decaying spectrum and a few wide columns."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=draw) * 0.02
    low = torch.randn(size, 64, generator=draw) @ torch.randn(64, size, generator=draw)
    weight += low * 0.02 / 16
    weight[:, :: size // 16] *= 8
    return weight.to(torch.bfloat16)


def quantize_layer(weight: torch.Tensor, preset: str) -> QuantizedLinear:
    """Return the record of one layer, quantized without data."""
    records, _ = quantize_linear_group([weight], [None], None, PRESETS[preset])
    return records[0]


def measure_error(weight: torch.Tensor, record: QuantizedLinear) -> float:
    """Return the relative Frobenius error of the record's weight."""
    wide = dequantize(record.weight)
    if record.lora_up is not None and record.lora_down is not None:
        wide = wide + record.lora_up.float() @ record.lora_down.float()
    return float((wide - weight.float()).norm() / weight.float().norm())


def main() -> int:
    """Print medians; return 1 when the bar is missed."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--size", type=int, default=4096, help="N = K (%(default)s)")
    options = parser.parse_args()
    weight = make_weight(options.size)
    errors: dict[str, float] = {}

    def check() -> None:
        for name in NAMES:
            errors[name] = measure_error(weight, quantize_layer(weight, name))
            plain = dequantize(quantize(weight, PRESETS[name].weight_format))
            plain_error = float((plain - weight.float()).norm() / weight.float().norm())
            errors[f"{name}: plain rounding"] = plain_error
            if not errors[name] < plain_error:
                raise ValueError(f"{name}: error {errors[name]}, plain {plain_error}")

    check_first("svdquant layer", check)
    cases = {name: lambda name=name: quantize_layer(weight, name) for name in NAMES}
    timings = measure_interleaved(cases, options.repeats, warmups=1)
    slowest_s = max(timing.median_s for timing in timings.values())
    extra = {
        "relative_error": {name: round(error, 5) for name, error in errors.items()},
        "slowest_median_s": round(slowest_s, 3),
        "bar_s": BAR_S,
        "bar_met": slowest_s <= BAR_S,
    }
    title = f"SVDQuant weight-only, {options.size}x{options.size}, rank 32"
    print_report(title, timings, [], as_json=options.json, extra=extra)
    return 0 if slowest_s <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
