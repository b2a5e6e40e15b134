"""The interpreter against silicon: an oracle is worth what it was compared with."""

import numpy as np
import pytest

from halfbyte.errors import PtxError
from halfbyte.virtual.interpreter import run_kernel

from ..conformance.elementwise import THREADS
from ..conformance.program import ConformanceProgram
from ..conformance.programs import list_programs
from ..conformance.silicon_results import read_silicon

# What the interpreter does not model: approximate functions, formats of 8 bits and tf32, packed
# comparisons, calls, clusters, addresses in initialisers, cp.async, activemask.
LEFT_OUT = {
    *("float_approximate", "float_sine_cosine", "float_half_approximate", "float_half_comparisons"),
    *("convert_f32_to_f16_bf16_tf32", "convert_f32_to_e4m3_e5m2", "convert_f16_to_e4m3_e5m2"),
    *("convert_e4m3_e5m2_to_f16", "collective_active_masks"),
    *("control_calls", "control_indirect_and_recursive_calls", "memory_spaces"),
    *("memory_special_registers", "memory_cp_async_zfill", "memory_cp_async_groups"),
    "memory_address_spaces",
}
FAMILIES = ("integer", "float", "convert", "collective", "atomic", "control", "memory", "mbarrier")
PROGRAMS = [p for p in list_programs() if p.family in FAMILIES and p.name not in LEFT_OUT]


def _is_elementwise(program: ConformanceProgram) -> bool:
    return program.block == (THREADS, 1, 1) and all(
        buffer.name in ("out16", "out32", "out64") for buffer in program.outputs
    )


def _compare(program: ConformanceProgram, elements: int) -> None:
    """Run a program and compare every bit; of a table, that many elements, drawn by lot."""
    silicon = read_silicon(program.name)
    arrays = {b.name: b.data.copy() for b in (*program.inputs, *program.outputs)}
    is_table = _is_elementwise(program)
    grid, block, order = program.grid, program.block, None
    if is_table:
        order = np.random.RandomState(1).permutation(len(program.inputs[0].data))
        grid, block = (
            (-(-min(elements, len(order)) // THREADS), 1, 1),
            (min(elements, THREADS), 1, 1),
        )
        arrays.update({b.name: b.data[order] for b in program.inputs})
        order = order[: grid[0] * block[0]]
    run_kernel(program.ptx, "kernel", grid, block, [*arrays.values()], program.dynamic_shared)
    for buffer in program.outputs:
        got = arrays[buffer.name]
        wanted = silicon.outputs[buffer.name].reshape(got.shape)
        if order is not None:
            got, wanted = got[:, : len(order)], wanted[:, order]
        np.testing.assert_array_equal(got, wanted, err_msg=f"{program.name} {buffer.name}")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_interpreter_agrees_with_silicon(program: ConformanceProgram) -> None:
    _compare(program, 32)


@pytest.mark.long
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if _is_elementwise(p)], ids=lambda program: program.name
)
def test_interpreter_agrees_with_silicon_on_whole_tables(program: ConformanceProgram) -> None:
    _compare(program, program.grid[0] * THREADS)


@pytest.mark.parametrize("opcode", ["sin.approx.f32", "cvt.rn.satfinite.e4m3x2.f32"])
def test_what_is_not_modelled_raises_with_its_line(opcode: str) -> None:
    operands = "%r1, %r2" if opcode.startswith("sin") else "%h1, %r1, %r2"
    text = (
        ".version 8.6\n.target sm_90a\n.address_size 64\n.visible .entry kernel()\n{\n"
        f".reg .b32 %r<4>;\n.reg .b16 %h<4>;\n{opcode} {operands};\nret;\n}}\n"
    )
    with pytest.raises(PtxError, match="does not know") as caught:
        run_kernel(text, "kernel", (1, 1, 1), (1, 1, 1))
    assert caught.value.line == 8


def test_threads_that_wait_for_ever_raise() -> None:
    text = (
        ".version 8.6\n.target sm_90a\n.address_size 64\n.visible .entry kernel()\n{\n"
        "bar.sync 1, 64;\nret;\n}\n"
    )
    with pytest.raises(PtxError, match="wait for what cannot happen"):
        run_kernel(text, "kernel", (1, 1, 1), (32, 1, 1))
