"""The measuring code takes turns, pairs its samples and times nothing that is wrong."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "timing.py"


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_timing", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_timing", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_cases_take_turns_after_the_warmups(timing: ModuleType) -> None:
    calls: list[str] = []
    cases = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timings = timing.measure_interleaved(cases, repeats=3, warmups=1)
    assert calls == ["a", "b"] * 4
    assert [len(timings[name].samples_s) for name in cases] == [3, 3]


def test_samples_are_the_clock_differences(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: Iterator[float] = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0, 30.0, 31.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    cases = {"a": lambda: None, "b": lambda: None}
    timings = timing.measure_interleaved(cases, repeats=2, warmups=0)
    assert timings["a"].samples_s == (1.0, 3.0)
    assert timings["b"].samples_s == (2.0, 1.0)
    ratio = timing.make_ratio(timings, "b", "a")
    assert (ratio.min, ratio.max) == (1.0 / 3.0, 2.0)  # pair by pair: 2/1 and 1/3
    row = timings["a"].make_row()
    assert (row["median_ms"], row["min_ms"], row["max_ms"]) == (2000.0, 1000.0, 3000.0)


def test_a_wrong_result_is_not_timed(timing: ModuleType) -> None:
    def check() -> None:
        raise ValueError("bytes differ")

    with pytest.raises(SystemExit, match="nothing is timed: ValueError: bytes differ"):
        timing.check_first("pack", check)


def test_the_json_report_names_the_machine(
    timing: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    timings = timing.measure_interleaved({"a": lambda: None}, repeats=1)
    timing.print_report("title", timings, [], as_json=True, extra={"bar_met": True})
    output = capsys.readouterr().out
    assert '"bar_met": true' in output
    assert "cores" in output
