"""A launch that cannot go on: who waits for what, in words and as data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfbyte.virtual.instruction_place import InstructionPlace, find_place

if TYPE_CHECKING:
    from halfbyte.virtual.lowering import Program

_FULL_MASK = 0xFFFFFFFF
_MAX_CTAS = 4  # CTAs named per group
_MAX_GROUPS = 40
_TITLES = {
    "deadlock": "deadlock at cycle {}: every thread waits for something that cannot happen",
    "livelock": (
        "livelock at cycle {}: threads run without stores, arrivals, completions or exits, and "
        "come back to states that they were in before"
    ),
    "no-progress": (
        "no progress up to cycle {}: threads run without stores, arrivals, completions or exits; a "
        "loop without an end, or one that needs a larger LaunchOptions.livelock_instructions"
    ),
    "instruction-limit": "the limit of instructions was reached at cycle {}",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """Lanes of one warp that wait, or that run without getting anywhere.

    Attributes:
        cta: the CTA's index in the grid.
        rank: its rank in the cluster.
        warp: the warp in the CTA.
        lanes: mask of the lanes.
        place: the instruction they stand at.
        wait: what they wait for ("mbarrier", "named-barrier", "cluster-barrier", "convergence",
            "async-group", "tensor-alloc", "warp-barrier", "other"); "" for running lanes.
        facts: numbers about what is waited for, e.g. offset, parity, phases, pending, expected and
            pending_bytes of an mbarrier.
    """

    cta: tuple[int, int, int]
    rank: int
    warp: int
    lanes: int
    place: InstructionPlace | None
    wait: str
    facts: dict[str, Any]

    def describe_wait(self) -> str:
        """Return what is waited for, e.g. "waits on mbarrier at shared+0x408: parity 0, ..."."""
        describe = _DESCRIPTIONS.get(self.wait)
        return describe(self) if describe else f"waits ({self.wait})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "cta": list(self.cta),
            "rank": self.rank,
            "warp": self.warp,
            "lanes": self.lanes,
            **(self.place.to_json() if self.place else {}),
            "wait": self.wait,
            **self.facts,
        }


@dataclass(frozen=True, slots=True)
class Flight:
    """A range of shared memory (bytes) or tensor memory (columns) that work in flight touches."""

    cta: tuple[int, int, int]
    rank: int
    warp: int
    place: InstructionPlace | None
    resource: str
    first: int
    last: int
    issued_at: int

    def __str__(self) -> str:
        """Return one line."""
        space, access = self.resource.split("-")
        what = f"{access}s {space} memory [0x{self.first:x}, 0x{self.last:x})"
        return (
            f"in flight since cycle {self.issued_at}: {self.place} of warp {self.warp} {what} of "
            f"{_name_cta(self.cta, self.rank)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "cta": list(self.cta),
            "rank": self.rank,
            "warp": self.warp,
            **(self.place.to_json() if self.place else {}),
            "resource": self.resource,
            "first": self.first,
            "last": self.last,
            "issued_at": self.issued_at,
        }


@dataclass(frozen=True, slots=True)
class HangReport:
    """The state of a launch that was given up.

    Attributes:
        kind: "deadlock", "livelock", "no-progress" or "instruction-limit".
        cycles: of the virtual clock when it was given up.
        waits: every group of lanes that waits.
        running: every group of lanes that does not.
        in_flight: asynchronous work that has not completed.
        omitted: groups of lanes left out of a very long list.
    """

    kind: str
    cycles: int
    waits: tuple[Stop, ...]
    running: tuple[Stop, ...] = ()
    in_flight: tuple[Flight, ...] = ()
    omitted: int = 0

    def __str__(self) -> str:
        """Return a line per distinct wait, with the warps that share it."""
        lines = [_TITLES.get(self.kind, self.kind + " at cycle {}").format(self.cycles)]
        lines += _group_lines(self.waits, Stop.describe_wait)
        lines += _group_lines(self.running, lambda stop: "runs")
        lines += [str(flight) for flight in self.in_flight[:_MAX_GROUPS]]
        if self.omitted:
            lines.append(f"{self.omitted} more groups of lanes are left out")
        if self.list_fresh_waits():
            lines.append(
                "every mbarrier waited for is fresh (parity 0, 0 phases completed, no arrival): a "
                "warp that fills slots, a producer, starts at parity 1, where its first wait "
                "passes at once"
            )
        return "\n  ".join(lines)

    def list_fresh_waits(self) -> tuple[Stop, ...]:
        """Return the waits on mbarriers where each is for the first phase, and nobody arrived yet.

        () where one of them is not, or all wait on the same barrier: then nobody waits for a slot
        that was never used.
        """
        waits = [stop for stop in self.waits if stop.wait == "mbarrier"]
        barriers = {(stop.facts.get("barrier_rank"), stop.facts.get("offset")) for stop in waits}
        is_fresh = all(map(_is_fresh, waits))
        return tuple(waits) if is_fresh and len(barriers) > 1 else ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "kind": self.kind,
            "cycles": self.cycles,
            "waits": [stop.to_json() for stop in self.waits],
            "running": [stop.to_json() for stop in self.running],
            "in_flight": [flight.to_json() for flight in self.in_flight],
            "omitted": self.omitted,
        }


def _is_fresh(stop: Stop) -> bool:
    facts = stop.facts
    if facts.get("phases") != 0 or facts.get("parity") != 0:
        return False
    return bool(facts["pending"] == facts["expected"] and facts["pending_bytes"] == 0)


def read_hang(program: "Program", record: dict[str, Any]) -> HangReport:
    """Return the hang that the core's JSON describes (machine/hang.cpp writes it)."""
    return HangReport(
        kind=record["kind"],
        cycles=record["cycles"],
        waits=tuple(_read_stop(program, stop) for stop in record["waits"]),
        running=tuple(_read_stop(program, stop) for stop in record["running"]),
        in_flight=tuple(_read_flight(program, flight) for flight in record["in_flight"]),
        omitted=record["omitted"],
    )


def _read_stop(program: "Program", record: dict[str, Any]) -> Stop:
    facts = dict(record)
    x, y, z = facts.pop("cta")
    return Stop(
        cta=(x, y, z),
        rank=facts.pop("rank"),
        warp=facts.pop("warp"),
        lanes=facts.pop("lanes"),
        place=find_place(program, facts.pop("instruction")),
        wait=facts.pop("wait", ""),
        facts=facts,
    )


def _read_flight(program: "Program", record: dict[str, Any]) -> Flight:
    fields = dict(record)
    x, y, z = fields.pop("cta")
    return Flight(cta=(x, y, z), place=find_place(program, fields.pop("instruction")), **fields)


def _describe_mbarrier(stop: Stop) -> str:
    facts = stop.facts
    where = f"mbarrier at shared+0x{facts['offset']:x}"
    if facts["barrier_rank"] != stop.rank:
        where += f" of rank {facts['barrier_rank']}"
    if "phases" not in facts:
        return f"waits on {where}, which does not exist"
    phases = facts["phases"]
    return (
        f"waits on {where}: parity {facts['parity']}, {phases} "
        f"phase{'' if phases == 1 else 's'} completed, "
        f"pending arrivals {facts['pending']}/{facts['expected']}, "
        f"missing bytes {facts['pending_bytes']}"
    )


def _describe_named_barrier(stop: Stop) -> str:
    facts = stop.facts
    warps = _list_numbers(facts["arrived_warps"])
    return (
        f"waits on barrier {facts['number']}: {facts['arrived']} of {facts['expected']} threads "
        f"arrived (warps {warps})"
    )


def _describe_cluster_barrier(stop: Stop) -> str:
    missing = stop.facts["missing"]
    ranks: dict[int, list[int]] = {}
    for record in missing:
        ranks.setdefault(record["rank"], []).append(record["warp"])
    listed = "; ".join(
        f"warps {_list_numbers(warps)} of rank {rank}" for rank, warps in sorted(ranks.items())
    )
    return f"waits on the cluster barrier: not arrived are {listed}"


def _describe_lanes(stop: Stop) -> str:
    facts = stop.facts
    missing = facts["needed"] & ~(facts.get("arrived", 0) | stop.lanes)
    return f"waits for lanes 0x{missing:08x} of its warp"


def _describe_tensor_alloc(stop: Stop) -> str:
    owned = ", ".join(f"[{first}, {last})" for first, last in stop.facts["owned"]) or "none"
    return f"waits for {stop.facts['columns']} columns of tensor memory; allocated are {owned}"


def _describe_async_group(stop: Stop) -> str:
    return "waits for asynchronous operations to complete"


_DESCRIPTIONS = {
    "mbarrier": _describe_mbarrier,
    "named-barrier": _describe_named_barrier,
    "cluster-barrier": _describe_cluster_barrier,
    "convergence": _describe_lanes,
    "warp-barrier": _describe_lanes,
    "tensor-alloc": _describe_tensor_alloc,
    "async-group": _describe_async_group,
}


def _group_lines(stops: Iterable[Stop], describe: Any) -> list[str]:
    groups: dict[tuple[int, int, str], list[Stop]] = {}
    for stop in stops:
        index = stop.place.index if stop.place else -1
        groups.setdefault((index, stop.lanes, describe(stop)), []).append(stop)
    lines = [
        f"{_name_threads(members)} at {members[0].place} {description}"
        for (_, _, description), members in groups.items()
    ]
    if len(lines) > _MAX_GROUPS:
        lines = [*lines[:_MAX_GROUPS], f"and {len(lines) - _MAX_GROUPS} more groups of waits"]
    return lines


def _name_threads(stops: Sequence[Stop]) -> str:
    """Return "warps 0-3 (cta 0,0,0 rank 0; cta 1,0,0 rank 1)" for stops with the same lanes."""
    warps_of_ctas: dict[tuple[tuple[int, int, int], int], list[int]] = {}
    for stop in stops:
        warps_of_ctas.setdefault((stop.cta, stop.rank), []).append(stop.warp)
    ctas_of_warps: dict[tuple[int, ...], list[str]] = {}
    for (cta, rank), warps in warps_of_ctas.items():
        ctas_of_warps.setdefault(tuple(sorted(warps)), []).append(_name_cta(cta, rank))
    lanes = stops[0].lanes
    which = "" if lanes == _FULL_MASK else f" lanes 0x{lanes:x}"
    parts = []
    for listed, ctas in ctas_of_warps.items():
        shown = "; ".join(ctas[:_MAX_CTAS])
        if len(ctas) > _MAX_CTAS:
            shown += f"; and {len(ctas) - _MAX_CTAS} more"
        plural = "s" if len(listed) > 1 else ""
        parts.append(f"warp{plural} {_list_numbers(listed)}{which} ({shown})")
    return ", ".join(parts)


def _name_cta(cta: tuple[int, int, int], rank: int) -> str:
    return f"cta {','.join(map(str, cta))} rank {rank}"


def _list_numbers(numbers: Iterable[int]) -> str:
    """Return "0-3, 5" for 0, 1, 2, 3, 5; "none" for nothing."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = (str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return ", ".join(texts) or "none"
