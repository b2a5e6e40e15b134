"""`halfbyte inspect`: what a checkpoint is and what can run it; parsing and printing only."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.errors import printable
from halfbyte.wording import counted

if TYPE_CHECKING:
    from halfbyte.checkpoints.inspection import Inspection

_EPILOG = (
    "Examples: `halfbyte inspect model.safetensors`; `halfbyte inspect model/ --layers`; "
    "`halfbyte inspect model.safetensors --json`. "
    "A halfbyte file is read whole and every value checked; exit code 1 if one is not sound."
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="inspect", epilog=_EPILOG)(inspect)


def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A file of any container, or a directory."),
    ],
    layers: Annotated[bool, typer.Option("--layers", help="List every quantized layer.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read headers alone, not the values.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell a checkpoint's family, formats, ranks, layers and bytes, and what can be done with it.

    Which families could read it and why, into which it can be converted, what hardware runs it.
    """
    from halfbyte.checkpoints.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(file, is_quick=quick)
    if as_json:
        found = asdict(inspection)
        if not layers:
            found["layers"] = len(inspection.layers)
        typer.echo(json.dumps(found, indent=1))
    else:
        _print_inspection(inspection, layers, Console(highlight=False))


def _print_inspection(found: "Inspection", shows_layers: bool, console: Console) -> None:
    table = Table(show_header=False, title=escape(printable(found.path)), title_justify="left")
    version = f", version {found.format_version}" if found.format_version else ""
    table.add_row("family", escape(printable(found.family + version)))
    table.add_row("formats", _join(found.formats) or "none")
    table.add_row("ranks", _join(found.ranks) or "none")
    table.add_row("quantized layers", str(len(found.layers)))
    table.add_row("tensors", f"{found.num_tensors:,} in {counted(found.num_files, 'file')}")
    table.add_row("file bytes", f"{found.file_bytes:,}")
    for kind, count in found.bytes_by_kind.items():
        table.add_row(f"  {kind.replace('_', ' ')}", f"{count:,}")
    if found.bits_per_weight is not None:
        table.add_row("bits per weight", f"{found.bits_per_weight:.3f}")
    for reading in found.readings:
        words = "certain" if reading.is_certain else "possible"
        layers = counted(reading.layers, "layer")
        text = f"{reading.family} ({words}, {layers}): {reading.evidence}"
        table.add_row("can be read as", escape(printable(text)))
        if reading.problem is not None:
            table.add_row("", escape(printable(reading.problem)))
    targets = [name for name, answer in found.targets.items() if answer == "yes"]
    if targets:
        table.add_row("can be converted to", ", ".join(targets))
    for note in found.notes:
        table.add_row("note", escape(printable(note)))
    console.print(table)
    if shows_layers:
        _print_layers(found, console)
    machines = Table("machine", "runs here", "needs", title="hardware", title_justify="left")
    for row in found.hardware:
        machines.add_row(row.machine, row.state, row.needs)
    console.print(machines)


def _print_layers(found: "Inspection", console: Console) -> None:
    table = Table("layer", "format", "activation", "N x K", "rank", "bytes")
    for layer in found.layers:
        is_known = layer.in_features is not None
        shape = f"{layer.out_features} x {layer.in_features}" if is_known else "?"
        table.add_row(
            escape(printable(layer.name)),
            layer.format,
            layer.activation or "none",
            shape,
            str(layer.rank),
            f"{layer.num_bytes:,}",
        )
    console.print(table)


def _join(counts: dict[str, int] | dict[int, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())
