"""`halfbyte bench`: how fast kernels and their peers are on this GPU; parsing and printing only."""

import json
import secrets
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.added_options import AddedOptions
from halfbyte.cli.exit_codes import EXIT_CLEAN, EXIT_FINDINGS

if TYPE_CHECKING:
    from halfbyte.bench.speed.plan import SpeedRequest
    from halfbyte.bench.speed.result import SpeedResult

_EPILOG = (
    "Examples: `halfbyte bench`; `halfbyte bench linear --shapes 1x3840x3072x128 "
    "--peers cublas,scaled_mm --modes fp8`; `halfbyte bench --list`. "
    "A shape is MxKxN or MxKxNxR. Every result is checked before it is timed; what each column "
    "means stands in docs/benchmarks.md. Exit code 1: a result was wrong, or there is no GPU."
)


@dataclass(frozen=True)
class Measuring:
    """How to measure, and where on a machine without a GPU.

    Attributes:
        visits: how often each case is visited, None for the protocol's default.
        seed: of the random operands, None for a fresh one.
        arch: the target that `--list` lists for.
    """

    visits: int | None = None
    seed: int | None = None
    arch: str = "sm_90a"


_measuring = AddedOptions(
    {
        "visits": Annotated[
            int | None, typer.Option(min=1, help="How often each case is visited; default 4.")
        ],
        "seed": Annotated[
            int | None, typer.Option(min=0, help="Of the random operands; default a fresh one.")
        ],
        "arch": Annotated[
            str | None,
            typer.Option(metavar="TARGET", help="GPU that is listed or built for; default sm_90a."),
        ],
    },
    lambda visits, seed, arch: Measuring(visits, seed, arch or "sm_90a"),
    Measuring(),
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="bench", epilog=_EPILOG)(_measuring.put_on(bench))


def bench(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND]...", help="linear, quantize, copy; default the first two."),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="LIST", help="MxKxN or MxKxNxR, separated by commas.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option(metavar="LIST", help="What ours is compared with; '' for nothing.")
    ] = None,
    modes: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of our kernels: fp8, exact, int8.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of x and y: bfloat16 or float16.")] = "bfloat16",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for speed.csv, .json, .md and .png.")
    ] = Path("out"),
    only_list: Annotated[
        bool, typer.Option("--list", help="Print what would be measured, measure nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how fast linears and quantizers are on this GPU, beside torch's and other tools'.

    Needs an NVIDIA GPU and a CUDA build of torch.
    """
    from halfbyte.bench.speed.plan import parse_request

    measuring = _measuring.chosen.get()
    request = parse_request(kinds or [], shapes, peers, modes, dtype)
    if measuring.visits is not None:
        request = replace(request, protocol=replace(request.protocol, visits=measuring.visits))
    console = Console(stderr=True, highlight=False)
    if only_list:
        _print_list(_list_rows(request, measuring.arch), as_json=as_json)
        return
    result = _run(request, measuring, console)
    _finish(result, out, console, as_json=as_json)


def _list_rows(request: "SpeedRequest", target: str) -> list[dict[str, str]]:
    from halfbyte.bench.speed.plan import list_cases
    from halfbyte.runtime.targets import check_target

    target = check_target(target)
    return [
        {"kind": kind, "shape": str(shape), "case": name}
        for kind in request.kinds
        for shape in request.shapes
        for name in list_cases(request, kind, target)
    ]


def _print_list(rows: list[dict[str, str]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"cases": rows}, indent=1))
        return
    table = Table("kind", "MxKxNxR", "case")
    for row in rows:
        table.add_row(row["kind"], row["shape"], row["case"])
    Console(highlight=False).print(table)


def _run(request: "SpeedRequest", measuring: Measuring, console: Console) -> "SpeedResult":
    from halfbyte.bench.speed.gpu_facts import describe_run
    from halfbyte.bench.speed.plan import open_bench, run_speed
    from halfbyte.runtime.targets import read_device_target

    seed = secrets.randbits(31) if measuring.seed is None else measuring.seed
    bench = open_bench(request, seed, lambda line: console.print(escape(line), soft_wrap=True))
    command = shlex.join(["halfbyte", *sys.argv[1:]])
    return run_speed(request, bench, read_device_target(), describe_run(command, seed))


def _finish(result: "SpeedResult", out: Path, console: Console, *, as_json: bool) -> None:
    from halfbyte.bench.speed.report import make_json, make_markdown, write_report

    paths = write_report(result, out)
    typer.echo(json.dumps(make_json(result), indent=1) if as_json else make_markdown(result))
    console.print("written: " + ", ".join(escape(str(path)) for path in paths), soft_wrap=True)
    raise typer.Exit(EXIT_FINDINGS if result.wrong else EXIT_CLEAN)
