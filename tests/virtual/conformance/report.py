"""Write docs/facts/conformance_sm90a.md from the committed results and a run on the virtual GPU.

python -m tests.virtual.conformance.report
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import PtxError
from halfbyte.virtual.report import KernelFault

from .distances import RowDistance, find_limit, measure_rows
from .program import ConformanceProgram
from .programs import list_programs
from .silicon_results import read_manifest, read_silicon
from .virtual_runner import find_differences, run_on_virtual_gpu

PAGE = Path(__file__).parents[3] / "docs" / "facts" / "conformance_sm90a.md"
FACTS = Path(__file__).with_name("facts_seen.md")


@dataclass(frozen=True)
class Outcome:
    """One row of the page.

    `state` is "bits equal", "both fault", "documented difference", "not run" or "DIFFERENT"; `note`
    says more.
    """

    name: str
    state: str
    elements: int
    note: str
    rows: tuple[RowDistance, ...] = ()


def judge(program: ConformanceProgram) -> Outcome:
    """Run one program on the virtual GPU and return how it stands to silicon."""
    silicon = read_silicon(program.name)
    elements = sum(buffer.data.size for buffer in program.outputs)
    try:
        outputs = run_on_virtual_gpu(program)
    except (KernelFault, PtxError) as error:
        if silicon.error:
            return Outcome(program.name, "both fault", 0, _name_error(silicon.error))
        if program.compares.startswith("not run"):
            return Outcome(program.name, "not run", 0, program.compares.partition(": ")[2])
        return Outcome(program.name, "DIFFERENT", elements, str(error).splitlines()[0])
    if silicon.error:
        return Outcome(program.name, "DIFFERENT", elements, f"only silicon: {silicon.error}")
    differences = find_differences(program, outputs, silicon)
    if not differences:
        return Outcome(program.name, "bits equal", elements, "")
    if program.compares == "bits":
        return Outcome(program.name, "DIFFERENT", elements, str(differences[0]).splitlines()[0])
    rows = [
        row
        for name, virtual in outputs.items()
        for row in measure_rows(
            program.row_names[name], virtual, silicon.outputs[name].reshape(virtual.shape)
        )
    ]
    note = program.compares.partition(": ")[2]
    return Outcome(program.name, "documented difference", elements, note, tuple(rows))


def _name_error(text: str) -> str:
    """Return the driver's name for an error: `CUDA_ERROR_TRAP` of "cuCtxSynchronize: 1 CUDA..."."""
    return f"`{text.split()[-1]}`"


def make_page(outcomes: list[Outcome]) -> str:
    """Return the text of the page."""
    manifest = read_manifest()
    counts = Counter(outcome.state for outcome in outcomes)
    summary = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    lines = [
        "# Conformance on sm_90a: the same programs on the virtual GPU and on an H200",
        "",
        "Written by `python -m tests.virtual.conformance.report`; not by hand.",
        "",
        f"Silicon: {manifest['gpu']}, driver {manifest['driver']} (CUDA "
        f"{manifest['cuda_driver_api'] // 1000}.{manifest['cuda_driver_api'] % 1000 // 10}, its "
        f"JIT compiler), {manifest['date']}. {len(outcomes)} programs: {summary}. "
        f"Each ran twice on silicon; the two runs gave the same bits. CI repeats the comparison.",
        "",
        "How to run them again: `python -m tests.virtual.conformance.export DIRECTORY`, then on a "
        "machine with a GPU `python DIRECTORY/silicon_runner.py DIRECTORY RESULTS`, then here "
        "`python -m tests.virtual.conformance.silicon_results RESULTS`.",
        "",
        FACTS.read_text().rstrip(),
        "",
        "## Programs",
        "",
        "| program | result | output elements | note |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        elements = f"{outcome.elements:,}" if outcome.elements else ""
        lines.append(f"| {outcome.name} | {outcome.state} | {elements} | {outcome.note} |")
    lines += ["", "## Documented differences, row by row", "", *_list_rows(outcomes)]
    return "\n".join(lines) + "\n"


def _list_rows(outcomes: list[Outcome]) -> list[str]:
    lines = [
        "| program | form | differing | elements | largest distance | allowed in CI |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        for row in outcome.rows:
            measure, limit = find_limit(row.name)
            seen = f"{row.ulps} ulp" if measure == "ulps" else f"{row.absolute:.2g}"
            allowed = f"{limit} ulp" if measure == "ulps" else f"{limit:.2g}"
            form = row.name.split(" ")[0]
            counts = f"{row.differing} | {row.total}"
            lines.append(f"| {outcome.name} | `{form}` | {counts} | {seen} | {allowed} |")
    return lines


def main() -> int:
    """Write the page; return 1 where a program differs that should not."""
    outcomes = [judge(program) for program in list_programs()]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(make_page(outcomes))
    print(Counter(outcome.state for outcome in outcomes))
    return int(any(outcome.state == "DIFFERENT" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
