"""The `halfbyte` program: the verbs and the one policy for errors and exit codes.

Layer: cli, the last folder. A verb module registers itself with `register(app)` and imports torch
only inside the verb's function, so that `halfbyte --help` answers at once.
"""

import contextlib
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from halfbyte.cli import bench, budget, build, convert, demo, diff, doctor, inspect, quantize
from halfbyte.cli import run as run_verb
from halfbyte.cli.closed_pipe import end_output, tolerate_closed_pipes
from halfbyte.cli.exit_codes import EXIT_CLEAN, EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_MISUSE
from halfbyte.errors import HalfbyteError, UsageError, printable
from halfbyte.version import __version__

_EPILOG = (
    "Exit codes: 0 all well; 1 findings, or an error in the input or the machine; "
    "2 the command line was misused. "
    "HALFBYTE_TRACEBACK=1 shows the Python traceback of an error."
)

app = typer.Typer(
    name="halfbyte",
    help=(
        "4-bit inference in Python: quantize real checkpoints with SVDQuant, look into them, see "
        "what it costs. halfbyte.nn.load_model runs them. And a virtual GPU: `halfbyte run` runs "
        "programs for NVIDIA GPUs where there is none.\n\n"
        "Examples: `halfbyte doctor`, `halfbyte demo`, "
        "`halfbyte quantize model.safetensors out.safetensors`, "
        "`halfbyte run --gpu b200 program.py`."
    ),
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"halfbyte {__version__}")
        raise typer.Exit(EXIT_CLEAN)


@app.callback()
def halfbyte(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """4-bit inference in Python: quantize real checkpoints with SVDQuant and run them."""


for _verb in (demo, quantize, inspect, convert, diff, run_verb, budget, build, bench, doctor):
    _verb.register(app)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code of `halfbyte ARGUMENTS` (None: the process's own arguments).

    Prints one readable message on stderr for every error and never a traceback, unless the
    environment variable HALFBYTE_TRACEBACK is 1: then the exception is raised.
    """
    try:
        app(args=arguments, prog_name="halfbyte")
    except SystemExit as stop:
        return _get_exit_code(stop)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("HALFBYTE_TRACEBACK") == "1":
            raise
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            _print_error(error)
        return EXIT_MISUSE if isinstance(error, UsageError) else EXIT_FINDINGS
    return EXIT_CLEAN


def _get_exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return EXIT_CLEAN
    return stop.code if isinstance(stop.code, int) else EXIT_FINDINGS


def _print_error(error: Exception) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    text = escape("\n".join(printable(line) for line in str(error).split("\n")))
    if isinstance(error, HalfbyteError | OSError):
        console.print(f"[bold red]error:[/] {text}")
        return
    kind = type(error).__name__
    console.print(f"[bold red]internal error:[/] {kind}: {text}")
    console.print("This is a defect in halfbyte; HALFBYTE_TRACEBACK=1 shows where.")


def run() -> None:
    """Run the program on the process's arguments and exit; the console script's entry."""
    # Read when torch is loaded. By default a waiting OpenMP thread spins, and on a machine with
    # other work it spins on the very core that its partner needs: quantizing took twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    tolerate_closed_pipes()
    sys.exit(end_output(main()))


if __name__ == "__main__":
    run()
