"""Which cases a speed run measures, and the run itself, from what the command line asks for."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from halfbyte.bench.speed.flashinfer_peers import FLASHINFER_PEERS
from halfbyte.bench.speed.gemlite_peers import GEMLITE_PEERS
from halfbyte.bench.speed.own_cases import list_own_cases
from halfbyte.bench.speed.peers import PEERS, QUANTIZE_PEERS
from halfbyte.bench.speed.result import SpeedResult
from halfbyte.bench.speed.run import Bench, MakeTrial, measure_host, measure_rates, measure_shape
from halfbyte.bench.speed.settings import (
    DEFAULT_PROTOCOL,
    DEFAULT_SHAPES,
    MODES,
    LinearShape,
    TimingProtocol,
    parse_names,
    parse_shapes,
)
from halfbyte.errors import UnsupportedHardwareError, UsageError
from halfbyte.virtual.driver import session

_PEERS_BY_KIND: Mapping[str, Mapping[str, MakeTrial]] = {
    "linear": {**PEERS, **GEMLITE_PEERS, **FLASHINFER_PEERS},
    "quantize": QUANTIZE_PEERS,
    "copy": {"copy": QUANTIZE_PEERS["copy"]},
}
_FP4_TARGETS = ("sm_100a", "sm_103a")  # whose tensor cores multiply 4-bit numbers
PEER_NAMES = tuple(dict.fromkeys(name for group in _PEERS_BY_KIND.values() for name in group))
# GemLite tunes itself for 20 s and more at the first call of each shape: on request alone.
DEFAULT_PEERS = tuple(name for name in PEER_NAMES if name not in GEMLITE_PEERS)
LAUNCH = "launch"
TUNE = "tune"
KINDS = (*_PEERS_BY_KIND, LAUNCH, TUNE)
DEFAULT_KINDS = ("linear", "quantize", LAUNCH)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class SpeedRequest:
    """What to measure.

    Attributes:
        kinds: of `KINDS`.
        shapes: of the linears.
        peers: names of `PEER_NAMES`; one that does not belong to a kind is left out of it.
        modes: of our kernels.
        dtype: name of x's and y's dtype.
        protocol: how often and how long.
    """

    kinds: tuple[str, ...] = DEFAULT_KINDS
    shapes: tuple[LinearShape, ...] = DEFAULT_SHAPES
    peers: tuple[str, ...] = DEFAULT_PEERS
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
    if TUNE in kinds and len(kinds) > 1:
        raise UsageError("tune measures candidates, not rows: name it alone")
    dtypes = parse_names(dtype, tuple(DTYPES), "dtype") or ("bfloat16",)
    if len(dtypes) > 1:
        raise UsageError(f"dtype {', '.join(dtypes)}: a run measures one, name it alone")
    return SpeedRequest(
        kinds=parse_names(",".join(kinds), KINDS, "kind") or DEFAULT_KINDS,
        shapes=DEFAULT_SHAPES if shapes is None else parse_shapes(shapes),
        peers=DEFAULT_PEERS if peers is None else parse_names(peers, PEER_NAMES, "peer"),
        modes=MODES if modes is None else parse_names(modes, MODES, "mode"),
        dtype=dtypes[0],
    )


def list_cases(request: SpeedRequest, kind: str, target: str) -> dict[str, MakeTrial]:
    """Return the cases of a kind for a GPU of this target: peers first, then ours."""
    if kind == LAUNCH:
        return _list_launches(request, target)
    if kind == TUNE:
        return list_own_cases("linear", target, request.modes, with_parts=False)
    own = list_own_cases(kind, target, request.modes)
    peers = {
        name: make
        for name, make in _PEERS_BY_KIND[kind].items()
        if name in request.peers and (name not in FLASHINFER_PEERS or target in _FP4_TARGETS)
    }
    return {**peers, **own}


def list_shapes(request: SpeedRequest, kind: str) -> tuple[LinearShape, ...]:
    """Return the shapes that a kind is measured on: launches on the one of fewest tokens alone."""
    return (min(request.shapes),) if kind == LAUNCH else request.shapes


def _list_launches(request: SpeedRequest, target: str) -> dict[str, MakeTrial]:
    """Return the cases of one kernel each: torch's product, our GEMMs, our quantizers."""
    cases: dict[str, MakeTrial] = {}
    if "cublas" in request.peers:
        cases["cublas"] = PEERS["cublas"]
    for name, make in list_own_cases("linear", target, request.modes).items():
        if name.endswith("_gemm"):
            cases[name] = make
    for name, make in list_own_cases("quantize", target, request.modes).items():
        cases[f"{name}_quantize"] = make
    return cases


def run_speed(
    request: SpeedRequest,
    bench: Bench,
    target: str,
    machine: dict[str, str],
    keep: Callable[[SpeedResult], object] = lambda result: None,
) -> SpeedResult:
    """Return all rows of a request, measured one shape after the other.

    Args:
        request: what to measure.
        bench: where and how.
        target: of the GPU.
        machine: what heads the report.
        keep: called with all there is after every shape, so that a run that is ended leaves that.
    """
    started = time.perf_counter()
    rates = measure_rates(bench) if "linear" in request.kinds else None
    result = SpeedResult(machine, rates, ())
    for kind in request.kinds:
        cases = list_cases(request, kind, target)
        for shape in list_shapes(request, kind):
            if kind == LAUNCH:
                launches, rows = measure_host(bench, shape, cases)
                result = replace(result, launches=(*result.launches, *launches))
            else:
                rows = measure_shape(bench, kind, shape, cases)
            result = replace(result, rows=(*result.rows, *rows))
            result = replace(result, seconds=time.perf_counter() - started)
            keep(result)
    return result


def open_bench(request: SpeedRequest, seed: int, say: Callable[[str], None]) -> Bench:
    """Return a bench on torch's current GPU.

    Raises:
        UnsupportedHardwareError: there is none, or a virtual one, whose times mean nothing.
    """
    if session.get_active() is not None:
        raise UnsupportedHardwareError(
            "the virtual GPU runs programs on the CPU: its times say nothing of a GPU's. Run this "
            "on a machine with an NVIDIA GPU; `--list` shows what it would measure"
        )
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
