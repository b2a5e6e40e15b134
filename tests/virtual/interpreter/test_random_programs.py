"""The fast core against the interpreter: random programs leave the same bits."""

import copy

import numpy as np
import pytest

from halfbyte.virtual.device import Device, LaunchOptions
from halfbyte.virtual.interpreter import run_kernel

from ..random_programs import RandomProgram, make_random_program

PROGRAMS_IN_CI = 200
PROGRAMS_PER_TEST = 20
PROGRAMS_AT_LENGTH = 4000


def _run_core(program: RandomProgram, options: LaunchOptions | None = None) -> None:
    module = Device("h200").load(program.ptx)
    arrays = [program.source, program.out, program.cells]
    module.launch("program", program.grid, program.block, arguments=arrays, options=options)


def _run_interpreter(program: RandomProgram) -> None:
    arrays = [program.source, program.out, program.cells]
    run_kernel(program.ptx, "program", program.grid, program.block, arrays)


def _compare(seed: int, statements: int) -> None:
    fast = make_random_program(seed, statements)
    slow = copy.deepcopy(fast)
    _run_core(fast, LaunchOptions(reverse_warps=seed % 2 == 1))
    _run_interpreter(slow)
    rows = len(fast.out) // (fast.grid[0] * fast.block[0])
    for name in ("out", "cells"):
        got, wanted = getattr(fast, name), getattr(slow, name)
        where = np.flatnonzero(got != wanted)
        place = divmod(int(where[0]), rows) if len(where) else ()
        assert not len(where), f"seed {seed}: {name} differs first at (thread, byte) {place}"


@pytest.mark.parametrize("first", range(0, PROGRAMS_IN_CI, PROGRAMS_PER_TEST))
def test_core_and_interpreter_leave_the_same_bits(first: int) -> None:
    for seed in range(first, first + PROGRAMS_PER_TEST):
        _compare(seed, 24)


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 10_000 + PROGRAMS_AT_LENGTH, 100))
def test_core_and_interpreter_leave_the_same_bits_at_length(first: int) -> None:
    for seed in range(first, first + 100):
        _compare(seed, 60)


def test_a_wrong_bit_would_be_seen() -> None:
    program = make_random_program(1)
    changed = copy.deepcopy(program)
    assert "add.u32 %r6, %r1, %r2" in changed.ptx
    changed.ptx = changed.ptx.replace("add.u32 %r6, %r1, %r2", "sub.u32 %r6, %r1, %r2")
    _run_core(program)
    _run_interpreter(changed)
    assert (program.out != changed.out).any()


def test_programs_of_one_seed_are_the_same() -> None:
    assert make_random_program(7).ptx == make_random_program(7).ptx
    assert make_random_program(7).ptx != make_random_program(8).ptx


def test_programs_cover_branches_loops_and_collectives() -> None:
    text = "".join(make_random_program(seed).ptx for seed in range(40))
    for opcode in ("bra", "shfl.sync", "vote.sync", "redux.sync", "match.any", "red.shared"):
        assert opcode in text
