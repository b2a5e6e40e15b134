"""`halfbyte run`: an unmodified Python program on the virtual GPU; parsing and printing only."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from halfbyte.cli.closed_pipe import plain_output
from halfbyte.errors import UsageError, printable
from halfbyte.wording import counted

if TYPE_CHECKING:
    from halfbyte.virtual.driver.launches import LaunchRecord
    from halfbyte.virtual.driver.program import ProgramRun

_EPILOG = (
    "Examples: `halfbyte run --gpu b200 gemm.py --mnk 512,512,256`; "
    "`halfbyte run --json launches.json gemm.py`; `halfbyte run -m package.module`. "
    "Options of halfbyte come before the program, those after it are the program's. "
    "Launches and the summary are printed on stderr, so that the program's own output stays as it "
    "is. Exit code: the program's own; 1 where the program ends with 0 but a launch has a finding "
    "or a fault, or where an exception ends it."
)
_LONGEST_NAME = 60


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    app.command(name="run", epilog=_EPILOG, context_settings=settings)(run)


def run(
    program: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM [ARGS]...", help="A Python file and its arguments."),
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", help="The GPU: b200, b300, h200 or rtx5090.")
    ] = "b200",
    is_module: Annotated[
        bool, typer.Option("-m", help="PROGRAM is a module, as for `python -m`.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the run as JSON; - is a last line."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print findings alone, not every launch.")
    ] = False,
) -> None:
    """Run a Python program with a virtual GPU as its "cuda" device and report every launch."""
    from halfbyte.virtual.driver.program import run_program

    # Of this moment: the program gets another stream, and may close it.
    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)

    def show(record: "LaunchRecord") -> None:
        is_wanted = not quiet or record.findings or record.fault is not None
        if is_wanted and not _is_closed(sys.__stderr__):
            with _any_stderr():
                _print_launch(record, console)

    if program[0].startswith("-"):
        raise UsageError(
            f"halfbyte run has no option {printable(program[0])}; a program's options come after it"
        )
    if json_file is not None:
        json_file = _check_json_file(json_file)
    with plain_output():
        finished = run_program(program[0], program[1:], gpu=gpu, is_module=is_module, listener=show)
    if not _is_closed(sys.__stderr__):
        with _any_stderr():
            _print_summary(finished, console)
    if json_file is not None:
        _write_json(finished, json_file)
    raise typer.Exit(finished.exit_code)


def _is_closed(stream: TextIO | None) -> bool:
    return stream is not None and stream.closed


@contextmanager
def _any_stderr() -> Iterator[None]:
    """Let a program close stderr: what cannot be printed there changes no exit code."""
    try:
        yield
    except (OSError, ValueError):
        return


def _check_json_file(file: Path) -> Path:
    """Return the file's absolute path: the program may change its folder.

    Raises UsageError, before a long run, where it cannot be written.
    """
    if str(file) == "-":
        return file
    name = printable(str(file))
    path = file.resolve()
    if path.is_dir():
        raise UsageError(f"--json {name} is a directory; name a file or -")
    if not path.parent.is_dir():
        raise UsageError(f"--json {name}: the folder {printable(str(path.parent))} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--json {name} cannot be written: permission denied")
    return path


def _write_json(finished: "ProgramRun", file: Path) -> None:
    text = json.dumps(finished.to_json()) + "\n"
    if str(file) == "-":
        typer.echo(text, nl=False)
    elif file.exists() and not file.is_file():  # a pipe or a device
        file.write_text(text, encoding="utf-8")
    else:  # whole or not at all, whenever the process ends
        partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def _print_launch(record: "LaunchRecord", console: Console) -> None:
    request = record.request
    name = request.kernel
    if len(name) > _LONGEST_NAME:
        name = name[: _LONGEST_NAME - 1] + "…"
    sizes = f"grid {_join(request.grid)}, block {_join(request.block)}"
    if request.cluster is not None:
        sizes += f", cluster {_join(request.cluster)}"
    work = f"{counted(record.instructions, 'instruction')}, {record.seconds:.3f} s"
    if isinstance(record.fault, KeyboardInterrupt):
        work = f"interrupted after {record.seconds:.3f} s"
    console.print(escape(f"launch {record.index}: {name}: {sizes}: {work}"))
    for finding in record.findings:
        word = "note" if finding.is_note else "[yellow]finding[/]"
        console.print(f"  {word}: {escape(str(finding))}")
    if record.fault is not None and not isinstance(record.fault, KeyboardInterrupt):
        kind = type(record.fault).__name__
        console.print(f"  [bold red]{kind}:[/] {escape(str(record.fault))}")


def _join(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes)


def _print_summary(finished: "ProgramRun", console: Console) -> None:
    instructions = sum(record.instructions for record in finished.log)
    seconds = sum(record.seconds for record in finished.log)
    console.print(
        f"{counted(len(finished.log), 'launch', 'launches')} on {finished.gpu}: "
        f"{counted(instructions, 'instruction')}, {seconds:.2f} s, "
        f"{counted(finished.count_findings(), 'finding')}"
    )
    for name, count in finished.log.substitutions.items():
        console.print(
            escape(
                f"{name}: {counted(count, 'call')} computed by a float64 reference, not a kernel"
            )
        )
