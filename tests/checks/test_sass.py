"""Machine code: records of nvdisasm's JSON, cubins, and what a kernel should have."""

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.checks import sass
from halfbyte.checks.cubin import CubinKernel, read_cubin
from halfbyte.checks.finding import Severity
from halfbyte.checks.sass import SassInstruction, SassKernel, disassemble, read_disassembly
from halfbyte.checks.sass_facts import SassExpectation, check_sass_facts
from halfbyte.errors import FormatError, MissingDependencyError

TEXT = json.dumps(
    [
        {"SM": {"version": {"major": 10, "minor": 0}}},
        [
            {
                "function-name": "k",
                "start": 0,
                "length": 96,
                "sass-instructions": [
                    {"opcode": "MOV", "operands": "R1,R2"},
                    {"opcode": "UTMALDG.2D.2CTA", "operands": "[UR4],[UR42],desc[URZ]"},
                    {"opcode": "UTMALDG.2D.2CTA", "operands": "[UR8],[UR44],desc[URZ]"},
                    {"predicate": "@P0", "opcode": "BRA", "operands": "0x10"},
                    {"opcode": "UTCOMMA.2CTA.4X", "operands": "gdesc[UR6],UPT"},
                    {"opcode": "EXIT"},
                ],
            }
        ],
    ]
)


def test_a_disassembly_becomes_records() -> None:
    (kernel,) = read_disassembly(TEXT)
    assert kernel.name == "k"
    assert [i.offset for i in kernel.instructions] == [0, 16, 32, 48, 64, 80]
    branch = kernel.instructions[3]
    assert (branch.predicate, branch.opcode, branch.operands) == ("@P0", "BRA", "0x10")
    assert str(branch) == "SASS /*0030*/ @P0 BRA 0x10"


def test_another_schema_is_refused() -> None:
    for text in ("{}", "[]", "[{}, [{}]]", "not JSON"):
        with pytest.raises(FormatError, match="another schema"):
            read_disassembly(text)


def test_bytes_that_are_no_cubin_are_refused() -> None:
    for read in (disassemble, read_cubin):
        with pytest.raises(FormatError, match="starts with 7f454c46"):
            read(b"\x50\xed\x55\xba")
    with pytest.raises(FormatError, match="cut or damaged"):
        read_cubin(b"\x7fELF" + bytes(60))


def test_without_nvdisasm_the_message_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-nvdisasm"):
        sass.find_nvdisasm()


def test_modifiers_of_a_pattern_may_stand_anywhere() -> None:
    instruction = SassInstruction(0, "UTMALDG.4D.MULTICAST.2CTA", "", "")
    assert instruction.matches("UTMALDG.2CTA")
    assert not instruction.matches("UTMALDG.1CTA")
    assert not instruction.matches("UTMA")


def change(kernel: SassKernel, index: int, opcode: str) -> SassKernel:
    instructions = list(kernel.instructions)
    before = instructions[index]
    instructions[index] = SassInstruction(before.offset, opcode, before.operands, before.predicate)
    return SassKernel(kernel.name, tuple(instructions))


EXPECTATION = SassExpectation(("UTCOMMA.2CTA.4X",), loads_per_stage=(2,), max_registers=128)
CUBIN = CubinKernel("k", num_registers=96, frame_bytes=0, shared_bytes=1024)


def check(kernel: SassKernel, cubin: CubinKernel = CUBIN) -> dict[str, tuple[Severity, str]]:
    report = check_sass_facts(kernel, EXPECTATION, cubin)
    return {f.rule.removeprefix("sass/"): (f.severity, f.message) for f in report.findings}


def test_machine_code_as_meant_is_clean() -> None:
    (kernel,) = read_disassembly(TEXT)
    assert check(kernel) == {}
    facts = [item.fact for item in check_sass_facts(kernel, EXPECTATION, CUBIN).evidence]
    assert facts == [
        "1 UTCOMMA.2CTA.4X",
        "2 UTMALDG per pass of a loop",
        "96 registers per thread",
    ]


def test_each_fact_fails_by_its_rule() -> None:
    (kernel,) = read_disassembly(TEXT)
    error = Severity.ERROR
    missing = check(change(kernel, 4, "UTCOMMA.2CTA"))["missing-instruction"]
    assert missing == (error, "no UTCOMMA.2CTA.4X; of UTCOMMA there is UTCOMMA.2CTA")
    local = check(change(kernel, 0, "STL.64"))["local-memory"]
    assert local[1].startswith("0 LDL, 1 STL:")
    loads = check(change(kernel, 2, "NOP"))["tensor-loads"]
    assert loads == (
        error,
        "1 UTMALDG in one pass of a loop, 2 wanted: one per operand of a stage",
    )
    no_loop = check(change(kernel, 3, "NOP"))["tensor-loads"]
    assert no_loop[0] is Severity.UNDECIDED
    spilled = CubinKernel("k", num_registers=200, frame_bytes=64, shared_bytes=0)
    found = check(kernel, spilled)
    assert found["registers"][1].startswith("200 registers per thread, at most 128")
    assert found["local-memory"][1].startswith("a stack of 64 bytes")


def test_a_cubin_tells_registers_and_its_code(b200: Any, tmp_path: Path) -> None:
    from cutlass import Float32, cute
    from cutlass.base_dsl import compiler

    from tests.runtime.scaled_sum_program import launch_scaled_sum

    options = (
        compiler.EnableTVMFFI(True),
        compiler.KeepCUBIN(True),
        compiler.DumpDir(str(tmp_path)),
    )
    fakes = [cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int(),)) for _ in range(3)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    cute.compile[options](launch_scaled_sum, *fakes, 8, stream, 2.0)
    (file,) = tmp_path.glob("*.cubin")
    image = file.read_bytes()
    (kernel,) = read_cubin(image)
    assert 8 <= kernel.num_registers <= 64
    assert kernel.frame_bytes == 0
    (code,) = disassemble(image)
    assert code.name == kernel.name
    assert {"EXIT", "FADD"} <= {instruction.family for instruction in code.instructions}
    with pytest.raises(FormatError, match="cut or damaged"):
        read_cubin(image[: len(image) // 2])
