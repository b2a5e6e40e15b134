"""What two processes must have in common to make the same bytes.

Codes, scales and rounding are specified to the bit. Matrix products are not: their order of
summation follows torch, its math library, the CPU and the number of threads. So a worker that
differs in any of these is refused rather than trusted.
"""

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from halfbyte import native
from halfbyte.version import __version__

PACKAGE = Path(__file__).parents[1]
# Folders whose code decides about output bytes.
_DECIDING_FOLDERS = ("formats", "native", "svdquant", "checkpoints", "workers")
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Identity:
    """The facts, as strings that are compared for equality.

    Attributes:
        halfbyte: version of the package.
        code: digest of its code, since a checkout changes between versions.
        torch: version of torch.
        torch_instructions: what torch's own loops use, e.g. "AVX512".
        native_instructions: what the compiled loops use; "none" for the torch path.
        cpu: model of the processor, by which math libraries choose their loops.
        threads: of torch.
    """

    halfbyte: str
    code: str
    torch: str
    torch_instructions: str
    native_instructions: str
    cpu: str
    threads: str

    @staticmethod
    def read(threads: int) -> "Identity":
        """Return this process's, were it to run with `threads` torch threads."""
        loaded = native.library()
        return Identity(
            halfbyte=__version__,
            code=_hash_code(),
            torch=torch.__version__,
            torch_instructions=torch.backends.cpu.get_cpu_capability(),
            native_instructions="none" if loaded is None else loaded.isa,
            cpu=_read_cpu(),
            threads=str(threads),
        )


@cache
def _hash_code() -> str:
    hasher = hashlib.sha256()
    for folder in _DECIDING_FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            hasher.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode())
            hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


@cache
def _read_cpu() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    found = dict(line.split(":", 1) for line in lines[:40] if ":" in line)
    facts = {name.strip(): value.strip() for name, value in found.items()}
    shown = " ".join(facts[name] for name in names if name in facts)
    return shown or platform.machine()
