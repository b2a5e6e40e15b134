"""`halfbyte budget`: shared and tensor memory of a kernel; parsing and printing only."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfbyte.cli.budget_gemm import GEMM, Shared, print_gemm_budget, read_declared, read_options
from halfbyte.cli.exit_codes import EXIT_CLEAN, EXIT_FINDINGS
from halfbyte.errors import UsageError, printable
from halfbyte.wording import counted

if TYPE_CHECKING:
    from halfbyte.checks.finding import CheckReport, Evidence
    from halfbyte.checks.launch_budget import LaunchBudget
    from halfbyte.virtual.driver.launches import LaunchRecord

_EPILOG = (
    "Examples: `halfbyte budget gemm_w4a4 --m 4352 --n 3072 --k 3840 --rank 128`; "
    "`halfbyte budget gemm_w4a4 --layout`; "
    "`halfbyte budget --declare lora_up:8=32768 program.py its own arguments`. "
    "Options of gemm_w4a4: --m --n --k --rank (the GEMM; 4352 3072 3840 128), --tile MxN and "
    "--cta-group 1|2 (chosen where not given), --format nvfp4|mxfp4, --dtype float16|bfloat16, "
    "--placement tail|spread|own_ring (of low-rank chunks), --stages N (refuse unless so many ring "
    "slots fit), --layout (show that both products' accumulators agree, cell by cell), and those "
    "above. Options before a program are halfbyte's, those after it the program's. "
    "Exit code 1 where something does not fit, a declared figure is wrong, or cells differ."
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    app.command(name="budget", epilog=_EPILOG, context_settings=settings)(budget)


def budget(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="gemm_w4a4|PROGRAM [ARGS]...",
            help="Our GEMM and its options, or a Python file and its arguments.",
        ),
    ],
    declare: Annotated[
        list[str] | None,
        typer.Option(
            "--declare",
            metavar="NAME=BYTES",
            help="A figure to compare: bytes per ring slot of an operand; `shared`: a CTA's bytes; "
            "`tensor_memory`: columns. NAME:PARAMETER=BYTES names a program's tensor map.",
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", help="The GPU: b200, b300, h200 or rtx5090.")
    ] = "b200",
    is_module: Annotated[
        bool, typer.Option("-m", help="PROGRAM is a module, as for `python -m`.")
    ] = False,
    facts: Annotated[
        bool,
        typer.Option(
            "--facts",
            help="Of a program, print what its block-scaled MMAs are, with the lines that show it.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what a kernel takes of shared and tensor memory, per operand and CTA.

    Of gemm_w4a4 from its configuration; of any other CuTe DSL program from its launches on the
    virtual GPU: bytes of each TMA operand, bytes that barriers expect, columns.
    """
    console = Console(highlight=False, soft_wrap=True)
    if target[0] == GEMM and not is_module:
        if facts:
            raise UsageError("--facts are those of launches: name a program that runs the GEMM")
        options = read_options(target[1:], Shared(gpu, tuple(declare or ()), as_json))
        raise typer.Exit(print_gemm_budget(options, console))
    if target[0].startswith("-"):
        raise UsageError(
            f"halfbyte budget has no option {printable(target[0])}; a program's options come after "
            "it, those of gemm_w4a4 behind its name"
        )
    question = _Question(target[0], tuple(target[1:]), is_module, gpu, facts)
    raise typer.Exit(_budget_program(question, read_declared(declare or ()), as_json, console))


@dataclass(frozen=True)
class _Question:
    """A program to run and the GPU to run it on."""

    program: str
    arguments: tuple[str, ...]
    is_module: bool
    gpu: str
    wants_facts: bool


def _budget_program(
    question: _Question,
    declared: tuple[dict[str, int], dict[int, str]],
    as_json: bool,
    console: Console,
) -> int:
    """Run the program and print the budget of each distinct launch."""
    from halfbyte.virtual.driver.program import run_program

    with _stdout_to_stderr():  # ours is the budget
        finished = run_program(
            question.program, question.arguments, gpu=question.gpu, is_module=question.is_module
        )
    measured, seen = _measure_launches(finished.log.records, question.gpu, declared)
    unused = [name for name in declared[0] if name not in seen]
    if unused and not finished.program_code:
        raise UsageError(
            f"--declare: no launch has {', '.join(map(printable, unused))}; there are "
            f"{', '.join(sorted(seen)) or 'no launches'}"
        )
    shown = _list_facts(finished.log.records, question)
    if as_json:
        record = {
            "gpu": question.gpu,
            "facts": [{"fact": fact.fact, "shown_by": fact.shown_by} for fact in shown],
            "program": question.program,
            "program_exit_code": finished.program_code,
            "launches": [
                {
                    "launch": launches[0],
                    "launches": launches,
                    **found.to_json(),
                    "findings": [finding.to_json() for finding in report.findings],
                }
                for launches, found, report in measured
            ],
        }
        typer.echo(json.dumps(record, indent=1))
    else:
        for launches, found, report in measured:
            _print_launch(launches, found, report, console)
        for fact in shown:
            console.print(escape(f"{fact.fact}\n    {fact.shown_by}"))
        if not measured:
            console.print("the program launched no kernel")
    has_findings = any(report.findings for _, _, report in measured)
    return finished.program_code or (EXIT_FINDINGS if has_findings else EXIT_CLEAN)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what a program prints to stderr, also from C code and from processes that it starts."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            kept = os.dup(1)
        except OSError:  # this process was started without a stdout
            yield
            return
        try:
            with contextlib.suppress(OSError):
                os.dup2(2, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _list_facts(records: "list[LaunchRecord]", question: _Question) -> "list[Evidence]":
    """Return the facts of each kernel's block-scaled MMAs, once per fact; [] unless asked for."""
    from halfbyte.checks.kernel_text import read_kernel
    from halfbyte.checks.scaled_mma_facts import list_scaled_mma_facts

    facts: dict[str, Evidence] = {}
    for record in records:
        if question.wants_facts and record.syntax is not None:
            kernel = read_kernel(record.syntax, record.request.kernel, question.gpu)
            for fact in list_scaled_mma_facts(kernel, record.request.parameters):
                facts.setdefault(fact.fact, fact)
    return list(facts.values())


def _measure_launches(
    records: "list[LaunchRecord]", gpu: str, declared: tuple[dict[str, int], dict[int, str]]
) -> "tuple[list[tuple[list[int], LaunchBudget, CheckReport]], set[str]]":
    """Return (numbers of launches, budget, findings) of each budget, and all names of figures."""
    from halfbyte.checks.kernel_text import read_kernel
    from halfbyte.checks.launch_budget import check_launch_budget, measure_launch

    figures, names = declared
    seen: set[str] = set()
    groups: dict[Any, tuple[list[int], LaunchBudget, CheckReport]] = {}
    for record in records:
        if record.syntax is None:
            continue
        request = record.request
        kernel = read_kernel(record.syntax, request.kernel, gpu)
        found = measure_launch(kernel, request.parameters, request.dynamic_shared, names)
        if found in groups:
            groups[found][0].append(record.index)
        else:
            known = found.list_figures()
            seen.update(known)
            mine = {name: figure for name, figure in figures.items() if name in known}
            report = check_launch_budget(found, kernel, mine)
            groups[found] = ([record.index], found, report)
    return list(groups.values()), seen


def _print_launch(
    launches: list[int], found: "LaunchBudget", report: "CheckReport", console: Console
) -> None:
    numbers = ", ".join(map(str, launches))
    plural = "es" if len(launches) > 1 else ""
    console.print(escape(f"launch{plural} {numbers}: {found.kernel}"))
    padding = f" + {found.alignment_bytes:,} alignment" if found.alignment_bytes else ""
    console.print(
        f"  shared memory of a CTA: {found.static_bytes:,} static{padding} + "
        f"{found.dynamic_bytes:,} dynamic = {found.used_bytes:,} of {found.capacity_bytes:,} bytes "
        f"({found.slack_bytes:,} left), {counted(found.num_barriers, 'mbarrier')}"
    )
    columns = "?" if found.tensor_columns is None else found.tensor_columns
    console.print(f"  tensor memory: {columns} columns allocated, {found.used_columns} seen in use")
    if found.operands:
        console.print(_make_operand_table(found))
    for barrier in found.barriers:
        loaded = "?" if barrier.loaded_bytes is None else f"{barrier.loaded_bytes:,}"
        console.print(
            f"  barrier at shared+0x{barrier.offset:x}: expects {barrier.expected_bytes:,} bytes, "
            f"its loads bring {loaded}"
        )
    for finding in report.findings:
        console.print(escape(f"  {finding}"))


def _make_operand_table(found: "LaunchBudget") -> Table:
    table = Table("operand", "element")
    table.add_column("box", overflow="fold")
    for heading in ("box bytes", "boxes", "slot bytes", "swizzle"):
        table.add_column(heading, no_wrap=True)
    table.add_column("at", overflow="fold")
    for operand in found.operands:
        boxes, size = operand.boxes_per_slot, operand.slot_bytes
        shares = ", ".join(map(str, operand.shares_slots_with))
        at = "?" if operand.offset is None else f"0x{operand.offset:x}"
        table.add_row(
            escape(printable(operand.name)),
            operand.dtype,
            "x".join(map(str, operand.box)),
            f"{operand.box_bytes:,}",
            "?" if boxes is None else str(boxes),
            "?" if size is None else f"{size:,}",
            str(operand.swizzle or "none"),
            f"{at}, as {shares}" if shares else at,
        )
    return table
