"""Runs of peer programs on the virtual GPU: what to run, and what came of it.

Each runs unmodified in a process of its own, through `halfbyte run --json`.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
EXAMPLES = "examples/python/CuTeDSL"
CHECKOUT_VARIABLE = "HALFBYTE_CUTLASS"
LONGEST_REASON = 300


@dataclass(frozen=True)
class Run:
    """A program to run: its GPU ("-": not run), file, arguments, and what it must print.

    `when` is "ci" or "long"; for a program that is not run, `expected` says why.
    """

    gpu: str
    program: str
    arguments: tuple[str, ...] = ()
    expected: str = ""
    when: str = "long"

    @property
    def name(self) -> str:
        """The run in one line, as the tables and the test ids say it."""
        return " ".join((self.gpu, self.program, *self.arguments))


@dataclass(frozen=True)
class Outcome:
    """What a run did: passed or why not, its launches, their instructions and seconds."""

    name: str
    passed: bool
    reason: str
    launches: int
    instructions: int
    emulated_seconds: float
    seconds: float
    findings: int
    substituted: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON-ready values."""
        return asdict(self)


def _read_lines(name: str) -> list[str]:
    text = (FOLDER / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def read_examples() -> list[Run]:
    """NVIDIA's examples in the order of the table, those not run included."""
    runs = []
    for line in _read_lines("nvidia_examples.txt"):
        command, _, expected = line.partition(" => ")
        gpu, program, *arguments = command.split()
        runs.append(Run(gpu, program, tuple(arguments), expected.strip()))
    return runs


def read_package_programs() -> list[Run]:
    """The programs of this folder that try kernels of installed packages."""
    runs = []
    for line in _read_lines("package_programs.txt"):
        gpu, when, program, *cases = line.split()
        runs.append(Run(gpu, f"programs/{program}", tuple(cases), when=when))
    return runs


def find_checkout(path: str | None = None) -> Path | None:
    """The folder of the examples in a CUTLASS checkout: at `path`, or where the variable says."""
    root = path or os.environ.get(CHECKOUT_VARIABLE)
    if not root:
        return None
    folder = Path(root).expanduser() / EXAMPLES
    if not folder.is_dir():
        raise FileNotFoundError(f"no {EXAMPLES} in {root}: give the path of a CUTLASS checkout")
    return folder


def run_program(run: Run, folder: Path, time_limit: float = 600.0) -> Outcome:
    """Run one program of `folder` and judge it; `time_limit` is in seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "run.json"
        command = [
            sys.executable,
            "-m",
            "halfbyte.cli.main",
            "run",
            "--quiet",
            "--json",
            str(report),
        ]
        command += ["--gpu", run.gpu, str((folder / run.program).resolve()), *run.arguments]
        try:
            done = subprocess.run(
                command,
                cwd=scratch,
                env=_make_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=time_limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"not done after {time_limit:.0f} s"
            return _make_outcome(run, reason, {}, time.monotonic() - started)
        record = json.loads(report.read_text()) if report.exists() else {}
    reason = find_failure(run, done.returncode, done.stdout, record)
    return _make_outcome(run, reason, record, time.monotonic() - started)


def find_failure(run: Run, code: int, printed: str, record: dict[str, Any]) -> str:
    """Why the run did not pass; empty for one that did."""
    if not record:
        return f"no report, exit code {code}: {_read_last_words(printed)}"
    faults = [one["fault"] for one in record["launches"] if one["fault"]]
    if faults:
        return str(faults[0])[:LONGEST_REASON]
    if record["program_exit_code"]:
        return f"exit code {code}: {_read_last_words(printed)}"
    if record["findings"]:
        found = [finding for one in record["launches"] for finding in one["findings"]]
        return f"finding: {found[0]}"[:LONGEST_REASON]
    if code:
        return f"exit code {code}"
    if not record["launches"]:
        return "it launched no kernel"
    if run.expected not in printed:
        return f"it did not print {run.expected!r}"
    return ""


def write_command(run: Run) -> str:
    """The command that runs it, to be repeated by hand."""
    program = shlex.join((run.program, *run.arguments))
    return f"halfbyte run --gpu {run.gpu} {program}"


def _make_environment(folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    # The examples import their shared modules from the folder of all examples.
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["QUACK_CACHE_ENABLED"] = "0"
    environment.setdefault("PYTHONWARNINGS", "ignore")
    return environment


def _read_last_words(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    # The traceback's last line comes before the summary of the launches.
    errors = [line for line in lines if "Error" in line or "exception" in line.lower()]
    words = errors[-1] if errors else (lines[-1] if lines else "nothing printed")
    return words[:LONGEST_REASON]


def _make_outcome(run: Run, reason: str, record: dict[str, Any], seconds: float) -> Outcome:
    return Outcome(
        name=run.name,
        passed=not reason,
        reason=reason,
        launches=len(record.get("launches", ())),
        instructions=record.get("instructions", 0),
        emulated_seconds=round(record.get("seconds", 0.0), 3),
        seconds=round(seconds, 2),
        findings=record.get("findings", 0),
        substituted=record.get("substituted", {}),
    )
