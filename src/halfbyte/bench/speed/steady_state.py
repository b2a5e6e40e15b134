"""Times the cases of one group in turn, in steady state: warm-up of the same load, A B B A."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.bench.speed.sensors import ReadSensors, SensorReading, SensorSummary, summarize
from halfbyte.bench.speed.settings import TimingProtocol, count_calls
from halfbyte.bench.speed.timing_device import Launch, TimingDevice


@dataclass(frozen=True)
class CaseTiming:
    """What one case took.

    Attributes:
        samples_us: microseconds of one call, a sample a graph replay, in the order taken.
        calls: calls in one graph.
        sets: sets of operands that these rotated through.
        sensors: the GPU meanwhile.
    """

    samples_us: tuple[float, ...]
    calls: int
    sets: int
    sensors: SensorSummary | None = None

    @property
    def median_us(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_us)

    def quantile_us(self, share: float) -> float:
        """Return the sample below which `share` of all samples lie, between two where it falls."""
        ordered = sorted(self.samples_us)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass
class _Visited:
    """A case while it is measured: its graph, what a replay takes, what was seen."""

    graph: Any
    calls: int
    sets: int
    replay_ms: float
    samples_us: list[float] = field(default_factory=list)
    readings: list[SensorReading] = field(default_factory=list)


def measure_cases(
    cases: Mapping[str, Sequence[Launch]],
    device: TimingDevice,
    protocol: TimingProtocol,
    read_sensors: ReadSensors = lambda: None,
    report: Callable[[str], None] = lambda name: None,
) -> dict[str, CaseTiming]:
    """Return the timing of every case.

    Args:
        cases: name -> one launch for each set of operands.
        device: where they run.
        protocol: how often and how long.
        read_sensors: reads the GPU while it is busy.
        report: called with the name of each case before its graph is made and at each visit.
    """
    visited = {}
    for name, launches in cases.items():
        report(name)
        visited[name] = _capture(launches, device, protocol)
    for visit in range(protocol.visits):
        names = list(visited) if visit % 2 == 0 else list(reversed(visited))
        for name in names:
            report(name)
            _visit(visited[name], device, protocol, read_sensors)
    return {
        name: CaseTiming(tuple(one.samples_us), one.calls, one.sets, summarize(one.readings))
        for name, one in visited.items()
    }


def _capture(
    launches: Sequence[Launch], device: TimingDevice, protocol: TimingProtocol
) -> _Visited:
    for launch in launches:  # a first call may compile, tune itself or allocate: not in the graph
        launch()
    probe = device.capture(list(launches))
    probe_ms = statistics.median(device.time_replays(probe, 2, 3, lambda: None))
    calls = count_calls(probe_ms / len(launches), len(launches), protocol)
    if calls == len(launches):
        return _Visited(probe, calls, len(launches), probe_ms)
    del probe
    graph = device.capture([launches[index % len(launches)] for index in range(calls)])
    replay_ms = statistics.median(device.time_replays(graph, 1, 3, lambda: None))
    return _Visited(graph, calls, len(launches), replay_ms)


def _visit(
    case: _Visited, device: TimingDevice, protocol: TimingProtocol, read_sensors: ReadSensors
) -> None:
    replay_ms = max(case.replay_ms, 1e-3)
    untimed = max(1, round(protocol.warmup_ms / replay_ms))
    timed = max(protocol.replays, round(protocol.min_visit_ms / replay_ms))

    readings: list[SensorReading] = []

    def look() -> None:
        reading = read_sensors()
        if reading is not None:
            readings.append(reading)

    times_ms = device.time_replays(case.graph, untimed, timed, look)
    case.readings += readings[len(readings) // 2 :]  # before that the GPU was still warming up
    case.samples_us += [time_ms * 1e3 / case.calls for time_ms in times_ms]
