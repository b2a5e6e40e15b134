"""Unmodified programs of peers end well on the virtual GPU, with their own numbers checked."""

import importlib.util
from pathlib import Path

import pytest

from tests.peers.virtual.program_runs import (
    CHECKOUT_VARIABLE,
    FOLDER,
    Run,
    find_checkout,
    read_examples,
    read_package_programs,
    run_program,
    write_command,
)

PACKAGES = {"quack": "quack", "cutlass": "cutlass.operators"}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _make_parameter(run: Run) -> object:
    marks = [pytest.mark.long] if run.when == "long" else []
    return pytest.param(run, id=run.name, marks=marks)


def _check(run: Run, folder: Path) -> None:
    outcome = run_program(run, folder)
    assert outcome.passed, f"{outcome.reason}\n{write_command(run)}"


@pytest.mark.peers
@pytest.mark.parametrize("run", [_make_parameter(run) for run in read_package_programs()])
def test_kernels_of_a_package_give_the_right_numbers(run: Run) -> None:
    module = PACKAGES[Path(run.program).name.split("_")[0]]
    if not _is_installed(module):
        pytest.skip(f"{module} is not installed: pip install 'halfbyte[peers]'")
    _check(run, FOLDER)


@pytest.mark.long
@pytest.mark.peers
@pytest.mark.parametrize("run", [_make_parameter(run) for run in read_examples() if run.gpu != "-"])
def test_example_of_nvidia_passes_its_own_check(run: Run) -> None:
    folder = find_checkout()
    if folder is None:
        pytest.skip(f"set {CHECKOUT_VARIABLE} to a CUTLASS checkout")
    _check(run, folder)
