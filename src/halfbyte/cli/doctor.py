"""`halfbyte doctor`: what is installed, which GPU is here, and what can run; printing only.

Exit code 1 when a needed part is broken.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.exit_codes import EXIT_CLEAN, EXIT_FINDINGS
from halfbyte.runtime.diagnosis import Diagnosis, make_diagnosis, make_install_hint


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(name="doctor", epilog="Examples: `halfbyte doctor`, `halfbyte doctor --json`.")(
        doctor
    )


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what is installed, which GPU is here and what can run; exit 1 if a part is broken."""
    diagnosis = make_diagnosis()
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        print_diagnosis(diagnosis, Console())
    raise typer.Exit(EXIT_FINDINGS if diagnosis.problems else EXIT_CLEAN)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the diagnosis as two tables and a closing line."""
    parts = Table(title=f"halfbyte {diagnosis.version}", show_header=False, title_justify="left")
    parts.add_row("python", diagnosis.python)
    for package in diagnosis.packages:
        value = package.version or "missing"
        if package.name == "torch" and package.error is None:
            value += f" ({diagnosis.torch_build})"
        parts.add_row(package.name, escape(f"{value}  {package.error or ''}".strip()))
    parts.add_row("native library", escape(_describe_native(diagnosis.native)))
    cpu = diagnosis.cpu
    parts.add_row("cpu", f"{cpu['name']}, {cpu['cores']} cores, {cpu['memory_gib']} GiB")
    parts.add_row("cpu features", " ".join(cpu["features"]) or "unknown")
    for gpu in diagnosis.gpus:
        parts.add_row("gpu", escape(f"{gpu['name']} {gpu['target']}".strip()))
    if not diagnosis.gpus:
        parts.add_row("gpu", "none that torch can use")
    for extra, missing in diagnosis.extras.items():
        hint = f"missing {', '.join(missing)}: {make_install_hint(extra)}"
        parts.add_row(f"extra {extra}", escape(hint) if missing else "present")
    console.print(parts)
    features = Table("what", "here", "how", title="what can run", title_justify="left")
    for feature in diagnosis.features:
        features.add_row(feature.name, feature.state, escape(feature.detail))
    console.print(features)
    for problem in diagnosis.problems:
        console.print(f"[bold red]broken:[/] {escape(problem)}")
    if not diagnosis.problems:
        console.print("All that is needed works.")


def _describe_native(native: Mapping[str, Any]) -> str:
    if native["loaded"]:
        return f"loaded, {native['isa']} (available: {native.get('available', native['isa'])})"
    return f"{native['state']}; everything works without it, slower"
