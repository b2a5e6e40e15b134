"""The same programs on the virtual GPU as on silicon, and the same bits out of them."""

import numpy as np
import pytest

from halfbyte.errors import PtxError
from halfbyte.virtual.report import KernelFault

from .distances import is_within_limit, measure_rows
from .program import ConformanceProgram
from .programs import FAMILIES, list_programs
from .silicon_results import read_manifest, read_silicon
from .virtual_runner import encode_map, find_differences, run_on_virtual_gpu

PROGRAMS = list_programs()
by_name = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)

# Bit 65 is set in maps that CuTe DSL encodes, clear in those of the driver for sm_90. Bytes 64 on
# hold what the driver notes for itself: bytes of a copy, alignment of its destination.
CLEAR_BIT_65 = np.uint64(~(1 << 1) & (2**64 - 1))


def test_there_are_programs_of_every_family() -> None:
    assert len(PROGRAMS) >= 45
    assert {program.family for program in PROGRAMS} == set(FAMILIES)


@by_name
def test_silicon_ran_this_very_program(program: ConformanceProgram) -> None:
    silicon = read_silicon(program.name)
    assert silicon.digest == program.digest(), "export it, run it on silicon, store the results"
    assert bool(silicon.error) == (program.compares == "fault"), silicon.error
    if not silicon.error:
        assert silicon.is_stable, "two runs on silicon gave different outputs"


@by_name
def test_virtual_gpu_agrees_with_silicon(program: ConformanceProgram) -> None:
    silicon = read_silicon(program.name)
    if program.compares == "fault":
        with pytest.raises(KernelFault):
            run_on_virtual_gpu(program)
        return
    if program.compares.startswith("not run"):
        with pytest.raises((PtxError, KernelFault), match=r"cannot|does not know"):
            run_on_virtual_gpu(program)
        return
    outputs = run_on_virtual_gpu(program)
    differences = find_differences(program, outputs, silicon)
    if program.compares == "bits":
        assert not differences, "\n".join(map(str, differences))
        return
    assert differences, "nothing differs any more: compare bits"
    for name, virtual in outputs.items():
        rows = measure_rows(
            program.row_names[name], virtual, silicon.outputs[name].reshape(virtual.shape)
        )
        assert [row for row in rows if not is_within_limit(row)] == []


def test_tensor_maps_have_the_bits_that_the_driver_encodes() -> None:
    count = 0
    for program in PROGRAMS:
        silicon = read_silicon(program.name)
        for tensor_map in program.tensor_maps if not silicon.error else ():
            ours = np.frombuffer(encode_map(tensor_map, 0), np.uint64)[:8].copy()
            driver = silicon.tensor_maps[tensor_map.name].view(np.uint64)[:8].copy()
            ours[1] &= CLEAR_BIT_65
            if tensor_map.interleave == "none":  # a stride of dimension 0 is stored and not used
                driver[6] &= np.uint64(~(7 << 32) & (2**64 - 1))
            assert list(map(hex, ours)) == list(map(hex, driver)), (program.name, tensor_map.name)
            count += 1
    assert count > 90


def test_manifest_names_the_machine() -> None:
    manifest = read_manifest()
    assert manifest["gpu"] == "NVIDIA H200"
    assert manifest["driver"].startswith("580.")
    assert set(manifest["programs"]) == {program.name for program in PROGRAMS}
