"""The protocol of a speed run: order, warm-up, sets, and what the samples mean."""

import pytest

from halfbyte.bench.speed.sensors import SensorReading
from halfbyte.bench.speed.settings import TimingProtocol, count_calls, count_sets
from halfbyte.bench.speed.steady_state import CaseTiming, measure_cases
from tests.bench.speed.fake_device import FakeDevice

PROTOCOL = TimingProtocol(warmup_ms=100.0, visits=4, replays=3, graph_ms=2.0, min_visit_ms=1.0)


def test_sets_together_exceed_l2_by_the_wanted_factor() -> None:
    protocol = TimingProtocol(l2_multiple=2.0)
    assert count_sets(30, 100, protocol) == 7  # 210 bytes > 2 * 100
    assert count_sets(100, 100, protocol) * 100 > 200
    assert count_sets(1000, 100, protocol) == 1
    assert count_sets(0, 10**9, protocol) == protocol.max_sets


def test_a_graph_holds_whole_rounds_of_the_sets_and_lasts_long_enough() -> None:
    calls = count_calls(0.005, 16, PROTOCOL)
    assert calls % 16 == 0
    assert calls * 0.005 >= PROTOCOL.graph_ms > (calls - 16) * 0.005
    assert count_calls(50.0, 3, PROTOCOL) == 3
    assert count_calls(1e-9, 16, PROTOCOL) <= PROTOCOL.max_calls


def test_cases_are_visited_there_and_back_again() -> None:
    order: list[str] = []

    class Device(FakeDevice):
        def time_replays(self, graph, untimed, timed, while_busy):  # type: ignore[no-untyped-def]
            if timed == PROTOCOL.replays and untimed > 2:
                graph[0]()
                order.append(names[-1])
            return super().time_replays(graph, untimed, timed, while_busy)

    names: list[str] = []
    cases = {name: [lambda name=name: names.append(name)] for name in "abc"}
    measure_cases(cases, Device(), PROTOCOL)
    assert "".join(order) == "abccbaabccba"


def test_each_visit_warms_up_with_the_same_load_before_its_samples() -> None:
    device = FakeDevice(call_ms=0.5)
    timing = measure_cases({"a": [lambda: None]}, device, PROTOCOL)["a"]
    visits = [entry for entry in device.log if entry[0] == "replay"][-PROTOCOL.visits :]
    replay_ms = timing.calls * device.call_ms
    assert all(untimed * replay_ms >= PROTOCOL.warmup_ms for _, untimed, _ in visits)
    assert len(timing.samples_us) == sum(timed for _, _, timed in visits)
    assert timing.median_us == pytest.approx(500.0)


def test_a_graph_rotates_through_every_set_equally() -> None:
    counts = [0, 0, 0]

    def use(index: int) -> None:
        counts[index] += 1

    launches = [lambda index=index: use(index) for index in range(3)]
    timing = measure_cases({"a": launches}, FakeDevice(call_ms=0.01), PROTOCOL)["a"]
    assert timing.sets == 3
    assert timing.calls % 3 == 0
    assert counts[0] == counts[1] == counts[2] > 0


def test_sensors_are_read_while_the_device_is_busy_and_reasons_are_joined() -> None:
    readings = [
        SensorReading(1000.0, 100.0, 30.0, 0),  # still warming up: dropped
        SensorReading(1500.0, 690.0, 60.0, 4),
        SensorReading(1000.0, 100.0, 30.0, 0),
        SensorReading(1500.0, 690.0, 60.0, 0x20),
    ]
    protocol = TimingProtocol(visits=2, replays=1)
    device = FakeDevice(call_ms=3.0)
    timing = measure_cases({"a": [lambda: None]}, device, protocol, lambda: readings.pop(0))["a"]
    assert timing.sensors is not None
    assert (timing.sensors.clock_mhz, timing.sensors.power_w) == (1500.0, 690.0)
    assert timing.sensors.reasons == ("power cap", "thermal")
    assert timing.sensors.readings == 2


def test_without_sensors_a_timing_has_none() -> None:
    assert measure_cases({"a": [lambda: None]}, FakeDevice(), PROTOCOL)["a"].sensors is None


def test_quantiles_lie_between_samples() -> None:
    timing = CaseTiming((4.0, 1.0, 3.0, 2.0, 5.0), calls=1, sets=1)
    assert timing.median_us == 3.0
    assert timing.quantile_us(0.0) == 1.0
    assert timing.quantile_us(1.0) == 5.0
    assert timing.quantile_us(0.1) == pytest.approx(1.4)
