"""Nsight Compute: the command that is run, and what is read from what it prints."""

import shutil

import pytest

from halfbyte.bench.speed import counters
from halfbyte.bench.speed.counters import (
    ProfiledCase,
    list_counters,
    make_command,
    measure_counters,
    parse_counters,
)
from halfbyte.bench.speed.operations import shorten_name
from halfbyte.bench.speed.settings import LinearShape
from halfbyte.errors import HalfbyteError, MissingDependencyError, UnsupportedHardwareError

CASE = ProfiledCase("linear", "cublas", LinearShape(1, 64, 48, 0), "bfloat16", 7)
PRINTED = """==PROF== Connected to process 12
==PROF== Profiling "kernel" - 0: 0%....50%....100% - 9 passes
"ID","Process ID","Kernel Name","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","12","void gemm<float, 4>(Params<int>)","0","9.0","Command line profiler metrics","strange","%","1.5"
"0","12","void gemm<float, 4>(Params<int>)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","87,300"
==PROF== Disconnected
"""  # noqa: E501


def test_counters_are_read_in_the_list_s_order_and_explained() -> None:
    first, second = parse_counters(PRINTED, list_counters("sm_90a"))
    assert (first.kernel, first.value, first.unit) == ("gemm", "87,300", "ns")
    assert first.meaning.startswith("time of the kernel")
    assert second.meaning == ""


def test_output_without_a_table_gives_no_counters() -> None:
    assert parse_counters("==ERROR== no permission\n", {}) == []


def test_the_clocks_are_left_alone_and_the_case_is_named() -> None:
    command = make_command(CASE, list_counters("sm_90a"))
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[-5:] == ["linear", "cublas", "1x64x48x0", "bfloat16", "7"]


def test_each_target_has_a_list_and_others_are_refused_by_name() -> None:
    assert set(list_counters("sm_90a")) != set(list_counters("sm_100a"))
    with pytest.raises(UnsupportedHardwareError, match="sm_120a"):
        list_counters("sm_120a")


def test_a_missing_ncu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="Nsight Compute"):
        measure_counters(CASE, "sm_90a")


def test_a_failing_ncu_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    command = ["sh", "-c", "echo '==ERROR== Failed to find metric x'; exit 9"]
    monkeypatch.setattr(counters, "make_command", lambda *_: command)
    with pytest.raises(HalfbyteError, match="Failed to find metric x"):
        measure_counters(CASE, "sm_90a")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::f<int, g<2>>(int, float)", "at::native::f"),
        ("nvjet_sm90_tst_64x8", "nvjet_sm90_tst_64x8"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_kernel_names_lose_what_no_reader_needs(name: str, short: str) -> None:
    assert shorten_name(name) == short
