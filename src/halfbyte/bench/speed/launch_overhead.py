"""What one launch costs the host: many launches in a row, no graph, the device never waited for."""

import statistics
import time
from collections.abc import Callable

from halfbyte.bench.speed.result import LaunchRow
from halfbyte.bench.speed.settings import LinearShape
from halfbyte.bench.speed.timing_device import Launch

# A stream takes about a thousand launches before the host must wait; these are far fewer.
_LAUNCHES = 100
_ROUNDS = 50


def measure_launches(
    case: str,
    shape: LinearShape,
    launch: Launch,
    synchronize: Callable[[], None],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> LaunchRow:
    """Return the host's microseconds of one `launch`, over rounds of a hundred.

    Args:
        case: its name.
        shape: its sizes.
        launch: queues work and returns.
        synchronize: waits until the device has nothing to do: before every round.
        clock_ns: the host's clock.
    """
    samples_us = []
    for _ in range(_ROUNDS + 1):
        synchronize()
        start_ns = clock_ns()
        for _ in range(_LAUNCHES):
            launch()
        samples_us.append((clock_ns() - start_ns) / 1e3 / _LAUNCHES)
    synchronize()
    samples_us = sorted(samples_us[1:])  # the first round warms up
    p90_us = samples_us[int(0.9 * (len(samples_us) - 1))]
    return LaunchRow(case, shape, statistics.median(samples_us), p90_us)
