"""Peak memory of `halfbyte quantize` on a large file, and a kill in the middle of it.

Makes a random bfloat16 model of the shapes of an 8B transformer, quantizes it undisturbed, then
again with a SIGKILL midway and a second run, and compares the bytes.
Usage: python benchmarks/quantize_file.py [--gb 2] [--scratch FOLDER] [--json] [--keep]
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from halfbyte.formats.safetensors_header import make_layout, make_spec
from halfbyte.formats.safetensors_writer import SafetensorsWriter

MAX_PEAK_BYTES = 1_000_000_000  # the bar for a 2 GB file
HIDDEN, KV, FFN, VOCABULARY = 4096, 1024, 14336, 32000
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}


def list_shapes(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return tensor shapes of about `num_bytes` in bfloat16: an embedding, then whole layers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    total, index = VOCABULARY * HIDDEN * 2, 0
    while total < num_bytes:
        for name, (rows, columns) in LAYER.items():
            shapes[f"model.layers.{index}.{name}.weight"] = (rows, columns)
            total += rows * columns * 2
            if total >= num_bytes:
                break
        shapes[f"model.layers.{index}.norm.weight"] = (HIDDEN,)
        index += 1
    return shapes


def write_model(path: Path, num_bytes: int) -> None:
    """Write the random model, a few rows at a time."""
    shapes = list_shapes(num_bytes)
    specs = [make_spec(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    layout, prefix = make_layout(specs)
    draw = torch.Generator().manual_seed(0)
    with SafetensorsWriter(path, layout, prefix) as writer:
        for name, entry in layout.tensors.items():
            for start in range(0, entry.num_elements, 2**22):
                count = min(2**22, entry.num_elements - start)
                chunk = torch.randn(count, generator=draw).mul_(0.02).bfloat16()
                writer.write(name, chunk, start * 2)


def make_command(source: Path, target: Path) -> list[str]:
    """Return the command of one run."""
    return [
        sys.executable,
        "-m",
        "halfbyte.cli.main",
        "quantize",
        str(source),
        str(target),
        "--json",
    ]


def run_to_end(source: Path, target: Path) -> dict[str, Any]:
    """Return wall seconds and the peak resident bytes of one whole run, as the kernel counts."""
    start = time.perf_counter()
    child = subprocess.Popen(
        make_command(source, target), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit("halfbyte quantize failed")
    result = json.loads(printed)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "resumed_units": result["resumed_units"],
        "totals": result["report"]["totals"],
    }


def kill_midway(source: Path, target: Path, num_units: int) -> int:
    """Kill a run once its journal holds half of the units; return the lines it then held."""
    journal = target.parent / f".{target.name}.halfbyte-progress"
    child = subprocess.Popen(
        make_command(source, target), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while child.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > num_units // 2:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    return journal.read_bytes().count(b"\n")


def hash_file(path: Path) -> str:
    """Return the hex BLAKE2b of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def measure(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Return the figures of the undisturbed run, the killed one and their comparison."""
    source = folder / "model.safetensors"
    write_model(source, int(gigabytes * 1e9))
    whole = run_to_end(source, folder / "whole.safetensors")
    lines = kill_midway(source, folder / "killed.safetensors", whole["totals"]["layers"] // 2)
    resumed = run_to_end(source, folder / "killed.safetensors")
    is_equal = hash_file(folder / "whole.safetensors") == hash_file(folder / "killed.safetensors")
    return {
        "input_bytes": source.stat().st_size,
        "output_bytes": (folder / "whole.safetensors").stat().st_size,
        "undisturbed": whole,
        "killed_after_lines": lines,
        "resumed": resumed,
        "same_bytes": is_equal,
        "peak_rss_bytes": max(whole["peak_rss_bytes"], resumed["peak_rss_bytes"]),
        "max_peak_rss_bytes": MAX_PEAK_BYTES,
        "leftovers": sorted(p.name for p in folder.iterdir() if p.name.startswith(".")),
    }


def main() -> int:
    """Measure, print, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the input, in 1e9 bytes")
    parser.add_argument("--scratch", type=Path, default=None, help="where to work")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="keep the files")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="halfbyte-", dir=arguments.scratch))
    try:
        found = measure(folder, arguments.gb)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    is_good = found["same_bytes"] and found["peak_rss_bytes"] <= MAX_PEAK_BYTES
    is_good = is_good and not found["leftovers"]
    if arguments.json:
        print(json.dumps({**found, "passed": is_good}, indent=1))
    else:
        print(
            f"input {found['input_bytes'] / 1e9:.2f} GB, output {found['output_bytes'] / 1e9:.2f}"
        )
        print(f"peak resident memory {found['peak_rss_bytes'] / 1e6:.0f} MB (bar 1000)")
        print(f"undisturbed {found['undisturbed']['seconds']} s")
        print(
            f"killed after {found['killed_after_lines']} journal lines, then resumed: "
            f"{'same' if found['same_bytes'] else 'OTHER'} bytes"
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
