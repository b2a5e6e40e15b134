"""Runs an unmodified Python program on the virtual GPU and says what its launches did."""

import contextlib
import linecache
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.virtual.driver.launches import LaunchLog, LaunchRecord
from halfbyte.virtual.driver.session import cuda

EXIT_FINDINGS = 1


@dataclass(frozen=True)
class ProgramRun:
    """What a program did.

    Attributes:
        gpu: the product it ran on.
        program: its file or module name.
        arguments: what it was given.
        program_code: the exit code the program asked for; 1 for an uncaught exception.
        log: its launches.
    """

    gpu: str
    program: str
    arguments: tuple[str, ...]
    program_code: int
    log: LaunchLog

    @property
    def exit_code(self) -> int:
        """The program's own code; 1 where it is 0 although launches have findings or faults."""
        return self.program_code or (EXIT_FINDINGS if self.count_findings() else 0)

    def count_findings(self) -> int:
        """Return the number of findings, notes apart, and faults of all launches."""
        found = (finding for one in self.log for finding in one.findings)
        faults = sum(one.fault is not None for one in self.log)
        return faults + sum(not finding.is_note for finding in found)

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON-ready values."""
        return {
            "gpu": self.gpu,
            "program": self.program,
            "arguments": list(self.arguments),
            "program_exit_code": self.program_code,
            "exit_code": self.exit_code,
            "launches": [make_launch_json(record) for record in self.log],
            "instructions": sum(record.instructions for record in self.log),
            "seconds": sum(record.seconds for record in self.log),
            "findings": self.count_findings(),
            "substituted": dict(self.log.substitutions),
        }


def make_launch_json(record: LaunchRecord) -> dict[str, Any]:
    """Return one launch as JSON-ready values."""
    request = record.request
    return {
        "index": record.index,
        "kernel": request.kernel,
        "grid": request.grid,
        "block": request.block,
        "cluster": request.cluster,
        "dynamic_shared": request.dynamic_shared,
        "instructions": record.instructions,
        "cycles": record.cycles,
        "seconds": record.seconds,
        "findings": [finding.to_json() for finding in record.findings],
        "fault": None if record.fault is None else describe_fault(record.fault),
    }


def describe_fault(fault: BaseException) -> str:
    """Return the kind and the text of an error."""
    return f"{type(fault).__name__}: {fault}"


def run_program(
    program: str,
    arguments: Sequence[str] = (),
    *,
    gpu: str = "b200",
    is_module: bool = False,
    device: Any = None,
    options: Any = None,
    listener: Callable[[LaunchRecord], None] | None = None,
    errors: TextIO | None = None,
) -> ProgramRun:
    """Run a Python file (or module) as `python` would and return what it did.

    Its uncaught exception is printed to `errors` (None: stderr), a fault of the virtual GPU as its
    report with the program's line; without the report where the listener got it with its launch.

    Raises:
        UsageError: the program does not exist.
        MissingDependencyError: the virtual GPU is not built.
    """
    if not is_module and not Path(program).exists():
        raise UsageError(f"there is no program {program!r}")
    session = cuda(gpu, device=device, options=options)
    session.log.listener = listener
    saved = sys.argv, sys.path[:], sys.modules["__main__"]
    with session:
        try:
            sys.argv = [program, *arguments]
            code = _run(program, is_module, errors or sys.stderr, session.log)
        finally:
            sys.argv, sys.path[:], sys.modules["__main__"] = saved
            # Tensors that outlive the session must not be finalized against a closed runtime.
    return ProgramRun(gpu, program, tuple(arguments), code, session.log)


def _run(program: str, is_module: bool, errors: TextIO, log: LaunchLog) -> int:
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        return _read_exit_code(stop, errors)
    except KeyboardInterrupt:
        raise
    except HalfbyteError as fault:
        _print_fault(fault, errors, log)
        return EXIT_FINDINGS
    except BaseException as error:
        if isinstance(error, ImportError) and _find_first_frame(error) is None:
            kind = "module" if is_module else "program"
            raise UsageError(f"{kind} {program!r} cannot be run: {error}") from error
        _print_traceback(error, errors)
        return EXIT_FINDINGS
    return 0


def _read_exit_code(stop: SystemExit, errors: TextIO) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=errors)
    return EXIT_FINDINGS


def _print_traceback(error: BaseException, errors: TextIO) -> None:
    """Print the traceback from the program's first line on; none where it did not come so far."""
    frames = _find_first_frame(error)
    is_chain = frames is not None
    with contextlib.suppress(OSError, ValueError):  # the program may have closed stderr
        traceback.print_exception(type(error), error, frames, chain=is_chain, file=errors)


def _find_first_frame(error: BaseException) -> TracebackType | None:
    """Return the part of an error's traceback that starts in the program."""
    frames = error.__traceback__
    while frames is not None and _is_runner(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def _is_runner(file: str) -> bool:
    is_loader = file.startswith("<frozen ")  # runpy and the parts of importlib
    return file == __file__ or is_loader or file.endswith(f"{os.sep}runpy.py")


def _print_fault(fault: BaseException, errors: TextIO, log: LaunchLog) -> None:
    """Print where in the program the fault was raised, then its report unless that was told."""
    package = Path(__file__).parents[2]
    frames = []
    for frame in traceback.extract_tb(fault.__traceback__):
        if _is_runner(frame.filename):
            continue
        if package in Path(frame.filename).parents:
            break
        if "site-packages" not in frame.filename and not frame.filename.startswith("<"):
            frames.append(frame)
    for frame in frames[-1:]:
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        print(f"{frame.filename}:{frame.lineno}: {line}", file=errors)
    told = [one.index for one in log if one.fault is fault and log.listener is not None]
    text = f"{type(fault).__name__} of launch {told[0]}" if told else describe_fault(fault)
    print(text, file=errors)
