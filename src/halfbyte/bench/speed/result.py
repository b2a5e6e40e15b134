"""What a speed run found: rows, the machine's own rates, and the machine."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from halfbyte.bench.speed.settings import LinearShape
from halfbyte.bench.speed.steady_state import CaseTiming

Status = Literal["timed", "wrong", "refused"]
_MEASURED = (
    *("median_us", "p10_us", "p90_us", "samples", "calls", "sets", "tflops", "rate"),
    *("share_of_rate", "gb_per_s", "clock_mhz", "power_w", "temperature_c", "reasons"),
)


@dataclass(frozen=True)
class MachineRates:
    """What this GPU sustains in this run, by the same protocol as all rows.

    Attributes:
        bf16_tflops, fp8_tflops: of torch's products of 8192^3, after a long warm-up.
        copy_bytes_per_s: bytes read and written by a copy of 1 GiB.
    """

    bf16_tflops: float
    fp8_tflops: float
    copy_bytes_per_s: float

    def get(self, name: str) -> float:
        """Return the TFLOPS of "bf16" or "fp8"."""
        return self.fp8_tflops if name == "fp8" else self.bf16_tflops


@dataclass(frozen=True)
class SpeedRow:
    """One case on one shape.

    Attributes:
        kind: "linear", "quantize" or "copy". case: its name.
        shape: its sizes.
        status: "timed"; "wrong": its result failed the check; "refused": it cannot run here.
        message: why it was not timed.
        error: largest relative error of its check.
        timing: None where it was not timed.
        rate: whose TFLOPS it is compared with.
        moved_bytes: of one call, read and written.
        operations: names of the kernels of one call, in order.
        note: what a reader should know.
    """

    kind: str
    case: str
    shape: LinearShape
    status: Status
    message: str = ""
    error: float | None = None
    timing: CaseTiming | None = None
    rate: str = "bf16"
    moved_bytes: int = 0
    operations: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class LaunchRow:
    """Host time of one prepared launch, without a graph: microseconds."""

    case: str
    shape: LinearShape
    median_us: float
    p90_us: float


@dataclass(frozen=True)
class SpeedResult:
    """A whole run.

    Attributes:
        machine: GPU, driver, versions, date, command, seed.
        rates: None where nothing was to be compared with them.
        rows, launches: in the order measured.
        seconds: of the whole run.
    """

    machine: dict[str, str]
    rates: MachineRates | None
    rows: tuple[SpeedRow, ...]
    launches: tuple[LaunchRow, ...] = field(default=())
    seconds: float = 0.0

    @property
    def wrong(self) -> tuple[SpeedRow, ...]:
        """Rows whose result was not right."""
        return tuple(row for row in self.rows if row.status == "wrong")


def flatten_row(row: SpeedRow, rates: MachineRates | None) -> dict[str, Any]:
    """Return a row as one level of plain values: a line of the CSV and an object of the JSON."""
    shape, timing = row.shape, row.timing
    flat: dict[str, Any] = {"kind": row.kind, "case": row.case, **asdict(shape)}
    flat |= {"status": row.status, "message": row.message, "error": row.error}
    flat |= dict.fromkeys(_MEASURED)
    if timing is not None:
        flat |= {
            "median_us": round(timing.median_us, 3),
            "p10_us": round(timing.quantile_us(0.1), 3),
            "p90_us": round(timing.quantile_us(0.9), 3),
            "samples": len(timing.samples_us),
            "calls": timing.calls,
            "sets": timing.sets,
            "gb_per_s": round(row.moved_bytes / timing.median_us / 1e3, 1),
        }
        if row.kind == "linear":
            tflops = shape.flops / timing.median_us / 1e6
            flat |= {"tflops": round(tflops, 1), "rate": row.rate}
            flat["share_of_rate"] = round(tflops / rates.get(row.rate), 3) if rates else None
        if timing.sensors is not None:
            sensors = asdict(timing.sensors)
            flat |= {name: sensors[name] for name in ("clock_mhz", "power_w", "temperature_c")}
            flat["reasons"] = "; ".join(timing.sensors.reasons)
    return flat | {"operations": " + ".join(row.operations), "note": row.note}
