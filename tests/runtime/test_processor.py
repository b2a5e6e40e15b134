"""The processor is read on any system, and a strange /proc does not stop anything."""

from pathlib import Path

import pytest

from halfbyte.runtime import processor


def test_name_features_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("model name\t: A CPU\nflags\t: fma avx2\n\nmodel name\t: A CPU\n")
    monkeypatch.setattr(processor, "_CPU_INFO", cpu_info)
    found = processor.read_processor()
    assert found.name == "A CPU"
    assert found.features == {"fma", "avx2"}
    assert found.num_cores >= 1
    assert found.memory_gib > 0


def test_without_cpuinfo_the_machine_type_is_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_CPU_INFO", tmp_path / "absent")
    found = processor.read_processor()
    assert found.name
    assert found.features == frozenset()
