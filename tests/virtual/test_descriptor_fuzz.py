"""Tensor maps and descriptors with wrong bits: a fault or a legal copy, never a crash."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("seed", "launches"), [(1, 1000), pytest.param(2, 20_000, marks=pytest.mark.long)]
)
def test_wrong_bits_end_in_a_report_not_in_a_crash(seed: int, launches: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.virtual.descriptor_fuzz", str(seed), str(launches)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.fullmatch(r"(\d+) ended well, (\d+) in an error\n", done.stdout)
    assert found, done.stdout
    assert min(int(found[1]), int(found[2])) > launches // 20  # both ways were taken
