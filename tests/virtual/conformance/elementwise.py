"""Programs that apply many instructions to the same table of values, one element per thread."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .program import Buffer, ConformanceProgram, make_program, poison

THREADS = 128


@dataclass(frozen=True)
class Column:
    """One result of every element: its width in bits, the text that makes it, its name.

    In the text `{d}` is the result; the inputs are `%a`, `%b`, ...; `%r1..`, `%h`, `%d`, `%p`
    registers are scratch. A width of 1 is a predicate, stored as 0 or 1.
    """

    width: int
    text: str
    name: str = ""


def columns(width: int, *texts: str) -> list[Column]:
    """Return columns of one width from texts `opcode operands`; `{d}` is put first if absent."""
    result = []
    for text in texts:
        name = text.split(" ")[0] if "\n" not in text and text.count(";") < 1 else text
        if "{d}" not in text:
            opcode, _, operands = text.partition(" ")
            text = f"{opcode} {{d}}, {operands}"
        result.append(Column(width, text if text.endswith(";") else text + ";", name))
    return result


def cross(opcodes: Iterable[str], operands: str, width: int) -> list[Column]:
    """Return one column for every opcode, all with the same source operands."""
    return columns(width, *(f"{opcode} {operands}" for opcode in opcodes))


def elementwise(
    name: str,
    inputs: dict[str, np.ndarray],
    table: Sequence[Column],
    compares: str = "bits",
) -> ConformanceProgram:
    """Return the program whose row k of `out<width>` is column k of that width.

    Inputs are padded to whole CTAs by repetition from the start.
    """
    length = max(len(values) for values in inputs.values())
    count = -(-length // THREADS) * THREADS
    body, declared = [], []
    for key, values in inputs.items():
        width = values.dtype.itemsize * 8
        declared.append(f".reg .b{width} %{key};")
        body.append(f"mad.wide.u32 %d0, %index, {width // 8}, %{key}_in;")
        body.append(f"ld.global.b{width} %{key}, [%d0];")
    rows: dict[int, list[str]] = {}
    for column in table:
        stored = 32 if column.width == 1 else column.width
        row = len(rows.setdefault(stored, []))
        rows[stored].append(column.name or column.text)
        register = {1: "%p0", 16: "%h0", 32: "%r0", 64: "%d1"}[column.width]
        body.append(column.text.replace("{d}", register))
        if column.width == 1:
            body.append("selp.b32 %r0, 1, 0, %p0;\n")
            register = "%r0"
        offset = row * count * (stored // 8)
        body.append(f"mad.wide.u32 %d0, %index, {stored // 8}, %out{stored};")
        body.append(f"st.global.b{stored} [%d0+{offset}], {register};")
    buffers = [Buffer(f"{key}_in", np.resize(values, count)) for key, values in inputs.items()]
    outputs = [
        Buffer(f"out{width}", poison((len(names), count), f"u{width // 8}"))
        for width, names in sorted(rows.items())
    ]
    return make_program(
        name,
        "\n".join(declared + body),
        inputs=buffers,
        outputs=outputs,
        threads=THREADS,
        ctas=count // THREADS,
        compares=compares,
        row_names={f"out{width}": tuple(names) for width, names in rows.items()},
    )
