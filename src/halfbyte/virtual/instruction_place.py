"""Where a lowered instruction comes from: PTX line and text, and the line of the source program."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.ptx.syntax import SourceLocation
    from halfbyte.virtual.lowering import Program

_MAX_TEXT = 120  # characters of an instruction that a message shows


@dataclass(frozen=True, slots=True)
class InstructionPlace:
    """One instruction of a PTX text.

    Attributes:
        index: its position in the lowered program.
        line: of the PTX text, from 1.
        text: the instruction, on one line.
        source: "gemm.py:120", from `.loc`; with inlining, the innermost place and the outermost.
    """

    index: int
    line: int
    text: str
    source: str = ""

    def __str__(self) -> str:
        """Return e.g. "PTX line 812 `bar.sync 0` (gemm.py:120)"."""
        text = self.text if len(self.text) <= _MAX_TEXT else self.text[: _MAX_TEXT - 3] + "..."
        source = f" ({self.source})" if self.source else ""
        return f"PTX line {self.line} `{text}`{source}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {"line": self.line, "text": self.text, "source": self.source}


def find_place(program: "Program", index: int) -> InstructionPlace | None:
    """Return the place of the instruction at `index`; None where the index names none (-1)."""
    if not 0 <= index < len(program.sources):
        return None
    instruction = program.sources[index]
    text = " ".join(str(instruction).split()).rstrip("; ")
    return InstructionPlace(
        index, instruction.line, text, _describe_source(program.files, instruction.location)
    )


def _describe_source(files: dict[int, str], location: "SourceLocation | None") -> str:
    if location is None:
        return ""
    outermost = location
    while outermost.inlined_at is not None:
        outermost = outermost.inlined_at
    inner = _describe_line(files, location)
    outer = _describe_line(files, outermost)
    return inner if inner == outer else f"{inner}, called from {outer}"


def _describe_line(files: dict[int, str], location: "SourceLocation") -> str:
    name = files.get(location.file, f"file {location.file}")
    return f"{PurePath(name).name}:{location.line}"
