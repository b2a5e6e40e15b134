"""The processor and memory of this machine, as the system tells them."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """The processor that runs this process.

    Attributes:
        name: model name, or the machine type where the system does not tell.
        num_cores: cores that this process may use.
        features: instruction sets, as in /proc/cpuinfo; empty where there is none.
        memory_bytes: physical memory; 0 if unknown.
    """

    name: str
    num_cores: int
    features: frozenset[str]
    memory_bytes: int

    @property
    def memory_gib(self) -> float:
        """Physical memory in GiB."""
        return self.memory_bytes / 2**30


def read_processor() -> Processor:
    """Return what the system says; never raises."""
    name, features = "", set[str]()
    try:
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):  # x86 and Arm
                features.update(value.split())
    except OSError:
        pass
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory_bytes = 0
    name = name or platform.processor() or platform.machine()
    return Processor(name, num_cores, frozenset(features), memory_bytes)
