"""What a launch tells: findings, and the faults, deadlocks and livelocks that end it.

The core hands over JSON with instruction indices (machine/abi.cpp); here they become PTX lines,
instruction texts and, where the compiler kept `.loc` lines, places in the source program.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfbyte.errors import HalfbyteError
from halfbyte.virtual.hang_report import HangReport, read_hang
from halfbyte.virtual.instruction_place import InstructionPlace, find_place

if TYPE_CHECKING:
    from halfbyte.virtual.launch_shape import LaunchShape
    from halfbyte.virtual.lowering import Program

__all__ = [
    "Deadlock",
    "Finding",
    "HangReport",
    "KernelFault",
    "LaunchReport",
    "Livelock",
    "read_result",
]


# What programs that are known to work do: shared memory still being read or written at the end of a
# CTA, memory behind a tensor or of one just freed (torch's allocator keeps both mapped), tensor
# memory used after its CTA gave it back, products into columns that a store without
# tcgen05.wait::st may still fill. On hardware the time between mostly suffices.
NOTES = frozenset(
    {
        "exit-with-pending-bytes",
        "exit-with-store-in-flight",
        "shared-of-exited-cta",
        "stale-memory",
        "tensor-memory-lanes",
        "tensor-memory-released",
        "tensor-memory-unwaited-store",
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a kernel did that the PTX ISA forbids or leaves undefined.

    Attributes:
        kind: a stable word, e.g. "over-arrival" or "mbarrier-missed-phase".
        message: what came and what was expected.
        place: the instruction; None where no instruction is to blame.
        cta: the CTA's index in the grid of the first occurrence.
        rank: its rank in the cluster.
        warp: the warp in the CTA, -1 where none is to blame.
        lane: likewise.
        count: how often this kind was met at this instruction.
    """

    kind: str
    message: str
    place: InstructionPlace | None
    cta: tuple[int, int, int]
    rank: int
    warp: int
    lane: int
    count: int = 1

    @property
    def is_note(self) -> bool:
        """Whether it is undefined by the PTX ISA, but harmed nothing in the run at hand."""
        return self.kind in NOTES

    def __str__(self) -> str:
        """Return one line: kind, message, instruction, thread."""
        where = f" at {self.place}" if self.place else ""
        who = f", warp {self.warp}" if self.warp >= 0 else ""
        who += f" lane {self.lane}" if self.lane >= 0 else ""
        cta = ",".join(map(str, self.cta))
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{where}{who} (cta {cta} rank {self.rank}){times}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "kind": self.kind,
            "is_note": self.is_note,
            "message": self.message,
            **(self.place.to_json() if self.place else {}),
            "cta": list(self.cta),
            "rank": self.rank,
            "warp": self.warp,
            "lane": self.lane,
            "count": self.count,
        }


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch: what ran, how long it took, what was found.

    Attributes:
        kernel: the entry's name.
        grid: CTAs along x, y, z; likewise `block` threads and `cluster` CTAs.
        dynamic_shared: bytes of dynamic shared memory per CTA.
        instructions: warp instructions run.
        cycles: of the virtual clock, uncalibrated.
        seconds: of this machine.
        findings: at most one per kind and instruction.
        fault: what ended the launch, None where it ended well.
        hang: who waited for what when nothing could go on, None where it ended well.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    instructions: int
    cycles: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    fault: Finding | None = None
    hang: HangReport | None = None

    def __str__(self) -> str:
        """Return the launch in one line, then one line per finding, then the fault or hang."""
        lines = [
            f"{self.kernel}: grid {self.grid} block {self.block} cluster {self.cluster}, "
            f"{self.instructions} warp instructions in {self.seconds:.3f} s"
        ]
        lines += [f"  {finding}" for finding in self.findings]
        if self.fault:
            lines.append(f"  fault: {self.fault}")
        if self.hang:
            lines += [f"  {line}" for line in str(self.hang).splitlines()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "cluster": list(self.cluster),
            "dynamic_shared": self.dynamic_shared,
            "instructions": self.instructions,
            "cycles": self.cycles,
            "seconds": self.seconds,
            "findings": [finding.to_json() for finding in self.findings],
            "fault": self.fault.to_json() if self.fault else None,
            "hang": self.hang.to_json() if self.hang else None,
        }


class LaunchError(HalfbyteError, RuntimeError):
    """A launch that did not end as it should; `report` has all that is known."""

    def __init__(self, message: str, report: LaunchReport) -> None:
        """Keep the report beside the message."""
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type["LaunchError"], tuple[str, LaunchReport]]:
        """Return how to make it again: errors of worker processes come to their parent pickled."""
        return type(self), (str(self), self.report)


class KernelFault(LaunchError):  # noqa: N818 (an outcome's name)
    """A kernel did something illegal; `report.fault` says what, where and in which thread."""


class Deadlock(LaunchError):  # noqa: N818 (an outcome's name)
    """Every thread waits for something that cannot happen; `report.hang` lists the waits."""


class Livelock(LaunchError):  # noqa: N818 (an outcome's name)
    """Threads run without getting anywhere; `report.hang` says where they are."""


def read_result(
    program: "Program", shape: "LaunchShape", result: dict[str, Any], seconds: float
) -> LaunchReport:
    """Return the report of a launch from the core's JSON.

    Args:
        program: the lowered kernel; its instruction table gives lines and texts.
        shape: the launch's sizes.
        result: what `hb_launch` returned, decoded.
        seconds: wall time of the launch.

    Raises KernelFault, Deadlock or Livelock, by the result's status.
    """
    fault, hang = result.get("fault"), result.get("hang")
    report = LaunchReport(
        kernel=program.name,
        grid=shape.grid,
        block=shape.block,
        cluster=shape.cluster,
        dynamic_shared=shape.dynamic_shared,
        instructions=result["instructions"],
        cycles=result["cycles"],
        seconds=seconds,
        findings=tuple(_read_finding(program, finding) for finding in result["findings"]),
        fault=_read_finding(program, fault) if fault else None,
        hang=read_hang(program, hang) if hang else None,
    )
    if report.fault:
        raise KernelFault(f"{program.name}: {report.fault}{_list_findings(report)}", report)
    if report.hang:
        error = Deadlock if report.hang.kind == "deadlock" else Livelock
        raise error(f"{program.name}: {report.hang}{_list_findings(report)}", report)
    return report


def _list_findings(report: LaunchReport) -> str:
    return "".join(f"\nbefore that: {finding}" for finding in report.findings)


def _read_finding(program: "Program", record: dict[str, Any]) -> Finding:
    place = record["place"]
    x, y, z = place["cta"]
    return Finding(
        kind=record["kind"],
        message=record["message"],
        place=find_place(program, place["instruction"]),
        cta=(x, y, z),
        rank=place["rank"],
        warp=place["warp"],
        lane=place["lane"],
        count=record["count"],
    )
