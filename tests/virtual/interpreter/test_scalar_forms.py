"""Every scalar instruction form that the interpreter models, on the core and on it: same bits."""

import re
from functools import cache

import numpy as np
import pytest

from halfbyte.errors import PtxError
from halfbyte.ptx.forms import INSTRUCTION_FORMS
from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.virtual.device import Device
from halfbyte.virtual.interpreter import run_kernel

from ..conformance import values

FAMILIES = (
    *("integer", "bit_fields", "logic", "float32", "float64", "half", "convert"),
    "compare_select",
)
THREADS = 64
FORMS_PER_PROGRAM = 30
SOURCES = 4
# What the interpreter leaves out, by a piece of the name.
LEFT_OUT = re.compile(
    r"approx|div\.full|f32x2|tf32|\.rs\.|3\.(ftz|NaN|abs|f32)|f32\.b?f16$|satfinite|relu|(min|max)3|[us]8x4"
    r"|^(min|max)\.(\w+\.)*abs\.f32|^setp?\.(\w+\.)*b?f16x2|^slct\.(\w+\.)*\w+x2"
)
NOT_COMPARED = re.compile(r"approx|div\.full")  # not equal by definition
_PATTERN = re.compile(r"=(b8|b16|b32|b64|pred)(\|pred)?( (b8|b16|b32|b64|pred|imm))+")
EDGES = {
    16: np.concatenate([values.integer_edges(16), values.FLOAT16_EDGES, values.BFLOAT16_EDGES]),
    32: np.concatenate([values.integer_edges(32), values.FLOAT32_EDGES]),
    64: np.concatenate([values.integer_edges(64), values.FLOAT64_EDGES]),
}


def _is_candidate(form: InstructionForm) -> bool:
    return (
        form.family in FAMILIES
        and not form.alternatives
        and _PATTERN.fullmatch(form.operands) is not None
    )


def _make_text(forms: list[InstructionForm]) -> str:
    """Return a kernel in which every form has operands drawn from per-thread sources."""
    head = ".version 9.0\n.target sm_90a\n.address_size 64\n"
    head += ".visible .entry forms(.param .u64 source, .param .u64 out)\n{\n"
    head += ".reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<8>;\n"
    head += ".reg .b64 %at, %source, %out; .reg .b32 %thread, %word;\n"
    head += "ld.param.u64 %source, [source]; ld.param.u64 %out, [out]; mov.u32 %thread, %tid.x;\n"
    head += f"mad.wide.u32 %source, %thread, {SOURCES * 16}, %source;\n"
    for index in range(SOURCES):
        at = index * 16
        head += f"ld.global.u64 %d{index}, [%source+{at}];\n"
        head += f"ld.global.u32 %r{index}, [%source+{at + 8}];\n"
        head += f"ld.global.u16 %h{index}, [%source+{at + 12}];\n"
        head += f"ld.global.u8 %word, [%source+{at + 14}]; setp.gt.u32 %p{index}, %word, 127;\n"
    lines = []
    for row, form in enumerate(forms):
        lines.append(f"mad.wide.u32 %at, %thread, 8, %out; add.s64 %at, %at, {row * THREADS * 8};")
        operands = []
        for index, pattern in enumerate(form.operands.split()):
            prefix = {"b8": "%h", "b16": "%h", "b32": "%r", "b64": "%d", "pred": "%p"}
            if index == 0:
                first, _, second = pattern[1:].partition("|")
                result = f"{prefix[first]}7"
                operands.append(f"{result}|%p6" if second else result)
            else:
                operands.append("0x96" if pattern == "imm" else f"{prefix[pattern]}{index - 1}")
        lines.append(f"{form.name} {', '.join(operands)};")
        if second:
            lines.append("selp.b32 %word, 1, 0, %p6; st.global.b32 [%at+4], %word;")
        if result == "%p7":
            lines.append("selp.b32 %word, 1, 0, %p7; st.global.b32 [%at], %word;")
        else:
            width = {"%h7": 16, "%r7": 32, "%d7": 64}[result]
            lines.append(f"st.global.b{width} [%at], {result};")
    return head + "\n".join(lines) + "\nret;\n}\n"


def _make_sources(threads: int) -> np.ndarray:
    """Return 16 bytes for every source of every thread: 64, 32, 16 and 8 bits of edge values."""
    random = values.make_random(77)
    table = np.zeros((threads, SOURCES, 16), np.uint8)
    for width, start in ((64, 0), (32, 8), (16, 12)):
        drawn = EDGES[width][random.randint(0, len(EDGES[width]), (threads, SOURCES))]
        size = width // 8
        table[..., start : start + size] = drawn.view(np.uint8).reshape(threads, SOURCES, size)
    table[..., 14] = random.randint(0, 256, (threads, SOURCES))
    return table


def _run(text: str, threads: int, rows: int, on_core: bool) -> np.ndarray:
    out = np.full((rows, THREADS), 0xCDCDCDCDCDCDCDCD, np.uint64)
    arrays = [_make_sources(threads), out]
    if on_core:
        module = Device("h200").load(text)
        module.launch("forms", (1, 1, 1), (threads, 1, 1), arguments=arrays)
    else:
        run_kernel(text, "forms", (1, 1, 1), (threads, 1, 1), arrays)
    return out


@cache
def _is_modelled(form: InstructionForm) -> bool:
    if NOT_COMPARED.search(form.name):
        return False
    try:
        _run(_make_text([form]), 1, 1, on_core=False)
    except PtxError:
        return False
    return True


CANDIDATES = sorted(filter(_is_candidate, INSTRUCTION_FORMS.values()), key=lambda form: form.name)
STRIDES = {"convert": 4, "compare_select": 41}  # in CI one in so many, else all


def _choose(family: str, is_long: bool) -> list[InstructionForm]:
    forms = [form for form in CANDIDATES if form.family == family]
    return forms if is_long else forms[:: STRIDES.get(family, 1)]


def _compare(forms: list[InstructionForm]) -> None:
    modelled = [form for form in forms if _is_modelled(form)]
    lacking = {form.name for form in forms} - {form.name for form in modelled}
    assert {name for name in lacking if not LEFT_OUT.search(name)} == set()
    for first in range(0, len(modelled), FORMS_PER_PROGRAM):
        part = modelled[first : first + FORMS_PER_PROGRAM]
        text = _make_text(part)
        fast = _run(text, THREADS, len(part), on_core=True)
        slow = _run(text, THREADS, len(part), on_core=False)
        differing = {
            f.name: np.flatnonzero(a != b) for f, a, b in zip(part, fast, slow, strict=True)
        }
        wrong = {name: (int(at[0]), len(at)) for name, at in differing.items() if len(at)}
        assert wrong == {}, "form: (first thread, number of threads)"


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_give_the_same_bits_on_edge_values(family: str) -> None:
    _compare(_choose(family, is_long=False))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_all_forms_give_the_same_bits_on_edge_values(family: str) -> None:
    _compare(_choose(family, is_long=True))
