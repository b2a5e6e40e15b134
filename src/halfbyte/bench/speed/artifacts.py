"""Which compiled kernels a speed run needs: to be built for a machine that has no compiler."""

import itertools

import torch

from halfbyte.arch.gpus import GPUS
from halfbyte.bench.speed.own_cases import MODES_BY_TARGET, collect_own_sources
from halfbyte.bench.speed.own_linear import OWN_MODES
from halfbyte.bench.speed.plan import DTYPES, LAUNCH, TUNE, SpeedRequest, list_shapes
from halfbyte.bench.speed.problem import make_problem
from halfbyte.bench.speed.settings import LinearShape
from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UnsupportedHardwareError

_KINDS = ("linear", "quantize")
_SEED = 0  # values decide no configuration


def list_run_sources(
    request: SpeedRequest, target: str
) -> tuple[list[KernelSource], dict[str, str]]:
    """Return every kernel of ours that a request launches on GPUs of a target, each once.

    The ops of the virtual GPU of that target are asked, on the CPU: they choose by sizes, formats
    and GPU alone. Placing the weights of a large shape takes seconds. The second value says of
    cases that have no kernel there why.
    """
    backend = next(f"virtual-{gpu.name}" for gpu in GPUS.values() if gpu.target == target)
    found: dict[str, KernelSource] = {}
    refusals: dict[str, str] = {}
    names = [name for name in MODES_BY_TARGET.get(target, ()) if name in request.modes]
    for shape, kinds in _list_needs(request).items():
        problem = make_problem(shape, DTYPES[request.dtype], torch.device("cpu"), _SEED)
        for name, kind in itertools.product(names, sorted(kinds)):
            try:
                sources = collect_own_sources(kind, problem, OWN_MODES[name], backend)
            except UnsupportedHardwareError as refusal:
                refusals[f"{kind} {shape} {name}"] = str(refusal)
                continue
            if TUNE in request.kinds:
                sources += _list_candidates(sources, shape)
            found |= {f"{source.name} {source.config!r}": source for source in sources}
    return list(found.values()), refusals


def _list_needs(request: SpeedRequest) -> dict[LinearShape, set[str]]:
    """Return which kinds of our kernels each shape needs; a launch needs both."""
    needs: dict[LinearShape, set[str]] = {shape: set() for shape in request.shapes}
    for kind in request.kinds:
        for shape in list_shapes(request, kind):
            wanted = {LAUNCH: set(_KINDS), TUNE: {"linear"}}
            needs[shape] |= wanted.get(kind, {kind} & set(_KINDS))
    return needs


def _list_candidates(sources: list[KernelSource], shape: LinearShape) -> list[KernelSource]:
    """Return what tuning tries instead of the GEMMs among some sources."""
    from halfbyte.bench.speed.tune import TUNED_KERNEL, list_tuned_sources

    return [
        candidate
        for source in sources
        if source.name == TUNED_KERNEL
        for candidate in list_tuned_sources(source, shape)
    ]
