"""Which cases a speed run measures, and the run itself, from what the command line asks for."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from halfbyte.bench.speed.gemlite_peers import GEMLITE_PEERS
from halfbyte.bench.speed.own_cases import list_own_cases
from halfbyte.bench.speed.peers import PEERS, QUANTIZE_PEERS
from halfbyte.bench.speed.result import SpeedResult, SpeedRow
from halfbyte.bench.speed.run import Bench, MakeTrial, measure_rates, measure_shape
from halfbyte.bench.speed.settings import (
    DEFAULT_PROTOCOL,
    DEFAULT_SHAPES,
    MODES,
    LinearShape,
    TimingProtocol,
    parse_names,
    parse_shapes,
)

_PEERS_BY_KIND: Mapping[str, Mapping[str, MakeTrial]] = {
    "linear": {**PEERS, **GEMLITE_PEERS},
    "quantize": QUANTIZE_PEERS,
    "copy": {"copy": QUANTIZE_PEERS["copy"]},
}
PEER_NAMES = tuple(dict.fromkeys(name for group in _PEERS_BY_KIND.values() for name in group))
KINDS = tuple(_PEERS_BY_KIND)
DEFAULT_KINDS = ("linear", "quantize")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class SpeedRequest:
    """What to measure.

    Attributes:
        kinds: of "linear", "quantize", "copy".
        shapes: of the linears.
        peers: names of `PEER_NAMES`; one that does not belong to a kind is left out of it.
        modes: of our kernels.
        dtype: name of x's and y's dtype.
        protocol: how often and how long.
    """

    kinds: tuple[str, ...] = DEFAULT_KINDS
    shapes: tuple[LinearShape, ...] = DEFAULT_SHAPES
    peers: tuple[str, ...] = PEER_NAMES
    modes: tuple[str, ...] = MODES
    dtype: str = "bfloat16"
    protocol: TimingProtocol = DEFAULT_PROTOCOL


def parse_request(
    kinds: list[str], shapes: str | None, peers: str | None, modes: str | None, dtype: str
) -> SpeedRequest:
    """Return the request that a command line's words mean; None takes the default.

    Raises:
        UsageError: an unknown name or a shape that is none.
    """
    (chosen_dtype,) = parse_names(dtype, tuple(DTYPES), "dtype") or ("bfloat16",)
    return SpeedRequest(
        kinds=parse_names(",".join(kinds), KINDS, "kind") or DEFAULT_KINDS,
        shapes=DEFAULT_SHAPES if shapes is None else parse_shapes(shapes),
        peers=PEER_NAMES if peers is None else parse_names(peers, PEER_NAMES, "peer"),
        modes=MODES if modes is None else parse_names(modes, MODES, "mode"),
        dtype=chosen_dtype,
    )


def list_cases(request: SpeedRequest, kind: str, target: str) -> dict[str, MakeTrial]:
    """Return the cases of a kind for a GPU of this target: peers first, then ours."""
    peers = {name: make for name, make in _PEERS_BY_KIND[kind].items() if name in request.peers}
    return {**peers, **list_own_cases(kind, target, request.modes)}


def run_speed(
    request: SpeedRequest, bench: Bench, target: str, machine: dict[str, str]
) -> SpeedResult:
    """Return all rows of a request, measured one shape after the other."""
    started = time.perf_counter()
    rates = measure_rates(bench) if "linear" in request.kinds else None
    rows: list[SpeedRow] = []
    for kind in request.kinds:
        cases = list_cases(request, kind, target)
        for shape in request.shapes:
            rows += measure_shape(bench, kind, shape, cases)
    return SpeedResult(machine, rates, tuple(rows), seconds=time.perf_counter() - started)


def open_bench(request: SpeedRequest, seed: int, say: Callable[[str], None]) -> Bench:
    """Return a bench on torch's current GPU.

    Raises:
        UnsupportedHardwareError: there is none.
    """
    from halfbyte.bench.speed.sensors import open_sensors
    from halfbyte.bench.speed.timing_device import CudaTimingDevice

    device = CudaTimingDevice()
    place = torch.device("cuda", torch.cuda.current_device())
    return Bench(
        device,
        place,
        request.protocol,
        DTYPES[request.dtype],
        seed,
        read_sensors=open_sensors(),
        say=say,
    )
