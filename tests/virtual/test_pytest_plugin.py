"""The pytest fixture gives a test a virtual GPU and fails it on findings."""

import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.virtual.driver.availability import find_missing_parts

TESTS = """
import pytest
import torch

def record_finding(virtual_gpu, kind):
    from types import SimpleNamespace
    from halfbyte.virtual.report import Finding
    finding = Finding(kind, "seen at x", None, (0, 0, 0), 0, -1, -1)
    virtual_gpu.log.records.append(SimpleNamespace(findings=(finding,)))

def test_default(virtual_gpu):
    assert torch.cuda.get_device_name() == "NVIDIA B300"
    assert torch.ones(2, device="cuda").is_cuda

@pytest.mark.virtual_gpu("h200")
def test_marked(virtual_gpu):
    assert torch.cuda.get_device_capability() == (9, 0)

def test_without():
    assert not torch.cuda.is_available()

def test_with_a_finding(virtual_gpu):
    record_finding(virtual_gpu, "over-arrival")

def test_with_a_note(virtual_gpu):
    record_finding(virtual_gpu, "stale-memory")
"""


def test_the_fixture_chooses_the_gpu_and_fails_a_test_with_findings(tmp_path: Path) -> None:
    missing = find_missing_parts()
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")
    (tmp_path / "test_inner.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "halfbyte.virtual.pytest_plugin", "-q"]
    command += ["--virtual-gpu", "b300", "--rootdir", str(tmp_path), str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "5 passed, 1 error" in finished.stdout, finished.stdout + finished.stderr
    assert "over-arrival: seen at x" in finished.stdout
    assert "stale-memory" not in finished.stdout
