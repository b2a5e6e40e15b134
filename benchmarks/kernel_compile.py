"""Times from a kernel's source to a kernel that can be launched: compiled cold, and from the cache.

Measured once Python, torch, TVM FFI and CuTe DSL are imported; loading is measured in a process
that has not imported CuTe DSL, as loading never does. Both on the virtual GPU's variant, whose
host half is loaded like the device's. The bars: 3 s cold, 50 ms from the cache, per kernel.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import tvm_ffi  # noqa: F401 - imported before anything is timed

from halfbyte.arch import find_gpu
from halfbyte.device.kernel_source import KernelSource
from halfbyte.runtime.compile_kernel import compile_kernel, forget_loaded
from halfbyte.runtime.shipped_kernels import KERNELS, list_shipped
from halfbyte.runtime.virtual_device import find_runtime
from timing import Timing, check_first, make_parser, measure_interleaved, print_report

GPU = "b200"


def choose_sources(target: str) -> dict[str, KernelSource]:
    """Return one configuration of every kernel: the last that is shipped for the target."""
    found = {name: list_shipped(target, name) for name in KERNELS}
    return {name: sources[-1] for name, sources in found.items() if sources}


def measure_cold(source: KernelSource, repeats: int) -> Timing:
    """Return the times from a source to a loaded kernel, each with an empty cache."""
    samples = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HALFBYTE_KERNEL_CACHE"] = folder
            start_s = time.perf_counter()
            load_anew(source)
            samples.append(time.perf_counter() - start_s)
    return Timing(f"{source.name} cold", tuple(samples))


def check_loading(sources: dict[str, KernelSource]) -> None:
    """Load everything once: it must come from the cache, without CuTe DSL."""
    for source in sources.values():
        kernel = compile_kernel(source, find_runtime(find_gpu(GPU)))
        assert kernel.entry.facts.target == source.target
        assert f".target {source.target}" in kernel.read_ptx()
    assert "cutlass" not in sys.modules, "loading from the cache imported CuTe DSL"


def load_anew(source: KernelSource) -> None:
    """Load a kernel as a new process would: nothing of it is in memory."""
    forget_loaded()
    compile_kernel(source, find_runtime(find_gpu(GPU)))


def main() -> None:
    """Fill a cache in a process of its own, time loading, then compiling."""
    parser = make_parser(__doc__)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sources = choose_sources(find_gpu(GPU).target)
    if options.fill:
        for source in sources.values():
            compile_kernel(source, find_runtime(find_gpu(GPU)))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HALFBYTE_KERNEL_CACHE"] = folder
        subprocess.run([sys.executable, str(Path(__file__)), "--fill"], check=True)
        check_first("kernels from the cache", lambda: check_loading(sources))
        cases = {
            f"{name} from the cache": (lambda source=source: load_anew(source))
            for name, source in sources.items()
        }
        timings = measure_interleaved(cases, options.repeats, warmups=1)
    import cutlass  # noqa: F401 - not part of what is timed
    from cutlass import cute  # noqa: F401 - likewise

    for source in sources.values():
        cold = measure_cold(source, max(1, options.repeats // 3))
        timings[cold.name] = cold
    print_report(
        "kernels: from the source, and from the cache on disk",
        timings,
        [],
        as_json=options.json,
        extra={"kernels": {name: str(source) for name, source in sources.items()}},
    )


if __name__ == "__main__":
    main()
