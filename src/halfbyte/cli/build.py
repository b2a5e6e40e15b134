"""`halfbyte build`: compile the GPU kernels ahead of time; parsing and printing only."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.errors import HalfbyteError
from halfbyte.wording import counted

if TYPE_CHECKING:
    from halfbyte.device.kernel_source import KernelSource
    from halfbyte.runtime.kernel_entry import KernelEntry

_EPILOG = (
    "Examples: `halfbyte build --arch sm_100a --out kernels`; "
    "`halfbyte build --arch sm_100a,sm_103a --kernel gemm_w4a4`; `halfbyte build --list`. "
    "Compiling needs CuTe DSL and a C compiler and no GPU; using the result needs neither: set "
    "HALFBYTE_ARTIFACTS=kernels, or call halfbyte.runtime.use_artifacts('kernels'). "
    "Without artifacts kernels are compiled when they are first used, and kept in the folder that "
    "HALFBYTE_KERNEL_CACHE names (~/.cache/halfbyte/kernels): up to 1 GiB, safe to remove."
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="build", epilog=_EPILOG)(build)


def build(
    arch: Annotated[
        str,
        typer.Option(metavar="TARGETS", help="GPU targets, separated by commas."),
    ] = "sm_100a,sm_103a,sm_90a,sm_120a",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the artifacts; what it holds is kept.")
    ] = Path("halfbyte-artifacts"),
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the kernel of this name.")
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="Print what would be compiled, compile nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile the GPU kernels ahead of time, to files that load without the compiler."""
    from halfbyte.runtime.shipped_kernels import list_shipped
    from halfbyte.runtime.targets import list_targets

    targets = list_targets(arch)
    sources = {target: list_shipped(target, kernel) for target in targets}
    if not any(sources.values()):
        raise HalfbyteError(
            f"no kernel {kernel or ''} is written for {', '.join(targets)} yet".replace("  ", " ")
        )
    wanted = [source for target in targets for source in sources[target]]
    console = Console(highlight=False)
    progress = None if as_json or only_list else console
    rows = [_describe(source) for source in wanted] if only_list else _build(wanted, out, progress)
    absent = [target for target in targets if not sources[target]]
    if as_json:
        folder = None if only_list else str(out)
        typer.echo(
            json.dumps({"out": folder, "kernels": rows, "without_kernels": absent}, indent=1)
        )
        return
    if only_list:
        _print_rows(rows, console)
    for target in absent:
        console.print(f"{target}: no kernel is written for it yet")
    if not only_list:
        console.print(
            f"{counted(len(rows), 'kernel')} in [bold]{escape(str(out))}[/]: "
            "set HALFBYTE_ARTIFACTS to it"
        )


def _describe(source: "KernelSource") -> dict[str, Any]:
    return {"kernel": source.name, "target": source.target, "config": str(source.config)}


def _build(
    sources: "list[KernelSource]", out: Path, console: Console | None
) -> list[dict[str, Any]]:
    """Compile in order and return one row for each kernel; its line is printed when it is there."""
    from halfbyte.runtime.artifact import build_artifacts

    rows: list[dict[str, Any]] = []
    started = time.perf_counter()

    def report(source: "KernelSource", entry: "KernelEntry") -> None:
        nonlocal started
        now = time.perf_counter()
        size = sum(path.stat().st_size for path in entry.folder.iterdir())
        row = {**_describe(source), "bytes": size, "seconds": round(now - started, 3)}
        rows.append({**row, "key": entry.facts.source_key, "ptxas": entry.facts.ptxas})
        started = now
        if console is not None:
            console.print(
                f"{len(rows)}/{len(sources)} {source.name} {source.target} {size:,} bytes, "
                f"{row['seconds']:.1f} s: {escape(row['config'])}",
                soft_wrap=True,
            )

    build_artifacts(sources, out, report)
    return rows


def _print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("kernel", "target", "configuration")
    for row in rows:
        table.add_row(row["kernel"], row["target"], escape(row["config"]))
    console.print(table)
