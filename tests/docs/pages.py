"""Pages with programs: which blocks are programs, how they run, and what they are to print.

A block of Python is a whole program, or a part of one that lies beside the page. What a program
prints, fails with and is told by the virtual GPU stands in the block of text after it; `...` there
stands for anything.
"""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_RUN = re.compile(r"^halfbyte run --gpu (\w+) (docs/\S+\.py)(.*)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands after it, its text and its line in the page."""

    language: str
    marks: tuple[str, ...]
    text: str
    line: int


@dataclass(frozen=True)
class Program:
    """A program of a page.

    Attributes:
        name: page and line.
        path: its file; None where `text` is all of it.
        text: of a program that stands in the page.
        arguments: of its command line.
        marks: "fails": it is to raise; "alone": it runs in a process without a virtual GPU;
            "driverless": that is about a machine without a driver.
        expected: lines of the block of text after it.
    """

    name: str
    path: Path | None
    text: str
    arguments: tuple[str, ...]
    marks: tuple[str, ...]
    expected: tuple[str, ...]


def list_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that name a language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], tuple(found[2].split()), found[3], text[: found.start()].count("\n") + 1)
        for found in _BLOCK.finditer(text)
    ]


def list_programs(page: Path, language: str) -> list[Program]:
    """Return the programs of a page: "python" blocks, or commands of its "sh" blocks."""
    blocks = list_blocks(page)
    programs = []
    for block, following in zip_longest(blocks, blocks[1:]):
        if block.language != language:
            continue
        is_text = following is not None and following.language == "text"
        expected = tuple(following.text.splitlines()) if following and is_text else ()
        name = f"{page.name}:{block.line}"
        if language == "python":
            programs.append(Program(name, None, block.text, (), block.marks, expected))
            continue
        for line in block.text.splitlines():
            command = _RUN.match(line)
            if command:
                path, arguments = ROOT / command[2], tuple(command[3].split())
                programs.append(Program(name, path, "", arguments, block.marks, expected))
    return programs


def run_program(program: Program, gpu: Any, folder: Path) -> tuple[str, bool]:
    """Return (what it says, whether it raised); run in this process, on the open virtual GPU.

    What it says: its output, its error, and the findings of its launches.
    """
    path = program.path or _write(program, folder)
    output = io.StringIO()
    first_launch, arguments, has_raised = len(gpu.log), sys.argv, False
    sys.argv = [str(path), *program.arguments]
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(output),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # shown on standard error, which is not compared
            runpy.run_path(str(path), run_name="__main__")
    except Exception:
        has_raised = True
        output.write(traceback.format_exc())
    finally:
        sys.argv = arguments
    said = [output.getvalue()]
    said += [str(finding) for record in list(gpu.log)[first_launch:] for finding in record.findings]
    return _COLOUR.sub("", "\n".join(said)), has_raised


def run_alone(program: Program, folder: Path) -> tuple[str, bool]:
    """Return (what it says, whether it failed); run in a process of its own, without a GPU."""
    path = program.path or _write(program, folder)
    command = [sys.executable, str(path), *program.arguments]
    # A session leaves its settings in the environment of this process.
    bare = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    finished = subprocess.run(
        command, capture_output=True, text=True, check=False, env=bare, cwd=folder
    )
    return _COLOUR.sub("", finished.stdout + finished.stderr), finished.returncode != 0


def list_missing(said: str, expected: tuple[str, ...]) -> list[str]:
    """Return the expected lines that are not said in their order; white space does not count."""
    missing, rest = [], " ".join(said.split())
    for line in expected:
        parts = [re.escape(part.strip()) for part in " ".join(line.split()).split("...")]
        found = re.search(".*?".join(parts), rest)
        if found:
            rest = rest[found.end() :]
        else:
            missing.append(line)
    return missing


def has_excerpt(text: str, programs: list[str]) -> bool:
    """Return whether `text` is a run of lines of one of the programs, indentation aside."""
    wanted = [line.strip() for line in text.strip().splitlines()]
    return any(
        wanted == window
        for program in programs
        for window in _list_windows([line.strip() for line in program.splitlines()], len(wanted))
    )


def _list_windows(lines: list[str], size: int) -> Iterator[list[str]]:
    for start in range(len(lines) - size + 1):
        yield lines[start : start + size]


def _write(program: Program, folder: Path) -> Path:
    path = folder / (re.sub(r"\W", "_", program.name) + ".py")
    path.write_text(program.text, encoding="utf-8")
    return path
