"""`halfbyte quantize`: a safetensors file or sharded directory to 4 bits; parsing and printing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.exit_codes import EXIT_INTERRUPTED
from halfbyte.cli.progress import ProgressDisplay
from halfbyte.cli.worker_options import chosen_workers, with_worker_options
from halfbyte.errors import UsageError, printable
from halfbyte.peak_memory import read_peak_memory_bytes

if TYPE_CHECKING:
    from halfbyte.svdquant.presets import SVDQuantPreset
    from halfbyte.svdquant.quantize_file import QuantizeFileRequest

DEFAULT_PRESET = "nvfp4_weight_only_r32"
_SHOWN_LAYERS = 5  # worst layers in the closing table; the report holds all
_STAGES = {"check": "checking input", "quantize": "quantizing"}

_EPILOG = (
    "Examples: `halfbyte quantize model.safetensors model-nvfp4.safetensors`; "
    "`halfbyte quantize model/ model-int4/ --preset int4_weight_only_r32 --rank 64`; "
    "`halfbyte quantize model/ out/ --exclude '*.down_proj' --report out.json`; "
    "`halfbyte quantize model/ out/ --workers 8`. "
    "A run that was interrupted or killed continues when the same command is given again."
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="quantize", epilog=_EPILOG)(with_worker_options(quantize))


def quantize(
    paths: Annotated[
        tuple[Path, Path],
        typer.Argument(
            metavar="IN OUT",
            help="IN: a .safetensors file, or a directory with shards. OUT: a .safetensors file; "
            "for a directory IN also a directory.",
        ),
    ],
    preset: Annotated[
        str, typer.Option(help="What to make; an unknown name lists the known ones.")
    ] = DEFAULT_PRESET,
    rank: Annotated[
        int | None, typer.Option(min=0, max=4096, help="Low-rank width instead of the preset's.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an OUT of other making.")] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Glob on layer names: quantize these alone, embeddings and heads too."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Glob on layer names: never quantize these.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="JSON report; default OUT's name with .report.json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Quantize the linears of a model with SVDQuant, without data and in little memory.

    All but embeddings, output heads, routers and linears narrower than 64. The default preset
    keeps activations wide (weight-only); an `..._svdquant_r32` preset makes them 4-bit too.
    """
    from halfbyte.svdquant.linear_rules import LinearRules
    from halfbyte.svdquant.quantize_file import QuantizeFileRequest

    rules = LinearRules(include=tuple(include or ()), exclude=tuple(exclude or ()))
    request = QuantizeFileRequest(
        *paths,
        _find_preset(preset, rank),
        rules,
        report=report,
        force=force,
        workers=chosen_workers(),
    )
    console = Console(stderr=True, highlight=False)
    result = _run(request, console)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        _print_result(result, request, console)


def _find_preset(name: str, rank: int | None) -> "SVDQuantPreset":
    from halfbyte.svdquant.presets import PRESETS

    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r} is unknown; use one of: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    return preset if rank is None else replace(preset, rank=rank)


def _run(request: "QuantizeFileRequest", console: Console) -> dict[str, Any]:
    from halfbyte.svdquant.quantize_file import quantize_file

    try:
        with ProgressDisplay(console, _STAGES) as display:
            outcome = quantize_file(request, display.show)
    except UsageError as error:
        raise typer.BadParameter(printable(str(error))) from error
    except KeyboardInterrupt:
        console.print("interrupted; give the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    return {
        "status": outcome.status,
        "resumed_units": outcome.resumed_units,
        "peak_rss_bytes": read_peak_memory_bytes(),
        "report_path": str(request.report_path),
        "report": outcome.report,
    }


def _print_result(result: dict[str, Any], request: "QuantizeFileRequest", console: Console) -> None:
    target = _show(str(request.target))
    report = result["report"]
    if report is None:
        console.print(
            f"{target} is the finished result of this input with these settings already; "
            "nothing to do (--force makes it again)"
        )
        return
    totals, passthrough = report["totals"], report["passthrough"]
    table = Table(show_header=False, title=target, title_justify="left")
    before, after = totals["linear_bytes_before"], totals["linear_bytes_after"]
    table.add_row("linears", f"{totals['layers']} as {request.preset.weight_format}")
    table.add_row("activations", request.preset.activation or "16/32-bit (weight-only)")
    table.add_row("their bytes", f"{before:,} -> {after:,} ({before / max(after, 1):.2f}x smaller)")
    table.add_row("bits per weight", f"{totals['bits_per_weight']:.3f}, scales and low rank too")
    table.add_row("relative error", f"mean {totals['mean_relative_error']:.4f}")
    for layer in sorted(report["layers"], key=lambda row: -row["relative_error"])[:_SHOWN_LAYERS]:
        table.add_row("  worst", f"{layer['relative_error']:.4f} {_show(layer['name'])}")
    for name in ("saturated", "flushed", "zero"):
        table.add_row(f"{name} blocks", f"{totals[name]:,} of {totals['blocks']:,}")
    table.add_row("other tensors", f"{passthrough['tensors']}, {passthrough['bytes']:,} bytes")
    table.add_row("peak memory", f"{result['peak_rss_bytes'] / 1e6:.0f} MB")
    table.add_row("report", _show(result["report_path"]))
    console.print(table)
    if report["unindexed"]:
        console.print(f"not in the index, but kept: {_show(', '.join(report['unindexed']))}")
    if report["not_copied"]:
        console.print(f"not copied from the input: {_show(', '.join(report['not_copied']))}")


def _show(name: str) -> str:
    return escape(printable(name))
