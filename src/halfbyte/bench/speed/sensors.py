"""Clock, power, temperature and throttle reasons of a GPU while it is busy."""

import importlib
import importlib.util
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

# nvml.h: nvmlClocksEventReason*, what holds the clock down.
_REASONS: Final = {
    0x0002: "application clocks",
    0x0004: "power cap",
    0x0008: "hardware slowdown",
    0x0010: "sync boost",
    0x0020: "thermal",
    0x0040: "hardware thermal",
    0x0080: "power brake",
    0x0100: "display clocks",
}
_POWER_INSTANT: Final = 186  # nvml.h: NVML_FI_DEV_POWER_INSTANT; the plain call averages a second
_QUERY: Final = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
_PAUSE_S: Final = 0.004


@dataclass(frozen=True)
class SensorReading:
    """One look at the GPU: SM clock, power, temperature, and NVML's bits of what holds it down."""

    clock_mhz: float
    power_w: float
    temperature_c: float
    reasons: int


@dataclass(frozen=True)
class SensorSummary:
    """Medians of the readings of one case, and every reason that was seen."""

    clock_mhz: float
    power_w: float
    temperature_c: float
    reasons: tuple[str, ...]
    readings: int


def summarize(readings: list[SensorReading]) -> SensorSummary | None:
    """Return the medians of some readings; None of none."""
    if not readings:
        return None
    bits = 0
    for reading in readings:
        bits |= reading.reasons
    return SensorSummary(
        clock_mhz=statistics.median(reading.clock_mhz for reading in readings),
        power_w=statistics.median(reading.power_w for reading in readings),
        temperature_c=statistics.median(reading.temperature_c for reading in readings),
        reasons=tuple(name for bit, name in _REASONS.items() if bits & bit),
        readings=len(readings),
    )


ReadSensors = Callable[[], SensorReading | None]


def open_sensors() -> ReadSensors:
    """Return a function that reads torch's current GPU: by NVML, else nvidia-smi, else None."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
    if importlib.util.find_spec("pynvml") is not None:
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            pass
        else:
            return lambda: _read_nvml(nvml, handle)
    return lambda: _read_smi(uuid)


def _read_nvml(nvml: Any, handle: Any) -> SensorReading | None:
    time.sleep(_PAUSE_S)
    try:
        return SensorReading(
            clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            power_w=_read_power(nvml, handle),
            temperature_c=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            reasons=int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        )
    except nvml.NVMLError:
        return None


def _read_power(nvml: Any, handle: Any) -> float:
    """Return watts now; the average of the last second where the driver has no more."""
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [_POWER_INSTANT])
    if value.nvmlReturn == nvml.NVML_SUCCESS:
        return float(value.value.uiVal) / 1e3
    return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3


def _read_smi(uuid: str) -> SensorReading | None:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-i", uuid]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        time.sleep(_PAUSE_S)
        return None
    return parse_smi(output.stdout)


def parse_smi(text: str) -> SensorReading | None:
    """Return the reading in a line that nvidia-smi printed for `_QUERY`; None where it has gaps."""
    fields = [field.strip() for field in text.strip().split(",")]
    try:
        clock, power, temperature = (float(field) for field in fields[:3])
        return SensorReading(clock, power, temperature, int(fields[3], 16))
    except (ValueError, IndexError):
        return None
