"""What an eager call of a W4A4 linear costs the host, beside nn.Linear: milliseconds of 1000 calls.

That is microseconds of one. On a GPU both are calls of 1024 x 1024 layers that are enqueued and
not waited for. Without one the layer is that of the virtual H200, whose kernels are chosen and not
run: the host's work less the launches, which take some microseconds each.
"""

import contextlib
import sys
from collections.abc import Callable

import torch
from torch import nn

from halfbyte.nn import W4A4Linear
from halfbyte.runtime.run_kernel import collect_sources
from timing import check_first, make_parser, make_ratio, measure_interleaved, print_report

FEATURES, TOKENS, CALLS = 1024, 16, 1000
MAX_ERROR = 0.2  # against the float layer: 4-bit weights of random numbers are off by .1


def check_call(layer: W4A4Linear, dense: nn.Linear, x: torch.Tensor) -> None:
    """Raise unless the layer's result is that of the float layer, but for 4 bits."""
    wanted = dense(x).float()
    error = float((layer(x).float() - wanted).norm() / wanted.norm())
    if not error <= MAX_ERROR:
        raise ValueError(f"relative error {error:.2e}, wanted at most {MAX_ERROR}")


def repeat(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return what calls `module` CALLS times; the GPU has nothing to do when it starts."""

    def call() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()
        for _ in range(CALLS):
            module(x)

    return call


def main() -> int:
    """Print the times."""
    options = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    device, backend = ("cuda", "auto") if has_gpu else ("cpu", "virtual-h200")
    dense = nn.Linear(FEATURES, FEATURES).bfloat16()
    layer = W4A4Linear.from_linear(dense, backend=backend, mode="fp8").to(device)
    dense, x = dense.to(device), torch.randn(TOKENS, FEATURES).bfloat16().to(device)
    cases = {"W4A4Linear": repeat(layer, x)}
    if has_gpu:
        cases["nn.Linear"] = repeat(dense, x)
    with torch.no_grad():
        check_first("eager call", lambda: check_call(layer, dense, x))
        with contextlib.nullcontext() if has_gpu else collect_sources():
            timings = measure_interleaved(cases, options.repeats)
    ratios = [make_ratio(timings, *cases)] if has_gpu else []
    extra = {"gpu": torch.cuda.get_device_name() if has_gpu else "none: kernels are left out"}
    title = f"{CALLS} eager calls, M={TOKENS}, N=K={FEATURES}, fp8"
    print_report(title, timings, ratios, as_json=options.json, extra=extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())
