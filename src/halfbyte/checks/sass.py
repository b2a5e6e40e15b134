"""Machine code of a cubin as records, by NVIDIA's nvdisasm (PyPI: nvidia-cuda-nvdisasm)."""

import importlib.util
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checks.cubin import ELF_MAGIC
from halfbyte.errors import FormatError, MissingDependencyError

INSTRUCTION_BYTES = 16  # sm_70 and later
_TIMEOUT_S = 120
_INSTALL = "pip install nvidia-cuda-nvdisasm"


@dataclass(frozen=True, slots=True)
class SassInstruction:
    """One machine instruction.

    Attributes:
        offset: bytes from the start of the kernel.
        opcode: with modifiers, e.g. "UTCOMMA.2CTA.4X".
        operands: as nvdisasm writes them, without spaces.
        predicate: e.g. "@!P0", "" where there is none.
    """

    offset: int
    opcode: str
    operands: str
    predicate: str

    @property
    def family(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    def matches(self, pattern: str) -> bool:
        """Return whether family and all modifiers of `pattern` are those of this instruction."""
        family, *modifiers = pattern.split(".")
        words = self.opcode.split(".")
        return words[0] == family and set(modifiers).issubset(words[1:])

    def __str__(self) -> str:
        """Return one line."""
        text = " ".join(filter(None, (self.predicate, self.opcode, self.operands)))
        return f"SASS /*{self.offset:04x}*/ {text}"


@dataclass(frozen=True, slots=True)
class SassKernel:
    """The machine code of one kernel, in order."""

    name: str
    instructions: tuple[SassInstruction, ...]


def find_nvdisasm() -> Path:
    """Return the disassembler: the one of the PyPI package, else the one on PATH.

    Raises MissingDependencyError where there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm*")):
            if path.stem == "nvdisasm":
                return path
    found = shutil.which("nvdisasm")
    if found is None:
        raise MissingDependencyError(f"reading machine code needs nvdisasm: {_INSTALL}")
    return Path(found)


def disassemble(cubin: bytes) -> tuple[SassKernel, ...]:
    """Return the kernels of a cubin.

    Raises MissingDependencyError without nvdisasm, FormatError for what it cannot read.
    """
    if not cubin.startswith(ELF_MAGIC):
        raise FormatError(f"a cubin starts with 7f454c46 (ELF); {cubin[:4].hex()} came")
    program = find_nvdisasm()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [str(program), "-json", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FormatError(f"nvdisasm ({program}) failed: {error}; {_INSTALL}") from None
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip()
        raise FormatError(f"nvdisasm cannot read the cubin of {len(cubin)} bytes: {text}")
    return read_disassembly(done.stdout.decode(errors="replace"))


def read_disassembly(text: str) -> tuple[SassKernel, ...]:
    """Return the kernels of nvdisasm's JSON; FormatError for another schema."""
    try:
        _, functions = json.loads(text)
        return tuple(_read_function(function) for function in functions)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"nvdisasm's JSON has another schema than 13.5's: {error!r}") from None


def _read_function(function: dict[str, Any]) -> SassKernel:
    start = int(function["start"])
    return SassKernel(
        name=function["function-name"],
        instructions=tuple(
            SassInstruction(
                offset=start + INSTRUCTION_BYTES * number,
                opcode=record["opcode"],
                operands=record.get("operands", ""),
                predicate=record.get("predicate", ""),
            )
            for number, record in enumerate(function["sass-instructions"])
        ),
    )
