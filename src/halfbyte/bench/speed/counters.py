"""Hardware counters of one case's kernels: Nsight Compute runs them, a fixed list is read.

The counters of an architecture and what each one says are in `list_counters`; ncu measures a kernel
alone, several times over, so that its times are no speeds: it says where a kernel's time goes.
"""

import csv
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from halfbyte.bench.speed.operations import shorten_name
from halfbyte.bench.speed.settings import LinearShape
from halfbyte.errors import HalfbyteError, MissingDependencyError, UnsupportedHardwareError

_TIMEOUT_S: Final = 300
_EVERYWHERE: Final = {
    "gpu__time_duration.sum": "time of the kernel alone, caches as ncu leaves them",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "busiest unit of the SMs",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots that were used",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "integer and logic: decoding",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "float32 and IMAD",
    "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active": "loads and stores",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "shared memory bank conflicts",
    "lts__t_bytes.sum": "bytes through L2",
    "lts__t_sector_hit_rate.pct": "of these found in L2",
    "dram__bytes_read.sum": "bytes read from DRAM",
    "dram__bytes_write.sum": "bytes written to DRAM",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "share of DRAM's bandwidth",
    "launch__registers_per_thread": "registers a thread starts with",
    "launch__shared_mem_per_block_dynamic": "shared memory of a CTA",
    "launch__waves_per_multiprocessor": "rounds of CTAs",
}
_BY_TARGET: Final = {
    "sm_90a": {
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor cores busy",
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active": "wgmma issued",
    },
    "sm_100a": {
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor cores busy",
    },
}


@dataclass(frozen=True)
class Counter:
    """One counter of one kernel: `meaning` is what it says; value and unit are ncu's."""

    kernel: str
    name: str
    value: str
    unit: str
    meaning: str


def list_counters(target: str) -> dict[str, str]:
    """Return the counters that are read on GPUs of a target, and what each says.

    Raises:
        UnsupportedHardwareError: no list is written for it.
    """
    if target not in _BY_TARGET:
        raise UnsupportedHardwareError(
            f"no list of counters is written for {target}: there are those of "
            f"{', '.join(_BY_TARGET)}"
        )
    first, *others = _EVERYWHERE.items()
    return dict([first, *_BY_TARGET[target].items(), *others])


@dataclass(frozen=True)
class ProfiledCase:
    """Which case ncu runs."""

    kind: str
    case: str
    shape: LinearShape
    dtype: str
    seed: int

    def list_words(self) -> list[str]:
        """Return the case as words of a command line."""
        return [self.kind, self.case, str(self.shape), self.dtype, str(self.seed)]


def make_command(case: ProfiledCase, counters: dict[str, str]) -> list[str]:
    """Return the command that prints the counters of a case's kernels as CSV."""
    return [
        "ncu",
        *("--clock-control", "none"),  # the GPU's clocks are left alone
        *("--profile-from-start", "off"),
        *("--print-units", "base"),
        "--csv",
        *("--metrics", ",".join(counters)),
        *(sys.executable, "-m", "halfbyte.bench.speed.profiled_case"),
        *case.list_words(),
    ]


def measure_counters(case: ProfiledCase, target: str) -> list[Counter]:
    """Return the counters of every kernel of one call.

    Raises:
        MissingDependencyError: there is no ncu.
        UnsupportedHardwareError: no counters are listed for the target.
        HalfbyteError: ncu failed; its last lines are in the message.
    """
    counters = list_counters(target)
    if shutil.which("ncu") is None:
        raise MissingDependencyError(
            "ncu (Nsight Compute) is not on the PATH: it comes with the CUDA toolkit"
        )
    command = make_command(case, counters)
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise HalfbyteError(f"ncu took more than {_TIMEOUT_S} s; {' '.join(command)}") from None
    found = parse_counters(finished.stdout, counters)
    if finished.returncode or not found:
        lines = [*finished.stdout.splitlines(), *finished.stderr.splitlines()]
        raise HalfbyteError("ncu measured nothing: " + " | ".join(lines[-5:]))
    return found


def parse_counters(text: str, counters: dict[str, str]) -> list[Counter]:
    """Return the counters in what `ncu --csv` printed; other lines than the table are skipped.

    Kernels come in the order they ran, counters of each in that of `counters`, others last.
    """
    lines = text.splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith('"ID"')]
    if not heads:
        return []
    table = csv.DictReader(line for line in lines[heads[0] :] if line.startswith('"'))
    places = {name: place for place, name in enumerate(counters)}
    rows = sorted(
        table, key=lambda row: (int(row["ID"]), places.get(row["Metric Name"], len(places)))
    )
    return [
        Counter(
            kernel=shorten_name(row["Kernel Name"]),
            name=row["Metric Name"],
            value=row["Metric Value"],
            unit=row["Metric Unit"],
            meaning=counters.get(row["Metric Name"], ""),
        )
        for row in rows
    ]
