"""`halfbyte bench`: how fast kernels and their peers are on this GPU; parsing and printing only."""

import json
import secrets
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.added_options import AddedOptions
from halfbyte.cli.exit_codes import EXIT_CLEAN, EXIT_FINDINGS
from halfbyte.cli.output_folder import check_output_folder
from halfbyte.errors import UsageError, printable

if TYPE_CHECKING:
    from halfbyte.bench.speed.plan import SpeedRequest
    from halfbyte.bench.speed.result import SpeedResult
    from halfbyte.bench.speed.run import Bench

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
        arch: the target that is listed or built for.
        build: folder that the kernels of the run are built into; nothing is measured then.
        ncu: the case whose counters are read instead.
    """

    visits: int | None = None
    seed: int | None = None
    arch: str = "sm_90a"
    build: Path | None = None
    ncu: str | None = None


_measuring = AddedOptions(
    {
        "visits": Annotated[
            int | None, typer.Option(min=1, help="How often each case is visited; default 4.")
        ],
        "seed": Annotated[
            int | None,
            typer.Option(min=0, max=2**31 - 1, help="Of the random operands; default a fresh one."),
        ],
        "arch": Annotated[
            str | None,
            typer.Option(metavar="TARGET", help="GPU that is listed or built for; default sm_90a."),
        ],
        "build": Annotated[
            Path | None,
            typer.Option(
                metavar="DIR", help="Compile our kernels of this run for --arch, measure nothing."
            ),
        ],
        "ncu": Annotated[
            str | None,
            typer.Option(
                metavar="CASE", help="Print the hardware counters of this case on the first shape."
            ),
        ],
    },
    lambda visits, seed, arch, build, ncu: Measuring(visits, seed, arch or "sm_90a", build, ncu),
    Measuring(),
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="bench", epilog=_EPILOG)(_measuring.put_on(bench))


def bench(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help="linear, quantize, launch, copy; default the first three. tune goes alone.",
        ),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="LIST", help="MxKxN or MxKxNxR, separated by commas.")
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="What ours is compared with; '' for nothing; gemlite and "
            "gemlite_fp8 are measured only where they are named.",
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Of our kernels: fp8, exact, int8, exact_int4."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of x and y: bfloat16 or float16.")] = "bfloat16",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for speed.csv, .json, .md and .png, default out; of tune for its table, "
            "default where the chooser reads it.",
        ),
    ] = None,
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
    elif measuring.build is not None:
        _build(request, measuring, console)
    elif measuring.ncu is not None:
        _print_counters(request, measuring, as_json=as_json)
    elif request.kinds == ("tune",):
        _tune(request, measuring, out, console)
    else:
        folder = out or Path("out")
        _finish(_run(request, measuring, folder, console), folder, console, as_json=as_json)


def _list_rows(request: "SpeedRequest", target: str) -> list[dict[str, str]]:
    from halfbyte.bench.speed.plan import list_cases, list_shapes
    from halfbyte.runtime.targets import check_target

    target = check_target(target)
    return [
        {"kind": kind, "shape": str(shape), "case": name}
        for kind in request.kinds
        for shape in list_shapes(request, kind)
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


def _build(request: "SpeedRequest", measuring: Measuring, console: Console) -> None:
    from halfbyte.bench.speed.artifacts import list_run_sources
    from halfbyte.runtime.artifact import build_artifacts
    from halfbyte.runtime.targets import check_target

    assert measuring.build is not None
    sources, refusals = list_run_sources(request, check_target(measuring.arch))
    for case, reason in refusals.items():
        console.print(escape(f"{case}: {reason}"), soft_wrap=True)
    if not sources:
        raise UsageError(
            f"nothing to build for {measuring.arch}: the run has no kernel of ours; --list shows "
            "what it measures"
        )
    build_artifacts(
        sources,
        measuring.build,
        lambda source, _: console.print(escape(str(source)), soft_wrap=True),
    )
    console.print(
        f"{len(sources)} kernels in [bold]{escape(str(measuring.build))}[/]: "
        "set HALFBYTE_ARTIFACTS to it"
    )


def _print_counters(request: "SpeedRequest", measuring: Measuring, *, as_json: bool) -> None:
    from halfbyte.bench.speed.counters import ProfiledCase, measure_counters
    from halfbyte.bench.speed.plan import list_cases
    from halfbyte.bench.speed.timing_device import CudaTimingDevice
    from halfbyte.runtime.targets import read_device_target

    CudaTimingDevice()  # raises where there is no GPU
    target, kind, case = read_device_target(), request.kinds[0], measuring.ncu
    known = list_cases(request, kind, target)
    if case is None or case not in known:
        raise UsageError(f"case {printable(str(case))!r}: choose from {', '.join(known)}")
    profiled = ProfiledCase(kind, case, request.shapes[0], request.dtype, measuring.seed or 0)
    counters = measure_counters(profiled, target)
    if as_json:
        typer.echo(json.dumps([asdict(counter) for counter in counters], indent=1))
        return
    table = Table("kernel", "counter", "value", "unit", "what it says")
    for one in counters:
        table.add_row(*map(escape, (one.kernel, one.name, one.value, one.unit, one.meaning)))
    Console(highlight=False, width=200).print(table)


def _open(request: "SpeedRequest", measuring: Measuring, console: Console) -> "Bench":
    from halfbyte.bench.speed.plan import open_bench

    seed = secrets.randbits(31) if measuring.seed is None else measuring.seed
    return open_bench(request, seed, lambda line: console.print(escape(line), soft_wrap=True))


def _tune(
    request: "SpeedRequest", measuring: Measuring, out: Path | None, console: Console
) -> None:
    from halfbyte.bench.speed.tune import tune_shapes
    from halfbyte.bench.speed.tune_table import find_table, merge_choices, read_table, write_table

    path = find_table(out)
    check_output_folder("--out", path.parent)
    known = read_table(path)
    bench = _open(request, measuring, console)
    count = 0
    for choice in tune_shapes(bench, request.shapes, request.modes):
        known = merge_choices(known, [choice])
        write_table(path, known)
        count += 1
    console.print(f"{count} choices measured, in {escape(str(path))}", soft_wrap=True)


def _run(
    request: "SpeedRequest", measuring: Measuring, out: Path, console: Console
) -> "SpeedResult":
    from halfbyte.bench.speed.gpu_facts import describe_run
    from halfbyte.bench.speed.plan import run_speed
    from halfbyte.bench.speed.report import write_tables
    from halfbyte.runtime.targets import read_device_target

    check_output_folder("--out", out)
    bench = _open(request, measuring, console)
    command = shlex.join(["halfbyte", *sys.argv[1:]])
    machine = describe_run(command, bench.seed)
    return run_speed(
        request, bench, read_device_target(), machine, lambda result: write_tables(result, out)
    )


def _finish(result: "SpeedResult", out: Path, console: Console, *, as_json: bool) -> None:
    from halfbyte.bench.speed.report import make_json, make_markdown, write_report

    paths = write_report(result, out)
    typer.echo(json.dumps(make_json(result), indent=1) if as_json else make_markdown(result))
    console.print("written: " + ", ".join(escape(str(path)) for path in paths), soft_wrap=True)
    raise typer.Exit(EXIT_FINDINGS if result.wrong else EXIT_CLEAN)
