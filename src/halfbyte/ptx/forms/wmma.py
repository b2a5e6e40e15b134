"""wmma.load, .mma and .store (PTX ISA, "Matrix multiply-accumulate using wmma").

Attributes of load and store: state space (machine/access.h), rows, columns, bits of an element,
32-bit registers, 1 where memory is row major. Of mma: M, N, K, formats of A and B
(machine/number_tables.h), types of D and C, saturation, bit operation, registers of A, B, D, C.
"""

from halfbyte.ptx.forms.mma_sync import BIT_OPERATIONS, FORMATS, RESULTS
from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "wmma"
RESOLVED_WORDS = ("wmma",)

SPACES = {"global": 1, "shared": 2, "shared::cta": 2}
SIXTEEN = ("m16n16k16", "m8n32k16", "m32n8k16")
SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), SIXTEEN),
    "tf32": ("m16n16k8",),
    "f64": ("m8n8k4",),
    **dict.fromkeys(("s4", "u4"), ("m8n8k32",)),
    "b1": ("m8n8k128",),
}
# Accumulator types by element type.
ACCUMULATORS = {
    "f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "f64": ("f64",),
    **dict.fromkeys(("s8", "u8", "s4", "u4", "b1"), ("s32",)),
}  # fmt: skip
BITS = {**{name: bits for name, (_, bits) in FORMATS.items()}, "f32": 32, "s32": 32}
FLAGS = frozenset(("sync", "aligned", "satfinite", "popc", "rn", *BIT_OPERATIONS))


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a wmma instruction, None if it is not legal."""
    words = name.split(".")[1:]
    operation = words[0]
    matrix = words[1] if operation in ("load", "store") else ""
    rest = words[2:] if matrix else words[1:]
    shapes = [word for word in rest if word[0] == "m" and word[1:2].isdigit()]
    layouts = [word for word in rest if word in ("row", "col")]
    spaces = [word for word in rest if word in SPACES]
    types = [word for word in rest if word in BITS]
    flags = [word for word in rest if word in FLAGS]
    known = len(shapes) + len(layouts) + len(spaces) + len(types) + len(flags)
    if known != len(rest) or len(shapes) != 1 or not {"sync", "aligned"} <= set(flags):
        return None
    m, n, k = (int(part) for part in shapes[0].replace("n", " ").replace("k", " ")[1:].split())
    if operation == "mma":
        if len(layouts) != 2 or spaces:
            return None
        return _make_product(name, shapes[0], (m, n, k), types, set(flags))
    is_load = operation == "load"
    if (
        matrix not in (("a", "b", "c") if is_load else ("d",))
        or len(types) != len(layouts)
        or len(types) != 1
    ):
        return None
    extents = {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[matrix]
    if not _exists(shapes[0], types[0], matrix):
        return None
    return _make_transfer(name, is_load, extents, types[0], matrix, layouts[0], spaces)


def _exists(shape: str, element: str, matrix: str) -> bool:
    if matrix in ("a", "b"):
        return shape in SHAPES.get(element, ())
    return any(
        shape in SHAPES[kind] for kind, results in ACCUMULATORS.items() if element in results
    )


def _count_registers(element: str, extents: tuple[int, int], *, is_multiplicand: bool) -> int:
    """Return the 32-bit registers of a fragment; those of f16 multiplicands are always eight."""
    if element == "f16" and is_multiplicand:
        return 8
    return extents[0] * extents[1] * BITS[element] // 1024


def _list_operands(element: str, registers: int) -> str:
    return f"b64*{registers // 2}" if BITS[element] == 64 else f"b32*{registers}"


def _make_transfer(
    name: str,
    is_load: bool,
    extents: tuple[int, int],
    element: str,
    matrix: str,
    layout: str,
    spaces: list[str],
) -> InstructionForm:
    space = SPACES[spaces[0]] if spaces else 0
    registers = _count_registers(element, extents, is_multiplicand=matrix in ("a", "b"))
    address = "[b32]" if space == SPACES["shared"] else "[b64]"
    fragment = _list_operands(element, registers)
    attributes = (space, *extents, BITS[element], registers, int(layout == "row"))
    operands = f"={fragment} {address} ?b32" if is_load else f"{address} {fragment} ?b32"
    handler = "wmma.load" if is_load else "wmma.store"
    return InstructionForm(name, FAMILY, operands, handler, attributes, "aligned")


def _make_product(
    name: str, shape: str, sizes: tuple[int, int, int], types: list[str], flags: set[str]
) -> InstructionForm | None:
    m, n, k = sizes
    if len(types) == 2:  # f16 multiplicands go without saying: D and C
        types = [types[0], "f16", "f16", types[1]]
    if len(types) != 4:
        return None
    result, left, right, addend = types
    integers = {"s8", "u8"}, {"s4", "u4"}
    is_same = left == right or any({left, right} <= kinds for kinds in integers)
    results = ACCUMULATORS.get(left, ())
    if not is_same or shape not in SHAPES[left] or result not in results or addend not in results:
        return None
    if (left == "b1") != ("popc" in flags) or ("satfinite" in flags and result != "s32"):
        return None
    registers = (
        _count_registers(left, (m, k), is_multiplicand=True),
        _count_registers(right, (k, n), is_multiplicand=True),
        _count_registers(result, (m, n), is_multiplicand=False),
        _count_registers(addend, (m, n), is_multiplicand=False),
    )
    a, b, d, c = (
        _list_operands(kind, count)
        for kind, count in zip((left, right, result, addend), registers, strict=True)
    )
    bits = next((BIT_OPERATIONS[word] for word in BIT_OPERATIONS if word in flags), 0)
    attributes = (
        m, n, k, FORMATS[left][0], FORMATS[right][0], RESULTS[result], RESULTS[addend],
        int("satfinite" in flags), bits, *registers,
    )  # fmt: skip
    return InstructionForm(name, FAMILY, f"={d} {a} {b} {c}", "wmma.mma", attributes, "aligned")


def _list_names() -> list[str]:
    names = []
    for element, shapes in SHAPES.items():
        for shape in shapes:
            for layout in ("row", "col"):
                for matrix in ("a", "b"):
                    names.append(
                        f"wmma.load.{matrix}.sync.aligned.{layout}.{shape}.global.{element}"
                    )
            for result in ACCUMULATORS[element]:
                types = (
                    f"{result}.{result}"
                    if element == "f16"
                    else f"{result}.{element}.{element}.{result}"
                )
                stem = "wmma.mma.xor.popc" if element == "b1" else "wmma.mma"
                names.append(f"{stem}.sync.aligned.row.col.{shape}.{types}")
                for layout in ("row", "col"):
                    names.append(f"wmma.load.c.sync.aligned.{layout}.{shape}.global.{result}")
                    names.append(f"wmma.store.d.sync.aligned.{layout}.{shape}.global.{result}")
    return list(dict.fromkeys(names))


FORMS: tuple[InstructionForm, ...] = tuple(
    form for form in map(resolve, _list_names()) if form is not None
)
