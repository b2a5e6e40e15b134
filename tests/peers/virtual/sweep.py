"""Run peer programs on the virtual GPU and write a table of what passed.

python -m tests.peers.virtual.sweep --packages
python -m tests.peers.virtual.sweep --cutlass PATH [--only TEXT]... [--jobs 2] [--table FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.peers.virtual.program_runs import (
    FOLDER,
    Outcome,
    Run,
    find_checkout,
    read_examples,
    read_package_programs,
    run_program,
)


def choose_runs(options: argparse.Namespace) -> list[tuple[Run, Path]]:
    """The runs asked for, each with the folder of its program."""
    chosen: list[tuple[Run, Path]] = []
    if options.packages:
        chosen += [(run, FOLDER) for run in read_package_programs()]
    examples = find_checkout(options.cutlass)
    if examples is not None:
        chosen += [(run, examples) for run in read_examples() if run.gpu != "-"]
    return [one for one in chosen if _is_wanted(one[0], options)]


def _is_wanted(run: Run, options: argparse.Namespace) -> bool:
    if options.gpu and run.gpu not in options.gpu:
        return False
    return not options.only or any(text in run.name for text in options.only)


def write_table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown table, failures first."""
    lines = ["| run | result | launches | instructions | emulated, s | total, s |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for one in sorted(outcomes, key=lambda one: (one.passed, one.name)):
        result = "passed" if one.passed else one.reason.replace("|", "\\|").replace("\n", " ")
        if one.substituted:
            result += f" (computed by a reference: {', '.join(one.substituted)})"
        numbers = f"{one.launches} | {one.instructions:,} | {one.emulated_seconds} | {one.seconds}"
        lines.append(f"| `{one.name}` | {result} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what the command line asks for; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cutlass", help="a CUTLASS checkout, for NVIDIA's examples")
    parser.add_argument("--packages", action="store_true", help="programs of installed packages")
    parser.add_argument("--only", action="append", help="runs that contain this text")
    parser.add_argument("--gpu", action="append", help="runs on this GPU")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("--table", type=Path, help="write a Markdown table")
    parser.add_argument("--json", type=Path, help="write one JSON object a line, while it runs")
    options = parser.parse_args()
    runs = choose_runs(options)
    if not runs:
        parser.error("nothing to run: give --packages, --cutlass PATH or another --only")
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = [pool.submit(run_program, run, path, options.time_limit) for run, path in runs]
        for task in as_completed(tasks):
            one = task.result()
            outcomes.append(one)
            word = "passed" if one.passed else "FAILED"
            print(f"{word} {one.seconds:6.1f} s  {one.name}  {one.reason}", flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one.to_json()) + "\n")
            if options.table:
                options.table.write_text(write_table(outcomes), encoding="utf-8")
    failed = sum(not one.passed for one in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
