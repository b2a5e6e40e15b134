"""Shared measuring code of the benchmarks: correctness first, then interleaved repeats.

Every benchmark calls `check_first` before it times anything, times its cases in turn (A B A B ...)
inside one run so that drifting clocks hit all of them alike, and reports median, minimum and
maximum with a line that describes the machine.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.runtime.processor import read_processor


@dataclass(frozen=True)
class Timing:
    """Wall times of one case, in the order they were taken.

    Attributes:
        name: the case.
        samples_s: seconds per call, one a repeat.
    """

    name: str
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the samples, in seconds."""
        return statistics.median(self.samples_s)

    @property
    def min_s(self) -> float:
        """Smallest sample, in seconds."""
        return min(self.samples_s)

    @property
    def max_s(self) -> float:
        """Largest sample, in seconds."""
        return max(self.samples_s)

    def make_row(self) -> dict[str, Any]:
        """Return name, median, minimum, maximum (ms) and the number of repeats."""
        return {
            "name": self.name,
            "median_ms": round(self.median_s * 1e3, 3),
            "min_ms": round(self.min_s * 1e3, 3),
            "max_ms": round(self.max_s * 1e3, 3),
            "repeats": len(self.samples_s),
        }


@dataclass(frozen=True)
class Ratio:
    """How many times longer `numerator` takes than `denominator`, from interleaved pairs."""

    numerator: str
    denominator: str
    median: float
    min: float
    max: float


def check_first(name: str, check: Callable[[], None]) -> None:
    """Run `check`; SystemExit(1) with its message when it raises: a wrong result is not timed."""
    try:
        check()
    except Exception as error:
        sys.exit(f"{name}: wrong result, nothing is timed: {type(error).__name__}: {error}")


def measure_interleaved(
    cases: Mapping[str, Callable[[], object]], repeats: int = 9, warmups: int = 2
) -> dict[str, Timing]:
    """Return one Timing per case; round i calls every case once, in turn.

    Args:
        cases: name -> function without arguments; its result is dropped outside the timed part.
        repeats: timed rounds.
        warmups: untimed rounds before them (first-call costs: compilation, page faults).
    """
    if repeats < 1:
        raise ValueError(f"{repeats=}: wanted at least 1")
    for _ in range(warmups):
        for call in cases.values():
            call()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, call in cases.items():
                start_s = time.perf_counter()
                result = call()
                samples[name].append(time.perf_counter() - start_s)
                del result
    finally:
        if was_enabled:
            gc.enable()
    return {name: Timing(name, tuple(values)) for name, values in samples.items()}


def make_ratio(timings: Mapping[str, Timing], numerator: str, denominator: str) -> Ratio:
    """Return the ratio of two cases of one `measure_interleaved` run, pair by pair."""
    pairs = zip(timings[numerator].samples_s, timings[denominator].samples_s, strict=True)
    ratios = [above / below for above, below in pairs]
    return Ratio(numerator, denominator, statistics.median(ratios), min(ratios), max(ratios))


def make_machine_line() -> str:
    """Return one line: processor, usable cores, memory, Python and (where imported) torch."""
    processor = read_processor()
    parts = [
        processor.name,
        f"{processor.num_cores} cores",
        f"{processor.memory_gib:.0f} GiB",
        f"Python {platform.python_version()}",
    ]
    torch = sys.modules.get("torch")
    if torch is not None:
        parts.append(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    return ", ".join(parts)


def make_parser(description: str | None, repeats: int = 9) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has: --json and --repeats."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed rounds (%(default)s)")
    return parser


def print_report(
    title: str,
    timings: Mapping[str, Timing],
    ratios: list[Ratio],
    *,
    as_json: bool,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print the timings, ratios and `extra` figures as text or as one JSON object."""
    rows = [timing.make_row() for timing in timings.values()]
    if as_json:
        report = {
            "title": title,
            "machine": make_machine_line(),
            "timings": rows,
            "ratios": [asdict(ratio) for ratio in ratios],
            **(extra or {}),
        }
        print(json.dumps(report, indent=2))
        return
    print(title)
    print(f"machine: {make_machine_line()}")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        spread = f"min {row['min_ms']:.2f}, max {row['max_ms']:.2f}, {row['repeats']} repeats"
        print(f"  {row['name']:<{width}}  median {row['median_ms']:10.2f} ms  ({spread})")
    for ratio in ratios:
        spread = f"min {ratio.min:.2f}, max {ratio.max:.2f}"
        print(f"  {ratio.numerator} / {ratio.denominator}: {ratio.median:.2f}x  ({spread})")
    for name, value in (extra or {}).items():
        print(f"  {name}: {value}")
