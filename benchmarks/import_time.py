"""What `import halfbyte` and `import halfbyte.nn` cost beyond torch, in fresh processes.

Bar: `import halfbyte` at most 0.3 s beyond `import torch`. Every round starts one fresh process
per case, in turn; the process itself times the import, after torch where the case says so, so
that torch's own seconds and their spread are not in the figure.
"""

import subprocess
import sys

from timing import Timing, check_first, make_parser, print_report

BAR_S = 0.3

# Case -> (what is imported first, untimed; what is timed).
CASES = {
    "halfbyte": ("sys", "halfbyte"),
    "torch": ("sys", "torch"),
    "halfbyte after torch": ("torch", "halfbyte"),
    "halfbyte.nn.w4a4_linear after torch": ("torch", "halfbyte.nn.w4a4_linear"),
    "halfbyte.cli.main": ("sys", "halfbyte.cli.main"),
}


def run_python(program: str) -> str:
    """Return what a program prints in a fresh process; CalledProcessError when it fails."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure_import_s(first: str, timed: str) -> float:
    """Return the seconds of `import timed` in a fresh process that has imported `first`."""
    program = f"import time, {first}; s = time.perf_counter(); import {timed}"
    return float(run_python(f"{program}; print(time.perf_counter() - s)"))


def check_is_light() -> None:
    """Raise unless importing halfbyte leaves torch, numpy, CuTe and CUDA alone."""
    heavy = "{'torch', 'numpy', 'cutlass', 'cuda'}"
    run_python(f"import halfbyte, sys; assert not {heavy} & set(sys.modules), 'not light'")


def main() -> int:
    """Print medians of interleaved rounds; return 1 when the bar is missed."""
    options = make_parser(__doc__, repeats=7).parse_args()
    check_first("import halfbyte", check_is_light)
    for first, timed in CASES.values():  # once untimed: byte code and the page cache
        measure_import_s(first, timed)
    samples: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.repeats):
        for name, (first, timed) in CASES.items():
            samples[name].append(measure_import_s(first, timed))
    timings = {name: Timing(name, tuple(values)) for name, values in samples.items()}
    beyond_s = timings["halfbyte after torch"].median_s
    is_met = max(beyond_s, timings["halfbyte"].median_s) <= BAR_S
    extra = {"beyond_torch_s": round(beyond_s, 4), "bar_s": BAR_S, "bar_met": is_met}
    print_report("import time", timings, [], as_json=options.json, extra=extra)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
