"""What `import halfbyte` and `import halfbyte.nn` cost beyond torch, in fresh processes.

Bar: each at most 0.3 s beyond `import torch`, which halfbyte.nn needs. Every round starts one
fresh process per case, in turn; the difference is taken round by round.
"""

import subprocess
import sys

from timing import check_first, make_parser, make_ratio, measure_interleaved, print_report

BAR_S = 0.3
CASES = {
    "nothing": "pass",
    "halfbyte": "import halfbyte",
    "torch": "import torch",
    "torch, then halfbyte": "import torch, halfbyte",
    "torch, then halfbyte.nn": "import torch, halfbyte.nn",
}


def run_python(statement: str) -> None:
    """Run a statement in a fresh process; CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-c", statement], check=True)


def check_is_light() -> None:
    """Raise unless importing halfbyte leaves torch, CuTe and CUDA alone."""
    heavy = "{'torch', 'numpy', 'cutlass', 'cuda'}"
    run_python(f"import halfbyte, sys; assert not {heavy} & set(sys.modules), 'not light'")


def main() -> int:
    """Print the medians and the cost beyond torch; return 1 when the bar is missed."""
    options = make_parser(__doc__, repeats=7).parse_args()
    check_first("import halfbyte", check_is_light)
    calls = {name: (lambda text=text: run_python(text)) for name, text in CASES.items()}
    timings = measure_interleaved(calls, options.repeats, warmups=1)

    def find_difference_s(above: str, below: str) -> float:
        pairs = zip(timings[above].samples_s, timings[below].samples_s, strict=True)
        differences = sorted(high - low for high, low in pairs)
        return differences[len(differences) // 2]

    figures = {
        "halfbyte_alone_s": round(find_difference_s("halfbyte", "nothing"), 3),
        "halfbyte_beyond_torch_s": round(find_difference_s("torch, then halfbyte", "torch"), 3),
        "halfbyte_nn_beyond_torch_s": round(
            find_difference_s("torch, then halfbyte.nn", "torch"), 3
        ),
        "bar_s": BAR_S,
    }
    is_met = figures["halfbyte_alone_s"] <= BAR_S and figures["halfbyte_beyond_torch_s"] <= BAR_S
    ratios = [make_ratio(timings, "torch, then halfbyte.nn", "torch")]
    extra = {**figures, "bar_met": is_met}
    print_report("import time", timings, ratios, as_json=options.json, extra=extra)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
