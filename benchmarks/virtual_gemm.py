"""The virtual GPU on NVIDIA's NVFP4 2-CTA GEMM, unmodified: first its numbers, then its time.

Needs the `kernels` extra and a checkout of NVIDIA's CUTLASS:

    python benchmarks/virtual_gemm.py --cutlass path/to/cutlass            # 4352 x 3072 x 3840
    python benchmarks/virtual_gemm.py --cutlass path/to/cutlass --mnk 512,512,512

Every element is compared with the float64 product of the dequantized operands, rounded once to
float16; how far a differing element's reference lies from a rounding midpoint is printed as well.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfbyte.formats.scale_layout import pack_scales
from halfbyte.reference.decode import make_value_table, unpack_codes

KERNEL = "examples/python/CuTeDSL/cute/blackwell/kernel/blockscaled_gemm"


def make_operand(generator: np.random.Generator, rows: int, k: int) -> tuple[np.ndarray, ...]:
    """Return packed E2M1 codes [rows, k/2], E4M3 scales as tcgen05 reads them, float64 values."""
    codes = generator.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    scales = generator.integers(0x28, 0x48, (rows, k // 16), dtype=np.uint8)
    elements = make_value_table("e2m1")[unpack_codes(codes, 4)].reshape(rows, k // 16, 16)
    values = elements * make_value_table("e4m3")[scales][:, :, None]
    return (
        codes,
        pack_scales(torch.from_numpy(scales), "swizzled_128x4").numpy(),
        values.reshape(rows, k),
    )


def check_product(result: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Return how many float16 elements differ from the rounded reference, and where it lies."""
    expected = reference.astype(np.float16)
    wrong = np.argwhere(result != expected)
    distances = []
    for row, column in wrong[:1000]:
        midpoint = (float(result[row, column]) + float(expected[row, column])) / 2
        distances.append(abs(reference[row, column] - midpoint) / abs(midpoint))
    return {
        "elements": int(result.size),
        "wrong": len(wrong),
        "largest_distance_from_midpoint": max(distances, default=0.0),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compile the kernel, launch it `repeats` times and return figures."""
    import halfbyte.virtual

    m, n, k = options.mnk
    generator = np.random.default_rng(0)
    a, scale_a, values_a = make_operand(generator, m, k)
    b, scale_b, values_b = make_operand(generator, n, k)
    arrays = {"A": a, "B": b, "SFA": scale_a, "SFB": scale_b}
    arrays["C"] = np.full((m, n), np.nan, np.float16)
    sys.path.insert(0, str(options.cutlass / KERNEL))
    with halfbyte.virtual.cuda("b200") as gpu:
        arrays = {name: place(gpu.runtime.device.memory, name, x) for name, x in arrays.items()}
        start = time.perf_counter()
        launch = compile_gemm(arrays, (m, n, k), options.clusters)
        compiled = time.perf_counter()
        launch()  # parses and lowers the PTX too
        first = time.perf_counter()
        for _ in range(options.repeats):
            launch()
        seconds = [record.seconds for record in gpu.log.records[1:]]
        report = gpu.log.records[-1]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = check_product(arrays["C"], values_a @ values_b.T)
    return {
        "mnk": options.mnk,
        "clusters": options.clusters,
        "compile_s": round(compiled - start, 3),
        "first_launch_s": round(first - compiled, 3),
        "launch_s": [round(s, 4) for s in seconds],
        "median_launch_s": round(statistics.median(seconds), 4),
        "instructions": report.instructions,
        "findings": len(report.findings),
        "peak_bytes": memory,
        "cpus": os.cpu_count(),
        **figures,
    }


def place(memory: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Return a copy of `array` in the device's memory, aligned as CUDA aligns."""
    buffer = memory.allocate(array.nbytes, name)
    buffer[:] = array.reshape(-1).view(np.uint8)
    return buffer.view(array.dtype).reshape(array.shape)


def compile_gemm(arrays: dict[str, np.ndarray], mnk: tuple[int, int, int], clusters: int) -> Any:
    """Return a function that launches NVIDIA's kernel on the arrays (256x256 tiles of 2 CTAs)."""
    import cutlass
    import dense_blockscaled_gemm_persistent as example
    from cuda.bindings.driver import CUstream
    from cutlass import cute

    types = {"A": cutlass.Float4E2M1FN, "B": cutlass.Float4E2M1FN, "C": cutlass.Float16}
    types |= {"SFA": cutlass.Float8E4M3FN, "SFB": cutlass.Float8E4M3FN}
    gemm = example.Sm100BlockScaledPersistentDenseGemmKernel(16, (256, 256), (2, 1))
    compiled = example.scaled_mm(
        gemm,
        types["A"],
        types["B"],
        types["C"],
        types["SFA"],
        "k",
        "k",
        "n",
        clusters,
        CUstream(0),
    )
    pointers = [
        cute.runtime.make_ptr(
            types[name],
            arrays[name].ctypes.data,
            cute.AddressSpace.gmem,
            assumed_align=32 if name.startswith("SF") else 16,
        )
        for name in ("A", "B", "SFA", "SFB", "C")
    ]
    return lambda: compiled(*pointers, (*mnk, 1), CUstream(0))


def main() -> int:
    """Print the figures as JSON; exit 1 where an element is wrong away from a midpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cutlass", type=Path, required=True, help="a checkout of CUTLASS")
    parser.add_argument("--mnk", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--clusters", type=int, default=74, help="clusters resident at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(mnk=(4352, 3072, 3840))
    figures = run(parser.parse_args())
    print(json.dumps(figures, indent=2))
    return int(figures["largest_distance_from_midpoint"] > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
