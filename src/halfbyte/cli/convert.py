"""`halfbyte convert`: a checkpoint of one family into another's; parsing and printing."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.exit_codes import EXIT_INTERRUPTED
from halfbyte.cli.merge_options import chosen_merge, with_merge_options
from halfbyte.cli.progress import ProgressDisplay
from halfbyte.cli.worker_options import chosen_workers, with_worker_options
from halfbyte.errors import UsageError, printable
from halfbyte.peak_memory import read_peak_memory_bytes
from halfbyte.wording import counted

if TYPE_CHECKING:
    from halfbyte.checkpoints.convert import ConvertRequest

_STAGES = {"convert": "converting", "verify": "verifying"}
_EPILOG = (
    "Examples: `halfbyte convert nunchaku.safetensors own.safetensors --to halfbyte --verify`; "
    "`halfbyte convert model/ out/ --to modelopt`; "
    "`halfbyte convert a.safetensors b.safetensors --to nunchaku --merge style.safetensors=0.8`; "
    "`halfbyte convert odd.safetensors own.safetensors --to halfbyte --original model/`. "
    "A run that was interrupted or killed continues when the same command is given again; one that "
    "has ended is not repeated while IN, OUT and the report are as it left them."
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="convert", epilog=_EPILOG)(with_merge_options(with_worker_options(convert)))


def convert(
    paths: Annotated[
        tuple[Path, Path],
        typer.Argument(
            metavar="IN OUT",
            help="IN: a checkpoint file or directory of any family that is read. OUT: a file, "
            "where its name ends in .safetensors, .sft or .gguf; else a directory, if IN is one "
            "or the family has a configuration file.",
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", help="Family to write; an unknown name lists the known ones.")
    ],
    origin: Annotated[
        str | None, typer.Option("--from", help="Family of IN, where the file does not tell.")
    ] = None,
    original: Annotated[
        Path | None,
        typer.Option(help="The unquantized model: decides between possible families by trial."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read OUT again and prove that every layer has IN's values."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an OUT that is there.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="JSON report; default OUT's name with .report.json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Convert a quantized checkpoint to another family, exactly and in little memory.

    Nothing is quantized again: codes and scales move, and a layer that the other family cannot
    hold is an error that says why.
    """
    from halfbyte.checkpoints.convert import ConvertRequest

    request = ConvertRequest(
        *paths, to, origin, original, verify, report, force, chosen_workers(), chosen_merge()
    )
    console = Console(stderr=True, highlight=False)
    result = _run(request, console)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        _print_result(result, request, console)


def _run(request: "ConvertRequest", console: Console) -> dict[str, Any]:
    from halfbyte.checkpoints.convert import convert_checkpoint

    try:
        with ProgressDisplay(console, _STAGES) as display:
            outcome = convert_checkpoint(request, display.show)
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
        "verified": outcome.verified,
    }


def _print_result(result: dict[str, Any], request: "ConvertRequest", console: Console) -> None:
    target, report = _show(str(request.target)), result["report"]
    if report is None:
        console.print(
            f"{target} is the finished result of this conversion already; nothing to do "
            "(--force makes it again)"
        )
        if result["verified"] is not None:
            console.print(f"verified: {_describe_proof(result['verified'])}")
        return
    totals, passthrough = report["totals"], report["passthrough"]
    table = Table(show_header=False, title=target, title_justify="left")
    table.add_row("from", f"{report['from']}: {_show(report['evidence'])}")
    table.add_row("to", report["to"])
    before, after = totals["bytes_before"], totals["bytes_after"]
    table.add_row("layers", f"{totals['layers']}, {before:,} -> {after:,} bytes")
    table.add_row("other tensors", f"{passthrough['tensors']}, {passthrough['bytes']:,} bytes")
    for merged in report["merged"]:
        table.add_row("merged", _show(merged))
    table.add_row("verified", _describe_proof(result["verified"]))
    table.add_row("peak memory", f"{result['peak_rss_bytes'] / 1e6:.0f} MB")
    table.add_row("report", _show(result["report_path"]))
    console.print(table)
    if report["not_copied"]:
        console.print(f"not copied from the input: {_show(', '.join(report['not_copied']))}")


def _describe_proof(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no (--verify reads the output again)"
    return (
        f"{counted(found['identical'], 'layer')} bit for bit, "
        f"{found['equal_values']} with equal values, "
        f"{found['rounded']} within {found['bound']:.2g} (worst {found['worst_deviation']:.2g}); "
        f"{counted(found['copied_tensors'], 'copied tensor')} byte for byte"
    )


def _show(name: str) -> str:
    return escape(printable(name))
