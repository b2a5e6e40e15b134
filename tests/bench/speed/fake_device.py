"""A timing device without a GPU: calls run on the CPU, and a scripted clock says what they took."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from halfbyte.bench.speed.timing_device import Launch


@dataclass
class FakeDevice:
    """Every call takes `call_ms` of the fake clock; what was done is kept in `log`."""

    l2_bytes: int = 1000
    call_ms: float = 0.5
    now_ms: float = 0.0
    log: list[tuple[str, int, int]] = field(default_factory=list)
    looks: int = 2
    slow: dict[int, float] = field(default_factory=dict)

    def capture(self, launches: Sequence[Launch]) -> list[Launch]:
        self.log.append(("capture", len(launches), 0))
        return list(launches)

    def synchronize(self) -> None:
        self.log.append(("synchronize", 0, 0))

    def time_replays(
        self, graph: list[Launch], untimed: int, timed: int, while_busy: Callable[[], None]
    ) -> list[float]:
        self.log.append(("replay", untimed, timed))
        for _ in range(self.looks):
            while_busy()
        took_ms = len(graph) * self.call_ms
        self.now_ms += took_ms * (untimed + timed)
        for launch in graph:
            launch()
        return [took_ms * self.slow.get(index, 1.0) for index in range(timed)]
