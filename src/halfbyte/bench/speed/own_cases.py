"""Our kernels as cases: the whole linear, the GEMM alone, the quantizer alone.

The ops run once and what they launch is recorded; a graph then holds the prepared launches, on
tensors that stay where they are. Operands come from the ops' own placement of a 4-bit linear.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from halfbyte.bench.speed.own_linear import (
    OWN_MODES,
    OwnMode,
    decode_hopper_act,
    define_output,
    make_linear,
    quantize_input,
)
from halfbyte.bench.speed.problem import Problem
from halfbyte.bench.speed.timing_device import Launch
from halfbyte.bench.speed.trial import (
    Expected,
    Operands,
    Trial,
    copy_operands,
    count_bytes,
)
from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UnsupportedHardwareError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.ops.linear_parts import PART_NAMES, LinearSpec, list_parts
from halfbyte.runtime.launch import PreparedLaunch
from halfbyte.runtime.run_kernel import collect_sources, record_launches

_ACT_PARTS = ("codes", "scales", "global_scale", "lora_act")
MODES_BY_TARGET = {
    "sm_90a": tuple(OWN_MODES),
    "sm_100a": ("exact",),  # Blackwell multiplies 4-bit activations: one kernel, one contract
    "sm_103a": ("exact",),
}
_FEW_CHANNELS = 128  # of the linear whose x alone is quantized: its weight is not read


def list_own_cases(
    kind: str, target: str, modes: tuple[str, ...], *, with_parts: bool = True
) -> dict[str, Callable[[Problem], Trial]]:
    """Return the cases of a kind that are written for a target, by name.

    Args:
        kind: "linear" or "quantize"; there are none of others.
        target: "sm_90a", ...
        modes: names of `OWN_MODES`.
        with_parts: also the GEMM of each linear alone.
    """
    cases: dict[str, Callable[[Problem], Trial]] = {}
    for name in MODES_BY_TARGET.get(target, ()):
        if name not in modes:
            continue
        own = OWN_MODES[name]
        if kind == "linear":
            cases[name] = partial(make_total, own=own)
            if with_parts:
                cases[f"{name}_gemm"] = partial(make_gemm, own=own)
        elif kind == "quantize":
            cases[name] = partial(make_quantizer, own=own)
    return cases


@dataclass(frozen=True, eq=False)
class _OwnLinear:
    """A record as the ops take it."""

    linear: QuantizedLinear
    spec: str
    own: OwnMode
    backend: str = "auto"

    def list_operands(self, x: torch.Tensor) -> Operands:
        """Return x and the parts of the record by name."""
        return {"x": x, **dict(zip(PART_NAMES, list_parts(self.linear), strict=True))}

    def quantize(self, given: Operands) -> Operands:
        """Return what the quantizer writes, by name."""
        parts = [given[name] for name in PART_NAMES]
        act = torch.ops.halfbyte.quantize_act_lora(
            given["x"], parts, self.spec, self.backend, self.own.mode
        )
        return dict(zip(_ACT_PARTS, act, strict=True))

    def multiply(self, given: Operands, act: Operands) -> Operands:
        """Return y by name."""
        parts = [given[name] for name in PART_NAMES]
        tensors, dtype = [act[name] for name in _ACT_PARTS], given["x"].dtype
        y = torch.ops.halfbyte.gemm_w4a4(
            tensors, parts, self.spec, dtype, self.backend, mode=self.own.mode
        )
        return {"y": y}

    def expect_codes(self, given: Operands, act: Operands) -> list[Expected]:
        """Return what x must have become, number by number; none for layouts of Blackwell."""
        actual = self.decode_codes(act)
        if actual is None:
            return []
        wanted = quantize_input(given["x"], self.linear, self.own)
        return [Expected("codes", actual, wanted, 0.0)]

    def decode_codes(self, act: Operands) -> torch.Tensor | None:
        """Return the quantized x [M, K] in float64; None for the packed codes of Blackwell."""
        columns = self.linear.in_features
        if act["codes"].shape[1] < columns:
            return None
        return decode_hopper_act(act["codes"], act["scales"], self.own)[:, :columns]


def _make_own(problem: Problem, own: OwnMode, backend: str = "auto") -> _OwnLinear:
    linear = make_linear(problem, own)
    spec = LinearSpec(own.weight, own.activation, problem.shape.k).encode()
    return _OwnLinear(linear, spec, own, backend)


def collect_own_sources(
    kind: str, problem: Problem, own: OwnMode, backend: str
) -> list[KernelSource]:
    """Return the kernels that a case of ours launches, check included, on a virtual GPU's like.

    Args:
        kind: "linear" or "quantize".
        problem: on the CPU.
        own: the mode.
        backend: "virtual-h200", ...
    """
    one = _make_own(problem if kind == "linear" else _cut_channels(problem), own, backend)
    operands = one.list_operands(problem.x)
    with collect_sources() as sources:
        one.multiply(operands, one.quantize(operands))
    return sources


@dataclass(frozen=True, eq=False)
class OwnLaunches:
    """A linear of ours on one set of operands, its kernels prepared.

    Attributes:
        operands: x and the parts of the record.
        quantize: launches of the quantizer, in order.
        gemm_tensors: what the GEMM is launched with, in its order; y is the last.
        gemm_source: what was chosen for it.
        y: [M, N].
        moved_bytes: of one GEMM, read and written.
        act: what the quantizer wrote.
    """

    one: _OwnLinear
    operands: Operands
    act: Operands
    quantize: tuple[Launch, ...]
    gemm_tensors: tuple[torch.Tensor, ...]
    gemm_source: KernelSource
    y: torch.Tensor
    moved_bytes: int

    def expect(self) -> Expected:
        """Return y and what it must be for the codes that the GEMM is given."""
        own, quantized = self.one.own, self.one.decode_codes(self.act)
        wanted = define_output(self.operands["x"], self.one.linear, own, quantized)
        return Expected("y", self.y, wanted, own.limit, own.element_limit)


def record_own(problem: Problem, own: OwnMode, like: OwnLaunches | None = None) -> OwnLaunches:
    """Return a linear's kernels on a set of operands of their own; `like`: copies of that set's."""
    one = _make_own(problem, own) if like is None else like.one
    given = one.list_operands(problem.x) if like is None else copy_operands(like.operands)
    with record_launches() as quantize:
        act = one.quantize(given)
    with record_launches() as multiply:
        y = one.multiply(given, act)["y"]
    with collect_sources() as sources:
        one.multiply(given, act)
    (gemm,), (source,) = multiply, sources
    tensors = gemm.arguments[0]
    return OwnLaunches(
        one=one,
        operands=given,
        act=act,
        quantize=tuple(launch.launch for launch in quantize),
        gemm_tensors=tensors,
        gemm_source=source,
        y=y,
        moved_bytes=count_bytes({str(index): tensor for index, tensor in enumerate(tensors)}),
    )


def make_total(problem: Problem, own: OwnMode) -> Trial:
    """Quantizer and GEMM, one after the other."""
    return _make(problem, own, has_quantizer=True)


def make_gemm(problem: Problem, own: OwnMode) -> Trial:
    """The GEMM alone, with low-rank branch, scales and bias, of x quantized beforehand."""
    return _make(problem, own, has_quantizer=False)


def _make(problem: Problem, own: OwnMode, *, has_quantizer: bool) -> Trial:
    one = _make_own(problem, own)
    operands = one.list_operands(problem.x)
    act = one.quantize(operands)
    outputs: Operands = {}
    if not has_quantizer:
        operands |= act

    def bind(given: Operands, out: Operands) -> Launch:
        with record_launches() as launches:
            if has_quantizer:
                out |= one.quantize(given)
            out |= one.multiply(given, out if has_quantizer else given)
        return _launch_all(launches)

    def expect(given: Operands, out: Operands) -> list[Expected]:
        # The GEMM alone answers for the codes that it was given.
        quantized = None if has_quantizer else one.decode_codes(given)
        wanted = define_output(given["x"], one.linear, own, quantized)
        found = [Expected("y", out["y"], wanted, own.limit, own.element_limit)]
        return [*one.expect_codes(given, out), *found] if has_quantizer else found

    size = problem.shape.m * problem.shape.n * problem.x.element_size()
    moved_bytes = count_bytes(operands, act if has_quantizer else {}) + size
    return Trial(operands, outputs, bind, expect, own.rate, moved_bytes, is_repeatable=True)


def _cut_channels(problem: Problem) -> Problem:
    """Return the problem with few output channels: for what reads x and lora_down alone."""
    channels = torch.arange(_FEW_CHANNELS, device=problem.device) % problem.shape.n
    return replace(
        problem,
        shape=replace(problem.shape, n=_FEW_CHANNELS),
        weight=problem.weight[channels],
        bias=problem.bias[channels],
        lora_up=None if problem.lora_up is None else problem.lora_up[channels],
    )


def make_quantizer(problem: Problem, own: OwnMode) -> Trial:
    """The quantizer alone: x read; codes, scales and low-rank activations written."""
    one = _make_own(_cut_channels(problem), own)
    operands = one.list_operands(problem.x)

    def bind(given: Operands, out: Operands) -> Launch:
        with record_launches() as launches:
            out |= one.quantize(given)
        return _launch_all(launches)

    def expect(given: Operands, out: Operands) -> list[Expected]:
        y = one.multiply(given, out)["y"]
        wanted = define_output(given["x"], one.linear, own)
        found = Expected("y of 128 channels", y, wanted, own.limit, own.element_limit)
        return [*one.expect_codes(given, out), found]

    written = one.quantize(operands)
    read = {"x": problem.x, "lora_down": problem.lora_down, "smooth": one.linear.smooth}
    moved_bytes = count_bytes(read, written)
    return Trial(operands, {}, bind, expect, own.rate, moved_bytes, is_repeatable=True)


def _launch_all(launches: list[PreparedLaunch]) -> Launch:
    if not launches:
        raise UnsupportedHardwareError("the ops launched no kernel of ours")
    calls: list[Callable[[], Any]] = [launch.launch for launch in launches]
    if len(calls) == 1:
        return calls[0]

    def launch_each() -> None:
        for call in calls:
            call()

    return launch_each
