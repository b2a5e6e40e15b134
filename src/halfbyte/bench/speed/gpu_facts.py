"""What a speed run was measured on: GPU, driver, versions, date, command."""

import datetime
import importlib
import importlib.util
import subprocess
from typing import Any

import torch

from halfbyte.bench.machine import list_versions

_PACKAGES = ("torch", "triton", "gemlite", "flashinfer-python", "nvidia-cutlass-dsl")


def describe_run(command: str, seed: int) -> dict[str, str]:
    """Return the lines that head a report of this machine's GPU, by name."""
    properties: Any = torch.cuda.get_device_properties()
    versions = list_versions(_PACKAGES)
    return {
        "gpu": str(properties.name),
        "SMs": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "L2": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "driver": _read_driver(),
        "CUDA": str(torch.version.cuda),
        **{name: version for name, version in versions.items() if version != "not installed"},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": str(seed),
        "command": command,
    }


def _read_driver() -> str:
    if importlib.util.find_spec("pynvml") is not None:
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            return str(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.stdout.split("\n")[0].strip()
