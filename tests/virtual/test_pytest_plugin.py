"""The pytest fixture gives a test a virtual GPU and fails it on findings."""

import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.virtual.driver.availability import find_missing_parts

TESTS = """
import pytest
import torch

def test_default(virtual_gpu):
    assert torch.cuda.get_device_name() == "NVIDIA B300"
    assert torch.ones(2, device="cuda").is_cuda

@pytest.mark.virtual_gpu("h200")
def test_marked(virtual_gpu):
    assert torch.cuda.get_device_capability() == (9, 0)

def test_without():
    assert not torch.cuda.is_available()

def test_with_a_finding(virtual_gpu):
    from types import SimpleNamespace
    virtual_gpu.log.records.append(SimpleNamespace(findings=("over-arrival at x",)))
"""


def test_the_fixture_chooses_the_gpu_and_fails_a_test_with_findings(tmp_path: Path) -> None:
    missing = find_missing_parts()
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")
    (tmp_path / "test_inner.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "halfbyte.virtual.pytest_plugin", "-q"]
    command += ["--virtual-gpu", "b300", "--rootdir", str(tmp_path), str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "4 passed, 1 error" in finished.stdout, finished.stdout + finished.stderr
    assert "over-arrival at x" in finished.stdout
