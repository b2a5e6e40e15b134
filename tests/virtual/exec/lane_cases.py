"""Instructions with the results they must give, checked many at a time.

All cases of a call run in one kernel, once by all lanes and once under a guard that leaves every
other lane out: those lanes must keep what the destination held before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..run_ptx import run_lanes

CASES_PER_KERNEL = 40


@dataclass(frozen=True)
class Case:
    """`text` is an instruction with `{o}` for its destination; a bool array means a predicate."""

    text: str
    expected: np.ndarray


def check_cases(
    inputs: Sequence[np.ndarray], cases: Sequence[Case], *, registers: str = "", gpu: str = "b200"
) -> None:
    """Run all cases on `inputs` (%i0, %i1, ...); raise AssertionError naming what differs."""
    assert cases, "a test without cases checks nothing"
    for first in range(0, len(cases), CASES_PER_KERNEL):
        chunk = cases[first : first + CASES_PER_KERNEL]
        _check_chunk(inputs, chunk, registers, gpu, is_guarded=False)
        _check_chunk(inputs, chunk, registers, gpu, is_guarded=True)


def _check_chunk(
    inputs: Sequence[np.ndarray],
    cases: Sequence[Case],
    registers: str,
    gpu: str,
    is_guarded: bool,
) -> None:
    lines = ["and.b32 %t15, %lane, 1; setp.ne.u32 %p7, %t15, 0;"]
    outputs: list[Any] = []
    threads = len(inputs[0])
    before = []
    for number, case in enumerate(cases):
        is_predicate = case.expected.dtype == bool
        name = f"%q{number}" if is_predicate else f"%o{number}"
        if is_predicate:
            lines.append(f"setp.eq.u32 {name}, %t15, 5;")  # false everywhere
        guard = "@%p7 " if is_guarded else ""
        lines.append(guard + case.text.format(o=name) + ";")
        outputs.append(bool if is_predicate else case.expected.dtype)
        dtype = np.dtype(np.uint32) if is_predicate else case.expected.dtype
        poison = (np.arange(threads * dtype.itemsize) * 73 % 251).astype(np.uint8).view(dtype)
        before.append(poison)
    results = run_lanes(
        "\n".join(lines), inputs, outputs, registers=registers, gpu=gpu, before=before
    )
    is_active = np.arange(threads) % 2 == 1 if is_guarded else np.full(threads, True)
    for case, result, poison in zip(cases, results, before, strict=True):
        kept = np.zeros(threads, bool) if case.expected.dtype == bool else poison
        wanted = np.where(is_active, as_bits(case.expected), as_bits(kept))
        _compare(case, as_bits(result), wanted, inputs, is_guarded)


def as_bits(array: np.ndarray) -> np.ndarray:
    """Return the bit patterns of an array as unsigned integers."""
    if array.dtype == bool:
        return array.astype(np.uint8)
    return array.view(f"u{array.dtype.itemsize}")


def _compare(
    case: Case, got: np.ndarray, wanted: np.ndarray, inputs: Sequence[np.ndarray], is_guarded: bool
) -> None:
    wrong = np.flatnonzero(got != wanted)
    if not len(wrong):
        return
    shown = [
        f"({', '.join(hex(int(as_bits(each)[i])) for each in inputs)}) -> "
        f"{int(got[i]):#x}, not {int(wanted[i]):#x}"
        for i in wrong[:5]
    ]
    where = "under a guard" if is_guarded else "by all lanes"
    raise AssertionError(
        f"{case.text} {where}: {len(wrong)} of {len(got)} differ: {'; '.join(shown)}"
    )


def map_values(function: Callable[..., int], dtype: Any, *columns: np.ndarray) -> np.ndarray:
    """Return `function` of Python integers, element by element, wrapped to an unsigned dtype."""
    mask = (1 << (8 * np.dtype(dtype).itemsize)) - 1
    values = [function(*row) & mask for row in zip(*(c.tolist() for c in columns), strict=True)]
    return np.array(values, dtype=np.uint64).astype(dtype)


def pad_to_warps(*columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the columns repeated up to a multiple of 32 elements."""
    length = -(-len(columns[0]) // 32) * 32
    return tuple(np.resize(column, length) for column in columns)


def make_pairs(edges: np.ndarray, randoms: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of edge values and `randoms` random pairs of the same unsigned dtype."""
    rng = np.random.default_rng(seed)
    left, right = (each.ravel() for each in np.meshgrid(edges, edges))
    limit = np.iinfo(edges.dtype).max
    extra = [rng.integers(0, limit, randoms, edges.dtype, endpoint=True) for _ in range(2)]
    return pad_to_warps(np.concatenate([left, extra[0]]), np.concatenate([right, extra[1]]))
