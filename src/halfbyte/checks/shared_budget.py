"""Check: shared memory fits, and declared figures are those of the real layouts.

A budget that is written by hand is wrong in silence: too small it overruns, too large it costs ring
stages. Buffers are counted with the padding of their alignment, as an allocator places them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.arch import Gpu
from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.errors import UsageError

CHECK = "shared-budget"


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """One buffer of a CTA's shared memory; `alignment_bytes` is a power of two."""

    name: str
    num_bytes: int
    alignment_bytes: int = 16

    def __post_init__(self) -> None:
        """Raise UsageError for sizes that no buffer has."""
        if self.num_bytes < 0:
            raise UsageError(f"{self.name} has {self.num_bytes} bytes; 0 or more are wanted")
        alignment = self.alignment_bytes
        if alignment < 1 or alignment & (alignment - 1):
            raise UsageError(f"{self.name} is aligned to {alignment}; a power of two is wanted")


@dataclass(frozen=True, slots=True)
class PlacedBuffer:
    """A buffer with its offset and the padding in front of it."""

    buffer: SharedBuffer
    offset: int
    padding_bytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.buffer.num_bytes


def place_buffers(buffers: Sequence[SharedBuffer]) -> tuple[PlacedBuffer, ...]:
    """Return the buffers one after the other, each at the next multiple of its alignment."""
    placed, end = [], 0
    for buffer in buffers:
        offset = -(-end // buffer.alignment_bytes) * buffer.alignment_bytes
        placed.append(PlacedBuffer(buffer, offset, offset - end))
        end = offset + buffer.num_bytes
    return tuple(placed)


def check_shared_budget(
    buffers: Sequence[SharedBuffer],
    gpu: Gpu,
    declared: Mapping[str, int] | None = None,
    place: str = "configuration",
) -> CheckReport:
    """Return whether the buffers of one CTA fit, and which declared figures are wrong.

    Args:
        buffers: sizes taken from layouts, in the order in which they are allocated.
        gpu: the GPU.
        declared: figures by buffer name that somebody wrote down.
        place: where the configuration stands, for the findings.
    """
    placed = place_buffers(buffers)
    used = placed[-1].end if placed else 0
    padding = sum(one.padding_bytes for one in placed)
    measured = {buffer.name: buffer.num_bytes for buffer in buffers}
    findings = (
        *check_shared_total(used, gpu, place, padding),
        *compare_declared(declared or {}, measured, place),
    )
    evidence = tuple(
        Evidence(
            f"{one.buffer.name}: {one.buffer.num_bytes} bytes"
            + (f" behind {one.padding_bytes} of padding" if one.padding_bytes else ""),
            f"shared+0x{one.offset:x} to 0x{one.end:x}",
        )
        for one in placed
    )
    return CheckReport(CHECK, findings, evidence, len(buffers))


def check_shared_total(used: int, gpu: Gpu, place: str, padding: int = 0) -> Iterator[CheckFinding]:
    """Yield an error where a CTA asks for more shared memory than the GPU has, with the overrun."""
    over = used - gpu.shared_bytes_per_cta
    if over > 0:
        padded = f", {padding} of them padding" if padding else ""
        message = (
            f"{used} bytes of shared memory per CTA{padded}; {gpu.name} has "
            f"{gpu.shared_bytes_per_cta} ({over} too many)"
        )
        facts = {"used": used, "limit": gpu.shared_bytes_per_cta, "over": over}
        yield CheckFinding(f"{CHECK}/overrun", Severity.ERROR, place, message, facts)


def compare_declared(
    declared: Mapping[str, int], measured: Mapping[str, int | None], place: str
) -> Iterator[CheckFinding]:
    """Yield a finding for each declared figure that is not what the layout takes.

    `measured` is None where the real bytes cannot be told. Raises UsageError for a name that is in
    no layout.
    """
    for name, figure in declared.items():
        if name not in measured:
            raise UsageError(f"nothing is called {name!r}; there are {', '.join(measured)}")
        size = measured[name]
        if size is None:
            message = f"declared {figure} bytes for {name}; what it takes cannot be told"
            yield CheckFinding(f"{CHECK}/declared", Severity.UNDECIDED, place, message)
        elif size != figure:
            message = f"declared {figure} bytes for {name}, its layout takes {size}"
            if size and figure % size == 0:
                message += f" ({figure // size} times as much)"
            facts = {"name": name, "declared": figure, "measured": size}
            yield CheckFinding(f"{CHECK}/declared", Severity.ERROR, place, message, facts)
