"""What a result was measured on: processor, cores, software versions."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from halfbyte.version import __version__

_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, str | int]:
    """Return the processor's name, usable cores, torch's threads, and the operating system."""
    return {
        "cpu": _read_cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def list_versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python, halfbyte and the named distributions that are installed."""
    versions = {"python": platform.python_version(), "halfbyte": __version__}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _read_cpu_name() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
