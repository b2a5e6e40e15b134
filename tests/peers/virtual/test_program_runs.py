"""The tables of peer programs name what exists, and a run that is not right does not pass."""

from typing import Any

import pytest

from halfbyte.arch.gpus import GPUS
from tests.peers.virtual.program_runs import (
    FOLDER,
    Run,
    find_checkout,
    find_failure,
    read_examples,
    read_package_programs,
)

LAUNCH = {"fault": None, "findings": []}
GOOD: dict[str, Any] = {"launches": [LAUNCH], "program_exit_code": 0, "findings": 0}


def test_every_run_is_listed_once() -> None:
    names = [run.name for run in (*read_examples(), *read_package_programs())]
    assert len(names) == len(set(names))


def test_every_run_names_a_gpu() -> None:
    assert {run.gpu for run in read_examples()} <= {*GPUS, "-"}
    assert {run.gpu for run in read_package_programs()} <= set(GPUS)


def test_package_programs_and_cases_exist() -> None:
    for run in read_package_programs():
        text = (FOLDER / run.program).read_text(encoding="utf-8")
        for case in run.arguments:
            assert f"@case\ndef {case}(" in text, f"{run.program} has no case {case}"


def test_every_example_of_a_checkout_is_listed() -> None:
    folder = find_checkout()
    if folder is None:
        pytest.skip("no CUTLASS checkout")
    listed = {run.program for run in read_examples()}
    programs = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if "__main__" in path.read_text(encoding="utf-8")
    }
    assert not programs - listed


@pytest.mark.parametrize(
    ("code", "printed", "change", "reason"),
    [
        (0, "PASS", {}, ""),
        (0, "nothing", {}, "did not print"),
        (1, "PASS\nAssertionError: 3 of 4 differ", {"program_exit_code": 1}, "3 of 4 differ"),
        (1, "PASS", {"findings": 1, "launches": [{**LAUNCH, "findings": ["race"]}]}, "race"),
        (1, "PASS", {"launches": [{**LAUNCH, "fault": "Deadlock: 2 warps"}]}, "Deadlock"),
        (0, "PASS", {"launches": []}, "launched no kernel"),
    ],
)
def test_failures_are_told(code: int, printed: str, change: dict[str, Any], reason: str) -> None:
    run = Run("b200", "program.py", expected="PASS")
    found = find_failure(run, code, printed, {**GOOD, **change})
    assert reason in found if reason else not found


def test_a_program_that_dies_without_a_report_fails() -> None:
    assert "exit code -11" in find_failure(Run("b200", "program.py"), -11, "", {})
