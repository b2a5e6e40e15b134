"""The packed 4-bit CPU linear beside torch's float32 linear: time, and memory beside the tensors.

Bar, at M=256 and K=N=4096: NVFP4 and INT4 take at most twice the time of `F.linear` in float32,
with at most 16 MB of transient memory beside input and output. Every case is first compared with
the float64 reference. M=1 and M=16 are shown beside.

Memory: for each case a fresh process makes its tensors, calls once (so that code and thread stacks
are there), resets the kernel's high-water mark of resident memory (/proc/self/clear_refs), calls
once more and reads it (VmHWM in /proc/self/status). Transient memory is the high-water mark less
the resident memory before that call and less the output's bytes.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional

from halfbyte import cpu
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.native import describe
from halfbyte.reference import w4a4_linear as reference_linear
from timing import check_first, make_parser, make_ratio, measure_interleaved, print_report

N, K, RANK = 4096, 4096, 32
BAR_ROWS = 256
ROWS = (BAR_ROWS, 16, 1)
BAR_RATIO = 2.0
BAR_MEMORY_MB = 16.0
FORMATS = {
    "nvfp4": ("nvfp4", "nvfp4_nunchaku"),
    "int4": ("int4", "int4"),
    "nvfp4 weight-only": ("nvfp4", None),
}
MAX_ERROR = 1e-6  # float32 sums against float64; a wrong scale or code is off by 1e-2 and more


def make_linear(name: str) -> QuantizedLinear:
    """Return a random [N, K] linear of rank 32 in one of FORMATS."""
    weight_format, activation = FORMATS[name]
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(N, K, generator=draw) / K**0.5
    return QuantizedLinear(
        weight=quantize(weight, weight_format),
        activation=None if activation is None else get_activation_format(activation),
        smooth=torch.rand(K, generator=draw) + 0.5,
        lora_down=torch.randn(RANK, K, generator=draw) / K**0.5,
        lora_up=torch.randn(N, RANK, generator=draw),
        bias=torch.randn(N, generator=draw),
    )


def make_input(rows: int) -> torch.Tensor:
    """Return x [rows, K] float32."""
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(2))


def check_linear(linear: QuantizedLinear) -> None:
    """Raise unless a few rows equal the float64 reference."""
    x = make_input(5)
    wanted = torch.from_numpy(reference_linear(x, linear))
    error = float((cpu.w4a4_linear(x, linear) - wanted).norm() / wanted.norm())
    if not error <= MAX_ERROR:
        raise ValueError(f"relative error {error:.2e}, wanted at most {MAX_ERROR:.0e}")


def read_status_mb(field: str) -> float:
    """Return a memory field of /proc/self/status in MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_transient_mb(name: str) -> float:
    """Return the memory of one call beside input and output, in MB; run it in a fresh process."""
    linear, x = make_linear(name), make_input(BAR_ROWS)
    first = cpu.w4a4_linear(x, linear)
    del first
    # What the first call freed must not wait in the heap for the second one.
    ctypes.CDLL(None).malloc_trim(0)
    before_mb = read_status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    y = cpu.w4a4_linear(x, linear)
    return read_status_mb("VmHWM") - before_mb - y.numel() * y.element_size() / 1e6


def measure_memory() -> dict[str, float]:
    """Return the transient MB of each format, each measured in a process of its own."""
    figures = {}
    for name in FORMATS:
        command = [sys.executable, __file__, "--memory-of", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        figures[name] = round(float(done.stdout), 2)
    return figures


def main() -> int:
    """Print times, ratios and memory; return 1 when a bar is missed."""
    parser = make_parser(__doc__, repeats=9)
    parser.add_argument("--memory-of", choices=FORMATS, help="print the transient MB of one format")
    options = parser.parse_args()
    if options.memory_of:
        print(measure_transient_mb(options.memory_of))
        return 0
    memory_mb = measure_memory()
    linears = {name: make_linear(name) for name in FORMATS}
    for name, linear in linears.items():
        check_first(name, lambda linear=linear: check_linear(linear))
    weight = torch.randn(N, K)
    cases = {}
    for rows in ROWS:
        x = make_input(rows)
        cases[f"float32 M={rows}"] = lambda x=x: functional.linear(x, weight)
        for name, linear in linears.items():
            cases[f"{name} M={rows}"] = lambda x=x, linear=linear: cpu.w4a4_linear(x, linear)
    timings = measure_interleaved(cases, options.repeats)
    ratios = [
        make_ratio(timings, f"{name} M={rows}", f"float32 M={rows}")
        for rows in ROWS
        for name in FORMATS
    ]
    barred = [ratio.median for ratio in ratios[:2]]
    is_met = max(barred) <= BAR_RATIO and max(memory_mb.values()) <= BAR_MEMORY_MB
    extra = {
        "native": describe(),
        "transient_mb": memory_mb,
        "bar_ratio": BAR_RATIO,
        "bar_memory_mb": BAR_MEMORY_MB,
        "bar_met": is_met,
    }
    print_report(f"CPU linear, K=N={K}", timings, ratios, as_json=options.json, extra=extra)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
