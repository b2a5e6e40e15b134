"""What a speed run measures and how: shapes, cases, and the measuring protocol."""

import re
from dataclasses import dataclass

from halfbyte.errors import UsageError, printable

_SIZE = r"([0-9]{1,9})"  # below 2^30: sizes and strides are 32-bit in the kernels
_SHAPE = re.compile(rf"{_SIZE}x{_SIZE}x{_SIZE}(?:x{_SIZE})?")
MODES = ("fp8", "exact", "int8", "exact_int4")


@dataclass(frozen=True, order=True)
class LinearShape:
    """One linear call: x [M, K] times W [N, K], with a low-rank branch of rank R (0: none)."""

    m: int
    k: int
    n: int
    rank: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of x @ W.T alone: the low-rank branch is not counted."""
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        """Return MxKxNxR, as `parse_shapes` reads it."""
        return f"{self.m}x{self.k}x{self.n}x{self.rank}"


# Decoding, small batches and whole images: the linears that SVDQuant is used on.
DEFAULT_SHAPES = tuple(
    LinearShape(*sizes)
    for sizes in (
        (1, 3840, 3072, 128),
        (16, 3840, 3072, 128),
        (64, 3840, 15360, 128),
        (256, 3840, 3072, 128),
        (4352, 3840, 3072, 128),
        (4352, 3840, 15360, 128),
        (4352, 15360, 3840, 128),
        (4352, 10240, 3072, 32),
    )
)


def parse_shapes(text: str) -> tuple[LinearShape, ...]:
    """Return the shapes of a comma-separated list of MxKxN or MxKxNxR.

    Raises:
        UsageError: an entry is no shape, or has a size of zero or of more than nine digits.
    """
    shapes = []
    for part in (part.strip() for part in text.split(",")):
        match = _SHAPE.fullmatch(part)
        sizes = [int(size or 0) for size in match.groups()] if match else [0]
        if min(sizes[:3]) < 1:
            raise UsageError(
                f"shape {printable(part)!r}: wanted MxKxN or MxKxNxR, e.g. 4352x3840x3072x128"
            )
        shapes.append(LinearShape(*sizes))
    return tuple(dict.fromkeys(shapes))


def parse_names(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list, each once; "" gives none.

    Raises:
        UsageError: a name is not among `known`; the message lists them.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{what} {printable(name)!r}: choose from {', '.join(known)}")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class TimingProtocol:
    """How a case is timed; see docs/benchmarks.md.

    Attributes:
        warmup_ms: of the same load before the first sample of a visit: clocks and power settle.
        visits: how often the cases of a group are visited, there and back again (A B B A ...).
        replays: samples of one visit; a sample is one replay of the case's graph.
        graph_ms: time that a graph should take at least: what starting it costs is spread over it.
        min_visit_ms: time that the samples of a visit should take at least.
        l2_multiple: operand sets together are at least so many times the L2 large.
        max_sets, max_calls: limits of sets of operands, and of calls in one graph.
    """

    warmup_ms: float = 120.0
    visits: int = 4
    replays: int = 5
    graph_ms: float = 2.0
    min_visit_ms: float = 20.0
    l2_multiple: float = 2.0
    max_sets: int = 256
    max_calls: int = 1024

    def __post_init__(self) -> None:
        """Refuse a protocol that takes no sample."""
        if self.visits < 1 or self.replays < 1 or self.max_sets < 1 or self.max_calls < 1:
            raise UsageError("a speed run needs at least one visit, one replay, one set, one call")


DEFAULT_PROTOCOL = TimingProtocol()


def count_sets(bytes_per_call: int, l2_bytes: int, protocol: TimingProtocol) -> int:
    """Return how many sets of operands a graph rotates through, so that L2 holds none of them."""
    wanted = protocol.l2_multiple * l2_bytes
    return max(1, min(protocol.max_sets, int(wanted // max(bytes_per_call, 1)) + 1))


def count_calls(call_ms: float, num_sets: int, protocol: TimingProtocol) -> int:
    """Return how many calls a graph holds: whole rounds of the sets, `graph_ms` together."""
    rounds = -(-protocol.graph_ms // max(call_ms * num_sets, 1e-6))
    limit = max(1, protocol.max_calls // num_sets)
    return int(max(1, min(rounds, limit))) * num_sets
