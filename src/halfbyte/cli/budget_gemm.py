"""`halfbyte budget gemm_w4a4`: options and tables; parsing and printing only."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.exit_codes import EXIT_CLEAN, EXIT_FINDINGS
from halfbyte.errors import UsageError, printable
from halfbyte.wording import counted

if TYPE_CHECKING:
    from halfbyte.checks.finding import CheckReport
    from halfbyte.kernels.gemm_w4a4.budget import GemmBudget
    from halfbyte.kernels.gemm_w4a4.choose import GemmRequest
    from halfbyte.kernels.gemm_w4a4.config import GemmConfig

GEMM = "gemm_w4a4"
_LAYOUT_TILES = ((128, 256, 1), (256, 256, 2))  # M, N, CTAs
_MOST_DIGITS, _SHOWN_CHARACTERS = 18, 200
_FORMATS, _DTYPES = ("nvfp4", "mxfp4", "int4"), ("float16", "bfloat16")
_PLACEMENTS = ("tail", "spread", "own_ring")


@dataclass(frozen=True)
class Shared:
    """Options that both kinds of budget have, as given in front of the target."""

    gpu: str
    declare: tuple[str, ...]
    as_json: bool


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are halfbyte's."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"halfbyte budget {GEMM}: {printable(message)}")


def read_options(arguments: Sequence[str], shared: Shared) -> argparse.Namespace:
    """Return the options behind `gemm_w4a4`; UsageError for others."""
    parser = _Parser(prog=f"halfbyte budget {GEMM}", allow_abbrev=False)
    for name, default, what in (
        ("m", 4352, "rows (tokens)"),
        ("n", 3072, "output features"),
        ("k", 3840, "input features"),
        ("rank", 128, "of the low-rank branch, 0: none"),
        ("stages", 0, "ring slots that must fit"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--tile", default="", metavar="MxN", help="e.g. 256x128; else chosen")
    parser.add_argument("--cta-group", type=int, choices=(1, 2), help="CTAs of the tile's MMA")
    parser.add_argument("--format", choices=_FORMATS, default="nvfp4", help="of the blocks")
    parser.add_argument("--dtype", choices=_DTYPES, default="float16", help="of y and low rank")
    parser.add_argument("--placement", choices=_PLACEMENTS, default="tail", help="of chunks")
    parser.add_argument("--layout", action="store_true", help="compare accumulators by cell")
    parser.add_argument("--declare", action="append", metavar="NAME=BYTES", help="to compare")
    parser.add_argument("--gpu", default=shared.gpu, help="b200 or b300")
    parser.add_argument("--json", action="store_true", default=shared.as_json, dest="as_json")
    options = parser.parse_args(list(arguments))
    for name, least in (("m", 0), ("n", 1), ("k", 1), ("rank", 0), ("stages", 0)):
        if getattr(options, name) < least:
            value = getattr(options, name)
            raise UsageError(f"--{name} {value}: an integer of at least {least} is wanted")
    options.declare = [*shared.declare, *(options.declare or ())]
    return options


def print_gemm_budget(options: argparse.Namespace, console: Console) -> int:
    """Print the budget, or the proof of the layouts, and return the exit code."""
    figures, names = read_declared(options.declare)
    if names:
        raise UsageError("NAME:PARAMETER names a program's tensor map; gemm_w4a4 has names: NAME")
    if options.layout:
        return _show_layout(options.gpu, options.as_json, console)
    from halfbyte.kernels.gemm_w4a4.choose import GemmRequest

    request = GemmRequest(
        options.m, options.n, options.k, options.rank, options.format, options.dtype, options.dtype
    )
    config = _choose_config(request, options)
    return _budget_gemm(request, config, (options.stages, figures), options.as_json, console)


def read_declared(texts: Sequence[str]) -> tuple[dict[str, int], dict[int, str]]:
    """Return (bytes by name, names of parameters) of `--declare NAME[:PARAMETER]=BYTES`.

    Raises UsageError naming the figure that has another form.
    """
    figures, names = {}, {}
    for text in texts:
        left, _, figure = text.partition("=")
        name, _, parameter = left.partition(":")
        is_number = _is_number(figure) and (_is_number(parameter) or ":" not in left)
        if not name or not is_number:
            wanted = "NAME=BYTES or NAME:PARAMETER=BYTES"
            shown = printable(text[:_SHOWN_CHARACTERS])
            raise UsageError(f"--declare {shown}: {wanted} is wanted, e.g. lora_up=16384")
        figures[name] = int(figure)
        if parameter:
            names[int(parameter)] = name
    return figures, names


def _is_number(text: str) -> bool:
    """Return whether a text is a decimal number of at most 18 digits; int() takes others too."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _choose_config(request: "GemmRequest", options: argparse.Namespace) -> "GemmConfig":
    """Return the configuration that the GEMM chooses, or the one that is asked for, checked."""
    from dataclasses import replace

    from halfbyte.arch import find_gpu
    from halfbyte.kernels.gemm_w4a4.choose import check_request, choose_config
    from halfbyte.kernels.gemm_w4a4.config import TileConfig, check_legal

    config = choose_config(request, find_gpu(options.gpu).target)
    if options.tile:
        rows, _, columns = options.tile.partition("x")
        if not _is_number(rows) or not _is_number(columns):
            shown = printable(options.tile[:_SHOWN_CHARACTERS])
            raise UsageError(f"--tile {shown}: MxN is wanted, e.g. 256x128")
        num_ctas = options.cta_group or (2 if int(rows) == 256 else 1)
        config = replace(config, tile=TileConfig(int(rows), int(columns), num_ctas))
    elif options.cta_group:
        raise UsageError("--cta-group goes with --tile")
    if config.low_rank is not None:
        config = replace(config, low_rank=replace(config.low_rank, placement=options.placement))
    check_legal(config)
    check_request(config, request)
    return config


def _budget_gemm(
    request: "GemmRequest",
    config: "GemmConfig",
    wanted: tuple[int, dict[str, int]],
    as_json: bool,
    console: Console,
) -> int:
    from halfbyte.kernels.gemm_w4a4.budget import check_stages, make_budget

    found = make_budget(request, config)
    stages, figures = wanted
    check_stages(found.storage, stages)
    findings = found.compare(figures)
    if as_json:
        record = {**found.to_json(), "findings": [finding.to_json() for finding in findings]}
        typer.echo(json.dumps(record, indent=1))
    else:
        _print_gemm(found, console)
        for finding in findings:
            console.print(escape(str(finding)))
    return EXIT_FINDINGS if findings else EXIT_CLEAN


def _print_gemm(found: "GemmBudget", console: Console) -> None:
    storage, config = found.storage, found.config
    gpu = config.gpu.name
    console.print(f"gemm_w4a4 on {gpu}: tile {config.tile}, {config.block_format}")
    table = Table("shared memory of a CTA", "bytes per slot", "slots", "bytes")
    for row in found.rows:
        total = f"in {row.shares}" if row.shares else f"{row.total_bytes:,}"
        table.add_row(row.name, f"{row.slot_bytes:,}", str(row.num_slots), total)
    table.add_row("used", "", "", f"{storage.used_bytes:,}")
    table.add_row(f"{gpu} has", "", "", f"{storage.capacity_bytes:,}")
    table.add_row("slack", "", "", f"{storage.slack_bytes:,}")
    console.print(table)
    columns = Table("tensor memory", "columns", "from", "to")
    for buffer in found.tensor_buffers:
        last = str(buffer.end - 1)
        columns.add_row(buffer.name, str(buffer.num_columns), str(buffer.first), last)
    console.print(columns)
    overlap = storage.overlap_columns
    shared = f", the accumulators share {counted(overlap, 'column')}" if overlap else ""
    console.print(
        f"{counted(storage.num_stages, 'ring slot')} of {storage.slot_bytes:,} bytes{shared}; "
        f"{counted(found.num_tiles, 'tile')} in {counted(found.num_waves, 'wave')}, each of "
        f"{counted(found.num_blocks, 'block')} and {counted(found.num_chunks, 'low-rank chunk')}"
    )


def _show_layout(gpu: str, as_json: bool, console: Console) -> int:
    from halfbyte.arch import find_gpu
    from halfbyte.checks import accumulator_layout as cells
    from halfbyte.kernels.gemm_w4a4.config import TARGETS
    from halfbyte.runtime.accumulator_layouts import read_accumulator_layouts

    target = find_gpu(gpu).target
    if target not in TARGETS:
        raise UsageError(f"--layout --gpu {gpu}: {GEMM} is a kernel for {', '.join(TARGETS)}")
    records: list[dict[str, Any]] = []
    code = EXIT_CLEAN
    for m, n, num_ctas in _LAYOUT_TILES:
        products = read_accumulator_layouts((m, n), num_ctas, target)
        found = [
            cells.find_cells_by_layouts(p.product, p.value_layout, p.fragment_layout, (m, n))
            for p in products
        ]
        report = cells.compare_cells(cells.find_cells_by_isa(num_ctas, (m, n)), *found)
        code = code if report.is_clean else EXIT_FINDINGS
        tile = f"{m}x{n}x{num_ctas}cta"
        records.append({"tile": tile, **report.to_json()})
        if not as_json:
            verdict = "the same in all three" if report.is_clean else "NOT the same"
            sources = "PTX ISA, scaled MMA, low-rank MMA"
            console.print(f"{tile}: {m * n:,} cells of {sources}: {verdict}")
            for product in products:
                texts = f"{product.value_layout} -> {product.fragment_layout}"
                console.print(escape(f"  {product.product}: (cta, value) {texts}"))
            _print_report(report, console)
    if as_json:
        typer.echo(json.dumps({"layouts": records}, indent=1))
    return code


def _print_report(report: "CheckReport", console: Console) -> None:
    for finding in report.findings:
        console.print(escape(f"  {finding}"))
    for fact in report.evidence:
        console.print(escape(f"  {fact.fact}"))
