"""wgmma.mma_async, .fence, .commit_group, .wait_group (PTX ISA, sections of these names).

A comes from shared memory (a descriptor) or from registers: two forms of one name. Attributes: N,
K, formats of A and B (machine/number_tables.h), result type, saturation, A in registers,
immediates after scale-d.
"""

from collections.abc import Iterator
from dataclasses import replace

from halfbyte.ptx.forms.mma_sync import FORMATS, RESULTS
from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "wgmma"
FP8 = ("e4m3", "e5m2")
INTEGERS = ("s8", "u8")
EVERY_N = tuple(range(8, 257, 8))
INTEGER_N = (8, 16, 24, *range(32, 257, 16))


def _make_product(
    name: str, n: int, types: tuple[str, str, str], immediates: int, *, saturates: bool = False
) -> InstructionForm:
    result, left, right = types
    k = 256 // FORMATS[left][1]
    registers = n // (4 if result == "f16" else 2)
    attributes = (n, k, FORMATS[left][0], FORMATS[right][0], RESULTS[result], int(saturates))
    # A in registers cannot be transposed.
    from_registers = 3 if immediates == 4 else immediates
    forms = [
        InstructionForm(
            name,
            FAMILY,
            f"=b32*{registers} {source} b64 pred" + " imm" * count,
            "wgmma.mma_async",
            (*attributes, int(source != "b64"), count),
            "aligned",
        )
        for source, count in (("b64", immediates), ("b32*4", from_registers))
    ]
    return replace(forms[0], alternatives=(forms[1],))


def _list_products() -> Iterator[InstructionForm]:
    stem = "wgmma.mma_async.sync.aligned"
    for n in EVERY_N:
        for element, results in (("f16", ("f16", "f32")), ("bf16", ("f32",)), ("tf32", ("f32",))):
            k = 256 // FORMATS[element][1]
            for result in results:
                name = f"{stem}.m64n{n}k{k}.{result}.{element}.{element}"
                immediates = 2 if element == "tf32" else 4
                yield _make_product(name, n, (result, element, element), immediates)
        for left in FP8:
            for right in FP8:
                for result in ("f16", "f32"):
                    name = f"{stem}.m64n{n}k32.{result}.{left}.{right}"
                    yield _make_product(name, n, (result, left, right), 2)
    for n in INTEGER_N:
        for left in INTEGERS:
            for right in INTEGERS:
                types = ("s32", left, right)
                tail = ".".join(types)
                yield _make_product(f"{stem}.m64n{n}k32.{tail}", n, types, 0)
                for name in (f"m64n{n}k32.satfinite.{tail}", f"m64n{n}k32.{tail}.satfinite"):
                    yield _make_product(f"{stem}.{name}", n, types, 0, saturates=True)
        name = f"{stem}.m64n{n}k256.s32.b1.b1.and.popc"
        yield _make_product(name, n, ("s32", "b1", "b1"), 0)


def _make_synchronization(word: str, operands: str = "") -> InstructionForm:
    name = f"wgmma.{word}.sync.aligned"
    return InstructionForm(name, FAMILY, operands, f"wgmma.{word}", (), "aligned")


FORMS: tuple[InstructionForm, ...] = (
    *_list_products(),
    _make_synchronization("fence"),
    _make_synchronization("commit_group"),
    _make_synchronization("wait_group", "imm"),
)
