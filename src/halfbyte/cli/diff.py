"""`halfbyte diff`: two checkpoints of any families compared; parsing and printing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.exit_codes import EXIT_FINDINGS
from halfbyte.errors import UsageError, printable

if TYPE_CHECKING:
    from halfbyte.checkpoints.compare_files import FileComparison, LayerComparison

_SHOWN_NAMES = 10
_EPILOG = (
    "Examples: `halfbyte diff a.safetensors b.safetensors`; "
    "`halfbyte diff nunchaku.safetensors own.safetensors --json`; "
    "`halfbyte diff a b --from-a modelopt --exact`. "
    "Exit code 0: equal, or within the roundings to float32 that a conversion costs; "
    "1: they differ."
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="diff", epilog=_EPILOG)(diff)


def diff(
    paths: Annotated[
        tuple[Path, Path],
        typer.Argument(metavar="A B", help="Two quantized checkpoints, of any families."),
    ],
    from_a: Annotated[
        str | None, typer.Option("--from-a", help="Family of A, where the file does not tell.")
    ] = None,
    from_b: Annotated[
        str | None, typer.Option("--from-b", help="Family of B, where the file does not tell.")
    ] = None,
    original: Annotated[
        Path | None,
        typer.Option(help="The unquantized model: decides between possible families by trial."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="A rounding to float32 is a difference too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare what two checkpoints compute: weights, low-rank branches, smoothing, biases."""
    from halfbyte.checkpoints.compare_files import Side, compare_files

    try:
        found = compare_files(Side(paths[0], from_a), Side(paths[1], from_b), original)
    except UsageError as error:
        raise typer.BadParameter(printable(str(error))) from error
    is_equal = found.is_equal(is_exact=exact)
    if as_json:
        typer.echo(json.dumps({"equal": is_equal, **asdict(found)}, indent=1))
    else:
        _print_comparison(found, is_equal, Console(highlight=False))
    if not is_equal:
        raise typer.Exit(EXIT_FINDINGS)


def _print_comparison(found: "FileComparison", is_equal: bool, console: Console) -> None:
    counts = {
        state: sum(layer.state == state for layer in found.layers)
        for state in ("equal", "rounded", "differs")
    }
    table = Table(show_header=False)
    table.add_row("families", " and ".join(found.families))
    table.add_row("layers equal", str(counts["equal"]))
    table.add_row("layers within float32 rounding", str(counts["rounded"]))
    table.add_row("layers that differ", str(counts["differs"]))
    table.add_row("other tensors equal", str(found.tensors_equal))
    lists = {
        "layers only in A": found.only_left,
        "layers only in B": found.only_right,
        "other tensors that differ": found.tensors_differ,
        "other tensors only in A": found.tensors_only_left,
        "other tensors only in B": found.tensors_only_right,
    }
    for title, names in lists.items():
        if names:
            table.add_row(title, _join(names))
    console.print(table)
    shown = [layer for layer in found.layers if layer.state != "equal"]
    if shown:
        _print_layers(shown, console)
    console.print("equal" if is_equal else "they differ")


def _print_layers(layers: "list[LayerComparison]", console: Console) -> None:
    table = Table("layer", "state", "A", "B", "component", "largest", "relative")
    for layer in layers:
        left, right = (
            f"{side['format']}, {side['activation'] or 'weight-only'}, "
            f"{side['out_features']} x {side['in_features']}, rank {side['rank']}"
            for side in (layer.left, layer.right)
        )
        name = escape(printable(layer.name))
        parts = {key: one for key, one in layer.differences.items() if not one.is_exact}
        if not parts:
            table.add_row(name, layer.state, left, right, "", "", "")
        for component, one in parts.items():
            figures = (f"{one.largest:.3g}", f"{one.relative:.3g}")
            table.add_row(name, layer.state, left, right, component, *figures)
    console.print(table)


def _join(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return escape(printable(shown)) + more
