"""`halfbyte convert` on a large file: bytes a second of wall and of CPU time, peak memory, a kill.

Makes a random ModelOpt NVFP4_SVD model of the shapes of an 8B transformer, converts it to our own
format as it is and with --verify, then again with a SIGKILL midway and a second run, and compares
the bytes. Rates are of input bytes. On a busy machine the wall rate is of that machine's rest; the
CPU rate (user and system time of the whole process, both cores together) is not.
Usage: python benchmarks/convert_file.py [--gb 4] [--to FAMILY] [--scratch FOLDER] [--json] [--keep]
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.formats.safetensors_header import make_layout, make_spec
from halfbyte.formats.safetensors_writer import SafetensorsWriter, write_bytes_atomically
from quantize_file import FFN, HIDDEN, KV, LAYER, VOCABULARY, hash_file
from timing import make_machine_line

MAX_PEAK_BYTES = 1_000_000_000
MIN_BYTES_PER_SECOND = 200e6
MIN_VERIFIED_BYTES_PER_SECOND = 50e6
RANK = 32
CONFIG = {"quantization": {"quant_algo": "NVFP4_SVD", "lora_rank": RANK}}
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Run:
    """One whole run of the program.

    Attributes:
        seconds: wall time.
        cpu_seconds: user and system time of the process.
        bytes_per_second: input bytes over wall time.
        bytes_per_cpu_second: input bytes over CPU time.
        peak_rss_bytes: as the kernel counts.
        resumed_units: units that an earlier run had finished.
    """

    seconds: float
    cpu_seconds: float
    bytes_per_second: float
    bytes_per_cpu_second: float
    peak_rss_bytes: int
    resumed_units: int


def list_layer(name: str, rows: int, columns: int) -> Shapes:
    """Return dtype and shape of every tensor of one NVFP4_SVD linear."""
    return {
        f"{name}.weight": (torch.uint8, (rows, columns // 2)),
        f"{name}.weight_scale": (torch.float8_e4m3fn, (rows, columns // 16)),
        f"{name}.weight_scale_2": (torch.float32, ()),
        f"{name}.input_scale": (torch.float32, ()),
        f"{name}.pre_quant_scale": (torch.bfloat16, (columns,)),
        f"{name}.svdquant_lora_a": (torch.bfloat16, (RANK, columns)),
        f"{name}.svdquant_lora_b": (torch.bfloat16, (rows, RANK)),
    }


def list_shapes(num_bytes: int) -> Shapes:
    """Return the tensors of a model of about `num_bytes`: an embedding, then whole layers."""
    shapes: Shapes = {"model.embed_tokens.weight": (torch.bfloat16, (VOCABULARY, HIDDEN))}
    total, index = 2 * VOCABULARY * HIDDEN, 0
    while total < num_bytes:
        for name, (rows, columns) in LAYER.items():
            added = list_layer(f"model.layers.{index}.{name}", rows, columns)
            total += sum(make_spec("", *one).num_bytes for one in added.values())
            shapes |= added
        shapes[f"model.layers.{index}.norm.weight"] = (torch.bfloat16, (HIDDEN,))
        index += 1
    return shapes


def fill(name: str, dtype: torch.dtype, count: int, draw: torch.Generator) -> torch.Tensor:
    """Return `count` random values of one tensor, sound ones for its part."""
    if name.endswith(("weight_scale_2", "input_scale")):
        return torch.full((count,), 0.0021)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)
    if dtype == torch.float8_e4m3fn:
        return torch.randint(0x28, 0x48, (count,), generator=draw, dtype=torch.uint8).view(dtype)
    values = torch.randn(count, generator=draw).mul_(0.02)
    return (values.abs_() + 0.5).to(dtype) if "pre_quant" in name else values.to(dtype)


def write_model(folder: Path, num_bytes: int) -> int:
    """Write the random model, a few rows at a time; return its bytes."""
    folder.mkdir()
    shapes = list_shapes(num_bytes)
    layout, prefix = make_layout([make_spec(name, *one) for name, one in shapes.items()])
    draw = torch.Generator().manual_seed(0)
    path = folder / "model.safetensors"
    with SafetensorsWriter(path, layout, prefix) as writer:
        for name, entry in layout.tensors.items():
            dtype, size = shapes[name][0], shapes[name][0].itemsize
            for start in range(0, entry.num_elements, 2**22):
                count = min(2**22, entry.num_elements - start)
                writer.write(name, fill(name, dtype, count, draw), start * size)
    write_bytes_atomically(folder / "hf_quant_config.json", json.dumps(CONFIG).encode())
    return path.stat().st_size


def make_command(source: Path, target: Path, family: str, *flags: str) -> list[str]:
    """Return the command of one run."""
    program = [sys.executable, "-m", "halfbyte.cli.main", "convert"]
    return [*program, str(source), str(target), "--to", family, "--json", *flags]


def run_to_end(command: list[str], num_bytes: int) -> Run:
    """Return the figures of one whole run."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"failed: {' '.join(command)}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(
        seconds=round(seconds, 2),
        cpu_seconds=round(cpu, 2),
        bytes_per_second=round(num_bytes / seconds),
        bytes_per_cpu_second=round(num_bytes / cpu),
        peak_rss_bytes=usage.ru_maxrss * 1024,
        resumed_units=json.loads(printed)["resumed_units"],
    )


def kill_midway(command: list[str], target: Path, lines: int) -> int:
    """Kill a run once its journal holds `lines`; return the lines it then held."""
    journal = target.parent / f".{target.name}.halfbyte-progress"
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > lines:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def measure(folder: Path, gigabytes: float, family: str) -> dict[str, Any]:
    """Return the figures of a plain run, a verified one, a killed one, and their comparison."""
    source = folder / "model"
    num_bytes = write_model(source, int(gigabytes * 1e9))
    targets = {name: folder / name for name in ("plain", "verified", "killed")}
    runs = {
        "plain": run_to_end(make_command(source, targets["plain"], family), num_bytes),
        "verified": run_to_end(
            make_command(source, targets["verified"], family, "--verify"), num_bytes
        ),
    }
    command = make_command(source, targets["killed"], family)
    lines = kill_midway(command, targets["killed"], max(1, int(gigabytes * 8)))
    runs["resumed"] = run_to_end(command, num_bytes)
    hashes = {hash_file(place / "model.safetensors") for place in targets.values()}
    return {
        "machine": make_machine_line(),
        "family": family,
        "input_bytes": num_bytes,
        "output_bytes": (targets["plain"] / "model.safetensors").stat().st_size,
        "largest_layer": [FFN, HIDDEN],
        "smallest_layer": [KV, HIDDEN],
        "runs": {name: asdict(run) for name, run in runs.items()},
        "killed_after_lines": lines,
        "same_bytes": len(hashes) == 1,
        "peak_rss_bytes": max(run.peak_rss_bytes for run in runs.values()),
        "leftovers": sorted(p.name for p in folder.iterdir() if p.name.startswith(".")),
    }


def is_passed(found: dict[str, Any]) -> bool:
    """Return whether every bar holds, the rates by wall time."""
    runs = found["runs"]
    is_fast = (
        runs["plain"]["bytes_per_second"] >= MIN_BYTES_PER_SECOND
        and runs["verified"]["bytes_per_second"] >= MIN_VERIFIED_BYTES_PER_SECOND
    )
    is_clean = found["same_bytes"] and not found["leftovers"]
    return is_fast and is_clean and found["peak_rss_bytes"] <= MAX_PEAK_BYTES


def main() -> int:
    """Measure, print, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the input, in 1e9 bytes")
    parser.add_argument("--to", default="halfbyte", help="family to write")
    parser.add_argument("--scratch", type=Path, default=None, help="where to work")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", action="store_true", help="keep the files")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="halfbyte-", dir=arguments.scratch))
    try:
        found = measure(folder, arguments.gb, arguments.to)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    found["passed"] = is_passed(found)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0 if found["passed"] else 1
    print(f"machine: {found['machine']}")
    print(f"modelopt -> {found['family']}, input {found['input_bytes'] / 1e9:.2f} GB")
    for name, run in found["runs"].items():
        print(
            f"  {name:<9} {run['seconds']:7.2f} s = {run['bytes_per_second'] / 1e6:5.0f} MB/s; "
            f"CPU {run['cpu_seconds']:6.2f} s = {run['bytes_per_cpu_second'] / 1e6:5.0f} MB/s; "
            f"peak {run['peak_rss_bytes'] / 1e6:.0f} MB"
        )
    word = "same" if found["same_bytes"] else "OTHER"
    print(f"killed after {found['killed_after_lines']} journal lines, then resumed: {word} bytes")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
