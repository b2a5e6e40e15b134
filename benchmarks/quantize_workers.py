"""`halfbyte quantize --workers`: SmolLM2-135M by one worker and by two, of one thread each.

Compares the bytes with those of one process, and the seconds of the quantizing stage (from the
first unit given out until the last is done) with workers that run already: starting Ray, Python
and torch takes the same seconds for a model of any size, and is reported beside it.
Usage: python benchmarks/quantize_workers.py [--source FILE] [--preset NAME] [--repeat 3] [--json]
"""

import argparse
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from halfbyte.formats.safetensors_writer import write_safetensors
from halfbyte.svdquant.presets import PRESETS
from halfbyte.svdquant.quantize_file import ProgressEvent, QuantizeFileRequest, quantize_file
from halfbyte.workers.settings import WorkerSettings

MIN_SPEEDUP = 1.5  # two workers over one
PRESET = "nvfp4_weight_only_r32"


def write_smollm2(path: Path) -> None:
    """Write the bfloat16 weights of the model package."""
    from halfbyte.nn.models.smollm2 import load_smollm2

    state = load_smollm2().model.state_dict()
    write_safetensors(path, {name: value.bfloat16() for name, value in state.items()})


def start_ray() -> None:
    """Start two worker processes' worth of Ray, used by every run."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )


def read_worker_cpu_seconds() -> float:
    """Return the CPU seconds of all Ray worker processes of this machine so far."""
    total = 0.0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if not (place / "cmdline").read_bytes().startswith(b"ray::"):
                continue
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def hash_file(path: Path) -> str:
    """Return a digest of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def quantize(source: Path, target: Path, preset: str, workers: int | None) -> dict[str, Any]:
    """Return seconds and CPU seconds of the quantizing stage of one run, and its output's hash."""
    stage: list[float] = []

    def listen(event: ProgressEvent) -> None:
        if event.stage == "quantize":
            stage.append(time.perf_counter())

    settings = None if workers is None else WorkerSettings(workers)
    request = QuantizeFileRequest(source, target, PRESETS[preset], workers=settings, force=True)
    begun, own, theirs = time.perf_counter(), time.process_time(), read_worker_cpu_seconds()
    quantize_file(request, listen)
    return {
        "seconds": round(stage[-1] - stage[0], 3),
        "whole_seconds": round(time.perf_counter() - begun, 3),
        "worker_cpu_seconds": round(read_worker_cpu_seconds() - theirs, 2),
        "own_cpu_seconds": round(time.process_time() - own, 2),
        "sha256": hash_file(target),
    }


def measure(folder: Path, source: Path, preset: str, repeat: int) -> dict[str, Any]:
    """Return the figures of `repeat` runs of each kind, taken in turn."""
    kinds: dict[str, int | None] = {"one process": None, "1 worker": 1, "2 workers": 2}
    start_ray()
    warm_up = quantize(source, folder / "warm.safetensors", preset, 2)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeat):
        for kind, workers in kinds.items():
            runs[kind].append(quantize(source, folder / "out.safetensors", preset, workers))
    best = {kind: min(run["seconds"] for run in found) for kind, found in runs.items()}
    digests = {run["sha256"] for found in runs.values() for run in found} | {warm_up["sha256"]}
    return {
        "preset": preset,
        "input_bytes": source.stat().st_size,
        "load_before": os.getloadavg()[0],
        "first_run_with_start": warm_up,
        "runs": runs,
        "seconds": best,
        "same_bytes": len(digests) == 1,
        "speedup_of_2_workers": round(best["1 worker"] / best["2 workers"], 3),
        "min_speedup": MIN_SPEEDUP,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    """Measure, print, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="a safetensors file instead of SmolLM2")
    parser.add_argument("--preset", default=PRESET, choices=sorted(PRESETS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="halfbyte-") as name:
        folder = Path(name)
        source = arguments.source
        if source is None:
            source = folder / "smollm2.safetensors"
            write_smollm2(source)
        found = measure(folder, source, arguments.preset, arguments.repeat)
    is_good = found["same_bytes"] and found["speedup_of_2_workers"] >= MIN_SPEEDUP
    if arguments.json:
        print(json.dumps({**found, "passed": is_good}, indent=1))
        return 0 if is_good else 1
    print(f"{arguments.preset}, input {found['input_bytes'] / 1e6:.0f} MB")
    for kind, runs in found["runs"].items():
        run = min(runs, key=lambda run: run["seconds"])
        cpu = f"CPU: workers {run['worker_cpu_seconds']} s, own {run['own_cpu_seconds']} s"
        print(f"{kind:12} {run['seconds']:7.2f} s of quantizing ({cpu})")
    print(f"first run, workers starting: {found['first_run_with_start']['whole_seconds']:.2f} s")
    print(f"2 workers over 1: {found['speedup_of_2_workers']:.2f} (bar {MIN_SPEEDUP})")
    print(f"bytes of all runs: {'the same' if found['same_bytes'] else 'DIFFERENT'}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
